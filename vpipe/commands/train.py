"""Run ``vpipe train``: alone on this host, on the hosts of ``machines``, or as a rank that torchrun or srun started."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress

from vpipe.checkpoint.integrity import check_intact
from vpipe.config import config as configs
from vpipe.config.config import Config
from vpipe.distributed.environment import RankEnvironment
from vpipe.errors import UserError, VpipeError, counted
from vpipe.launch.restart import Starter
from vpipe.progress import byte_progress
from vpipe.train.resume import ResumePoint, absolute_path, find_resume_point, resumed_config
from vpipe.train.run_folder import unlock_runs


def run_train(options: argparse.Namespace) -> None:
    """Train as a config says, or resume a run.

    A rank whose config is refused still joins the others, so that all of them end with the same error.
    """
    try:
        _train(options)
    finally:
        unlock_runs()


def _train(options: argparse.Namespace) -> None:
    config: Config | VpipeError
    start = None
    try:
        start, config = _start_and_config(options)
    except VpipeError as error:
        config = error
    address = () if isinstance(config, VpipeError) else (config.parallel.master_address, config.parallel.master_port)
    try:
        rank = RankEnvironment.parse(os.environ, *address)
    except VpipeError as wrong:
        raise config if isinstance(config, VpipeError) else wrong from None
    if not isinstance(config, VpipeError) and (rank is None or rank.rank == 0):
        _note_scheduler(options, config)
        try:
            _check_intact(start)
        except VpipeError as damaged:
            config = damaged
    if rank is not None:
        from vpipe.launch.rank_main import train_rank

        train_rank(rank, config, start, options.restarts)
    elif isinstance(config, VpipeError):
        raise config
    else:
        from vpipe.launch.launcher import run

        run(config, start, options.restarts)


def _note_scheduler(options: argparse.Namespace, config: Config) -> None:
    """Print a note where ``--scheduler`` gives a flush to a file without one: its batch may be one microbatch."""
    if options.scheduler is None or options.config is None:
        return
    with suppress(UserError):  # in a file that is wrong without it
        written = configs.load_config(options.config, options.settings).parallel
        if written.asynchronous:
            few, stages = config.training.num_microbatches, config.parallel.model_parallel_size
            print(f"note: --scheduler {options.scheduler} takes {config.parallel.schedule} instead of "
                  f"{written.schedule}: {counted(few, 'microbatch')} per flush"
                  + (f", so most of the {stages} stages wait; set training.num_microbatches" if few < stages else ""),
                  file=sys.stderr, flush=True)


def _start_and_config(options: argparse.Namespace) -> tuple[ResumePoint | None, Config]:
    """Return the run or checkpoint to resume, if any, and the config."""
    if options.restarts is not None and options.restarts < 0:
        raise UserError(f"--restarts is {options.restarts}", hint="give a whole number, 0 or more")
    if options.resume is None:
        if options.config is None:
            raise UserError("vpipe train is given no config", hint="name a YAML file: vpipe train CONFIG; or a run to "
                            "go on with: vpipe train --resume RUN")
        return None, configs.load_config(options.config, options.settings, options.scheduler)
    try:
        start = find_resume_point(options.resume)
    except UserError:
        started_before = _run_of_same_starter(options)
        if started_before is None:
            raise
        start = started_before
    return start, resumed_config(start, options.config, options.settings, options.scheduler)


def _run_of_same_starter(options: argparse.Namespace) -> ResumePoint | None:
    """Return the run of a checkpoint that it has removed since (``checkpoint.keep``), if one starter began both.

    A starter such as torchrun gives the same command with every attempt.
    """
    path = absolute_path(options.resume)
    if path.exists():
        return None
    with suppress(VpipeError):
        start, rank = find_resume_point(path.parent), RankEnvironment.parse(os.environ)
        starter = None if start.folder is None else Starter.read(start.folder)
        if starter is not None and rank is not None and rank.agent in starter.agents:
            return start
    return None


def _check_intact(start: ResumePoint | None) -> None:
    """Read every byte of a checkpoint, and refuse one that is damaged before anything starts."""
    if start is not None and start.checkpoint is not None:
        with byte_progress(f"checking {start.checkpoint.name}") as progress:
            check_intact(start.checkpoint, progress, manifest=start.manifest)
