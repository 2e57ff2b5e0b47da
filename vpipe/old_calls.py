"""Refuse calls of an older vpipe, which passed 29 values one by one, with the same call as it is written now."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from vpipe.arguments import shown
from vpipe.errors import UserError

OLD = {
    "model": ("model", "model"), "optimizer": ("optimizer", "optimizer"),
    "learning_rate_factor": ("optimizer", "learning_rate_factor"),
    "grad_clip": ("optimizer", "grad_clip"), "skip_not_finite": ("optimizer", "skip_not_finite"),
    "stages": ("stages", "stages"), "partition": ("stages", "stages"), "plan": ("stages", "stages"),
    "recompute": ("stages", "recompute"), "placement": ("stages", "ranks"), "replicas": ("stages", "ranks"),
    "schedule": ("schedule", "schedule"), "chunks": ("schedule", "chunks"),
    "update_every": ("schedule", "update_every"), "warmup_depth": ("schedule", "warmup_depth"),
    "delay_correction": ("schedule", "delay_correction"), "delay_correction_strength": ("schedule", "delay_correction"),
    "microbatches": ("microbatches", "microbatches"), "precision": ("precision", "name"),
    "loss_scale": ("precision", "loss_scale"), "backend": ("transfers", "backend"),
    "timeout_s": ("transfers", "timeout_s"), "shared_memory": ("transfers", "shared_memory"),
    "compress": ("transfers", "compress"), "compress_rounding": ("transfers", "compress"),
    "device": ("execution", "device"), "executor": ("execution", "executor"), "compile": ("execution", "compile"),
    "seed": ("seed", "seed"),
}
"""What an older vpipe called a value: the argument that has it now, and the field there."""

PARTS = {"optimizer": "Update", "stages": "Cut", "schedule": "Order", "transfers": "Transfers",
         "execution": "Execution", "precision": "Precision"}
"""The class of each argument that has fields, of which the first may stand alone."""

ASYNCHRONOUS = ("update_every", "warmup_depth", "delay_correction")

Method = TypeVar("Method", bound=Callable[..., None])


def shows_new_call(init: Method) -> Method:
    """Wrap ``Pipeline.__init__``: what Python would refuse by a TypeError, an old call, is refused with the new one."""
    signature = inspect.signature(init)

    @wraps(init)
    def call(self: object, *arguments: Any, **keywords: Any) -> None:
        old = dict(zip(("model", "stages", "schedule", "microbatches"), arguments, strict=False)) | keywords
        try:
            signature.bind(self, *arguments, **keywords)
        except TypeError as error:
            if not set(old) <= set(OLD) or "optimizer" not in old:
                raise
            what = f"Pipeline takes its arguments in another way now: {error}"
        else:
            if len(arguments) < 2 or not isinstance(arguments[1], int):
                return init(self, *arguments, **keywords)
            what = f"optimizer is {shown(arguments[1])}"
        raise UserError(what, hint=f"write {new_call(old)}") from None

    return call  # type: ignore[return-value]


def new_call(old: Mapping[str, object]) -> str:
    """Return the call of ``Pipeline`` that means what an old one meant."""
    fields: dict[str, dict[str, str]] = {}
    for name in OLD:
        value = old.get(name)
        if (value is None and name not in ("model", "optimizer")) or value == "none":
            continue
        argument, field = OLD[name]
        said = _said(name, value)
        if name == "delay_correction":
            said = _said(name, old.get("delay_correction_strength", 1.0))
        elif name == "compress" and old.get("compress_rounding") == "stochastic":
            said = said.replace("'int8'", "'int8_stochastic'")
        if name not in ("compress_rounding", "delay_correction_strength"):
            fields.setdefault(argument, {})[field] = said
    words = []
    for argument, values in fields.items():
        first = OLD_FIRST.get(argument, argument)
        said = values[first] if set(values) == {first} else _part(argument, first, values)
        words.append(said if argument in ("model", "optimizer") else f"{argument}={said}")
    return f"Pipeline({', '.join(words)})"


OLD_FIRST = {"precision": "name", "transfers": "", "execution": ""}
"""The field that may stand alone for an argument, where it is not called as the argument; none where it is empty."""


def _part(argument: str, first: str, values: Mapping[str, str]) -> str:
    kind = "Asynchronous" if set(values) & set(ASYNCHRONOUS) else PARTS[argument]
    if argument == "schedule" and first not in values:
        values = {first: "'pipedream'" if kind == "Asynchronous" else "'1f1b'", **values}
    ordered = sorted(values, key=lambda field: field != first)
    return f"{kind}({', '.join(values[field] if field == first else f'{field}={values[field]}' for field in ordered)})"


def _said(name: str, value: object) -> str:
    """Return a value as a script writes it: as it is where that is short, else by its old name."""
    text = repr(value) if isinstance(value, (int, float, str, list, tuple)) else ""
    return text if text and len(text) <= 60 and "<" not in text else name
