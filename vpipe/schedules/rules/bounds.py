"""Rules on what a schedule may hold: weight versions and activations."""

from __future__ import annotations

from vpipe.errors import counted
from vpipe.schedules.facts import rank_loads, stage_loads
from vpipe.schedules.grid import fault
from vpipe.schedules.reading import Reading


def weight_versions(reading: Reading) -> None:
    """A stage holds at most its stated number of versions, and no backward is staler than these allow."""
    schedule = reading.schedule
    for stage, rank in reading.replicas():
        bound = schedule.versions[stage]
        for load in stage_loads(schedule.programs[rank], stage):
            if load.versions > bound or load.staleness > bound - 1:
                raise fault(schedule, f"stage {stage} holds {counted(load.versions, 'weight version')} with staleness "
                            f"{load.staleness}; the schedule states at most {bound} and {bound - 1}",
                            "let fewer microbatches be in flight at a step, or state more versions",
                            (rank, load.position))


def peak_activations(reading: Reading) -> None:
    """A rank holds the activations of at most its stated number of microbatch-stages."""
    schedule = reading.schedule
    for rank, (program, bound) in enumerate(zip(schedule.programs, schedule.peak_activations, strict=True)):
        for load in rank_loads(program):
            if load.activations > bound:
                raise fault(schedule, f"rank {rank} holds the activations of "
                            f"{counted(load.activations, 'microbatch-stage')}; the schedule states at most {bound}",
                            "run a backward before this forward, or state a higher peak", (rank, load.position))
