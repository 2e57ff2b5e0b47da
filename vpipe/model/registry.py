"""Model families by name: a family is one file with one decorator.

A built-in family called ``gpt`` lives in ``vpipe/model/gpt.py`` and is imported when it is asked for. An
installed package adds a family through an entry point of its name, in the group ``vpipe.models``, that points to
the module or the factory::

    [project.entry-points."vpipe.models"]
    mamba = "my_package.mamba"
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

import vpipe.model
from vpipe.errors import UserError, nearest
from vpipe.model.layer import Model

ENTRY_POINT_GROUP = "vpipe.models"


@dataclass(frozen=True)
class ModelSettings:
    """What a config file says about a model; None = the family's own default.

    ``vocab_size`` is known by now (-1, "ask the data set", is answered before). ``num_layers`` counts blocks as
    in config files, not the layers a pipeline cuts between. ``dropout`` is a probability and replaces every
    dropout of the family. ``overrides`` holds the family's own keys, such as a Hugging Face config's.
    """

    vocab_size: int
    preset: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    sequence_length: int | None = None
    dropout: float | None = None
    tie_weights: bool | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)


Factory = Callable[[ModelSettings], Model]

_factories: dict[str, Factory] = {}


def register_model(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a factory the family ``name``. Raises UserError if another module's has that name."""

    def register(factory: Factory) -> Factory:
        holder = _factories.get(name, factory).__module__
        if holder != factory.__module__:  # the same module again is a reload
            raise UserError(f"two modules register the model '{name}': {holder} and {factory.__module__}",
                            hint="give one of them another name")
        _factories[name] = factory
        return factory

    return register


def model_named(name: str) -> Factory:
    """The factory of the family ``name``. Raises UserError, with the nearest name, when there is none."""
    if name not in _factories:
        _import_family(name)
    if name not in _factories:
        raise UserError(f"there is no model '{name}'", hint=nearest(name, model_names()))
    return _factories[name]


def model_names() -> list[str]:
    """Every family: built in, registered so far, and announced by installed packages."""
    for module in pkgutil.iter_modules(vpipe.model.__path__, prefix="vpipe.model."):
        import_module(module.name)
    return sorted({*_factories, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def _import_family(name: str) -> None:
    if name.isidentifier() and find_spec(f"vpipe.model.{name}") is not None:
        import_module(f"vpipe.model.{name}")
        return
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        entry.load()
