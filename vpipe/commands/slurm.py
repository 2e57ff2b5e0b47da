"""Run ``vpipe slurm``: write a batch script for a config, or submit it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from vpipe.config.config import load_config
from vpipe.errors import RunError, UserError
from vpipe.launch.checks import ranks_of
from vpipe.launch.slurm import Nodes, ranks_per_node, slurm_script


def run_slurm(options: argparse.Namespace) -> None:
    """Print the script, write it to a file, or hand it to sbatch. No data are opened: they may be where only nodes are.

    Raises:
        UserError: nodes and ranks do not fit, or there is no sbatch.
        RunError: sbatch refuses the script.
    """
    config = load_config(options.config, options.settings, options.scheduler)
    per_node = ranks_per_node(ranks_of(config), options.nodes, options.ranks_per_node)
    parallel, devices = config.parallel, [f"The {config.parallel.devices}."]
    if parallel.device is None and not parallel.asks_for_gpus:
        devices.append("SLURM is asked for no GPUs; with parallel.device: cuda it is, for one per rank.")
    wanted = Nodes(options.nodes, per_node, config.training.threads, parallel.asks_for_gpus, devices,
                   options.partition, options.time, config.machines is not None, options.restarts)
    overrides = [word for setting in options.settings for word in ("--set", setting)]
    if options.scheduler is not None:
        overrides += ["--scheduler", options.scheduler]
    chosen = [word for option, value in (("--nodes", options.nodes), ("--ranks-per-node", options.ranks_per_node),
                                         ("--partition", options.partition), ("--time", options.time),
                                         ("--restarts", options.restarts))
              if value is not None for word in (option, str(value))]
    path = str(options.config)
    again = [] if options.restarts is None else ["--restarts", str(options.restarts)]
    script = slurm_script(options.config.stem, ["vpipe", "train", path, *again, *overrides], wanted,
                          ["vpipe", "slurm", path, *chosen, *overrides])
    if options.output is not None:
        _write(options.output, script)
    if options.submit:
        print(_submitted(script))
    elif options.output is None:
        sys.stdout.write(script)


def _write(path: Path, script: str) -> None:
    try:
        path.write_text(script)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}", hint="name a file in a folder that exists and can "
                        "be written as -o") from None


def _submitted(script: str) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("there is no sbatch on PATH", hint="submit on a machine of the cluster, often called the login "
                        "node; without --submit the script is written only") from None
    if done.returncode:
        raise RunError(f"sbatch did not take the job: {' '.join(done.stderr.split())}",
                       hint="sinfo shows the partitions with their nodes and time limits")
    return f"submitted job {done.stdout.strip().partition(';')[0]}: squeue shows it"
