"""Profile and plan a job in the ranks of its run: all measure the layers, rank 0 plans, all follow the plan."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from vpipe import Plan, files
from vpipe.app.config.config import Config
from vpipe.app.config.parallel import AUTO
from vpipe.app.errors import StartError
from vpipe.app.progress import message_if_slow
from vpipe.app.train.job import Job, device_of, microbatch_of, model_name
from vpipe.app.train.profile_cache import cached, store
from vpipe.app.train.run_folder import CONFIG, PROFILE
from vpipe.app.visualize.explain_plan import ahead_text
from vpipe.distributed import exchange, join_world
from vpipe.errors import Problem, UserError
from vpipe.plan import PlanRequest, Profile, solve
from vpipe.profiling import RankGroup, measure
from vpipe.schedules import RegisteredSchedule

log = logging.getLogger("vpipe")


def plan_job(job: Job, folder: Path) -> Job:
    """Return the job with a plan for the keys that its config leaves open.

    All ranks call this and get the same job. Rank 0 writes the plan, the profile and the resolved config into the run
    folder.

    Raises:
        StartError: no plan fits into the memory; on every rank.
    """
    first, size = exchange().rank == 0, job.config.microbatch_size
    profile = profile_job(job, [size])[size]
    outcome: dict[str, Any] = {}
    if first:
        try:
            with message_if_slow("planning"):
                limit_bytes, _ = memory_limit(job.config, profile)
                solution = solve(request_of(job, {job.config.microbatches: profile}, limit_bytes))
                planned = job.with_plan(solution.plan)
        except UserError as error:
            outcome = {"problems": [[problem.what, problem.hint] for problem in error.problems]}
        else:
            outcome = {"plan": solution.plan.as_json()}
            show_line(_plan_summary(job, solution.plan, solution.seconds))
    outcome = exchange().from_rank(outcome)
    if "problems" in outcome:
        raise StartError.all_of([Problem(what, hint) for what, hint in outcome["problems"]])
    if not first:
        return job.with_plan(Plan.of_json(outcome["plan"]), proved=True)
    planned.keep_plan(folder)
    profile.save(folder / PROFILE)
    files.replace_text(folder / CONFIG, planned.config.resolved_yaml())
    return planned


def show_line(line: str) -> None:
    """Write a line to the log, and on rank 0 to stderr."""
    log.info(line)
    if exchange().rank == 0:
        print(line, file=sys.stderr, flush=True)


def memory_limit(config: Config, profile: Profile, given_bytes: int | None = None) -> tuple[int | None, str]:
    """Return the bytes that a rank may use, and what says so: ``--memory``, ``parallel.memory``, or its device.

    None if the memory of the device is unknown.
    """
    if given_bytes is not None:
        return given_bytes, "--memory"
    if config.parallel.memory is not None:
        return config.parallel.memory, "parallel.memory"
    if profile.cores is None:
        return profile.device_bytes or None, "its device"
    identity = profile.identity
    return (profile.device_bytes // (identity.ranks_per_host * identity.tensor) or None,
            "its part of the host's memory")


def request_of(job: Job, profiles: Mapping[int, Profile], memory_bytes: int | None, *,
               anew: Job | None = None) -> PlanRequest:
    """Return the planning request for the keys that a config leaves open; ranks and samples per update stay.

    Args:
        profiles: by microbatches per batch.
        memory_bytes: that a rank may use; None is no limit.
        anew: all else is left open, but the slices of this job, its updates, and whether its schedule has a flush.
    """
    parallel, slices = job.config.parallel, (anew or job).config.parallel.slices
    own = (parallel.update_every or 1) if anew is None else update_samples(anew)
    of = job.config.microbatches if anew is None else job.config.dataset.batch_size
    every: dict[int, int | None] = {count: own * count // of for count in profiles if parallel.asynchronous}
    free = PlanRequest(
        profiles, job.schedule.ranks, memory_bytes,
        RegisteredSchedule.for_plans(flush=not parallel.asynchronous, slices=slices),
        every, shared_updates=anew is not None,
        warmup=AUTO if parallel.asynchronous else None, slices=slices)
    return free if anew else replace(
        free, schedules=free.schedules if parallel.schedule == AUTO else (parallel.schedule,),
        placement=job.schedule.placement, partition=None if "partition" in parallel.to_plan else job.cut.partition,
        recompute=None if isinstance(parallel.recompute, str) else parallel.recompute,
        warmup=parallel.warmup)


def update_samples(job: Job) -> int:
    """Return the samples of an update, of the stage that takes most."""
    per_update = map(job.schedule.assignment.per_update, range(job.cut.count))
    return max(per_update) // job.schedule.slices * job.config.microbatch_size


def _plan_summary(job: Job, plan: Plan, search_s: float) -> str:
    """Describe a plan in a line."""
    assert plan.predictions is not None, "a solution's plan has them"
    recomputed = sum(map(len, plan.recomputed))
    return (f"planned in {search_s:.1f} s: stages of {list(plan.partition)} layers, "
            + (f"{recomputed} of {len(job.model)} layers recomputed" if recomputed else "nothing recomputed")
            + f", schedule {plan.schedule}" + f" in {plan.order.slices} slices" * ((plan.order.slices or 1) > 1)
            + f"{ahead_text(plan)}; expected are {1e3 * plan.predictions.step_s:.0f} ms per {job.step_name}")


PROGRESS_S = 2.0
"""Seconds between two lines of progress."""


def file_of(size: int) -> str:
    """Return the file name of the profile for a microbatch size."""
    return f"profile-{size}.json"


def profile_rank(job: Job, folder: Path, words: Sequence[str]) -> None:
    """Run a rank of ``vpipe profile``: measure with the others; rank 0 writes the profiles into the folder.

    Args:
        words: microbatch sizes; ``again`` among them ignores the cache.
    """
    torch.set_num_threads(job.config.training.threads)
    join_world(**job.config.parallel.joining)
    found = profile_job(job, [int(word) for word in words if word != "again"], again="again" in words)
    if exchange().rank == 0:
        for size, profile in found.items():
            profile.save(folder / file_of(size))


def profile_job(job: Job, sizes: Sequence[int], *, again: bool = False) -> dict[int, Profile]:
    """Return the profiles of a job for several microbatch sizes; measure and cache those that are not cached.

    Every rank of the world calls this; a process alone measures no transfers.

    Args:
        sizes: samples per microbatch.
        again: ignore the cache.

    Returns:
        Profiles by size, the same on every rank.

    Raises:
        UserError, RunError: a layer cannot be run.
    """
    config = job.config
    torch.set_num_threads(config.training.threads)
    device = device_of(config)
    world = RankGroup(device, config.parallel.tensor)
    wanted = sorted(set(sizes))
    identities = world.identify(job.model, [microbatch_of(job, size) for size in wanted], **settings_of(job))
    directory = config.dataset.cache_directory
    known: dict[str, object] = {}
    if world.rank == 0 and not again:
        known = {str(size): profile.as_json() for size, identity in zip(wanted, identities, strict=True)
                 if (profile := cached(identity.kept_as, directory, show_line)) is not None}
    found = {int(size): Profile.of_json(content) for size, content in world.all_gather(known)[0].items()}
    missing = [(size, identity) for size, identity in zip(wanted, identities, strict=True) if size not in found]
    if missing:
        shown_s = -PROGRESS_S

        def progress(line: str) -> None:
            nonlocal shown_s
            if monotonic() - shown_s >= PROGRESS_S:
                shown_s = monotonic()
                show_line(line)

        model, _ = job.split_layers(device)
        measured = measure(model, [microbatch_of(job, size) for size, _ in missing], job.optimizer.from_named,
                           identities=[identity for _, identity in missing], device=device, seed=config.training.seed,
                           timeout_s=config.parallel.timeout_s, tell=progress,
                           shared_memory=config.parallel.shared_memory, backend=config.parallel.backend)
        found |= {size: profile for (size, _), profile in zip(missing, measured, strict=True)}
    if world.rank == 0:
        for size, _ in missing:
            try:
                store(found[size], directory)
            except UserError as error:  # the profile is used all the same
                show_line(f"{error.problems[0].what}; {error.problems[0].hint}")
                break
    return {size: job.with_correction(found[size]) for size in wanted}


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings of a job on which its profiles depend, as :meth:`vpipe.profiling.RankGroup.identify` takes
    them."""
    parallel, training = job.config.parallel, job.config.training
    optimizer = (training.optimizer + " with momentum" * (training.optimizer == "sgd" and training.momentum > 0)
                 + " and weight decay" * (training.weight_decay > 0))  # what changes its memory or its work
    return {"model_name": model_name(job), "optimizer": optimizer, "backend": parallel.backend,
            "shared_memory": parallel.shared_memory, "threads": training.threads, "precision": training.precision}
