"""Optimizers that do not load torch's compiler."""

from __future__ import annotations

import sys

from torch.optim import Optimizer

_MARK = "__dynamo_disable"
"""Where torch keeps a method of an optimizer as its compiler is to see it (torch/_compile.py)."""


def spare_compiler() -> None:
    """Let the first optimizer of this process leave torch's compiler where it is.

    torch keeps the compiler away from some methods of every optimizer, and loads it for that: 1.1 s of processor time
    and 77 MB in each rank (torch 2.13), before the first update. Where nobody has loaded it there is nothing to keep
    away from. A torch that does this otherwise takes no notice.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and not hasattr(plain, _MARK):
            setattr(plain, _MARK, plain)
