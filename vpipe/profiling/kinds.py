"""Which layers of a model are equal, and so need to be measured once only."""

from __future__ import annotations

import hashlib
import inspect
import re
import weakref
from collections.abc import Mapping
from types import FunctionType

from torch import Tensor, nn

from vpipe.model.layer import Layer, Model, split_target, without_values
from vpipe.model.split import resolve_tie

_OWN = frozenset(vars(nn.Module()))
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def structure(layer: Layer) -> str:
    """All that decides what a layer computes, as text: its modules with their settings, its parameters and buffers.

    Built on the meta device: no memory. Two layers with the same text are taken for equal. An object among the settings
    that does not say what is in it counts as another one in every layer: rather measured twice than mistaken.
    """
    with without_values():
        module = layer.make()
    lines = []
    for name, part in module.named_modules(remove_duplicate=False):
        settings = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(part).items())
                             if key not in _OWN and not _points(value))
        lines.append(f"{name}: {type(part).__module__}.{type(part).__qualname__}({settings})")
    lines += [f"{name}: {_spec(parameter)}" for name, parameter in module.named_parameters(remove_duplicate=False)]
    lines += [f"{name}: {_spec(buffer)}" for name, buffer in module.named_buffers(remove_duplicate=False)]
    return "\n".join([*lines, f"ties {sorted(layer.ties)}"])


def _points(value: object) -> bool:
    """Whether a setting only leads to what is known otherwise, as a list of weak references to parameters does."""
    return isinstance(value, (list, tuple)) and any(isinstance(one, weakref.ref) for one in value)


def digest(model: Model, structures: list[str], batch: Mapping[str, Tensor]) -> str:
    """Sixteen characters that stand for a model and the samples it is given, however many of them.

    Args:
        structures: of its layers.
        batch: a microbatch; dimension 0 counts samples.
    """
    text = [f"{layer.name}: {layer.inputs} -> {layer.outputs}, {dict(layer.ties)}\n{_ADDRESS.sub('', what)}"
            for layer, what in zip(model.layers, structures, strict=True)]
    text += [f"{name}: {batch[name].dtype} {tuple(batch[name].shape[1:])}" for name in model.batch]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def code(model: Model, structures: list[str]) -> str | None:
    """A digest of the source of what the layers are made of, beside torch, which has its version.

    Args:
        structures: of its layers.

    Returns:
        None where two processes cannot tell whether it is the same: a class without source, a function made within
        another, an object among the settings that does not say what is in it.
    """
    sources: dict[str, str] = {}
    for layer in dict(zip(structures, model.layers, strict=True)).values():
        with without_values():
            module = layer.make()
        for part in module.modules():
            made_of: list[object] = [kind for kind in type(part).__mro__ if kind not in nn.Module.__mro__]
            for key, value in vars(part).items():
                if key in _OWN or _points(value):
                    continue
                if isinstance(value, FunctionType) and "<" not in value.__qualname__:
                    made_of.append(value)
                elif _ADDRESS.search(repr(value)):
                    return None
            for source in made_of:
                assert isinstance(source, (type, FunctionType)), "of a module, or among its settings"
                if source.__module__.partition(".")[0] == "torch":
                    continue
                try:
                    sources[f"{source.__module__}.{source.__qualname__}"] = inspect.getsource(source)
                except (OSError, TypeError):
                    return None
    return hashlib.sha256("\n".join(text for _, text in sorted(sources.items())).encode()).hexdigest()[:16]


def owners(model: Model, number: int) -> dict[str, tuple[int, str]]:
    """The tied parameters of a layer: own name -> (the number of the layer that owns it, its name there)."""
    found = {}
    for own, target in model.layers[number].ties.items():
        name, parameter = split_target(resolve_tie(model, target), model.layers)
        found[own] = (model.index(name), parameter)
    return found


def _spec(tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{trained}"
