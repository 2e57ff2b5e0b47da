"""Run ``vpipe slurm``: write the batch script that starts a run, or submit it."""

from __future__ import annotations

import argparse
import subprocess
import sys

from vpipe.app.command_line import setting_words
from vpipe.app.config.config import load_config
from vpipe.app.launch.rank_env import check_neighbours, ranks_of
from vpipe.app.launch.slurm import Nodes, ranks_per_node, slurm_script
from vpipe.errors import RunError, UserError


def run_slurm(options: argparse.Namespace) -> None:
    """Print the batch script, write it to a file, or submit it. Opens no data: they may be readable on nodes only."""
    config = load_config(options.config, options.settings, started=True)
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
