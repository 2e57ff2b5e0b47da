"""Schedules by name, as the config has everything else."""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.compare.entry import Entry, Field
from vpipe.errors import UserError
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
            refused[name] = error.problems[0].what
        else:
            entries.append(Entry(name, words, plan))
    return Field(tuple(entries), refused, None)


def _plan(job: Job, name: str) -> tuple[Plan, str]:
    recipe, parallel = recipe_named(name), job.config.parallel
    ranks, microbatches = job.schedule.ranks, job.config.training.num_microbatches
    every = None if recipe.flush else parallel.update_every or microbatches
    if recipe.chunks == 1 and not (recipe.any_chunks and parallel.chunks) and len(job.partition) == ranks:
        return (Plan(job.partition, (), job.placement, name, tuple(tuple(sorted(own)) for own in job.recomputed),
                     microbatches, every), "the config's partition")
    chunks = parallel.chunks if recipe.any_chunks and parallel.chunks else recipe.chunks
    if any(len(own) > 1 for own in job.placement):
        raise UserError(f"'{name}' with {chunks} stages on a rank, but the config has replicas of stages",
                        hint="leave the replicas out, or the schedule")
    partition = tuple(balanced(parameter_counts(job.model), ranks * chunks))
    recomputed = recomputed_layers(parallel.recompute if not isinstance(parallel.recompute, str) else 0.0, partition)
    return (Plan(partition, (), recipe.layout.placement(ranks, chunks), name,
                 tuple(tuple(sorted(own)) for own in recomputed), microbatches, every),
            f"{chunks} stages on each rank, balanced by parameters")
