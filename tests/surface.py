"""List what users can ask vpipe for: keys of a config and their words, commands and options, public names and methods.

``python tests/surface.py`` prints the list; ``tests/fixtures/surface_5332972d.txt`` is that of 5332972d.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Literal, get_args, get_origin

from public_names import faces
from pydantic import BaseModel

from vpipe.app import cli
from vpipe.app.config.config import Config
from vpipe.app.config.validation import section_of
from vpipe.description import Executor


def keys(section: type[BaseModel] = Config, before: str = "") -> Iterator[str]:
    """Yield ``training.optimizer``, and ``training.optimizer=sgd`` for each word that it may be."""
    for name, field in section.model_fields.items():
        yield before + name
        if (inner := section_of(field)) is not None:
            yield from keys(inner, f"{before}{name}.")
        for part in (field.annotation, *get_args(field.annotation)):
            if get_origin(part) is Literal:
                yield from (f"{before}{name}={word}" for word in get_args(part))


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield ``vpipe plan``, ``vpipe plan --memory`` for each option, ``vpipe plan --solver exact`` for each word."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{parser.prog} {name}"
                yield from options(command)
        else:
            for option in action.option_strings:
                yield f"{parser.prog} {option}"
                yield from (f"{parser.prog} {option} {word}" for word in action.choices or ())


def names() -> Iterator[str]:
    """Yield ``vpipe.Pipeline``, ``vpipe.Pipeline.train`` and ``vpipe.Pipeline.train(pauses)``."""
    for face, public in faces().items():
        for name in public:
            thing = getattr(import_module(face), name)
            yield f"{face}.{name}"
            yield from (f"{face}.{name}({parameter})" for parameter in parameters(thing))
            for inner, method in inspect.getmembers(thing) if inspect.isclass(thing) else []:
                if not inner.startswith("_") and (isinstance(method, cached_property) or (
                        inspect.getmodule(method) or import_module(face)).__name__.startswith("vpipe")):
                    yield f"{face}.{name}.{inner}"
                    yield from (f"{face}.{name}.{inner}({parameter})" for parameter in parameters(method))


def parameters(thing: object) -> list[str]:
    try:
        return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


def surface() -> list[str]:
    executors = (f"parallel.executor={name}" for name in Executor.names())
    return sorted({*keys(), *executors, *options(cli._parser()), *names()})


if __name__ == "__main__":
    print("\n".join(surface()))
