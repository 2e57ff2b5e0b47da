"""Import the public names of a package when they are first asked for: reading a config must not wait for torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from vpipe.errors import UserError


def lazy(package: str, files: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package.

    Args:
        files: where each name is; relative to the package.
    """
    def load(name: str) -> object:
        if name not in files:
            if (remedy := UserError.retired.get(f"{package}.{name}")) is not None:
                raise UserError(f"{package} has no '{name}' any more", hint=remedy)  # an AttributeError loses its text
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{files[name]}"), name)

    return load
