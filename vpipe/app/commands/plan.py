"""Run ``vpipe plan``: find the fastest way to run a config within the memory of its ranks, and explain it."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vpipe import Plan
from vpipe.app.command_line import Setting, setting_words
from vpipe.app.config.apply_plan import TARGETS
from vpipe.app.config.config import Config, load_config
from vpipe.app.launch.rank_env import check_alone, check_unsplit, ranks_of
from vpipe.app.progress import message_if_slow
from vpipe.app.sizes import parse_size
from vpipe.app.train.csv_rows import check_output
from vpipe.app.visualize.explain_plan import OtherPlan, PlanExplanation, depths_text
from vpipe.app.visualize.table import PIPE_COLUMNS, terminal_columns
from vpipe.errors import UserError, counted
from vpipe.plan import PlanRequest, Profile, predict, solve
from vpipe.schedules import CsvFile, RegisteredSchedule
from vpipe.units import size_text

if TYPE_CHECKING:
    from vpipe.app.train.job import Job

PLANNED = frozenset(".".join(map(str, keys)) for keys in TARGETS.values()) | frozenset(
    f"parallel.{key}" for key in ("model_parallel_size", "data_parallel_size", "chunks", "memory", "plan"))
"""Keys that a plan sets, or that only planning reads. The command that runs the plan leaves them out."""


def run_plan(options: argparse.Namespace) -> None:
    """Measure what is not measured yet, search, explain, and write the plan."""
    memory_bytes = None if options.memory is None else parse_size(options.memory, "--memory")
    check_alone("vpipe plan", os.environ)
    if options.ranks is not None and options.ranks < 1:
        raise UserError(f"--ranks is {options.ranks}", hint="plan for 1 rank or more")
    if options.stages is not None and options.stages < 1:
        raise UserError(f"--stages is {options.stages}", hint="plan for 1 stage or more")
    if options.output is not None:
        check_output(options.output)
    config = load_config(options.config, options.settings)
    check_unsplit("vpipe plan", config)
    own_ranks = ranks_of(config)
    ranks = own_ranks if options.ranks is None else options.ranks

    # torch is slow to import: not before the config is checked
    from vpipe.app.commands.profile import profiles_of
    from vpipe.app.train.job import Job

    job = Job.from_config(config)
    if ranks != own_ranks:
        if ranks > len(job.model):
            raise UserError(f"--ranks is {ranks}, but the model has only {counted(len(job.model), 'layer')}",
                            hint=f"use {len(job.model)} ranks at most")
        job = Job.from_config(with_ranks(config, ranks))
    if options.stages is not None:
        _check_stages(options.stages, ranks, len(job.model))
    profiles = profiles_of(job, [config.dataset.batch_size // count for count in microbatch_choices(job.config)])
    by_count = {config.dataset.batch_size // size: profile for size, profile in profiles.items()}
    limit_bytes, limit_from = limit_of(memory_bytes, config, next(iter(by_count.values())))
    own = _own_choice(job, by_count, limit_bytes) if ranks == own_ranks else None
    known = (own.plan,) if own is not None and own.plan is not None and options.solver == "exact" and (
        options.stages in (None, len(own.plan.partition))) else ()
    request = PlanRequest(by_count, ranks, limit_bytes,
                          RegisteredSchedule.for_plans(flush=not job.config.parallel.asynchronous),
                          updates_every(job.config, by_count), stages=options.stages, known=known,
                          warmup="auto" if job.config.parallel.asynchronous else None, solver=options.solver)
    with message_if_slow(f"searching: {len(job.model)} layers on {ranks} ranks"):
        found = explanation(request, limit_from, own, _other_ways(job.config, request))
    print(found.text(terminal_columns(PIPE_COLUMNS)))
    _save(found.plan, options)


def _other_ways(config: Config, request: PlanRequest) -> list[PlanRequest]:
    """Return the request with what else the ranks may share: what the config does not say."""
    shares = "zero1" not in config.parallel.model_fields_set and request.ranks > 1 and request.solver == "exact"
    return [request.with_zero1] if shares else []


def _check_stages(stages: int, ranks: int, layers: int) -> None:
    """Check that so many stages, each with as many ranks as the others, or on each rank equally many, are possible."""
    possible = [count for count in range(1, layers + 1) if ranks % count == 0 or count % ranks == 0]
    if stages in possible:
        return
    near = [max((count for count in possible if count < stages), default=None),
            min((count for count in possible if count > stages), default=None)]
    hint = " or ".join(f"--stages {count}" for count in near if count is not None)
    if stages > layers:
        raise UserError(f"--stages is {stages}, but the model has only {counted(layers, 'layer')}", hint=f"give {hint}")
    raise UserError(f"--stages is {stages}, which {counted(ranks, 'rank')} cannot share equally: neither number "
                    "divides the other", hint=f"give {hint}, or {stages} ranks with --ranks")


def with_ranks(config: Config, ranks: int) -> Config:
    """Return a config of so many ranks, a stage on each, with a schedule of the same kind, to be measured."""
    return config.model_copy(update={"machines": None}).with_parallel(
        config.parallel.cut_anew(ranks),
        schedule=(RegisteredSchedule.DEFAULT_ASYNCHRONOUS if config.parallel.asynchronous
                  else RegisteredSchedule.DEFAULT),
        recompute=0.0, chunks=None, compress="none", compress_rounding="nearest")


def microbatch_choices(config: Config) -> list[int]:
    """Return the numbers of microbatches that are tried: the config's, half, twice and four times as many.

    Without a flush an update keeps its samples, so they must be whole microbatches; and where no gradient of the config
    is a whole update late on average, none of the plan is.
    """
    own, samples, parallel = config.microbatches, config.dataset.batch_size, config.parallel
    every = (parallel.update_every or 1) if parallel.asynchronous else own
    least = parallel.in_flight if parallel.asynchronous and every >= parallel.in_flight else 1
    return [count for count in (own // 2, own, 2 * own, 4 * own)
            if count and samples % count == 0 and every * count % own == 0 and every * count // own >= least]


def updates_every(config: Config, counts: Iterable[int]) -> dict[int, int | None]:
    """Return microbatches per update and replica by number of microbatches, for equal samples; none with a flush."""
    if not config.parallel.asynchronous:
        return {}
    every, own = config.parallel.update_every or 1, config.microbatches
    return {count: every * count // own for count in counts}


def limit_of(memory_bytes: int | None, config: Config, profile: Profile) -> tuple[int | None, str]:
    """Return what a rank may hold, None where it is unknown, and its source: command line, config or device."""
    from vpipe.app.train.planning import memory_limit

    if memory_bytes is not None:
        return memory_bytes, "--memory"
    return memory_limit(config, profile), "parallel.memory" if config.parallel.memory is not None else (
        "its device" if profile.cores is None else "its part of the host's memory")


def _own_choice(job: Job, profiles: Mapping[int, Profile], limit_bytes: int | None) -> OtherPlan | None:
    """Return the config's own plan, where it leaves nothing open."""
    parallel, name = job.config.parallel, "the config's own"
    if parallel.to_plan or CsvFile.is_path(parallel.schedule) or isinstance(parallel.recompute, str):
        return None
    plan = job.as_plan
    plan = replace(plan, predictions=predict(profiles[job.config.microbatches], plan).prediction)
    peak, seconds = plan.predicted.fullest_rank[1], plan.predicted.seconds_per_sample
    if limit_bytes is not None and peak > limit_bytes:
        return OtherPlan(name, why=f"{1 / seconds:.3g} samples/s, but a rank would hold {size_text(peak, up=True)}")
    return OtherPlan.simulated_one(name, plan)


def explanation(request: PlanRequest, limit_from: str, own: OtherPlan | None,
                ways: Sequence[PlanRequest] = ()) -> PlanExplanation:
    """Solve a request and explain the plan.

    Args:
        own: the plan of the config; None where that leaves something open.
        ways: the request with other profiles, of ranks that share in other ways.
    """
    solution = solve(request, *ways)
    kind = "exact for this schedule, m and replicas" if solution.exact else (
        "the VPipe paper's" if request.solver == "vpipe" else "not exact")
    solver = (f"{kind}; {counted(solution.considered, 'choice')} of schedule, microbatches and replicas in "
              f"{solution.seconds:.1f} s" + (f" ({solution.note})" if solution.note else ""))
    count = solution.plan.microbatches
    assert count is not None, "a solver chooses it"
    others = [*([own] if own is not None else []), *(OtherPlan(**vars(one)) for one in solution.alternatives)]
    if (shallow := solution.shallow) is not None and shallow.warmup != solution.plan.warmup:
        others.append(OtherPlan.simulated_one(f"warm-up {depths_text(shallow)}, as 1F1B", shallow))
    if (free := solution.without_recompute()) is not None:
        others.append(OtherPlan.simulated_one(f"no recompute, from {size_text(free[0], up=True)}", free[1]))
    return PlanExplanation(solution.plan, solution.request.profiles[count], request.memory_bytes, limit_from, solver,
                           others)


def _save(plan: Plan, options: argparse.Namespace) -> None:
    """Write the plan, and print the command that runs it."""
    output = options.output
    words = ["vpipe", "train", str(options.config)]
    words += setting_words(setting for setting in options.settings
                           if setting.partition("=")[0].strip() not in PLANNED and not isinstance(setting, Setting))
    run = shlex.join([*words, "--set", f"parallel.plan={output or 'plan.json'}"])
    if output is None:
        print(f"to run it, write it with -o plan.json, then: {run}")
        return
    plan.save(output)
    print(f"plan: {output}\nrun it: {run}")
