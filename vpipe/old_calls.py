"""Refuse calls of an older vpipe, which passed 29 values one by one, with the same call as it is written now."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from vpipe.arguments import shown
from vpipe.description.cut import Cut
from vpipe.description.execution import Execution
from vpipe.description.order import Asynchronous, Order
from vpipe.description.precision import Precision
from vpipe.description.transfers import Transfers
from vpipe.description.update import Update
from vpipe.errors import UserError

PARTS: dict[str, type] = {"optimizer": Update, "stages": Cut, "schedule": Asynchronous, "precision": Precision,
                          "transfers": Transfers, "execution": Execution}
"""The part of each argument that has one."""

OLD = {
    "model": ("model", "model"),
    **{field.name: (argument, field.name) for argument, part in PARTS.items() for field in fields(part)},
    "partition": ("stages", "stages"), "plan": ("stages", "stages"),
    "placement": ("stages", "ranks"), "replicas": ("stages", "ranks"),
    "delay_correction_strength": ("schedule", "delay_correction"), "compress_rounding": ("transfers", "compress"),
    "precision": ("precision", "name"), "microbatches": ("microbatches", "microbatches"), "seed": ("seed", "seed")}
"""What an older vpipe called a value: the argument that has it now, and the field there."""

Method = TypeVar("Method", bound=Callable[..., None])


def shows_new_call(init: Method) -> Method:
    """Wrap ``Pipeline.__init__``: what Python would refuse by a TypeError, an old call, is refused with the new one."""
    signature = inspect.signature(init)

    @wraps(init)
    def call(self: object, *arguments: Any, **keywords: Any) -> None:
        given_late = len(arguments) < 2 or isinstance(arguments[1], int) or "optimizer" in keywords
        names = ("model", "stages", "schedule", "microbatches") if given_late else tuple(signature.parameters)[1:]
        old = dict(zip(names, arguments, strict=False)) | keywords
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
    parts: dict[str, dict[str, str]] = {}
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
            parts.setdefault(argument, {})[field] = said
    words = []
    for argument, values in parts.items():
        first = OLD_FIRST.get(argument, argument)
        said = values[first] if set(values) == {first} else _part(argument, first, values)
        words.append(said if argument in ("model", "optimizer") else f"{argument}={said}")
    return f"Pipeline({', '.join(words)})"


def part_of(argument: str, names: Iterable[str]) -> type:
    """Return the part with these fields for an argument."""
    part = PARTS[argument]
    return Order if part is Asynchronous and set(names) <= {field.name for field in fields(Order)} else part


OLD_FIRST = {"precision": "name", "transfers": "", "execution": ""}
"""The field that may stand alone for an argument, where it is not called as the argument; none where it is empty."""


def _part(argument: str, first: str, values: Mapping[str, str]) -> str:
    kind = part_of(argument, values).__name__
    ordered = sorted(values, key=lambda field: field != first)
    return f"{kind}({', '.join(values[field] if field == first else f'{field}={values[field]}' for field in ordered)})"


def _said(name: str, value: object) -> str:
    """Return a value as a script writes it: as it is where that is short, else by its old name."""
    text = repr(value) if isinstance(value, (int, float, str, list, tuple)) else ""
    return text if text and len(text) <= 60 and "<" not in text else name
