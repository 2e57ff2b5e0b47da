"""Compile the layers of a stage with torch.compile, each for itself: layers of one class and shape share their code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

import torch
from torch import nn

from vpipe.errors import UserError
from vpipe.schedules.action import Op
from vpipe.schedules.schedule import Schedule

DEFAULT_BACKEND = "inductor"


def compile_backend(given: bool | str) -> str:
    """Return the backend that ``compile`` means: torch's default for True."""
    return DEFAULT_BACKEND if given is True else str(given)


def check_compiled(backend: str, schedule: Schedule, device: torch.device | None = None) -> None:
    """Refuse a backend that torch does not have, or that cannot work here or under this schedule.

    Args:
        device: of this process; None where it is another's.

    Raises:
        UserError: one of these.
    """
    names = torch.compiler.list_backends(exclude_tags=())
    if backend not in names:
        near = get_close_matches(backend, names, n=1)
        raise UserError(f"torch.compile has no backend '{backend}'",
                        hint=f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}")
    if any(action.op is Op.INPUT for program in schedule.programs for action in program):
        raise UserError(f"'{schedule.name}' splits every backward: it intercepts the operations that take a weight, "
                        "and a compiled layer shows none",
                        hint="choose a schedule with whole backwards, such as 1f1b or interleaved, or do not compile")
    if backend == DEFAULT_BACKEND and device is not None:
        compiler = os.environ.get("CXX", "g++")
        if device.type == "cpu" and shutil.which(compiler) is None and shutil.which("clang++") is None:
            raise UserError(f"compiling for a processor needs a C++ compiler, and there is no {compiler}",
                            hint="install g++, or name the compiler in CXX; aot_eager needs none, and gains little")
        if device.type == "cuda" and find_spec("triton") is None:
            raise UserError("compiling for a GPU needs the package triton", hint="install it, or do not compile")


def compile_layers(layers: Iterable[nn.Module], backend: str) -> None:
    """Compile modules in place; their names, parameters and hooks stay.

    Weights are inputs of the code, so another weight version is no reason to compile again.
    """
    for layer in layers:
        layer.compile(backend=backend)
