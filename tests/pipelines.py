"""Describe a pipeline by words, one for each field, as tests vary them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vpipe.description.cut import Cut
from vpipe.description.execution import Execution
from vpipe.description.order import Asynchronous, Order
from vpipe.description.precision import Precision
from vpipe.description.transfers import Transfers
from vpipe.description.update import Update

PARTS: dict[str, type] = {"optimizer": Update, "stages": Cut, "schedule": Asynchronous, "precision": Precision,
                          "transfers": Transfers, "execution": Execution}
"""The part of each argument that has one."""

WORDS = {
    **{field.name: (argument, field.name) for argument, part in PARTS.items() for field in fields(part)},
    "partition": ("stages", "stages"), "plan": ("stages", "stages"),
    "placement": ("stages", "ranks"), "replicas": ("stages", "ranks"),
    "precision": ("precision", "name"), "transfers": ("transfers", ""), "execution": ("execution", ""),
    "microbatches": ("microbatches", "microbatches"), "seed": ("seed", "seed")}
"""The argument and the field of each word."""

FIRST = {"precision": "name", "transfers": "", "execution": ""}
"""The field that may stand alone for an argument, where it is not called as the argument; none where it is empty."""


def parts(**words: Any) -> dict[str, Any]:
    """Return the arguments of ``Pipeline``; a word is the name of a field, or of what a pipeline has for it."""
    values: dict[str, dict[str, Any]] = {}
    for word, value in words.items():
        argument, field = WORDS[word]
        if value is not None or argument not in PARTS or word in ("optimizer", "recompute"):
            values.setdefault(argument, {})[field] = value
    return {argument: _part(argument, given) for argument, given in values.items()}


def _part(argument: str, values: Mapping[str, Any]) -> Any:
    first = FIRST.get(argument, argument)
    if set(values) == {first}:
        return values[first]
    part = PARTS[argument]
    if part is Asynchronous and set(values) <= {field.name for field in fields(Order)}:
        part = Order
    return part(**values)
