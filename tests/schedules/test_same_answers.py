"""The checker, lowering, orders, simulator and peaks answer as before they read one table of kinds.

Digests of the old answers, of the code at f60ed1a, are in ``answers.json``. At that commit each of these parts had its
own idea of what an action waits for, makes and frees. Run as a script, this file prints new digests.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

import pytest

from vpipe.errors import CheckError, UserError
from vpipe.schedules.assignment import Placement, widened
from vpipe.schedules.builder import build, build_evaluation
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs, Link, StageCosts
from vpipe.schedules.kinds import Action
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.rewrites import reverse_backwards
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate

OLD = json.loads(Path(__file__).with_name("answers.json").read_text())
RANDOM = 10_000
PER_DIGEST = 100


def answers(schedule: Schedule, norm: bool, seed: int) -> Iterator[str]:
    """Everything about a schedule of compute actions: as it is, lowered, and over nccl."""
    yield verdict(schedule)
    with suppress(KeyError, CheckError, AssertionError, ValueError, IndexError, StopIteration, RuntimeError):
        lowered = lower(schedule, norm)
        yield programs(lowered)
        yield from asked(schedule, lowered, seed)


def asked(schedule: Schedule, lowered: Schedule, seed: int) -> Iterator[str]:
    """What holds only where the rules hold."""
    for each in (schedule, lowered):
        said = verdict(each)
        yield said
        if said == "ok":
            yield from measured(each, seed)


def verdict(schedule: Schedule) -> str:
    try:
        check(schedule)
    except CheckError as error:
        return str(error)
    return "ok"


def programs(schedule: Schedule) -> str:
    return "\n".join(" ".join(map(str, program)) for program in schedule.programs)


def measured(schedule: Schedule, seed: int) -> Iterator[str]:
    yield repr([(peaks.peak_activations, peaks.peak_weight_halves) for peaks in schedule.rank_peaks])
    yield repr([(peaks.versions, peaks.staleness) for peaks in schedule.stage_peaks])
    for costs in some_costs(schedule, random.Random(seed)):
        timeline = simulate(schedule, costs)
        yield repr([[(str(event.action), str(event.start_s), str(event.end_s)) for event in rank]
                    for rank in timeline.events])
        yield repr([(str(one.action), one.source, one.target, str(one.start_s), str(one.end_s))
                    for one in timeline.transfers])
        yield repr([[(str(at), str(held)) for at, held in curve] for curve in timeline.memory])
        yield f"{timeline.makespan_s} {timeline.bubble_s} {timeline.peak_bytes}"


def some_costs(schedule: Schedule, chance: random.Random) -> Iterator[Costs]:
    ranks = range(schedule.ranks)

    def stage() -> StageCosts:
        forward, activation = chance.randint(1, 5), chance.randint(2, 6)
        return StageCosts(forward, chance.randint(1, 4), Fraction(chance.randint(1, 7), 2),
                          recompute_s=forward * chance.randint(0, 1), step_s=chance.randint(0, 2),
                          activation_bytes=activation, weight_half_bytes=1, kept_bytes=1,
                          version_bytes=chance.randint(0, 2), output_bytes=chance.randint(0, 3),
                          gradient_bytes=chance.randint(0, 3), tied_bytes=chance.randint(0, 2),
                          reduce_bytes=chance.randint(0, 6))

    stages = tuple(stage() for _ in range(schedule.stages))
    links = {(one, other): Link(Fraction(1, 4), chance.randint(1, 3)) for one in ranks for other in ranks
             if chance.random() < 0.3}
    yield Costs(stages, Link(Fraction(1, 8), 2), links, overlap=True)
    yield Costs(stages, Link(0, 1), links, overlap=False)
    yield Costs(stages, Link(0, 4), overlap=True, cores=2, hosts=tuple(rank % 2 for rank in ranks))


LATER = ("chimera", "dualpipe", "seq1f1b")
FIRST = ("1f1b", "2bw", "auto", "dualpipe_v", "gpipe", "hanayo", "interleaved", "interleaved_zb", "looped_bfs",
         "pipedream", "pipedream_vertical_sync", "v_half", "v_min", "zb_h1", "zb_h2", "zb_v")
"""Schedules that the answers are of, in their order; younger ones have answers in no file."""


def registered() -> Iterator[tuple[Schedule, bool]]:
    """Every generator, in several sizes, with replicas, ties, recomputation, chunks and other warm-ups."""
    yield from _in_some_sizes(FIRST)
    for name in ("1f1b", "gpipe", "zb_h1", "pipedream", "2bw"):
        for placement in (((0, 1), (2,)), ((0,), (1, 2)), ((2, 0), (1,), (3,)), ((0, 1, 2), (3, 4))):
            yield from _built(name, placement, 12, True, False, None)
    yield from _built("pipedream", ((0,), (1,), (2,)), 12, True, False, (5, 3, 0))
    yield reverse_backwards(build("gpipe", ((0,), (1,), (2,)), 5)), False
    yield build_evaluation(((0, 1), (2,), (3, 4, 5)), 12), False
    yield build_evaluation(((0,), (1,), (0,), (1,)), 5), False
    yield from _in_some_sizes(LATER)


def _in_some_sizes(names: Iterable[str]) -> Iterator[tuple[Schedule, bool]]:
    for name in names:
        recipe = RegisteredSchedule.named(name)
        for ranks, replicas, microbatches, tied, recomputed in (
                (1, 1, 3, False, False), (2, 1, 8, True, True), (3, 1, 6, True, False), (4, 1, 8, False, True),
                (2, 2, 8, True, False), (2, 3, 12, False, True)):
            for chunks in {recipe.chunks, *([1, 3] if recipe.any_chunks else [])}:
                placement = widened(recipe.layout(ranks, chunks), replicas)
                yield from _built(name, placement, microbatches, tied, recomputed, None)


def _built(name: str, placement: Placement, microbatches: int, tied: bool, recomputed: bool,
           warmup: tuple[int, ...] | None) -> Iterator[tuple[Schedule, bool]]:
    stages = range(len(placement))
    ties = {0: tuple(stages[1:])} if tied and len(stages) > 1 else {}
    with suppress(UserError):
        schedule = build(name, placement, microbatches, None, ties, stages[::2] if recomputed else (), warmup=warmup)
        yield schedule, schedule.flush and tied


def at_random(seed: int) -> tuple[Schedule, bool]:
    """A schedule whose ranks do at any time what they can; of every second one something is then moved or lost."""
    chance = random.Random(seed)
    ranks, microbatches = chance.randint(1, 3), chance.randint(1, 3)
    stages = chance.randint(ranks, ranks + 2)
    homes = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(homes)
    halved = {stage for stage in range(stages) if chance.random() < 0.3}
    recomputed = {stage for stage in range(stages) if chance.random() < 0.2}
    waits: dict[str, list[str]] = {}
    for microbatch in range(microbatches):
        for stage in range(stages):
            returns = [f"{stage}{'I' if stage in halved else 'B'}{microbatch}",
                       f"{stage + 1}{'I' if stage + 1 in halved else 'B'}{microbatch}"]
            forward, again = f"{stage}F{microbatch}", f"{stage}R{microbatch}"
            waits[forward] = [f"{stage - 1}F{microbatch}"]
            waits[returns[0]] = [forward, returns[1], again]
            if stage in recomputed:
                waits[again] = [forward]
            if stage in halved:
                waits[f"{stage}W{microbatch}"] = returns[:1]
    rows: list[list[str]] = [[] for _ in range(ranks)]
    while waits:
        text = chance.choice([one for one, before in waits.items() if not any(other in waits for other in before)])
        del waits[text]
        rows[homes[Action.parse(text).stage]].append(text)
    for stage, rank in enumerate(homes):
        rows[rank].append(f"{stage}STEP0")
    if seed % 2:
        row = rows[chance.randrange(ranks)]
        at = chance.randrange(len(row))
        match chance.randrange(4):
            case 0:
                del row[at]
            case 1:
                row.insert(chance.randrange(len(row)), row[at])
            case _:
                row.insert(chance.randrange(len(row)), row.pop(at))
    ties = {0: tuple(range(1, stages))[:chance.randint(1, 2)]} if stages > 1 and chance.random() < 0.5 else {}
    held = microbatches * stages
    return Schedule("any", tuple((rank,) for rank in homes), tuple(tuple(map(Action.parse, row)) for row in rows),
                    microbatches, microbatches, flush=True, peak_activations=(held,) * ranks, versions=(1,) * stages,
                    ties=ties), chance.random() < 0.5


def lost(schedule: Schedule, seed: int) -> Schedule:
    """A lowered schedule of which something is moved or lost, so that every rule is asked."""
    chance = random.Random(seed)
    rows = [list(program) for program in schedule.programs]
    for _ in range(chance.randint(1, 2)):
        row = chance.choice(rows)
        if row:
            action = row.pop(chance.randrange(len(row)))
            if chance.random() < 0.8:
                row.insert(chance.randint(0, len(row)), action)
    return schedule.with_programs(rows)


def digest(texts: Iterator[str]) -> str:
    made = hashlib.sha256()
    for text in texts:
        made.update(text.encode() + b"\0")
    return made.hexdigest()[:16]


def of_registered() -> Iterator[tuple[str, str]]:
    """A digest for each of the generators' schedules, and one of what is said when something of it is lost."""
    for seed, (schedule, norm) in enumerate(registered()):
        lowered = lower(schedule, norm)
        yield (digest(answers(schedule, norm, seed)),
               digest(verdict(lost(replace(lowered, name="lost"), 100 * seed + turn)) for turn in range(12)))


def of_random(group: int) -> str:
    """The digest of a hundred random schedules."""
    def texts() -> Iterator[str]:
        for seed in range(group * PER_DIGEST, (group + 1) * PER_DIGEST):
            schedule, norm = at_random(seed)
            yield from answers(schedule, norm, seed)
            with suppress(KeyError, CheckError, AssertionError, ValueError, IndexError, StopIteration, RuntimeError):
                yield verdict(lost(lower(schedule, norm), seed))

    return digest(texts())


def of_registered_pairs(count: int | None = None) -> list[str]:
    return [each for pair in islice(of_registered(), count) for each in pair]


def test_some_registered_schedules() -> None:
    """The first ones, and so every kind of question."""
    assert of_registered_pairs(12) == OLD["registered"][:24]


def test_some_random_schedules() -> None:
    assert of_random(0) == OLD["at random"][0]


@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_of_them() -> None:
    assert of_registered_pairs()[:len(OLD["registered"])] == OLD["registered"]
    assert [of_random(group) for group in range(len(OLD["at random"]))] == OLD["at random"]


if __name__ == "__main__":
    json.dump({"registered": of_registered_pairs(),
               "at random": [of_random(group) for group in range(RANDOM // PER_DIGEST)]}, sys.stdout, indent=0)
