"""Tell equal layers and models: equal layers are measured once, a profile is used again for an equal model."""

from __future__ import annotations

import hashlib
import inspect
import re
import weakref
from collections.abc import Mapping, Sequence
from types import FunctionType

import torch
from torch import Tensor, nn

from vpipe import accelerator
from vpipe.model.layer import Layer, split_target, without_values
from vpipe.model.model import Model
from vpipe.plan.profile import Identity
from vpipe.plugins import package_versions
from vpipe.profiling.device import shared_bytes, usable_cores

_OWN = frozenset(vars(nn.Module()))
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def structure(layer: Layer) -> str:
    """Describe all that decides what a layer computes: its modules with their settings, parameters and buffers.

    Built on the meta device: no memory. Two layers with the same text are taken for equal. An object among the settings
    whose content cannot be read counts as different in every layer: rather measured twice than mistaken.
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
    """Tell whether a setting only refers to what is described elsewhere, as a list of weak references does."""
    return isinstance(value, (list, tuple)) and any(isinstance(one, weakref.ref) for one in value)


def model_digest(model: Model, batch: Mapping[str, Tensor], structures: Sequence[str] | None = None) -> str:
    """Return sixteen characters that identify a model and the fields of its samples, however many samples there are.

    Args:
        batch: a microbatch; dimension 0 counts samples.
        structures: of the layers, where they are known already.
    """
    structures = [structure(layer) for layer in model.layers] if structures is None else structures
    text = [f"{layer.name}: {layer.inputs} -> {layer.outputs}, {dict(layer.ties)}\n{_ADDRESS.sub('', what)}"
            for layer, what in zip(model.layers, structures, strict=True)]
    text += [f"{name}: {batch[name].dtype} {tuple(batch[name].shape[1:])}" for name in model.batch]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def code_digest(model: Model, structures: list[str]) -> str | None:
    """Return a digest of the source of the layers' classes and functions, except torch's, which has its version.

    None where two processes cannot compare it: a class without source, a function made within another, an object among
    the settings whose content cannot be read.
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


def tied_owners(model: Model, number: int) -> dict[str, tuple[int, str]]:
    """Return the tied parameters of a layer: own name -> (the number of the layer that owns it, its name there)."""
    found = {}
    for own in model.layers[number].ties:
        name, parameter = split_target(model.ties[f"{model.layers[number].name}.{own}"], model.layers)
        found[own] = (model.index(name), parameter)
    return found


def _spec(tensor: Tensor) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{trained}"


def identify(model: Model, microbatch: Mapping[str, Tensor], *, model_name: str, optimizer: str,
             device: torch.device | str, ranks_per_host: int, backend: str, threads: int | None = None,
             ranks: int | None = None, hosts: int = 1, cores: int | None = None,
             precision: str = "fp32") -> Identity:
    """Return the identity of a profile that would be measured here and now.

    Args:
        microbatch: its fields; dimension 0 counts samples.
        model_name: family and size, for people.
        optimizer: its name, and its settings that cost time or memory.
        threads: per rank; those of this process when left out.
        ranks: of all hosts; those of one when left out.
        cores: ranks of a host that can compute at once; on a processor the cores of this process when left out.
    """
    device, structures = torch.device(device), [structure(layer) for layer in model.layers]
    threads = threads or torch.get_num_threads()
    if cores is None and device.type == "cpu":
        cores = max(1, len(usable_cores()) // threads)
    return Identity(
        model=model_digest(model, microbatch, structures), model_name=model_name,
        layers=len(model), microbatch_size=len(microbatch[model.batch[0]]) if model.batch else 0, optimizer=optimizer,
        device=accelerator.name_of(device), threads=threads, ranks_per_host=ranks_per_host, backend=backend,
        torch=str(torch.__version__), ranks=ranks or ranks_per_host, hosts=hosts, cores=cores,
        device_bytes=shared_bytes(device, cores), vpipe=package_versions(["vpipe"]).get("vpipe", ""),
        code=code_digest(model, structures), precision=precision)
