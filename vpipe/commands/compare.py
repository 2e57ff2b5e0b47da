"""``vpipe compare``: systems or schedules in the same processes, taking turns."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path

from vpipe.compare.ask import Ask
from vpipe.config.config import load_config
from vpipe.errors import UserError
from vpipe.launch.alone import check_alone
from vpipe.launch.folder import make_run_folder
from vpipe.launch.local import run_ranks
from vpipe.launch.machine import check_gpus, hosts_of, ranks_of
from vpipe.launch.network import free_port
from vpipe.launch.ranks import ranks_here
from vpipe.runtime.executors.registry import THREADED
from vpipe.train.csv_rows import check_output


def run_compare(options: argparse.Namespace) -> None:
    """Start the ranks of the config on this host; they measure, plan, and take turns.

    Raises:
        VpipeError: what was asked, the config or the run is at fault.
    """
    if options.output is not None:
        check_output(options.output)
    ask = Ask.of(options.systems, options.schedules, options.memory)
    config = load_config(options.config, options.settings, options.scheduler)
    if config.parallel.executor == THREADED:
        raise UserError(f"vpipe compare runs schedules that {THREADED} cannot, and notes when each action ran",
                        hint="add --set parallel.executor=overlapped, or leave --scheduler out")
    check_alone("vpipe compare", os.environ)
    hosts = hosts_of(config)
    if hosts is not None and hosts.others:
        raise UserError(f"vpipe compare runs on this host alone, but machines names {len(hosts.others)} more",
                        hint="leave machines out, or name this host only")
    free_port(config.parallel.master_port)
    if config.parallel.asks_for_gpus:
        check_gpus(config, range(ranks_of(config)) if hosts is None else hosts.on(None).values())
    from vpipe.train.job import Job  # torch is slow to import: only when the config is worth it

    job = Job.of(config)
    here = replace(ranks_here(job.config, hosts, job.schedule.ranks, free_port(config.parallel.master_port)),
                   task=("compare", *ask.words()))
    folder = make_run_folder(job.config.log_directory, job.config.resolved_yaml())
    print(f"run folder: {folder}", flush=True)
    try:
        run_ranks(here, folder, job.describe)
        if options.output is not None:
            _copy(folder, options.output)
    finally:
        print(f"run folder: {folder}", flush=True)


def _copy(folder: Path, output: Path) -> None:
    from vpipe.compare.world import CSV  # which reads torch

    try:
        shutil.copyfile(folder / CSV, output)
    except OSError as error:
        raise UserError(f"cannot write '{output}': {error.strerror}",
                        hint=f"copy it yourself: {folder / CSV}") from None
