"""Plan the contenders of a comparison: each is a model with a system, a schedule, or what its config says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from math import lcm
from typing import Any

from vpipe import Cut, Order, Plan
from vpipe.app.config.parallel import AUTO
from vpipe.app.train.job import Job
from vpipe.app.train.planning import memory_limit, profile_job, request_of
from vpipe.errors import Problem, UserError, counted
from vpipe.extras.comparison.systems import SYSTEMS, ComparisonRequest, microbatch_counts, plan_system
from vpipe.plan import Profile, solve
from vpipe.profiling import RankGroup
from vpipe.schedules import RegisteredSchedule
from vpipe.units import size_text

Log = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """One entry of a comparison: a model and how it is trained.

    Attributes:
        name: for tables.
        model: its name on the command line; empty where there is only one.
        description: of how it trains.
        plan: None: as the config says.
        largest_size: the largest microbatch that fits, in samples, where several were tried.
        memory_bytes: limit of each rank, if there is one.
        problem: the reason why it cannot take part, if there is one.
    """

    name: str
    model: str
    description: str = ""
    plan: Plan | None = None
    largest_size: int | None = None
    memory_bytes: int | None = None
    problem: Problem | None = None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "plan": None if self.plan is None else self.plan.as_json(),
                "problem": None if self.problem is None else asdict(self.problem)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Contender:
        plan, problem = content["plan"], content["problem"]
        return cls(**{**content, "plan": None if plan is None else Plan.of_json(plan),
                      "problem": None if problem is None else Problem(**problem)})


def plan_contenders(jobs: Mapping[str, Job], request: ComparisonRequest, world: RankGroup, log: Log) -> list[Contender]:
    """Plan the contenders: of every model each of the systems or schedules, in order.

    All ranks call this, since they measure layers together. Only rank 0 plans; the others return an empty list.

    Args:
        jobs: by model.
        log: called with lines of progress.
    """
    profiles = {model: _measure(job, request, log) for model, job in jobs.items()}
    if world.rank:
        return []
    contenders, device = [], None
    names = request.systems or request.schedules or ("",)
    for model, job in jobs.items():
        memory = request.memory_bytes or job.config.parallel.memory
        if profiles[model]:
            device = memory_limit(job.config.with_parallel(memory=None), profiles[model][min(profiles[model])])
            if memory is None and device is not None:  # the weights of all contenders stay there from turn to turn
                memory = device // (len(jobs) * len(names))
        for name in names:
            label = f"{model} {name}".strip()
            try:
                contenders.append(
                    system_contender(label, model, name, profiles[model], job.schedule.ranks, memory, log)
                    if request.systems else _schedule_contender(label, model, name, job, profiles[model], memory))
            except UserError as error:
                contenders.append(Contender(label, model, problem=error.problems[0]))
                log(f"{label}: does not take part: {error.problems[0].what}")
    if device is not None and (warning := memory_warning(contenders, device)):
        log(warning)
    return contenders


def _measure(job: Job, request: ComparisonRequest, log: Log) -> Mapping[int, Profile]:
    """Measure a job, if its plans need that; returns profiles by microbatches per batch."""
    batch, counts = job.config.dataset.batch_size, [job.config.microbatches]
    if request.systems:
        counts = microbatch_counts(batch)
    elif AUTO not in request.schedules and (request.schedules or not job.config.parallel.to_plan):
        return {}
    profiles = profile_job(job, [batch // count for count in counts], report=log)
    return {count: profiles[batch // count] for count in counts}


def memory_warning(contenders: Sequence[Contender], device_bytes: int) -> str | None:
    """Return a warning if all contenders together need more than a rank has, which a given limit allows."""
    plans: list[tuple[str, Plan]] = []
    for contender in contenders:
        if contender.plan is not None and (contender.model, contender.plan) not in plans:  # equal ones run once
            plans.append((contender.model, contender.plan))
    needs: Counter[int] = Counter()
    for stage in chain.from_iterable(plan.predictions.stages for _, plan in plans if plan.predictions is not None):
        needs.update(dict.fromkeys(stage.ranks, stage.memory.peak))
    [(rank, most)] = needs.most_common(1) or [(0, 0)]
    if most <= device_bytes:
        return None
    return (f"warning: all {len(plans)} contenders stay in memory from turn to turn: rank {rank} may need "
            f"{size_text(most)}, the sum of their peaks, and has {size_text(device_bytes)}; compare fewer at once, or "
            "give less --memory")


def system_contender(label: str, model: str, name: str, profiles: Mapping[int, Profile], ranks: int,
                     memory_bytes: int | None, log: Log) -> Contender:
    system = SYSTEMS[name]
    found = plan_system(system, profiles, ranks, memory_bytes)
    tried = ", ".join(f"{size} " + ("does not fit" if seconds is None else f"{1 / seconds:.1f}/s")
                      for size, seconds in found.seconds_per_sample.items())
    most = max(stage.memory.peak for stage in found.plan.predicted.stages)
    log(f"{label}: microbatches of {found.microbatch_size}, {size_text(most)} on the fullest rank (samples per second "
        f"predicted by microbatch: {tried})")
    return Contender(label, model, system.description, found.plan, found.largest_size, memory_bytes)


def _schedule_contender(label: str, model: str, name: str, job: Job, profiles: Mapping[int, Profile],
                        memory_bytes: int | None) -> Contender:
    """Plan a schedule for a model with its config's partition, recompute and microbatches, and an update per batch.

    A schedule with several stages per rank gets a partition of its own, balanced by parameters.

    Args:
        name: of the schedule; empty: as the config says.
        profiles: for the solver, where the schedule or a key of the config is ``auto``.
    """
    if name == AUTO or (not name and job.config.parallel.to_plan):
        changes: dict[str, Any] = {"memory": memory_bytes} | ({"schedule": AUTO, "update_every": None} if name else {})
        plan = solve(request_of(replace(job, config=job.config.with_parallel(**changes)), profiles)).plan
        return Contender(label, model, "planned for the measured layers", plan, memory_bytes=memory_bytes)
    if not name:
        return Contender(label, model, "as its config says")
    registered, parallel = RegisteredSchedule.named(name), job.config.parallel
    ranks, microbatches = job.schedule.ranks, job.config.microbatches
    every = None if registered.flush else parallel.update_every or _microbatches_per_replica(job)
    chunks = parallel.chunks if registered.any_chunks and parallel.chunks else None
    if (registered.chunks == 1 and chunks is None and not registered.places_copies(ranks)
            and sum(map(len, job.placement)) == ranks):  # a stage, or replica, on each
        description, partition, placement = "the config's partition", job.partition, job.placement
        recomputed = job.recomputed
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
    job.with_plan(plan)  # refuses one that does not fit the config
    return Contender(label, model, description, plan)


def _microbatches_per_replica(job: Job) -> int:
    """Return the microbatches of an update on each replica, so that a step takes one batch."""
    microbatches, replicas = job.config.microbatches, lcm(*map(len, job.placement))
    if microbatches % replicas:
        raise UserError(f"{counted(microbatches, 'microbatch')} of a batch cannot be divided among {replicas} replicas",
                        hint=f"make training.num_microbatches a multiple of {replicas}, or set parallel.update_every")
    return microbatches // replicas
