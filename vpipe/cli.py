"""The ``vpipe`` command: parse, call, print."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vpipe.commands.parser import Parser, Version, add_config, add_models, add_overrides, lazy
from vpipe.distributed.excepthook import report, user_frames, write_error_file
from vpipe.errors import VpipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed run, 2 for a user's mistake, 128 + n for signal n."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except VpipeError as error:
        text = report(error)
        print(text, file=sys.stderr)
        write_error_file(text)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `vpipe ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more
        return 1
    except Exception as error:
        from vpipe.launch.local import Interrupted

        if isinstance(error, Interrupted):
            print(f"interrupted ({error}): all ranks have ended", file=sys.stderr)
            return error.exit_status
        return _defect(error)
    return 0


def _defect(error: Exception) -> int:
    """Print a line on an unexpected error, and write its traceback to a file."""
    import tempfile
    import traceback

    frames = user_frames(error)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="vpipe-traceback-", suffix=".txt", delete=False) as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"the traceback is in {file.name}"
    except OSError:
        where = "no file could be written for the traceback either"
    if isinstance(error, OSError):
        print(f"error: {error}\nhint: look whether the path exists, may be used and has room; {where}", file=sys.stderr)
    else:
        whose = "mend what raised it" if frames else "this is a defect of vpipe or of a package it loads"
        print(f"error: {type(error).__name__}: {error}\n{frames}hint: {whose}; {where}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="vpipe", description="Pipeline-parallel training for PyTorch in which a schedule is data.")
    parser.add_argument("--version", action=Version, nargs=0, help="say which version this is")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train as a config says, or go on with a run")
    add_config(train, needed=False)
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder from its newest "
                       "checkpoint, or from the one named; its own config when none is given")
    train.add_argument("--restarts", type=int, metavar="N", help="start again up to N times when the run fails, from "
                       "its newest checkpoint; never when left out")
    train.set_defaults(run=lazy("train", "run_train"))

    launch = commands.add_parser("launch", help="show what train would start, on which host")
    launch.add_argument("--print", action="store_true", required=True, help="print the commands; starts nothing")
    add_config(launch)
    launch.set_defaults(run=lazy("launch", "run_launch"))

    slurm = commands.add_parser("slurm", help="write a batch script for SLURM, or submit it")
    add_config(slurm)
    slurm.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the job")
    slurm.add_argument("--ranks-per-node", type=int, metavar="R", help="ranks on each; the schedule's ranks divided by "
                       "the nodes when left out")
    slurm.add_argument("--partition", metavar="NAME", help="SLURM's partition; its default when left out")
    slurm.add_argument("--time", metavar="TIME", help="limit, as sbatch writes it, such as 2:00:00; the partition's "
                       "when left out")
    slurm.add_argument("--restarts", type=int, metavar="N", help="let the job go back into the queue before its time "
                       "limit, and after up to N failures; the cluster decides when left out")
    slurm.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the script goes; printed when left out")
    slurm.add_argument("--submit", action="store_true", help="hand it to sbatch and print the job's number")
    slurm.set_defaults(run=lazy("slurm", "run_slurm"))

    verify = commands.add_parser("verify", help="a few updates of a config beside plain PyTorch: the same numbers?")
    add_config(verify)
    verify.add_argument("--steps", type=int, default=3, metavar="N", help="updates to compare; 3 when left out, more "
                        "where a schedule without a flush needs them to show every weight version")
    verify.set_defaults(run=lazy("verify", "run_verify"))

    compare = commands.add_parser("compare", help="models, systems or schedules beside each other, in the same "
                                  "processes; one table, one CSV")
    add_config(compare, needed=False)
    add_models(compare)
    compare.add_argument("--systems", metavar="NAME,...", help="gpipe, pipedream, vpipe: each as its users ran it, "
                         "planned within the memory")
    compare.add_argument("--memory", metavar="SIZE", help="what a rank of a system may hold, such as 8GiB; the "
                         "config's parallel.memory, else its part of the device's when left out")
    compare.set_defaults(run=lazy("compare", "run_compare"))

    bench = commands.add_parser("bench", help="the old name of compare --models")
    add_models(bench, needed=True)
    add_overrides(bench)
    bench.set_defaults(run=lazy("compare", "run_bench"), config=None, systems=None, memory=None)

    profile = commands.add_parser("profile", help="measure what every layer takes and keeps, on the ranks of a config")
    add_config(profile)
    profile.add_argument("--again", action="store_true", help="measure even if it was measured before")
    profile.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the profile there, too, such as "
                         "profile.json")
    profile.set_defaults(run=lazy("profile", "run_profile"))

    plan = commands.add_parser("plan", help="the fastest cut, recomputation and schedule within your memory, explained")
    add_config(plan)
    plan.add_argument("--memory", metavar="SIZE", help="what a rank may hold, such as 8GiB or 500MB; the config's "
                      "parallel.memory, else its device's when left out")
    plan.add_argument("--ranks", type=int, metavar="N", help="plan for as many; the config's when left out")
    plan.add_argument("--solver", choices=("exact", "vpipe"), default="exact", help="vpipe: the heuristic of the "
                      "VPipe paper, to compare with; exact when left out")
    plan.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan there, such as plan.json")
    plan.set_defaults(run=lazy("plan", "run_plan"))

    trace = commands.add_parser("trace", help="the timeline and the report of a run, as planned and as run")
    trace.add_argument("folder", type=Path, metavar="RUN", help="the run's folder, trained with 'trace: true'")
    trace.set_defaults(run=lazy("trace", "run_trace"))

    checkpoint = commands.add_parser("checkpoint", help="look at what a run has saved, check it, take it elsewhere")
    _add_checkpoint(checkpoint.add_subparsers(required=True, metavar="COMMAND"))

    schedule = commands.add_parser("schedule", help="draw a schedule, or compare all of them")
    schedule.add_argument("name", nargs="?", metavar="NAME|FILE.csv", help="a schedule by its name, or in a file")
    schedule.add_argument("--all", action="store_true", help="one table of all schedules")
    schedule.add_argument("--stages", type=int, metavar="P", help="ranks that work at once, replicas counting as "
                          "one; without --chunks a stage each, unless the schedule holds several")
    schedule.add_argument("--microbatches", type=int, metavar="M", help="per update with a flush, in all without")
    schedule.add_argument("--chunks", type=int, metavar="V", help="stages per rank")
    schedule.add_argument("--widths", metavar="W,W,...", help="replicas of the stages of each of the P, such as 2,1; "
                          "one number: of all alike")
    schedule.add_argument("--update-every", type=int, metavar="K", help="microbatches per update without a flush, on "
                          "every replica")
    schedule.add_argument("--memory", type=int, metavar="N", help="auto: the most a rank may hold, in microbatches of "
                          "all its stages")
    schedule.add_argument("--format", choices=("text", "csv", "svg", "json"), default="text")
    _add_costs(schedule)
    schedule.set_defaults(run=lazy("schedule", "run_schedule"))

    check = commands.add_parser("check", help="prove a schedule in a CSV file")
    check.add_argument("file", type=Path, metavar="FILE.csv")
    check.set_defaults(run=lazy("schedule", "run_check"))

    simulate = commands.add_parser("simulate", help="draw a schedule in a CSV file")
    simulate.add_argument("file", type=Path, metavar="FILE.csv")
    _add_costs(simulate)
    simulate.set_defaults(run=lazy("schedule", "run_simulate"))

    data = commands.add_parser("data", help="make data sets").add_subparsers(required=True, metavar="COMMAND")
    build = data.add_parser("build-bert", help="write HDF5 shards for BERT pre-training")
    build.add_argument("--text", type=Path, metavar="FOLDER",
                       help="folder of .txt files, documents separated by blank lines; the English prose found on "
                            "this machine when left out")
    build.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the shards go")
    build.add_argument("--sequence-length", type=int, default=128, metavar="TOKENS")
    build.add_argument("--vocab-size", type=int, default=8192, metavar="TOKENS")
    build.add_argument("--seed", type=int, default=0)
    build.set_defaults(run=lazy("data", "run_build_bert"))
    return parser


def _add_checkpoint(commands: Any) -> None:
    """Add the commands of ``vpipe checkpoint``."""
    where = "folder of a run, or one of its checkpoints"

    ls = commands.add_parser("ls", help="the checkpoints of a run")
    ls.add_argument("folder", type=Path, metavar="RUN", help=where)
    ls.set_defaults(run=lazy("checkpoint", "run_ls"))

    show = commands.add_parser("show", help="what is in a checkpoint: sizes, layers, files, config")
    show.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; of a run the newest")
    show.set_defaults(run=lazy("checkpoint", "run_show"))

    verify = commands.add_parser("verify", help="read every byte and compare; status 1 when one has changed")
    verify.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; of a run all")
    verify.set_defaults(run=lazy("checkpoint", "run_verify"))

    export = commands.add_parser("export", help="write the whole model for other programs")
    export.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; of a run the newest")
    export.add_argument("--format", choices=("safetensors", "torch", "huggingface"), required=True,
                        help="one file of tensors; a state dict for torch.load; a folder for transformers")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="a file; a folder of "
                        "huggingface. It must not exist")
    export.set_defaults(run=lazy("checkpoint_convert", "run_export", writes_output=True))

    take = commands.add_parser("import", help="a checkpoint at step 0, of weights alone, from those of others")
    take.add_argument("source", type=Path, metavar="FOLDER", help="one of Hugging Face's, or one with VPipe's "
                      "checkpoint.<stage>.pth.tar")
    take.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="where the checkpoint goes; it "
                      "must not exist")
    take.add_argument("--config", type=Path, help="the config that will train it; needed for VPipe's files, and "
                      "otherwise compared with what the folder says")
    add_overrides(take)
    take.set_defaults(run=lazy("checkpoint_convert", "run_import", writes_output=True))


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--costs", default="1,1,1,0", metavar="F,I,W,TRANSFER",
                        help="times of a microbatch on a whole rank: forward, input half of the backward, weight half "
                             "(a whole backward takes both), and from rank to rank; 1,1,1,0 when left out")


if __name__ == "__main__":
    sys.exit(main())
