"""Data sets by name.

A data set is added by one file in this folder, or by a package that names it under the entry-point group
``vpipe.datasets``, with a decorated factory in it::

    @register_dataset("text")
    def text(settings: DatasetSettings) -> Dataset: ...
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

import vpipe.data
from vpipe.data.dataset import Dataset, DatasetSettings
from vpipe.errors import UserError, nearest

Factory = Callable[[DatasetSettings], Dataset]
ENTRY_POINTS = "vpipe.datasets"
_factories: dict[str, Factory] = {}


def register_dataset(name: str) -> Callable[[Factory], Factory]:
    """Make the decorated factory known as ``name``. Raises :class:`UserError` when another one has that name."""
    def register(factory: Factory) -> Factory:
        known = _factories.setdefault(name, factory)
        if (known.__module__, known.__qualname__) != (factory.__module__, factory.__qualname__):
            raise UserError(f"two data sets are called '{name}': {known.__module__}.{known.__qualname__} "
                            f"and {factory.__module__}.{factory.__qualname__}", hint="rename one of them")
        return factory

    return register


def dataset_names() -> list[str]:
    """Every name that :func:`dataset_named` knows, sorted."""
    _find_all()
    return sorted(_factories)


def dataset_named(name: str) -> Factory:
    """The factory registered as ``name``. Raises :class:`UserError` that names the nearest known one."""
    names = dataset_names()
    if name not in _factories:
        raise UserError(f"no data set is called '{name}'", hint=nearest(name, names))
    return _factories[name]


def prepare(name: str, settings: DatasetSettings) -> int:
    """Do what is slow or can fail, in one process, before ranks start; returns the vocabulary size.

    Data sets prepare and validate themselves when they are made (``text`` builds its cache, ``bert_hdf5`` checks
    its shards), and import torch only when asked for tensors. Ranks find the work done.
    """
    return dataset_named(name)(settings).vocab_size


@cache
def _find_all() -> None:
    """Import every module of this folder, and what installed packages announce, so that decorators run."""
    for module in pkgutil.iter_modules(vpipe.data.__path__, prefix="vpipe.data."):
        importlib.import_module(module.name)
    for entry_point in entry_points(group=ENTRY_POINTS):
        entry_point.load()
