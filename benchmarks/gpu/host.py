"""Measure what vpipe costs beside the kernels: an action on the host, gaps between kernels, one executor or another.

The host's cost is that of ``benchmarks/host``: 4 stages of 8 x 8 linear layers in one process, 32 microbatches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from findings import Part
from models import published_jobs
from torch import Tensor

from vpipe import Execution, Pipeline, accelerator
from vpipe.description import Executor

sys.path.append(str(Path(__file__).parent.parent / "host"))

from systems import BATCH, MICROBATCHES, STAGES, bare_layers, bare_steps, pipelines

GOAL_US = 100.0


def seconds_per_batch(part: Part, systems: Mapping[str, Callable[[], object]], batches: int,
                      rounds: int) -> dict[str, float]:
    """Let systems train ``batches`` batches each, in turns, and return the median seconds per batch of each."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, train in systems.items():
            part.wait()
            started = perf_counter()
            train()
            part.wait()
            if number:  # the first warms up
                seconds[name].append((perf_counter() - started) / batches)
    return {name: median(values) for name, values in seconds.items()}


def trainings(pipes: Mapping[str, Pipeline], batch: dict[str, Tensor], batches: int) -> dict[str, Callable[[], object]]:
    """Return functions that train pipelines on a batch so many times."""
    return {name: partial(lambda pipe: list(pipe.train([batch] * batches)), pipe) for name, pipe in pipes.items()}


def cost_of_actions(part: Part) -> None:
    """Time batches of layers so small that only the host's work takes time, beside the same layers in a loop."""
    optimizer, pairs = partial(torch.optim.SGD, lr=0.01), STAGES * MICROBATCHES
    times, rounds = (1, 1) if part.small else (4, 5)
    bare = {"layers": bare_layers(part.device), "steps": bare_steps(optimizer, part.device)}
    batch = {name: field.to(part.device) for name, field in BATCH.items()}
    systems = trainings(pipelines(optimizer, part.device), batch, times)
    systems |= {name: partial(lambda run: [run() for _ in range(times)], run) for name, run in bare.items()}
    found = seconds_per_batch(part, systems, times, rounds)
    for schedule, actions in (("1f1b", 2), ("pipedream", 3)):
        alone = found["layers"] + (found["steps"] if actions == 3 else 0)
        each = 1e6 * (found[schedule] - alone) / pairs / actions
        part.add(f"host, {schedule}", f"{1e6 * found[schedule] / pairs:.0f} us per microbatch and stage "
                 f"({'F, B, STEP' if actions == 3 else 'F, B'}), the layers alone {1e6 * alone / pairs:.0f} us: "
                 f"{each:.0f} us per action (goal {GOAL_US:.0f})", None if part.small else each <= GOAL_US)


def busy_share(kernels: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the share of the time from the first start to the last end in which a kernel runs, and the longest gap.

    Args:
        kernels: start and end of each, in one unit.
    """
    ordered = sorted(kernels)
    first, end, busy, longest = ordered[0][0], ordered[0][0], 0.0, 0.0
    for start, stop in ordered:
        longest = max(longest, start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / (end - first), longest


def gaps(part: Part, pipe: Pipeline, batch: dict[str, Tensor]) -> None:
    """Profile two batches and say how much of the time kernels run."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, supported_activities

    name, subject = part.device.type.upper(), "kernels of successive actions"
    activity = getattr(ProfilerActivity, name, None)
    if activity not in supported_activities():
        part.add(subject, f"left out: torch's profiler does not record kernels of {part.device.type}")
        return
    list(pipe.train([batch]))
    part.wait()
    with profile(activities={ProfilerActivity.CPU, activity}) as profiled:
        list(pipe.train([batch] * 2))
        part.wait()
    events: list[Any] = [event for event in profiled.events() or () if event.device_type == getattr(DeviceType, name)]
    if not events:
        part.add(subject, f"torch's profiler has recorded none on {part.device.type}",
                 False if part.device.type == accelerator.USUAL else None)
        return
    share, longest = busy_share([(event.time_range.start, event.time_range.end) for event in events])
    part.add(subject + " (here operators on the processor)" * part.on_processor,
             f"{len(events):,} in two batches; one runs {share:.1%} of the time, the longest gap is {longest:.0f} us")


def main() -> None:
    part = Part(__doc__)
    cost_of_actions(part)
    job = published_jobs(part.small)["GPT 124M"]
    batch = {name: value.to(part.device) for name, value in next(job.training_batches(job.model.batch)).items()}
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=part.device.type in accelerator.FUSED or None)
    pipes = {executor: Pipeline(job.model, adamw, stages=1,
                                schedule="gpipe", microbatches=job.config.training.num_microbatches,
                                precision=job.config.training.precision,
                                execution=Execution(device=part.device, executor=executor))
             for executor in Executor.names()}
    gaps(part, pipes["overlapped"], batch)
    seconds = seconds_per_batch(part, trainings(pipes, batch, 3), 3, 1 if part.small else 4)
    for executor, each in seconds.items():
        part.add(f"executor {executor}, GPT 124M, gpipe, one stage",
                 f"{1e3 * each:.1f} ms per batch, {seconds['overlapped'] / each:.2f} of overlapped's speed")


if __name__ == "__main__":
    main()
