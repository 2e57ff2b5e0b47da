"""Collect and check the keys of a family's config: from a preset, a Hugging Face ``config.json`` and the settings.

No torch is imported here: config files are checked against the same limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any

from vpipe.errors import Problem, UserError, nearest

if TYPE_CHECKING:
    from vpipe.model.registry import ModelSettings

LARGEST_SIZE = 1 << 24
"""Limit of a layer's width, a vocabulary and a sequence: products of two of them stay countable in 64 bits."""

MOST_BLOCKS = 1024
"""Limit of a model's blocks: each is an object or two, and counted when a model is cut."""

Positive = float
"""Type of a field that may be any number above 0."""

Blocks = int
"""Type of the field with a model's number of blocks."""

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int and 1 <= value <= LARGEST_SIZE,
            f"it must be an integer from 1 to {LARGEST_SIZE:,}"),
    "Blocks": (lambda value: type(value) is int and 1 <= value <= MOST_BLOCKS,
               f"it must be an integer from 1 to {MOST_BLOCKS:,}"),
    "float": (lambda value: type(value) in (int, float) and 0 <= value < 1,
              "it must be a number from 0 up to, not including, 1"),
    "Positive": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "it must be a number above 0"),
    "bool": (lambda value: type(value) is bool, "it must be true or false")}


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of a family's config. The config itself is a dataclass with the names and defaults of Hugging Face's.

    Attributes:
        family: as messages call it, such as ``GPT``.
        presets: sizes by name.
        fixed: keys that are no setting here, and must agree with what the family computes.
        silent: keys that do not affect training, or that no implementation reads.
        choices: values of the keys that are words.
    """

    family: str
    presets: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, object]
    silent: Set[str]
    choices: Mapping[str, Collection[object]]

    def merge(self, config: type[Any], preset: str | None, overrides: Mapping[str, object],
               own: Mapping[str, object]) -> dict[str, Any]:
        """Merge the values of the fields of ``config`` from the preset, ``overrides`` and ``own``; the later wins.

        Args:
            overrides: the contents of a ``config.json``.
            own: from settings; None = not set.

        Raises:
            UserError: an unknown preset; keys that are unknown, or ask for what the family does not compute.
        """
        if preset is not None and preset not in self.presets:
            raise UserError(f"{self.family} has no preset '{preset}'", hint=nearest(preset, list(self.presets)))
        problems = [Problem(f"'{key}' is {overrides[key]!r}, but this {self.family} computes {fixed!r} only",
                            f"set '{key}' to {fixed!r} or leave it out")
                    for key, fixed in self.fixed.items() if overrides.get(key, fixed) != fixed]
        known = [field.name for field in fields(config)]
        given = {key: value for key, value in overrides.items() if key not in self.silent and key not in self.fixed}
        problems += [Problem(f"a {self.family} config has no '{key}'", nearest(key, known))
                     for key in given if key not in known]
        if problems:
            raise UserError.all_of(problems)
        return {**({} if preset is None else self.presets[preset]), **given,
                **{key: value for key, value in own.items() if value is not None}}

    def check(self, config: Any, heads: str) -> None:
        """Check the type of every field, and that the heads divide the hidden size.

        Args:
            heads: the names of both fields, such as ``n_embd n_head``.

        Raises:
            UserError: naming every value that is wrong.
        """
        problems = [problem for field in fields(config) for problem in self._wrong(field, getattr(config, field.name))]
        width, number = (getattr(config, name) for name in heads.split())
        if not problems and width % number:
            divisors = sorted(n for low in range(1, math.isqrt(width) + 1) if width % low == 0
                              for n in (low, width // low))
            nearest_divisor = min(divisors, key=lambda n: abs(n - number))
            problems.append(Problem(
                f"{self.family}'s {heads.split()[0]} {width} is not divisible by its {number} attention heads",
                f"set num_heads to a number that divides {width}, such as {nearest_divisor}"))
        if problems:
            raise UserError.all_of(problems)

    def _wrong(self, field: Field[Any], value: object) -> Iterable[Problem]:
        what, kind = f"{self.family}'s {field.name} is {value!r}", str(field.type)
        if value is None and kind.endswith(" | None"):
            return
        if field.name in self.choices:
            if value not in self.choices[field.name]:
                yield Problem(what, f"choose one of {', '.join(map(str, self.choices[field.name]))}")
        elif (rule := _RULES.get(kind.removesuffix(" | None"))) is not None and not rule[0](value):
            yield Problem(what, rule[1])


def check_length(family: str, length: int, positions: int, key: str) -> None:
    """Raise UserError for a sequence of ``length`` tokens that is longer than the model's positions."""
    if length > positions:
        raise UserError(f"the sequence length is {length}, but {family} has position embeddings for {positions} tokens",
                        hint=f"shorten the sequences to {positions}, or raise {key} to {length}")


def check_no_groups(family: str, settings: ModelSettings) -> None:
    """Raise UserError where settings ask for grouped heads in a family without them."""
    if settings.num_kv_heads not in (None, settings.num_heads):
        raise UserError(f"num_kv_heads is {settings.num_kv_heads}, but every head of {family} has keys of its own",
                        hint="leave it out, or take the model llama")
