"""Run ``vpipe slurm``: write the batch script that starts a run, or submit it."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from signal import SIGUSR1

from vpipe.app.command_line import setting_words
from vpipe.app.config.config import Config, load_config
from vpipe.app.errors import os_errors
from vpipe.app.launch.rank_env import check_neighbours, ranks_of
from vpipe.app.visualize.table import check_output
from vpipe.errors import RunError, UserError, counted


def run_slurm(options: argparse.Namespace) -> None:
    """Print the batch script, write it to a file, or submit it. Opens no data: they may be readable on nodes only."""
    check_output(options.output)
    config = load_config(options.config, options.settings, started=True)
    per_node = ranks_per_node(ranks_of(config), options.nodes, options.ranks_per_node)
    check_neighbours(config, [f"node {node}" for node in range(options.nodes) for _ in range(per_node)])
    if options.restarts is not None and options.restarts < 0:
        raise UserError(f"--restarts is {options.restarts}", hint="give a whole number, 0 or more")
    if options.time is not None and _TIME.fullmatch(options.time) is None:
        raise UserError(f"--time is '{options.time}'", hint="write 30 (minutes), 2:00:00 or 1-12 (days-hours), as for "
                        "sbatch")
    if options.partition is not None and _PARTITION.fullmatch(options.partition) is None:
        raise UserError(f"--partition is '{options.partition}'", hint="name one that sinfo shows")
    overrides = setting_words(options.settings)
    overrides += [word for path in options.imports for word in ("--import", path)]
    chosen = [word for option in ("nodes", "ranks_per_node", "partition", "time", "restarts")
              if (value := getattr(options, option)) is not None
              for word in (f"--{option.replace('_', '-')}", str(value))]
    path = str(options.config)
    restarts = [] if options.restarts is None else ["--restarts", str(options.restarts)]
    script = slurm_script(options, config, per_node, ["vpipe", "train", path, *restarts, *overrides],
                          ["vpipe", "slurm", path, *chosen, *overrides])
    if options.output is not None:
        with os_errors(f"cannot write '{options.output}'", "make room there"):
            options.output.write_text(script, encoding="utf-8")
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


SAVE_S = 120
"""Time from the signal to the time limit. SLURM may be a minute early."""

WRITTEN_BY = "# Written by: "
"""Before the command, in the script that it wrote."""

_TIME = re.compile(r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}|infinite|UNLIMITED", re.ASCII)
"""``--time`` of sbatch: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, or DAYS-HOURS[:MINUTES[:SECONDS]]."""

_PARTITION = re.compile(r"[\w.+-]+(,[\w.+-]+)*", re.ASCII)


def ranks_per_node(ranks: int, nodes: int, wanted: int | None) -> int:
    """Return the ranks on each node, the same on all. Raises UserError if ``ranks`` cannot be divided so."""
    for option, value in (("--nodes", nodes), ("--ranks-per-node", wanted)):
        if value is not None and value < 1:
            raise UserError(f"{option} is {value}", hint="give a whole number, 1 or more")
    fitting = " or ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
    if wanted is not None and nodes * wanted != ranks:
        raise UserError(f"{counted(nodes, 'node')} with {counted(wanted, 'rank')} on each would be {nodes * wanted}, "
                        f"but the schedule has {counted(ranks, 'rank')}",
                        hint=f"leave --ranks-per-node out, with --nodes {fitting}")
    if ranks % nodes:
        raise UserError(f"{counted(ranks, 'rank')} cannot be put on {counted(nodes, 'node')} with equally many on each",
                        hint=f"use --nodes {fitting}")
    return ranks // nodes


def slurm_script(options: argparse.Namespace, config: Config, per_node: int, train: Sequence[str],
                 written_by: Sequence[str]) -> str:
    """Return the script, for ``sbatch``.

    Args:
        per_node: tasks on each node, each a rank of the schedule.
        train: the command that every rank runs, such as ``["vpipe", "train", "c.yaml"]``.
        written_by: the command that writes this.

    Raises:
        UserError: a word holds a line break or the like, which would be a line of the script.
    """
    for word in (*train, *written_by):
        if not word.isprintable():
            raise UserError(f"{word!r} cannot be written into a script: it holds a character that is not printed",
                            hint="leave out line breaks and tabs; a value of several lines belongs into the config")
    parallel, threads, devices = config.parallel, config.training.threads, [f"The {config.parallel.devices}."]
    if parallel.device is None and not parallel.asks_for_gpus:
        devices.append("The job requests no GPUs; with parallel.device: cuda it requests one per rank.")
    job = re.sub(r"[^\w.-]", "_", options.config.stem)
    directives = [
        (f"--job-name={job}", ""),
        ("--output=%x-%j.out", "<job name>-<job id>.out: output of rank 0; all logs are in the run's folder"),
        (f"--nodes={options.nodes}", ""),
        (f"--ntasks-per-node={per_node}", f"a task is a rank: {options.nodes * per_node} in all"),
        (f"--cpus-per-task={threads}", "training.threads")]
    if parallel.asks_for_gpus:
        directives.append((f"--gpus-per-node={per_node}", "one per rank"))
    if options.partition is not None:
        directives.append((f"--partition={options.partition}", ""))
    if options.time is not None:
        directives.append((f"--time={options.time}", "SLURM ends the job after it"))
    if options.restarts is not None:
        directives += [("--requeue", "the job may be requeued under its number"),
                       ("--open-mode=append", "then it appends to --output"),
                       (f"--signal=USR1@{SAVE_S}", f"{SAVE_S} s before the time limit the ranks save and end")]
    width = max(len(option) for option, _ in directives) + 2
    lines = [f"#SBATCH {option:{width}}# {why}" if why else f"#SBATCH {option}" for option, why in directives]
    hosts = "# SLURM chooses the hosts; the config's machines are not used.\n" if config.machines is not None else ""
    script = _SCRIPT.format(
        devices="".join(f"# {line}\n" for line in devices),
        written_by=f"{WRITTEN_BY}{shlex.join(written_by)}", hosts=hosts, directives="\n".join(lines),
        threads=threads, train=shlex.join(train))
    return script if options.restarts is None else \
        script.rstrip("\n") + _AGAIN.format(restarts=options.restarts, saved=128 + SIGUSR1)


_SCRIPT = """\
#!/bin/bash
{written_by}
# Submit it with sbatch from the folder where its relative paths start, with vpipe on PATH (its environment activated).
{devices}{hosts}
{directives}

set -euo pipefail

# What only the ranks of this run know: nobody else on the cluster can pass for one.
VPIPE_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d '[:space:]')
export VPIPE_SECRET

# srun starts the ranks on all nodes; they meet on the first node. When a rank fails, srun ends the others, which have a
# few seconds to report what they saw. --cpus-per-task is repeated: since SLURM 22.05 srun does not inherit it.
srun --cpus-per-task={threads} --kill-on-bad-exit=1 {train}
"""

_AGAIN = """ || status=$?

# Requeue the job, which then resumes from its newest checkpoint: after status {saved} (it saved before the time limit)
# and after up to {restarts} failures, counted in a file; never after status 2, a mistake in the config or the data.
failures="$SLURM_JOB_NAME-$SLURM_JOB_ID.failures"
case ${{status:=0}} in
    0|2) ;;
    {saved}) scontrol requeue "$SLURM_JOB_ID" ;;
    *)
        echo "$status" >> "$failures"
        if (( $(wc -l < "$failures") <= {restarts} )); then
            scontrol requeue "$SLURM_JOB_ID"
        fi ;;
esac
exit "$status"
"""
