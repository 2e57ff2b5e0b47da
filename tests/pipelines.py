"""Describe a pipeline by words, one for each field, as tests vary them one by one."""

from __future__ import annotations

from typing import Any

from vpipe.old_calls import OLD, OLD_FIRST, PARTS, part_of

NEW = {"ranks": ("stages", "ranks"), "transfers": ("transfers", ""), "execution": ("execution", ""),
       "mesh": ("execution", "mesh"), "data": ("execution", "data")}


def parts(**words: Any) -> dict[str, Any]:
    """Return the arguments of ``Pipeline``; a word is the name of a field, or what an older vpipe called it."""
    rounding, strength = words.pop("compress_rounding", "nearest"), words.pop("delay_correction_strength", 1.0)
    if rounding == "stochastic":
        words["compress"] = {"int8": "int8_stochastic"}.get(words["compress"]) if isinstance(words["compress"], str) \
            else ["int8_stochastic" if name == "int8" else name for name in words["compress"]]
    if "delay_correction" in words:
        words["delay_correction"] = {"none": 0.0, "extrapolate": strength}.get(words["delay_correction"],
                                                                               words["delay_correction"])
    fields: dict[str, dict[str, Any]] = {}
    for word, value in words.items():
        argument, field = NEW.get(word) or OLD[word]
        if value is not None or argument not in PARTS or word in ("optimizer", "recompute"):
            fields.setdefault(argument, {})[field] = value
    return {argument: _part(argument, values) for argument, values in fields.items()}


def _part(argument: str, values: dict[str, Any]) -> Any:
    first = OLD_FIRST.get(argument, argument)
    if set(values) == {first}:
        return values[first]
    return part_of(argument, values)(**values)
