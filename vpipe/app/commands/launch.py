"""Run ``vpipe launch --print`` and ``vpipe slurm``: write the commands, or the batch script, that start a run."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from vpipe.app.command_line import setting_words
from vpipe.app.config.config import load_config
from vpipe.app.config.machines import host_of
from vpipe.app.launch.rank_env import HostRanks, check_neighbours, hosts_of, ranks_here, ranks_of
from vpipe.app.launch.slurm import Nodes, ranks_per_node, slurm_script
from vpipe.app.launch.ssh import ssh_command
from vpipe.errors import RunError, UserError

FOLDER = "$FOLDER"


def run_launch(options: argparse.Namespace) -> None:
    """Print the commands that ``vpipe train`` runs on each host; opens no data and starts nothing."""
    config = load_config(options.config, options.settings)
    hosts = hosts_of(config)
    here = ranks_here(config, hosts, ranks_of(config), "train")
    print(f"# {_rank_numbers(here)} here" + (f", on {here.host}" if here.host else "") + "; a new folder of this run, "
          "with its config")
    print(f"# {config.parallel.devices}; vpipe train also gives the ranks a VPIPE_SECRET to know each "
          "other by")
    print(f"FOLDER={shlex.quote(os.path.abspath(config.log_directory))}/$(date +%Y-%m-%d_%H-%M-%S)")
    print('mkdir -p "$FOLDER"')
    print(f"cat > \"{FOLDER}/config.yaml\" <<'END'\n{config.resolved_yaml().rstrip()}\nEND")
    print("\n".join(_commands(here)))
    if hosts is None:
        return
    for login in hosts.others:
        there = replace(here, devices=hosts.on(login), host=host_of(login), interface=config.parallel.interface,
                        python=config.launch.python or here.python)
        print(f"\n# {_rank_numbers(there)} on {there.host}, by the agent that this starts there and sends the config")
        print(shlex.join(ssh_command(login, config.launch)))
        print("# which runs there" + ("" if there.interface else ", with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
                                      f"naming the interface that leads to {there.address}"))
        print("FOLDER=$(mktemp -d)  # with the same config.yaml")
        print("\n".join(_commands(there)))


def _rank_numbers(ranks: HostRanks) -> str:
    return f"rank{'s' * (len(ranks.devices) > 1)} {', '.join(map(str, ranks.devices))}"


def _commands(ranks: HostRanks) -> Iterator[str]:
    """Yield the commands of all ranks of a host, for one shell."""
    for rank in ranks.devices:
        variables = [f"{name}={shlex.quote(value)}" for name, value in ranks.environment(rank).items()]
        words = [f'"{FOLDER}"' if word == FOLDER else shlex.quote(word) for word in ranks.command(FOLDER)]
        yield " ".join([*variables, *words, "&"])
    yield "wait"


def run_slurm(options: argparse.Namespace) -> None:
    """Print the batch script, write it to a file, or submit it. Opens no data: they may be readable on nodes only."""
    config = load_config(options.config, options.settings)
    per_node = ranks_per_node(ranks_of(config), options.nodes, options.ranks_per_node)
    check_neighbours(config, [f"node {node}" for node in range(options.nodes) for _ in range(per_node)])
    parallel, devices = config.parallel, [f"The {config.parallel.devices}."]
    if parallel.device is None and not parallel.asks_for_gpus:
        devices.append("The job requests no GPUs; with parallel.device: cuda it requests one per rank.")
    nodes = Nodes(options.nodes, per_node, config.training.threads, parallel.asks_for_gpus, devices,
                  options.partition, options.time, config.machines is not None, options.restarts)
    overrides = setting_words(options.settings)
    overrides += [word for path in options.imports for word in ("--import", path)]
    chosen = [word for option in ("nodes", "ranks_per_node", "partition", "time", "restarts")
              if (value := getattr(options, option)) is not None
              for word in (f"--{option.replace('_', '-')}", str(value))]
    path = str(options.config)
    restarts = [] if options.restarts is None else ["--restarts", str(options.restarts)]
    script = slurm_script(options.config.stem, ["vpipe", "train", path, *restarts, *overrides], nodes,
                          ["vpipe", "slurm", path, *chosen, *overrides])
    if options.output is not None:
        try:
            options.output.write_text(script)
        except OSError as error:
            raise UserError(f"cannot write '{options.output}': {error.strerror}", hint="name a file in a folder that "
                            "exists and can be written as -o") from None
    if options.submit:
        print(f"submitted job {_submit(script)}: squeue shows it")
    elif options.output is None:
        sys.stdout.write(script)


def _submit(script: str) -> str:
    """Hand a script to sbatch; returns the number of the job."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("there is no sbatch on PATH", hint="submit on a machine of the cluster, often called the login "
                        "node; without --submit the script is written only") from None
    if done.returncode:
        raise RunError(f"sbatch did not take the job: {' '.join(done.stderr.split())}",
                       hint="sinfo shows the partitions with their nodes and time limits")
    return done.stdout.strip().partition(";")[0]
