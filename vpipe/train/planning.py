"""Planning at the start of a run: the ranks measure the layers together, the first one plans, all do as it says.

Inside the run's own ranks: one way for runs that vpipe, torchrun or srun started, here or on several hosts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vpipe.config.config import Config
from vpipe.config.parallel import AUTO
from vpipe.errors import PlanningError, Problem, UserError
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile
from vpipe.plan.solver import SYNCHRONOUS, Request, Solution, solve
from vpipe.profiling.world import World
from vpipe.train.device import device_of
from vpipe.train.job import Job
from vpipe.train.profiled import profile_job
from vpipe.train.run_folder import CONFIG, PROFILE

log = logging.getLogger("vpipe")


def planned(job: Job, folder: Path) -> Job:
    """The job with a plan in place of what its config leaves to be planned; at once, where that is nothing.

    All ranks of the run call this and get the same. The first writes the plan, the profile and the config with what was
    planned into the run's folder.

    Raises:
        PlanningError: nothing fits into the memory; on every rank.
    """
    if not job.config.parallel.to_plan:
        return job
    world = World(device_of(job.config))

    def say(line: str) -> None:
        log.info(line)
        if world.rank == 0:
            print(line, file=sys.stderr, flush=True)

    profile = profile_job(job, [job.config.microbatch_size], say=say)[job.config.microbatch_size]
    outcome: dict[str, Any] = {}
    if world.rank == 0:
        try:
            solution = solve(request_of(job, {job.config.training.num_microbatches: profile}))
        except UserError as error:
            outcome = {"problems": [[problem.what, problem.hint] for problem in error.problems]}
        else:
            outcome = {"plan": solution.plan.as_json()}
            say(announced(job, solution))
    plan = _shared(world, outcome)
    job = job.planned(plan)
    if world.rank == 0:
        job.keep_plan(folder)
        profile.save(folder / PROFILE)
        partial = folder / f"{CONFIG}.tmp"
        partial.write_text(job.config.resolved_yaml())
        partial.replace(folder / CONFIG)
    return job


def memory_limit(config: Config, profile: Profile) -> int | None:
    """The bytes that a rank may use: ``parallel.memory``, else those of its device, or its part of what the ranks of a
    host share; None where nobody knows."""
    if config.parallel.memory is not None:
        return config.parallel.memory
    sharing = 1 if profile.cores is None else profile.identity.ranks_per_host
    return profile.device_bytes // sharing or None


def request_of(job: Job, profiles: Mapping[int, Profile]) -> Request:
    """What is to be planned for a run: what its config leaves open. Stages, ranks and microbatches stay.

    Args:
        profiles: by microbatches of a batch.
    """
    parallel, microbatches = job.config.parallel, job.config.training.num_microbatches
    return Request(
        profiles, job.schedule.ranks, memory_limit(job.config, profiles[microbatches]),
        SYNCHRONOUS if parallel.schedule == AUTO else (parallel.schedule,),
        {microbatches: parallel.update_every}, job.placement,
        None if "partition" in parallel.to_plan else job.partition,
        None if isinstance(parallel.recompute, str) else parallel.recompute)


def announced(job: Job, solution: Solution) -> str:
    """What was planned, in a line."""
    plan = solution.plan
    assert plan.predictions is not None, "a solution's plan has them"
    recomputed = sum(map(len, plan.recomputed))
    return (f"planned in {solution.seconds:.1f} s: stages of {list(plan.partition)} layers, "
            + (f"{recomputed} of {len(job.model)} layers recomputed" if recomputed else "nothing recomputed")
            + f", schedule {plan.schedule}; expected are {1e3 * plan.predictions.step_s:.0f} ms per {job.step_name}")


def _shared(world: World, outcome: Mapping[str, Any]) -> Plan:
    """What the first rank found, on every rank."""
    found = world.share(outcome)[0]
    if "problems" in found:
        raise PlanningError.all_of([Problem(what, hint) for what, hint in found["problems"]])
    return Plan.of_json(found["plan"])

