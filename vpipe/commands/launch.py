"""Run ``vpipe launch --print``: print what ``vpipe train`` would start on which host, as commands to copy."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace

from vpipe.config.config import load_config
from vpipe.config.machines import host_of
from vpipe.distributed.network import free_port
from vpipe.launch.checks import hosts_of, ranks_of
from vpipe.launch.rank_env import HostRanks, ranks_here
from vpipe.launch.ssh import ssh_command

FOLDER = "$FOLDER"


def run_launch(options: argparse.Namespace) -> None:
    """Print the commands; opens no data and starts nothing."""
    config = load_config(options.config, options.settings, options.scheduler)
    hosts = hosts_of(config)
    here = ranks_here(config, hosts, ranks_of(config), free_port(config.parallel.master_port))
    print(f"# {_named(here)} here" + (f", on {here.host}" if here.host else "") + "; a new folder of this run, with "
          "its config")
    print(f"# {config.parallel.devices}")
    print(f"FOLDER={shlex.quote(os.path.abspath(config.log_directory))}/$(date +%Y-%m-%d_%H-%M-%S)")
    print('mkdir -p "$FOLDER"')
    print(f"cat > \"{FOLDER}/config.yaml\" <<'END'\n{config.resolved_yaml().rstrip()}\nEND")
    print("\n".join(_commands(here)))
    for login in [] if hosts is None else hosts.others:
        assert hosts is not None
        there = replace(here, devices=hosts.on(login), host=host_of(login), interface=config.parallel.interface,
                        python=config.launch.python or here.python)
        print(f"\n# {_named(there)} on {there.host}, by the launcher that this starts there, which is told the config")
        print(shlex.join(ssh_command(login, config.launch)))
        print("# and which runs there"
              + ("" if there.interface else ", with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME naming the interface "
                 f"that leads to {there.address}"))
        print("FOLDER=$(mktemp -d)  # with the same config.yaml")
        print("\n".join(_commands(there)))


def _named(ranks: HostRanks) -> str:
    numbers = list(ranks.devices)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _commands(ranks: HostRanks) -> Iterator[str]:
    """Yield the commands of all ranks of a host, for one shell."""
    for rank in ranks.devices:
        variables = [f"{name}={shlex.quote(value)}" for name, value in ranks.environment(rank).items()]
        words = [f'"{FOLDER}"' if word == FOLDER else shlex.quote(word) for word in ranks.command(FOLDER)]
        yield " ".join([*variables, *words, "&"])
    yield "wait"
