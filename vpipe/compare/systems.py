"""The systems that are compared, each as its users ran it, in the words of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.errors import Problem, UserError, nearest


@dataclass(frozen=True)
class System:
    """How a system trains.

    Attributes:
        name: on the command line.
        schedule: its order of actions.
        recompute: share of every stage's layers that it recomputes; None lets the planner choose the layers.
        words: what it is, for people.
    """

    name: str
    schedule: str
    recompute: float | None
    words: str


SYSTEMS = (
    System("gpipe", "gpipe", 1.0, "with a flush, every layer recomputed, its best partition"),
    System("pipedream", "pipedream", 0.0, "without a flush, weights stashed, nothing recomputed, its best partition"),
    System("vpipe", "pipedream", None, "without a flush, weights stashed, partition and recomputed layers planned"))
"""GPipe: Huang et al. (arXiv:1811.06965), section 2.3: recomputes all of a stage but its inputs. PipeDream: Narayanan
et al. (SOSP 2019), section 3.1: a partition from a profile. VPipe: Zhao et al. (TPDS 2021): partition and recompute."""


def systems_named(text: str) -> tuple[System, ...]:
    """``"gpipe,vpipe"`` as systems, in that order.

    Raises:
        UserError: a name is unknown, or comes twice; all mistakes at once.
    """
    known = {system.name: system for system in SYSTEMS}
    return tuple(known[name] for name in names_of(text, "--systems", list(known), "system"))


def names_of(text: str, option: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """The names of a list on the command line, each of them known and there once.

    Raises:
        UserError: they are not; all mistakes at once.
    """
    names = [name.strip() for name in text.split(",")]
    problems = [Problem(f"{option} names '{name}', which is no {what}", nearest(name, known))
                for name in dict.fromkeys(names) if name not in known]
    problems += [Problem(f"{option} names '{name}' {names.count(name)} times", "name it once")
                 for name in dict.fromkeys(names) if name in known and names.count(name) > 1]
    if problems:
        raise UserError.all_of(problems)
    return tuple(names)
