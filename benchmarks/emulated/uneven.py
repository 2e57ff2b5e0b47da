"""Schedules searched for measured costs against torch's own, in torch's runtime, on stages that differ. See README.md.

python benchmarks/emulated/uneven.py [--only gpt2] [--turns N]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "throughput"))

from awake import awake
from case import Case
from device import Device, Times
from machine import description
from ranks import measure, run_ranks
from system import System, Updates
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs
from torch_systems import updates

from vpipe.schedules.assignment import Layout, Placement, stages_of_rank
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs, Link, StageCosts
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.search.search import search
from vpipe.schedules.simulator.timeline import simulate

RANKS, MICROBATCHES = 4, 8
HOP_S = 0.001
"""A transfer over gloo, in the simulation; README.md has what it takes."""

TORCHS = (("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2), ("InterleavedZeroBubble", 1),
          ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2))
"""torch's schedules and their stages per rank."""


@dataclass(frozen=True)
class Uneven:
    """A model of equal blocks and a head.

    Attributes:
        blocks: how many.
        head: the head's operations over those of a block.
        forward_s: F of a block; either half of its backward takes as long.
    """

    blocks: int
    head: float
    forward_s: float

    def cut(self, stages: int) -> list[int]:
        """Blocks per stage as torchtitan cuts by default: embedding and head count as a block each."""
        each, more = divmod(self.blocks + 2, stages)
        sizes = [each + (stage < more) for stage in range(stages)]
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
        return sizes

    def times(self, stages: int) -> list[Times]:
        """Of every stage; the last has the head."""
        sizes: list[float] = [*self.cut(stages)]
        sizes[-1] += self.head
        seconds = [Fraction(size * self.forward_s).limit_denominator(10**6) for size in sizes]
        return [Times(one, 2 * one) for one in seconds]


MODELS = {"gpt2": Uneven(12, 5.4, 0.01), "llama3-8b": Uneven(32, 2.4, 0.005)}
"""GPT-2 small, whose head is as much work as 5.4 of its blocks; Llama 3 8B."""


def order_of_torch(name: str, chunks: int) -> Schedule:
    """The order of one of torch's schedules, from the file that torch writes of it."""
    if name == "1F1B":  # torch writes no file of those with one stage per rank
        return build("1f1b", Layout.LOOP(RANKS), MICROBATCHES)
    stage = SimpleNamespace(num_stages=RANKS * chunks, group_size=RANKS, group_rank=0, submod=None, is_last=False,
                            has_backward=True)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.csv"
        torchs.get_schedule_class(name)([stage] * chunks, MICROBATCHES)._dump_csv(str(path), format="compute_only")
        return CsvFile.read(path).schedule


def torchs_own(name: str, parts: list[PipelineStage], loss_fn: Any) -> torchs._PipelineSchedule:
    kind = torchs.get_schedule_class(name)
    return kind(parts[0] if issubclass(kind, torchs.PipelineScheduleSingle) else parts, MICROBATCHES, loss_fn=loss_fn,
                scale_grads=False)


def from_file(path: Path, parts: list[PipelineStage], loss_fn: Any) -> torchs._PipelineSchedule:
    schedule = torchs._PipelineScheduleRuntime(parts, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    schedule._load_csv(str(path))
    return schedule


def start(model: Uneven, placement: Placement, make: Any, case: Case, rank: int) -> Updates:
    """Make updates on a rank."""
    times = model.times(len(placement))
    return updates({i: Device(times[i], first=i == 0, last=False) for i in stages_of_rank(placement, rank)},
                   len(times), MICROBATCHES, make)


METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def measured_stages(model: Uneven, stages: int) -> list[StageCosts]:
    """The median seconds of F, I and W of every stage in torch's runtime, under its zero-bubble schedule."""
    name = "InterleavedZeroBubble"
    placement = order_of_torch(name, stages // RANKS).placement
    sizes = model.cut(stages)

    def work(rank: int, _: Any) -> dict[int, list[float]]:
        spent: dict[tuple[int, str], list[float]] = {}

        def timed(stage: PipelineStage, method: str) -> Callable[..., Any]:
            call, seconds = getattr(stage, method), spent.setdefault((stage.stage_index, method), [])

            def run(*args: Any, **kwargs: Any) -> Any:
                started = perf_counter()
                result = call(*args, **kwargs)
                seconds.append(perf_counter() - started)
                return result
            return run

        def make(parts: list[PipelineStage], loss_fn: Any) -> torchs._PipelineSchedule:
            for part, method in product(parts, METHODS):
                setattr(part, method, timed(part, method))
            # halves of every backward: torch's own has whole ones, too
            return from_file(halves, parts, loss_fn)

        made = start(model, placement, make, CASE, rank)
        for _ in range(4):
            next(made)
        return {i: [median(spent[i, method][MICROBATCHES:]) for method in METHODS]
                for i in stages_of_rank(placement, rank)}

    with TemporaryDirectory() as folder:
        halves = Path(folder) / "halves.csv"
        order = order_of_torch(name, stages // RANKS)
        halves.write_text(re.sub(r"(\d+)B(\d+)", r"\1I\2,\1W\2", order.to_torch_csv()))
        found: Mapping[int, list[float]] = {i: own for rank in run_ranks(RANKS, work) for i, own in rank.items()}
    return [StageCosts(*found[i], activation_bytes=sizes[i], weight_half_bytes=sizes[i]) for i in range(stages)]


CASE = Case(RANKS, MICROBATCHES, Times(Fraction(0), Fraction(0)), 5)


def placements(costs: Costs) -> Iterator[Placement]:
    """The stages on ranks so that the fullest has least to do, each way once."""
    work = [float(stage.forward_s + stage.input_s + stage.weight_s) for stage in costs.stages]
    found: dict[tuple[int, ...], float] = {}
    for ranks in product(range(RANKS), repeat=len(work)):
        if list(dict.fromkeys(ranks)) == list(range(RANKS)):
            found[ranks] = max(sum(own for own, there in zip(work, ranks, strict=True) if there == rank)
                               for rank in range(RANKS))
    least = min(found.values())
    yield from (tuple((rank,) for rank in ranks) for ranks, most in found.items() if most <= 1.01 * least)


def searched(costs: Costs, most_bytes: float) -> dict[str, Schedule]:
    """The orders that are searched for costs; one of them holds no more than a torch schedule does."""
    zigzag = Layout.ZIGZAG(RANKS, 2)
    return {"auto, V": search(zigzag, MICROBATCHES, costs),
            "auto, V, memory of torch's": search(zigzag, MICROBATCHES, costs, most_bytes),
            "auto, any placement": min((search(placement, MICROBATCHES, costs) for placement in placements(costs)),
                                       key=lambda schedule: float(simulate(schedule, costs).makespan_s))}


def compete(model: Uneven, turns: int) -> Iterator[str]:
    """Measure costs, search, let all take turns; the rows of a table."""
    costs = {stages: Costs(tuple(measured_stages(model, stages)), Link(HOP_S)) for stages in (RANKS, 2 * RANKS)}
    torch_has = {f"{name}, {chunks} per rank": order_of_torch(name, chunks) for name, chunks in TORCHS}
    most_bytes = max(float(max(simulate(schedule, costs[schedule.stages]).peak_bytes))
                     for schedule in torch_has.values() if schedule.placement == Layout.ZIGZAG(RANKS, 2))
    schedules = torch_has | searched(costs[2 * RANKS], most_bytes)
    makes: dict[str, Any] = {f"{name}, {chunks} per rank": partial(torchs_own, name) for name, chunks in TORCHS}
    with TemporaryDirectory() as folder:
        for name in schedules.keys() - makes.keys():
            path = Path(folder) / f"{len(makes)}.csv"
            path.write_text((schedules[name]).to_torch_csv())
            makes[name] = partial(from_file, path)
        found = measure(Case(RANKS, MICROBATCHES, CASE.times, turns), [
            System("torch", name, 1, partial(start, model, schedule.placement, makes[name]))
            for name, schedule in schedules.items()])
    took = {name: [seconds for seconds, _ in found[f"torch {name}"]] for name in schedules}
    best = min(torch_has, key=lambda name: median(took[name]))
    for name, schedule in schedules.items():
        middle_s = median(took[name])
        timeline, times = simulate(schedule, costs[schedule.stages]), model.times(schedule.stages)
        ratios = [one / other for one, other in zip(took[name], took[best], strict=True)]
        work_s = MICROBATCHES * max(sum(float(times[stage].forward_s + times[stage].backward_s)
                                        for stage in stages_of_rank(schedule.placement, rank)) for rank in range(RANKS))
        yield (f"| {name} | {' '.join(str(rank) for rank, in schedule.placement)} | "
               f"{float(timeline.makespan_s) * 1e3:.0f} | {middle_s * 1e3:.0f} "
               f"({min(took[name]) * 1e3:.0f} to {max(took[name]) * 1e3:.0f}) | {100 * (1 - work_s / middle_s):.1f} % "
               f"| {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | "
               f"{float(max(timeline.peak_bytes)):g} |")


def main() -> None:
    """Measure model after model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, help="of the models")
    parser.add_argument("--turns", type=int, default=10, help="of every system, two updates each (default: 10)")
    options = parser.parse_args()
    for name in [options.only] if options.only else MODELS:
        model = MODELS[name]
        print(f"\n{name}: blocks {model.cut(2 * RANKS)} or {model.cut(RANKS)}, the head is {model.head} more\n")
        print("| schedule | ranks of the stages | simulated ms | ms (least to most) | bubble | over torch's best | "
              "peak |\n|---|---|---:|---:|---:|---:|---:|")
        with awake():
            print("\n".join(compete(model, options.turns)), flush=True)
    print(f"\n{description()}\n{' '.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
