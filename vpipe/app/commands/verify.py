"""Run ``vpipe verify``: compare a few updates of a config with its oracle, in one process and over gloo."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from vpipe.app.commands.profile import folder_unless_failed
from vpipe.app.config.config import load_config
from vpipe.app.launch.local import run_ranks
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import HostRanks, check_alone
from vpipe.app.train.job import Job
from vpipe.app.train.run_folder import CONFIG
from vpipe.app.verify import (
    SavedReference,
    batches_for_steps,
    first_loss,
    lanes,
    references,
    run_in_process,
    steps_in_batches,
)
from vpipe.errors import RunError, UserError
from vpipe.testing import Reference, Trajectory, compare

MOST_STEPS = 10_000


def run_verify(options: argparse.Namespace) -> None:
    """Run a few updates in one process and over gloo, and print every step beside the oracle's.

    Raises:
        RunError: they differ by more than the bound.
    """
    check_alone("vpipe verify")
    if not 1 <= options.steps <= MOST_STEPS:
        raise UserError(f"--steps is {options.steps}", hint="compare 1 update or more" if options.steps < 1 else
                        f"compare {MOST_STEPS:,} updates at most: the weights of each are kept")
    torch.set_num_threads(1)
    # By default on processors, whatever the config trains on: there the numbers are the same to the bit.
    settings = [*options.settings, "parallel.backend=gloo", f"parallel.device={options.device}"]
    config = load_config(options.config, settings, started=None)
    job = Job.from_config(config)
    batches, ranks, parts = batches_for_steps(job, options.steps), job.schedule.ranks, config.parallel.tensor
    steps = steps_in_batches(job, batches)
    print(f"{job.config.model.name}: {len(job.model)} layers in {job.cut.count} stages on {ranks} ranks"
          + f" of {parts} processes that split each layer" * (parts > 1)
          + f", schedule {job.config.parallel.standing_in.order_text}, {steps} steps"
          + (", on this host without its container" if job.config.container else ""), flush=True)
    if to_plan := job.config.parallel.to_plan:
        print(f"a run plans {', '.join(to_plan)} when it starts; here stages balanced by their parameters stand in: "
              f"{list(job.cut.partition)}", flush=True)
    oracles: Sequence[Reference | SavedReference] = []
    wrong: list[str] = []
    if parts == 1:
        oracles = list(references(job, batches))
        print(f"\nreference: {oracles[0].name}\n    step  loss                 gradient norm")
        known = oracles[0].trajectory
        for step, (loss, updates) in enumerate(zip(known.losses, known.step_updates, strict=True)):
            print(f"  {step:6}  {loss:<19.16g}  {known.norm(updates):<.16g}")
        wrong += _compared("in one process", run_in_process(job, batches), oracles, job)
    with folder_unless_failed("vpipe-verify-") as folder:
        _over_gloo(job, batches, folder)
        if parts > 1:
            print("\nof gradients and weights each lane has its shards")
        for lane, (trajectory, of_lane) in enumerate(lanes(job, folder)):
            oracles = of_lane or oracles
            wrong += _compared("over gloo" + f", lane {lane}" * (parts > 1), trajectory, oracles, job)
        if parts > 1 and (first := first_loss(job)) is not None:
            expected, most = first
            off = abs(trajectory.losses[0] - expected)
            print(f"\nwhole layers on one device: the first loss is {expected:.16g}, off by {off:.1e} (may differ by "
                  f"{most:.1e}: sums are in another order)")
            if off > most:
                wrong.append(f"split layers change the first loss, to {trajectory.losses[0]:.7g} from {expected:.7g}: "
                             f"off by {off:.1e}, allowed are {most:.1e}; the tensor_plan of a module is wrong")
    if wrong:
        raise RunError("; ".join(wrong), hint="a layer that draws random numbers outside torch, changes a buffer that "
                       "it reads, or passes on memory that is not contiguous at a cut may differ from one device")
    print(f"equal: {steps} steps give to the last bit the losses, gradient norms and weights of {oracles[0].name}")


def _over_gloo(job: Job, batches: int, folder: Path) -> None:
    """Run all ranks of a job; they leave their trajectories in the folder."""
    (folder / CONFIG).write_text(job.config.resolved_yaml())
    run_ranks(HostRanks.alone(job.processes, free_port(job.config.parallel.master_port), 1, ("verify", str(batches))),
              folder, job.describe)


def _compared(run: str, trajectory: Trajectory, oracles: Sequence[Reference | SavedReference],
              job: Job) -> list[str]:
    """Print a run beside its oracles, and return its faults."""
    wrong = [f"{run}, {job.describe(found.rank)} differs from its replica, {job.describe(found.other)}, after update "
             f"{found.update} of {found.parameter}" for found in trajectory.mismatches[:1]]
    for oracle in oracles:
        bound = f"losses and norms may differ by {oracle.bound:.1e}" if oracle.bound else "must be equal"
        print(f"\n{run}, beside {oracle.name} ({bound})\n"
              "    step  loss                 gradient norm        largest difference of loss, norm, weights")
        far = []
        for difference in compare(trajectory, oracle.trajectory):
            numbers = (difference.loss_difference, difference.norm_difference, difference.weight_difference)
            off = "0" if not any(number != 0 for number in numbers) else ", ".join(f"{each:.1e}" for each in numbers)
            print(f"  {difference.step:6}  {difference.loss:<19.16g}  {difference.gradient_norm:<19.16g}  {off}"
                  + (f" ({difference.weight})" if difference.weight else ""), flush=True)
            far += [difference] if not difference.within(oracle.bound) else []
        if far:
            wrong.append(f"{run}, step {far[0].step} is not what {oracle.name} gives: loss off by "
                         f"{far[0].loss_difference:.1e}, gradient norm by {far[0].norm_difference:.1e}, weights by "
                         f"{far[0].weight_difference:.1e}" + (f" ({far[0].weight})" if far[0].weight else "")
                         + f"; allowed are {oracle.bound:.1e}")
    return wrong
