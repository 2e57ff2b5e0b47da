"""Run ``vpipe train``: alone on this host, on the hosts of ``machines``, or as a rank that torchrun or srun started."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vpipe.app.command_line import OptionSetting
from vpipe.app.commands.trace import write_report
from vpipe.app.config import config as configs
from vpipe.app.config.config import Config
from vpipe.app.config.formats import ADDITIONS
from vpipe.app.imports import import_files
from vpipe.app.launch.restart import Starter
from vpipe.app.progress import byte_progress
from vpipe.app.train.resume import ResumePoint, absolute_path, data_settings, find_resume_point, resumed_config
from vpipe.app.train.run_folder import CONFIG, unlock_runs
from vpipe.checkpoint import Checkpoint
from vpipe.distributed import RankEnvironment
from vpipe.errors import UserError, VpipeError


def run_train(options: argparse.Namespace) -> None:
    """Train as a config says, or resume a run.

    A rank whose config is refused still joins the others, so that all of them end with the same error.
    """
    try:
        _train(options)
    finally:
        unlock_runs()


def _train(options: argparse.Namespace) -> None:
    config: Config | VpipeError | None = None
    start, container, address, port = None, None, None, None
    try:
        import_files(options.imports)
        start = _resume_point(options)
        if options.data is not None and start is None:
            raise UserError("--data is given without --resume", hint=f"write --set dataset.path={options.data}")
        if options.data is not None and start is not None:
            options.settings = [*data_settings(start.folder, options.data), *options.settings]
            start = replace(start, other_data=True)
        if {"RANK", "SLURM_PROCID"} & os.environ.keys():
            container, address, port = _meeting_keys(options, start)
    except VpipeError as error:
        config = error
    try:
        rank = RankEnvironment.parse(os.environ, address, port)
    except VpipeError as wrong:
        raise config if isinstance(config, VpipeError) else wrong from None
    first = rank is None or rank.rank == 0
    if config is None and (first or container):
        try:
            settings = [*(text for kind in ADDITIONS.added() for text in kind().settings()), *options.settings]
            config = configs.load_config(options.config, settings, started=rank is not None) if start is None else \
                resumed_config(start, options.config, settings, rank is not None)
            if first:
                _note_form(options, config)
                _check_intact(start)
        except VpipeError as error:
            config = error
    if rank is not None:
        from vpipe.app.launch.rank_main import train_rank

        train_rank(rank, config, start, options.restarts)
    elif not isinstance(config, Config):
        assert config is not None, "the first rank reads it"
        raise config
    else:
        from vpipe.app.launch.launcher import run

        folder = run(config, start, options.restarts)
        if folder is not None and config.trace:
            write_report(folder)


def _meeting_keys(options: argparse.Namespace, start: ResumePoint | None) -> tuple[Any, str | None, int | None]:
    """Return what each rank must read of a config before it meets rank 0, which reads all other keys for all ranks: its
    container, and the address and port of rank 0. None of a config that cannot be read, which rank 0 reports.
    """
    path = start.folder / CONFIG if options.config is None and start is not None and start.folder else options.config
    container, address, port = None, None, None
    if path is not None:
        with suppress(VpipeError):
            tree = configs.config_tree(path, options.settings, resolved=options.config is None)
            container = tree.get(("container",))
            address, port = (tree.get(("parallel", key)) for key in ("master_address", "master_port"))
    return container, address if isinstance(address, str) else None, port if type(port) is int else None


def _note_form(options: argparse.Namespace, config: Config) -> None:
    """Print what those should know who train with options of another program."""
    if options.config is not None and any(isinstance(setting, OptionSetting) for setting in options.settings):
        for kind in ADDITIONS.added():
            if (note := kind().note(options.config, options.settings, config)) is not None:
                print(f"note: {note}", file=sys.stderr, flush=True)


def _resume_point(options: argparse.Namespace) -> ResumePoint | None:
    """Return the run or checkpoint to resume; None for a new run."""
    if options.restarts is not None and options.restarts < 0:
        raise UserError(f"--restarts is {options.restarts}", hint="give a whole number, 0 or more")
    if options.resume is None:
        if options.config is None:
            raise UserError("vpipe train is given no config", hint="name a YAML file: vpipe train CONFIG; or a run to "
                            "go on with: vpipe train --resume RUN")
        return None
    try:
        return find_resume_point(options.resume)
    except UserError:
        # A starter such as torchrun gives the same command with every attempt: the run that it began may have removed
        # the checkpoint since (checkpoint.keep).
        path = absolute_path(options.resume)
        with suppress(VpipeError):
            start, rank = find_resume_point(path.parent), RankEnvironment.parse(os.environ)
            starter = None if start.folder is None or path.exists() else Starter.read(start.folder)
            if starter is not None and rank is not None and rank.agent in starter.agents:
                return start
        raise


def _check_intact(start: ResumePoint | None) -> None:
    """Read every byte of a checkpoint, and refuse one that is damaged before anything starts."""
    if start is not None and start.checkpoint is not None and start.manifest is not None:
        with byte_progress(f"checking {start.checkpoint.name}") as progress:
            Checkpoint(start.checkpoint, start.manifest).check_intact(progress)
