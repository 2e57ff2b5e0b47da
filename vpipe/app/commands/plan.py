"""Run ``vpipe plan``: find the fastest way to run a config within the memory of its ranks, and explain it."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vpipe import Order, Plan, accelerator
from vpipe.app.command_line import OptionSetting, setting_words
from vpipe.app.config.apply_plan import TARGETS
from vpipe.app.config.config import Config, config_tree, load_config
from vpipe.app.launch.rank_env import check_alone, ranks_of
from vpipe.app.progress import message_if_slow
from vpipe.app.sizes import parse_size
from vpipe.app.visualize.explain_plan import OtherPlan, PlanExplanation
from vpipe.app.visualize.table import PIPE_COLUMNS, check_output, filled, terminal_columns
from vpipe.errors import UserError, counted
from vpipe.plan import PlanRequest, Profile, predict, solve
from vpipe.schedules import CsvFile, RegisteredSchedule
from vpipe.units import size_text

if TYPE_CHECKING:
    from vpipe.app.train.job import Job

SPLIT = (1, 2, 4, 8)
"""Ranks that split a layer, as they are tried where the config does not say how many."""

WORTH = 0.05
"""Share of a sample's time that splitting layers could save at best, below which it is not measured."""

PLANNED = frozenset(".".join(map(str, keys)) for keys in TARGETS.values()) | frozenset(
    f"parallel.{key}" for key in ("model_parallel_size", "data_parallel_size", "chunks", "memory", "plan"))
"""Keys that a plan sets, or that only planning reads. The command that runs the plan leaves them out."""


def run_plan(options: argparse.Namespace) -> None:
    """Measure what is not measured yet, search, explain, and write the plan."""
    memory_bytes = None if options.memory is None else parse_size(options.memory, "--memory")
    check_alone("vpipe plan")
    for name, count in (("rank", options.ranks), ("stage", options.stages), ("sample", options.samples)):
        if count is not None and count < 1:
            raise UserError(f"--{name}s is {count}", hint=f"plan for 1 {name} or more")
    check_output(options.output)
    config = load_config(options.config, options.settings, started=None)
    own_ranks = ranks_of(config)
    ranks = own_ranks if options.ranks is None else options.ranks

    # torch is slow to import: not before the config is checked
    from vpipe.app.commands.profile import profiles_of
    from vpipe.app.train.job import Job
    from vpipe.app.train.planning import memory_limit, request_of, update_samples

    tree = config_tree(options.config, [*options.settings, "parallel.plan=null"])  # a plan there is made anew
    said = {key for key in ("tensor", "zero1") if tree.get(("parallel", key)) is not None}
    own = Job.from_config(config)
    was, note = update_samples(own), None
    if options.samples not in (None, was):
        batch, rest = divmod(config.dataset.batch_size * options.samples, was)
        if rest:
            raise UserError(f"--samples is {options.samples}, but batches of {config.dataset.batch_size} samples are "
                            f"updates of {was}", hint=f"give a multiple of {was}")
        note = f"{counted(options.samples, 'sample')} in place of {was}: {_meaning(config, was, options.samples)}"
        options.settings = [*options.settings, f"dataset.batch_size={batch}"]
        config = load_config(options.config, options.settings, started=None)
        own = Job.from_config(config)
    jobs = _jobs(config, own, ranks, options.stages, "tensor" in said)
    answers: dict[Any, Any] = {}  # kept, since what is measured next depends on those before
    requests: list[PlanRequest] = []
    others: list[OtherPlan] = []
    took_s = 0.0
    for tensor, job in jobs.items():
        if requests and (gain := _most_gain(requests, ranks, answers)) < WORTH:
            why = f"not measured, for it gains {100 * gain:.0f} % at most"
            others += [OtherPlan(f"tensor {each}", why=why) for each in jobs if each >= tensor]
            break
        samples = config.dataset.batch_size
        with message_if_slow(f"layers split over {tensor} ranks are measured, too: about {took_s:.0f} s, as before; "
                             "--set parallel.tensor=1 leaves that out", show=bool(requests)):
            profiles = profiles_of(job, [samples // count for count in microbatch_choices(job.config)])
        by_count = {samples // size: profile for size, profile in profiles.items()}
        took_s = sum(profile.took_s for profile in profiles.values())
        limit_bytes, limit_from = memory_limit(config, next(iter(by_count.values())), memory_bytes)
        known: tuple[Plan, ...] = ()
        if (job.processes, tensor) == (own_ranks, config.parallel.tensor):
            chosen = _own_choice(job, by_count, limit_bytes)
            others += chosen
            known = tuple(one.plan for one in chosen if one.plan is not None and options.solver == "exact"
                          and options.stages in (None, len(one.plan.partition)))
        requests.append(replace(request_of(job, by_count, limit_bytes, anew=own), stages=options.stages,
                                known=known, solver=options.solver))
        if "zero1" not in said and job.schedule.ranks > 1 and options.solver == "exact":
            requests.append(requests[-1].with_zero1)
    with message_if_slow(f"searching: {len(job.model)} layers on {ranks} ranks"):
        found = explanation(requests, limit_from, others, answers)
        if config.parallel.asynchronous and options.solver == "exact":
            found = replace(found, others=[*found.others, *_larger(requests, found.plan, own, update_samples(own))])
    print(found.text(terminal_columns(PIPE_COLUMNS)))
    if note is not None:
        print("\n".join(filled(note, terminal_columns())), end="\n\n")
    _save(found.plan, options)


def _jobs(config: Config, own: Job, ranks: int, stages: int | None, said: bool) -> dict[int, Job]:
    """Return the jobs that are measured, by how many of the ranks split each layer.

    Args:
        own: the job of the config.
        ranks: in all.
        stages: that the plan shall have.
        said: the config says how many split a layer.

    Raises:
        UserError: none is possible.
    """
    jobs: dict[int, Job] = {}
    refused: list[UserError] = []
    for tensor in [config.parallel.tensor] if said else SPLIT:
        try:
            if not said and tensor > 1:
                _check_split(own, tensor)
            job = _job_of(config, own, ranks, tensor)
            if stages is not None:
                _check_stages(stages, job.schedule.ranks, len(own.model))
            jobs[tensor] = job
        except UserError as error:
            refused.append(error)
    if not jobs:
        raise refused[0]
    return jobs


def _check_split(own: Job, tensor: int) -> None:
    """Refuse to split layers over ranks that the model or the config does not allow, or that have too few devices."""
    from vpipe.app.train.job import on_processors

    config = own.config.with_parallel(tensor=tensor)
    if any(config.mistakes()) or any(config.parallel.mistakes()):
        raise UserError("the config has what does not go with split layers", hint="set parallel.tensor to 1")
    cpu = on_processors(config)
    devices = (os.cpu_count() or 1) // config.training.threads if cpu else accelerator.count()
    if tensor > devices or (devices % tensor and not cpu):
        raise UserError(f"{tensor} ranks would split a layer on {counted(devices, 'device')}", hint="take fewer")


def _job_of(config: Config, own: Job, ranks: int, tensor: int) -> Job:
    """Return the job of a config on so many ranks, of which ``tensor`` split a layer: ``own`` where it is that."""
    from vpipe.app.train.job import Job

    if (ranks, tensor) == (own.processes, own.config.parallel.tensor):
        return own
    each, rest = divmod(ranks, tensor)
    if rest:
        raise UserError(f"{counted(ranks, 'rank')} cannot split layers over {tensor} each (parallel.tensor)",
                        hint=f"plan for a multiple of {tensor} with --ranks")
    if each > len(own.model):
        raise UserError(f"--ranks is {ranks}, but the model has only {counted(len(own.model), 'layer')}",
                        hint=f"use {tensor * len(own.model)} ranks at most")
    return Job.from_config(with_ranks(config.with_parallel(tensor=tensor), each))


def _most_gain(requests: Sequence[PlanRequest], ranks: int, answers: dict[Any, Any]) -> float:
    """Return which share of a sample's time is saved where every rank, or core, computes all the time, and nothing is
    computed twice: no way to split layers saves more. All where no request has a plan."""
    try:
        found = solve(*requests, answers=answers).plan.predicted.seconds_per_sample
    except UserError:
        return 1.0
    least = []
    for profile in (profile for request in requests for profile in request.profiles.values()):
        own = profile.identity
        at_once = ranks if profile.cores is None else min(
            ranks, profile.cores * own.tensor * -(-ranks // (own.ranks_per_host * own.tensor)))
        work_s = sum(layer.forward.median + layer.backward.median for layer in profile.layers)
        least.append(work_s * own.tensor / at_once / own.microbatch_size)
    return 1 - min(least) / found


def _check_stages(stages: int, ranks: int, layers: int) -> None:
    """Check that so many stages, each with as many ranks as the others, or on each rank equally many, are possible."""
    possible = [count for count in range(1, layers + 1) if ranks % count == 0 or count % ranks == 0]
    if stages in possible:
        return
    fewer, more = [count for count in possible if count < stages], [count for count in possible if count > stages]
    hint = " or ".join(f"--stages {count}" for count in fewer[-1:] + more[:1])
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
        recompute=0.0, chunks=None, slices=1, compress="none", compress_rounding="nearest")


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


def _larger(requests: Sequence[PlanRequest], best: Plan, own: Job, was: int) -> Iterator[OtherPlan]:
    """Yield a faster plan whose replicas each take an update of the config, if there is one: its updates are larger."""
    try:
        plan = solve(*(replace(request, shared_updates=False, known=()) for request in requests)).plan
    except UserError:
        return
    samples, seconds = plan.predicted.samples_per_step, plan.predicted.seconds_per_sample
    if samples != was and seconds < (1 - WORTH) * best.predicted.seconds_per_sample:
        what = f"{samples} samples in place of {was}"
        yield OtherPlan.simulated_one(what, plan, f"{what} (--samples {samples}): {_meaning(own.config, was, samples)}")


def _meaning(config: Config, was: int, samples: int) -> str:
    """Return what an update of so many samples means for the number of updates and the learning rate."""
    training, times = config.training, samples / was
    steps = f"{times:.3g} times as few updates" if training.max_steps is None else (
        f"{round(training.max_steps / times):,} updates in place of {training.max_steps:,} (training.max_steps)")
    return (f"another training. The same data make {steps}, and training.learning_rate, {training.learning_rate:g}, "
            f"has to be found anew; often tried is the square root of {times:.3g} times as much, "
            f"{training.learning_rate * times ** 0.5:.2g}, and with sgd {times:.3g} times")


def _own_choice(job: Job, profiles: Mapping[int, Profile], limit_bytes: int | None) -> list[OtherPlan]:
    """Return the config's own plan, where it leaves nothing open; else nothing.

    A plan names ranks instead of chunks, and corrects no delay.
    """
    parallel, name = job.config.parallel, "the config's own"
    if parallel.to_plan or CsvFile.is_path(parallel.schedule) or isinstance(parallel.recompute, str):
        return []
    order = job.config.order
    plan = Plan(replace(job.cut, ranks=job.schedule.placement),
                Order.of(order.schedule, slices=order.slices, update_every=order.update_every,
                         warmup=order.warmup), job.config.microbatches)
    plan = replace(plan, predictions=predict(profiles[job.config.microbatches], plan).prediction)
    peak, seconds = plan.predicted.fullest_rank[1], plan.predicted.seconds_per_sample
    if limit_bytes is not None and peak > limit_bytes:
        why = f"{1 / seconds:.3g} samples/s, but a rank would hold {size_text(peak, up=True)}"
        return [OtherPlan(name, why=why)]
    return [OtherPlan.simulated_one(name, plan)]


def explanation(requests: Sequence[PlanRequest], limit_from: str, others: Sequence[OtherPlan] = (),
                answers: dict[Any, Any] | None = None) -> PlanExplanation:
    """Solve requests, with the ``answers`` to some of them, and explain the plan.

    Args:
        others: plans to compare with it, such as that of the config.
    """
    solution = solve(*requests, answers=answers)
    request = solution.request
    kind = "exact for this schedule, m and replicas" if solution.exact else (
        "the VPipe paper's" if request.solver == "vpipe" else "not exact")
    solver = (f"{kind}; {counted(solution.considered, 'choice')} of schedule, microbatches and replicas in "
              f"{solution.seconds:.1f} s" + (f" ({solution.note})" if solution.note else ""))
    count = solution.plan.microbatches
    assert count is not None, "a solver chooses it"
    others = [*others, *(OtherPlan(**vars(one)) for one in solution.alternatives)]
    if (shallow := solution.shallow) is not None and shallow.warmup != solution.plan.warmup:
        depths = " ".join(map(str, shallow.warmup or ()))
        others.append(OtherPlan.simulated_one(f"warm-up {depths}, as 1F1B", shallow))
    # With more memory than for this way to split layers another one may be the best, of which that would not speak.
    if len({of.identity.tensor for each in requests for of in each.profiles.values()}) == 1 and (
            free := solution.without_recompute()) is not None:
        others.append(OtherPlan.simulated_one(f"no recompute, from {size_text(free[0], up=True)}", free[1]))
    return PlanExplanation(solution.plan, request.profiles[count], request.memory_bytes, limit_from, solver, others)


def _save(plan: Plan, options: argparse.Namespace) -> None:
    """Write the plan, and print the command that runs it."""
    output = options.output
    words = ["vpipe", "train", str(options.config)]
    words += setting_words(setting for setting in options.settings if not isinstance(setting, OptionSetting)
                           and setting.partition("=")[0].strip() not in PLANNED)
    run = shlex.join([*words, "--set", f"parallel.plan={output or 'plan.json'}"])
    if output is None:
        print(f"to run it, write it with -o plan.json, then: {run}")
        return
    plan.save(output)
    print(f"plan: {output}\nrun it: {run}")
