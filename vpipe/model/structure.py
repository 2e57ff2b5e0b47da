"""Describe what a layer is built of, to tell equal layers and models."""

from __future__ import annotations

import hashlib
import inspect
import re
import weakref
from collections.abc import Sequence, Set
from dataclasses import fields, is_dataclass
from types import FunctionType

from torch import Tensor, nn

from vpipe.model.layer import Layer, without_values

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

ADDRESS = re.compile(r"0x[0-9a-f]+")
"""In the text of an object that does not say what is in it."""


def structure(layer: Layer) -> str:
    """Describe all that decides what a layer computes: its modules with their settings, parameters and buffers.

    Built on the meta device: no memory. Two layers with the same text are taken for equal. An object among the settings
    whose content cannot be read counts as different in every layer: rather measured twice than mistaken.
    """
    with without_values():
        module = layer.make()
    lines = []
    for name, part in module.named_modules(remove_duplicate=False):
        settings = ", ".join(f"{key}={_text(value)}" for key, value in sorted(vars(part).items())
                             if key not in _OWN and not _points(value))
        lines.append(f"{name}: {type(part).__module__}.{type(part).__qualname__}({settings})")
    lines += [f"{name}: {_spec(parameter)}" for name, parameter in module.named_parameters(remove_duplicate=False)]
    lines += [f"{name}: {_spec(buffer)}" for name, buffer in module.named_buffers(remove_duplicate=False)]
    return "\n".join([*lines, f"ties {sorted(layer.ties)}"])


def code_digest(layers: Sequence[Layer], structures: Sequence[str]) -> str | None:
    """Return a digest of the source of the layers' classes and functions, except torch's, which has its version.

    None where two processes cannot compare it: a class without source, a function made within another, an object among
    the settings whose content cannot be read.
    """
    sources: dict[str, str] = {}
    for layer in dict(zip(structures, layers, strict=True)).values():
        with without_values():
            module = layer.make()
        for part in module.modules():
            made_of: list[object] = [kind for kind in type(part).__mro__ if kind not in nn.Module.__mro__]
            for key, value in vars(part).items():
                if key in _OWN or _points(value):
                    continue
                if isinstance(value, FunctionType) and "<" not in value.__qualname__:
                    made_of.append(value)
                elif ADDRESS.search(repr(value)):
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


def _points(value: object) -> bool:
    """Tell whether a setting only refers to what is described elsewhere, as a list of weak references does."""
    return isinstance(value, (list, tuple)) and any(isinstance(one, weakref.ref) for one in value)


def _text(value: object) -> str:
    """Return the ``repr``, but with sets in order: theirs is another one in every process."""
    kind = type(value)
    if isinstance(value, Set):
        return f"{kind.__name__}({{{', '.join(sorted(map(_text, value)))}}})"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_text(one)}' for key, one in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    if is_dataclass(kind):
        shown = ((field.name, getattr(value, field.name)) for field in fields(kind) if field.repr)
        return f"{kind.__qualname__}({', '.join(f'{name}={_text(one)}' for name, one in shown)})"
    return repr(value)


def _spec(tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{trained}"
