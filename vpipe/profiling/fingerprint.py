"""Compare layers, models and profiles by what they compute: equal layers are measured once, a profile is used again for
an equal model.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import weakref
from collections.abc import Mapping
from importlib.metadata import version
from types import FunctionType

import torch
from torch import Tensor, nn

from vpipe.distributed.device import device_name
from vpipe.errors import UserError
from vpipe.model.layer import Layer, Model, split_target, without_values
from vpipe.model.split import resolve_tie
from vpipe.plan.profile import Identity, Profile
from vpipe.profiling.device import shared_bytes, usable_cores

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


_MUST_AGREE = {"model_name": "the model", "layers": "the number of layers", "model": "the digest of the layers",
               "microbatch_size": "the microbatch size", "optimizer": "the optimizer", "device": "the device",
               "threads": "the threads per rank", "precision": "the precision"}


def identify(model: Model, microbatch: Mapping[str, Tensor], *, model_name: str, optimizer: str,
             device: torch.device | str, ranks_per_host: int, backend: str, threads: int | None = None,
             ranks: int | None = None, hosts: int = 1, cores: int | None = None,
             precision: str = "fp32") -> Identity:
    """The identity of a profile that would be measured here and now.

    Args:
        microbatch: its fields; dimension 0 counts samples.
        model_name: family and size, for people.
        optimizer: its name, and what else of it costs.
        threads: per rank; those of this process when left out.
        ranks: of all hosts; those of one when left out.
        cores: how many ranks of a host can compute at once; on a processor what this process may use when left out.
        precision: of the numbers.
    """
    device, structures = torch.device(device), [structure(layer) for layer in model.layers]
    threads = threads or torch.get_num_threads()
    if cores is None and device.type != "cuda":
        cores = max(1, len(usable_cores()) // threads)
    return Identity(
        model=digest(model, structures, microbatch), model_name=model_name,
        layers=len(model), microbatch_size=len(microbatch[model.batch[0]]) if model.batch else 0, optimizer=optimizer,
        device=device_name(device), threads=threads, ranks_per_host=ranks_per_host, backend=backend,
        torch=str(torch.__version__), ranks=ranks or ranks_per_host, hosts=hosts, cores=cores,
        device_bytes=shared_bytes(device, cores), vpipe=version("vpipe"), code=code(model, structures),
        precision=precision)


def require(profile: Profile, wanted: Identity, where: str | None = None) -> None:
    """Refuse a profile of something else.

    How many ranks shared the host, what carried the transfers, and torch's version may differ: the figures still say
    most of what is wanted.

    Args:
        where: the file that it comes from, for messages.

    Raises:
        UserError: it is of another model, microbatch size, optimizer, precision or device; the text has both.
    """
    for name, what in _MUST_AGREE.items():
        found, needed = getattr(profile.identity, name), getattr(wanted, name)
        if found != needed:
            raise UserError(f"the profile is of another run: {what} is {found} there, and {needed} here", where=where,
                            hint="measure this one: vpipe profile CONFIG -o profile.json")
