"""Compile the layers of a stage with torch.compile, each for itself: layers of one class and shape share their code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn

from vpipe import accelerator
from vpipe.errors import UserError, nearest
from vpipe.schedules.schedule import Schedule

DEFAULT_BACKEND = "inductor"
VARIANTS = 16
"""Variants of a layer's code: two batch shapes (a smaller last batch), training, evaluation, recomputation, dtypes."""


def check_compiled(backend: str, schedule: Schedule, device: torch.device | None = None) -> None:
    """Refuse a backend that torch does not have, or that cannot work here or under this schedule.

    Args:
        device: of this process; None where it is another's.

    Raises:
        UserError: one of these.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise UserError(f"torch.compile has no backend '{backend}'",
                        hint=nearest(backend, (DEFAULT_BACKEND, "aot_eager", "eager", "cudagraphs")))
    if schedule.split_backwards:
        raise UserError(f"'{schedule.name}' splits every backward: it intercepts the operations that take a weight, "
                        "and a compiled layer shows none",
                        hint="choose a schedule with whole backwards, such as 1f1b or interleaved, or do not compile")
    if schedule.offloaded_stages:
        raise UserError(f"'{schedule.name}' offloads activations, and a compiled layer saves its own way",
                        hint="leave OFFLOAD out of the schedule, or do not compile")
    if backend == DEFAULT_BACKEND and device is not None:
        compiler = os.environ.get("CXX", "g++")
        if device.type == "cpu" and shutil.which(compiler) is None and shutil.which("clang++") is None:
            raise UserError(f"compiling for a processor needs a C++ compiler, and there is no {compiler}",
                            hint="install g++, or name the compiler in CXX; aot_eager needs none, and gains little")
        if accelerator.needs_triton(device) and find_spec("triton") is None:
            raise UserError("compiling for a GPU needs the package triton", hint="install it, or do not compile")


def compile_layers(layers: Sequence[nn.Module], backend: str) -> None:
    """Compile modules in place; their names, parameters and hooks stay.

    Weights are inputs of the code, so another weight version is no reason to compile again. Layers of one class share
    a list of variants: shapes, dtypes, training and evaluation, with and without gradients. By default torch keeps 8 of
    them and runs further layers without compiling, so the numbers would depend on which layer came first. Here there is
    room for all, and an error where it does not suffice.
    """
    from torch._dynamo import config  # its import takes seconds

    config.recompile_limit = max(config.recompile_limit, VARIANTS * len(layers))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * config.recompile_limit)
    config.fail_on_recompile_limit_hit = True
    for layer in layers:
        layer.compile(backend=backend)
