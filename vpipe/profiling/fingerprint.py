"""Tell equal models: a profile is used again for an equal model."""

from __future__ import annotations

import hashlib
import inspect
from types import FunctionType

from torch import nn

from vpipe.model.layer import split_target, without_values
from vpipe.model.model import Model
from vpipe.model.structure import ADDRESS, OWN, points


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
                if key in OWN or points(value):
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


def tied_owners(model: Model, number: int) -> dict[str, tuple[int, str]]:
    """Return the tied parameters of a layer: own name -> (the number of the layer that owns it, its name there)."""
    found = {}
    for own in model.layers[number].ties:
        name, parameter = split_target(model.ties[f"{model.layers[number].name}.{own}"], model.layers)
        found[own] = (model.index(name), parameter)
    return found
