"""Schedules by name, as the config has everything else."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from vpipe.compare.entry import Entry, Field
from vpipe.errors import UserError, counted
from vpipe.model.split import balanced, parameter_counts
from vpipe.plan.plan import Plan
from vpipe.plan.recompute import recomputed_layers
from vpipe.schedules.registry import recipe_named
from vpipe.train.job import Job


def of_schedules(job: Job, names: Sequence[str]) -> Field:
    """Schedules by name, with the config's partition, recompute and microbatches, and an update per batch of each.

    One that holds several stages on a rank cuts the model anew, balanced by parameters.
    """
    entries, refused = [], {}
    for name in names:
        try:
            plan, words = _plan(job, name)
            job.planned(plan)
        except UserError as error:
            refused[name] = error.problems[0]
        else:
            entries.append(Entry(name, words, plan))
    return Field(tuple(entries), refused, None)


def _plan(job: Job, name: str) -> tuple[Plan, str]:
    recipe, parallel = recipe_named(name), job.config.parallel
    ranks, microbatches = job.schedule.ranks, job.config.training.num_microbatches
    every = None if recipe.flush else parallel.update_every or _share(microbatches, job)
    one_each = sum(map(len, job.placement)) == ranks  # replicas of a stage are on as many ranks
    if recipe.chunks == 1 and not (recipe.any_chunks and parallel.chunks) and one_each:
        return (Plan(job.partition, (), job.placement, name, tuple(tuple(sorted(own)) for own in job.recomputed),
                     microbatches, every), "the config's partition")
    chunks = parallel.chunks if recipe.any_chunks and parallel.chunks else recipe.chunks
    if any(len(own) > 1 for own in job.placement):
        raise UserError(f"'{name}' holds {counted(chunks, 'stage')} on a rank, but the config has replicas of stages",
                        hint="leave the replicas out, or the schedule")
    partition = tuple(balanced(parameter_counts(job.model), ranks * chunks))
    recomputed = recomputed_layers(parallel.recompute if not isinstance(parallel.recompute, str) else 0.0, partition)
    return (Plan(partition, (), recipe.layout.placement(ranks, chunks), name,
                 tuple(tuple(sorted(own)) for own in recomputed), microbatches, every),
            f"{counted(chunks, 'stage')} on each rank, balanced by parameters")


def _share(microbatches: int, job: Job) -> int:
    """Microbatches of an update on each replica, so that a step takes one batch."""
    replicas = lcm(*map(len, job.placement))
    if microbatches % replicas:
        raise UserError(f"{counted(microbatches, 'microbatch')} of a batch cannot be divided among {replicas} replicas",
                        hint=f"make training.num_microbatches a multiple of {replicas}, or set parallel.update_every")
    return microbatches // replicas
