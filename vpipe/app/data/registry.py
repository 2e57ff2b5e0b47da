"""Find data sets by name.

A data set is added by one file in this folder, or by a package that names it under the entry-point group
``vpipe.datasets``, with a decorated factory in it::

    @register_dataset("text", files=("*.txt",))
    def text(settings: DatasetSettings) -> Dataset: ...
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from functools import cache

import vpipe.app.data
from vpipe.app.data.dataset import Dataset, DatasetSettings
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup

Factory = Callable[[DatasetSettings], Dataset]
PLUGINS = PluginGroup("vpipe.datasets", "data set")
_factories: dict[str, Factory] = {}
_files: dict[str, tuple[str, ...]] = {}
_reads: dict[str, Collection[str]] = {}


def register_dataset(name: str, files: tuple[str, ...] = (),
                     reads: Collection[str] = vpipe.app.data.DEFAULT) -> Callable[[Factory], Factory]:
    """Register the decorated factory as ``name``. Raises :class:`UserError` when another one has that name.

    Args:
        files: patterns of the names of the files that it reads, by which ``vpipe init`` finds it.
        reads: which of :data:`vpipe.app.data.KEYS` it takes from its settings; a config that sets another is refused.
    """
    def register(factory: Factory) -> Factory:
        if not PLUGINS.is_own(factory.__module__):
            _find_own()  # so that the names of vpipe's own data sets are known to be taken
        known = _factories.setdefault(name, factory)
        if (known.__module__, known.__qualname__) != (factory.__module__, factory.__qualname__):
            raise UserError(f"two data sets are called '{name}': {known.__module__}.{known.__qualname__} "
                            f"and {factory.__module__}.{factory.__qualname__}", hint="rename one of them")
        _files[name], _reads[name] = files, reads
        return factory

    return register


def dataset_names() -> list[str]:
    """Return every name that :func:`dataset_named` knows, sorted."""
    _find_own()
    return sorted({*_factories, *PLUGINS.names})


def dataset_named(name: str) -> Factory:
    """Return the factory. Raises UserError when there is none, or not one alone, or its package cannot be imported."""
    _find_own()
    return PLUGINS.named(name, _factories, lambda factory: factory.__module__, dataset_names)


def files_read(name: str) -> tuple[str, ...]:
    """Return the patterns of the files that a data set reads; none for one that is not here."""
    if name not in dataset_names():
        return ()
    dataset_named(name)
    return _files[name]


def keys_read(name: str) -> Collection[str]:
    """Return the keys of a config that a data set reads; raises as :func:`dataset_named`."""
    dataset_named(name)
    return vpipe.app.data.READS.get(name, _reads[name])


@cache
def _find_own() -> None:
    """Import every module of this folder, so that its decorators run."""
    for module in pkgutil.iter_modules(vpipe.app.data.__path__, prefix="vpipe.app.data."):
        importlib.import_module(module.name)
