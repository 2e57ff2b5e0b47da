"""Who takes part: from what was asked, and what was measured, to plans; and then the comparison."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vpipe.compare.ask import Ask
from vpipe.compare.entry import Entry, Field
from vpipe.compare.fitting import Fitted, fit, microbatch_counts
from vpipe.compare.plain import of_schedules
from vpipe.compare.systems import systems_named
from vpipe.compare.world import compare
from vpipe.errors import UserError
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile
from vpipe.profiling.world import World
from vpipe.sizes import size_text
from vpipe.train.job import Job
from vpipe.train.planning import memory_limit
from vpipe.train.profiled import profile_job

Say = Callable[[str], None]
_PLANNING = "planning"
"""What rank 0 says while it does."""


def take_part(job: Job, folder: Path, words: Sequence[str]) -> None:
    """A rank's task: what was asked comes as ``words``, see :class:`~vpipe.compare.ask.Ask`."""
    ask = Ask.of_words(words)

    def enter(world: World) -> Field:
        def say(line: str) -> None:
            if world.rank == 0:
                print(line, file=sys.stderr, flush=True)

        return field_of(job, ask, world, say)

    compare(job, folder, enter)


def field_of(job: Job, ask: Ask, world: World, say: Say) -> Field:
    """The field. Every rank of the world calls this, since layers are measured together; rank 0's answer counts."""
    if ask.schedules:
        return of_schedules(job, ask.schedules)
    batch = job.config.dataset.batch_size
    sizes = {count: batch // count for count in microbatch_counts(batch)}
    profiles = profile_job(job, list(sizes.values()), say=say)
    if world.rank:  # not planning, too: that would take the cores of rank 0
        while world.share(None)[0] == _PLANNING:
            pass
        return Field((), {}, None)
    by_count = {count: profiles[size] for count, size in sizes.items()}
    device = memory_limit(job.config.with_parallel(memory=None), by_count[min(by_count)])
    memory = limit(ask.memory_bytes or job.config.parallel.memory, device, len(ask.systems))
    field = of_systems(ask.systems, by_count, job.schedule.ranks, memory, say,
                       lambda: _tell(world, _PLANNING))
    if device is not None and (warning := crowded(field, device)):
        say(warning)
    _tell(world, "planned")
    return field


def limit(given: int | None, device_bytes: int | None, contenders: int) -> int | None:
    """The bytes that a rank of one contender may use: what was given, else an equal part of what the device has for a
    rank, since the weights and optimizers of all contenders stay there from turn to turn. None where nobody knows."""
    return given or (None if device_bytes is None else device_bytes // contenders)


def crowded(field: Field, device_bytes: int) -> str | None:
    """A warning where all contenders together should need more than the device has for a rank, which a limit that was
    given may allow."""
    needs: Counter[int] = Counter()
    plans: list[Plan] = []
    for entry in field.entries:
        plans += [entry.plan] if entry.plan not in plans else []  # equal ones run once
    for plan in plans:
        assert plan.predictions is not None, "the solver predicts"
        for stage in plan.predictions.stages:
            needs.update(dict.fromkeys(stage.ranks, stage.memory.peak))
    if not needs:
        return None
    rank, most = max(needs.items(), key=lambda need: need[1])
    if most <= device_bytes:
        return None
    return (f"warning: all {len(plans)} contenders stay in memory from turn to turn: rank {rank} may need "
            f"{size_text(most)}, the sum of their peaks, and has {size_text(device_bytes)}; compare fewer at once, or "
            "give less --memory")


def _tell(world: World, what: str) -> None:
    """Let the ranks that wait know, before they give this one up."""
    world.share(what)


def of_systems(names: Sequence[str], profiles: Mapping[int, Profile], ranks: int, memory_bytes: int | None,
               say: Say, solved: Callable[[], None] = lambda: None) -> Field:
    """Systems, each with the plan that is best for it within the memory."""
    entries, refused = [], {}
    for system in systems_named(",".join(names)):
        try:
            fitted = fit(system, profiles, ranks, memory_bytes, solved)
        except UserError as error:
            refused[system.name] = error.problems[0]
            say(f"{system.name}: does not fit: {refused[system.name].what}")
            continue
        say(f"{system.name}: {_says(fitted)}")
        entries.append(Entry(system.name, system.words, fitted.plan, fitted.largest_size))
    return Field(tuple(entries), refused, memory_bytes)


def _says(fitted: Fitted) -> str:
    tried = ", ".join(f"{size} " + ("does not fit" if seconds is None else f"{1 / seconds:.1f}/s")
                      for size, seconds in fitted.seconds_per_sample.items())
    most = max(stage.memory.peak for stage in fitted.prediction.stages)
    return (f"microbatches of {fitted.microbatch_size}, {size_text(most)} on the fullest rank (samples per second "
            f"predicted by microbatch: {tried})")
