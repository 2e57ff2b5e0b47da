"""Jobs for a test world that run other jobs under nccl's rules."""

from __future__ import annotations

import importlib
from typing import Any

from nccl_rules import nccl_rules


def under(*, run: str, eager: bool = False, buffered: bool = False, **arguments: Any) -> Any:
    """What a job, ``module.function``, returns when its tensors go over a backend with nccl's rules."""
    module, _, function = run.rpartition(".")
    with nccl_rules(eager=eager, buffered=buffered):
        return getattr(importlib.import_module(module), function)(**arguments)
