"""``vpipe train``: alone on this host, on the hosts of ``machines``, or as one rank that torchrun or srun started."""

from __future__ import annotations

import argparse
import os

from vpipe.errors import VpipeError
from vpipe.launch import local
from vpipe.launch.folder import make_run_folder
from vpipe.launch.machine import check_gpus, hosts_of, ranks_of
from vpipe.launch.member import Member
from vpipe.launch.network import free_port
from vpipe.launch.ranks import ranks_here
from vpipe.launch.ssh import connect, prepare
from vpipe.train import config as configs
from vpipe.train.config import Config


def run_train(options: argparse.Namespace) -> None:
    """Train as a config says.

    Raises:
        VpipeError: the config, a host or the run is at fault.
    """
    config: Config | VpipeError
    try:
        config = configs.load_config(options.config, options.settings, options.scheduler)
    except VpipeError as error:
        config = error
    try:
        member = Member.of(os.environ, None if isinstance(config, VpipeError) else config.parallel)
    except VpipeError as wrong:
        raise config if isinstance(config, VpipeError) else wrong from None
    if member is not None:
        from vpipe.launch.together import train_together

        train_together(member, config)
    elif isinstance(config, VpipeError):
        raise config
    else:
        _train(config)


def _train(config: Config) -> None:
    """Start the ranks, here and on the other hosts."""
    hosts = hosts_of(config)
    free_port(config.parallel.master_port)  # refuses early; preparing data may take minutes
    if config.parallel.backend == "nccl":  # else torch is not needed yet
        check_gpus(config, range(ranks_of(config)) if hosts is None else hosts.on(None).values())
    remotes = [] if hosts is None else connect(hosts, config.launch, container=bool(config.container))
    try:
        # torch is slow to import: only when the config is worth it.
        from vpipe.train.job import Job
        from vpipe.train.report import headline

        job = Job.of(config)
        config = job.config
        here = ranks_here(config, hosts, job.schedule.ranks, free_port(config.parallel.master_port))
        if remotes:
            prepare(remotes, config.resolved_yaml(), here, config.parallel.timeout_s, job.fingerprint())
        folder = make_run_folder(config.log_directory, config.resolved_yaml())
        job.keep_plan(folder)
        print(f"run folder: {folder}\n{headline(job)}" + (f" on {1 + len(remotes)} hosts" if remotes else ""),
              flush=True)
        try:
            local.run_ranks(here, folder, lambda rank: job.describe(rank) if hosts is None else
                            hosts.described(rank, job.describe(rank)), remotes)
        finally:
            print(f"run folder: {folder}", flush=True)
    finally:
        local.close_all(remotes)
