"""Compile the layers of a stage with torch.compile, each for itself: layers of one class and shape share their code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn

from vpipe import accelerator
from vpipe.description.execution import DEFAULT_BACKEND
from vpipe.errors import UserError

VARIANTS = 16
"""Variants of a layer's code: two batch shapes (a smaller last batch), training, evaluation, recomputation, dtypes."""


def check_compiler(backend: str, device: torch.device) -> None:
    """Refuse the default backend where nothing here compiles its code for this device."""
    if backend == DEFAULT_BACKEND:
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
