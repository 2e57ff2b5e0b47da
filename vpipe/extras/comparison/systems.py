"""Define the systems to compare, and plan each as its users ran it: the best partition and microbatch that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vpipe import Plan
from vpipe.app.sizes import parse_size
from vpipe.errors import Problem, UserError, nearest
from vpipe.plan import PlanRequest, Profile, solve
from vpipe.schedules import RegisteredSchedule

MOST_SIZES = 8
"""Number of microbatch sizes to try, the smallest ones: each has to be measured."""


@dataclass(frozen=True)
class System:
    """A system: its schedule, and the share of every stage's layers that it recomputes (None: the planner chooses)."""

    name: str
    schedule: str
    recompute: float | None
    description: str


SYSTEMS = {system.name: system for system in (
    System("gpipe", "gpipe", 1.0, "with a flush, every layer recomputed, its best partition"),
    System("pipedream", "pipedream", 0.0, "without a flush, weights stashed, nothing recomputed, its best partition"),
    System("vpipe", "pipedream", None, "without a flush, weights stashed, partition and recomputed layers planned"))}
"""GPipe: Huang et al. (arXiv:1811.06965), section 2.3: recomputes all of a stage but its inputs. PipeDream: Narayanan
et al. (SOSP 2019), section 3.1: a partition from a profile. VPipe: Zhao et al. (TPDS 2021): partition and recompute."""

HINT = "write --systems gpipe,pipedream,vpipe, or --schedules 1f1b,zb_h1,pipedream"


@dataclass(frozen=True)
class ComparisonRequest:
    """The systems or the schedules to compare, of each model. Without either, each model runs as its config says.

    ``memory_bytes`` is the limit of each rank; None: what the device has.
    """

    systems: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    memory_bytes: int | None = None

    @classmethod
    def parse(cls, systems: str | None, schedules: str | None, memory: str | None) -> ComparisonRequest:
        """Parse ``--systems``, ``--schedules`` and ``--memory``."""
        if systems is not None and schedules is not None:
            raise UserError("vpipe compare takes --systems or --schedules, not both", hint=HINT)
        if memory is not None and systems is None:
            raise UserError("--memory decides what systems recompute, but --schedules run as the config says",
                            hint="leave it out, or compare --systems")
        return cls(() if systems is None else parse_names(systems, "--systems", list(SYSTEMS), "system"),
                   () if schedules is None else parse_names(schedules, "--schedules", RegisteredSchedule.names(),
                                                                    "schedule"),
                   None if memory is None else parse_size(memory, "--memory"))


def parse_names(text: str, option: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Parse a list of known names, none of them twice; all mistakes are one error."""
    names = [name.strip() for name in text.split(",")]
    problems = []
    for name, times in Counter(names).items():
        if name not in known:
            hint = nearest(name, known, open_list=option == "--schedules")
            problems.append(Problem(f"{option} names '{name}', which is no {what}", hint))
        elif times > 1:
            problems.append(Problem(f"{option} names '{name}' {times} times", "name it once"))
    if problems:
        raise UserError.all_of(problems)
    return tuple(names)


def microbatch_counts(batch_size: int) -> list[int]:
    """Return into how many equal microbatches a batch may be cut, the fewest first."""
    return [count for count in range(1, batch_size + 1) if batch_size % count == 0][-MOST_SIZES:]


def plan_system(system: System, profiles: Mapping[int, Profile], ranks: int, memory_bytes: int | None) -> Plan:
    """Return the plan of a system with the partition and the microbatch that take the least time per sample.

    Args:
        profiles: by microbatches per update, all of equally many samples per update.
        ranks: one stage on each.
        memory_bytes: limit of a rank, if there is one.

    Raises:
        UserError: no size fits.
    """
    flush = RegisteredSchedule.named(system.schedule).flush
    every = {count: None if flush else count for count in profiles}  # without a flush: as many samples per update
    return solve(PlanRequest(profiles, ranks, memory_bytes, (system.schedule,), every,
                             placement=tuple((rank,) for rank in range(ranks)), recompute=system.recompute)).plan
