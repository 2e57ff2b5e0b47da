"""Plan the contenders of a comparison: each is a model with a system, a schedule, or what its config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from vpipe import Cut, Order, Plan
from vpipe.app.commands.profile import profiles_of
from vpipe.app.config.config import Config
from vpipe.app.config.parallel import AUTO
from vpipe.app.train.job import Job
from vpipe.app.train.planning import memory_limit
from vpipe.errors import Problem, UserError, counted
from vpipe.extras.comparison.systems import SYSTEMS, ComparisonRequest, microbatch_counts, plan_system
from vpipe.schedules import RegisteredSchedule
from vpipe.units import size_text


@dataclass(frozen=True)
class Contender:
    """One entry of a comparison: a model and how it is trained.

    Attributes:
        name: for tables.
        model: its name on the command line; empty where there is only one.
        config: that its runs train.
        description: of how it trains.
        plan: of a system, with its predictions; ``config`` has its values.
    """

    name: str
    model: str
    config: Config
    description: str
    plan: Plan | None = None

    def config_in(self, folder: Path, number: int) -> Config:
        """Return the config of its runs, which begin in ``folder``; write its plan there, which they follow."""
        config = self.config.model_copy(update={"log_directory": folder})
        if self.plan is None:
            return config
        self.plan.save(path := folder / f"plan-{number}.json")
        return config.with_parallel(plan=path)


def plan_contenders(configs: Mapping[str, Config], request: ComparisonRequest
                    ) -> tuple[list[Contender], dict[str, Problem]]:
    """Plan the contenders: of every model each of the systems or schedules, in order.

    Args:
        configs: by model.

    Returns:
        Those that can take part; and by name, why others cannot.
    """
    found: list[Contender] = []
    refused: dict[str, Problem] = {}
    for model, config in configs.items():
        job = Job.from_config(config)
        for name in request.systems or request.schedules or ("",):
            label = f"{model} {name}".strip()
            try:
                found.append(_system(label, model, name, job, request.memory_bytes) if request.systems else
                             _schedule(label, model, name, job))
            except UserError as error:
                refused[label] = error.problems[0]
    return found, refused


def _system(label: str, model: str, name: str, job: Job, memory_bytes: int | None) -> Contender:
    """Measure the layers, if they were not before, and plan a system for them."""
    batch, system = job.config.dataset.batch_size, SYSTEMS[name]
    counts = microbatch_counts(batch)
    by_size = profiles_of(job, [batch // count for count in counts])
    profiles = {count: by_size[batch // count] for count in counts}
    limit_bytes, _ = memory_limit(job.config, profiles[counts[0]], memory_bytes)
    plan = plan_system(system, profiles, job.schedule.ranks, limit_bytes)
    allowed = "" if limit_bytes is None else f" of {size_text(limit_bytes)}"
    print(f"{label}: {size_text(plan.predicted.fullest_rank[1])}{allowed} on the fullest rank, as its plan predicts",
          flush=True)
    return Contender(label, model, job.with_plan(plan).config, system.description, plan)


def _schedule(label: str, model: str, name: str, job: Job) -> Contender:
    """Take a schedule with the config's partition, recompute and microbatches, and an update per batch.

    A schedule with several stages per rank gets a partition of its own, balanced by parameters. What is ``auto`` is
    planned when a run starts.

    Args:
        name: of the schedule; empty: as the config says.
    """
    if not name:
        return Contender(label, model, job.config, "as its config says")
    if name == AUTO:
        config = job.config.with_parallel(schedule=AUTO, update_every=None)
        for mistake in (*config.mistakes(), *config.parallel.mistakes()):
            raise UserError(f"{mistake.keys[-1]} {mistake.predicate}", hint=mistake.hint)
        return Contender(label, model, config, "planned for the measured layers")
    registered, parallel = RegisteredSchedule.named(name), job.config.parallel
    ranks, microbatches = job.schedule.ranks, job.config.microbatches
    every = None if registered.flush else parallel.update_every or _microbatches_per_replica(job)
    chunks = parallel.chunks if registered.any_chunks and parallel.chunks else None
    if (registered.chunks == 1 and chunks is None and not registered.places_copies(ranks)
            and sum(map(len, job.schedule.placement)) == ranks):  # a stage, or replica, on each
        description, partition, placement = "the config's partition", job.cut.partition, job.schedule.placement
        recomputed = job.cut.recomputed
    else:
        chunks = chunks or registered.chunks
        if parallel.data_parallel_size > 1 or any(len(own) > 1 for own in parallel.placement or ()):
            raise UserError(f"'{name}' holds {counted(chunks, 'stage')} on a rank, but the config has replicas of "
                            "stages", hint="leave the replicas out, or the schedule")
        description = f"{counted(chunks, 'stage')} on each rank, balanced by parameters"
        partition = job.model.balanced(ranks * chunks)
        placement = registered.placement(ranks, chunks)
        share = parallel.recompute if not isinstance(parallel.recompute, str) else 0.0
        recomputed = Cut(partition, share).recomputed
    order = Order.of(name, slices=parallel.slices if registered.sliced else 1, update_every=every)
    plan = Plan(Cut(partition, recomputed, placement), order, microbatches)
    return Contender(label, model, job.with_plan(plan).config, description)


def _microbatches_per_replica(job: Job) -> int:
    """Return the microbatches of an update on each replica, so that a step takes one batch."""
    microbatches, replicas = job.config.microbatches, lcm(*map(len, job.schedule.placement))
    if microbatches % replicas:
        raise UserError(f"{counted(microbatches, 'microbatch')} of a batch cannot be divided among {replicas} replicas",
                        hint=f"make training.num_microbatches a multiple of {replicas}, or set parallel.update_every")
    return microbatches // replicas
