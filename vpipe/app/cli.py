"""Parse the ``vpipe`` command line and run a command. A command's module, and with it torch, loads when it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from vpipe.app.command_line import COMMANDS, Parser, add_command, add_config, add_import, add_overrides, add_run
from vpipe.app.progress import LOADING_TORCH, accept_any_text, message_if_slow
from vpipe.errors import RunError, VpipeError
from vpipe.plugins import PluginGroup


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed run, 2 for a user's mistake, 128 + n for signal n."""
    accept_any_text()
    options = _parser().parse_args(arguments)
    try:
        from vpipe.app.imports import import_files

        if options.new_output:
            from vpipe.app.weights import check_free

            check_free(options.output)
        if options.module != "vpipe.app.commands.train":  # its ranks report an error together
            import_files(getattr(options, "imports", ()))
        with message_if_slow(LOADING_TORCH, show=options.new_output):
            module = import_module(options.module)
        getattr(module, options.function)(options)
        sys.stdout.flush()
    except VpipeError as error:
        error.show()
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `vpipe ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more
        return 1
    except Exception as error:
        from vpipe.app.launch.local import Interrupted

        if isinstance(error, Interrupted):
            print(f"interrupted ({error}): all ranks have ended", file=sys.stderr)
            return error.exit_status
        return _print_unexpected(error)
    return 0


def _print_unexpected(error: Exception) -> int:
    """Print a line on an unexpected error, and write its traceback to a file."""
    import tempfile
    import traceback

    failure = RunError(f"{type(error).__name__}: {error}", hint="")
    failure.__cause__ = error
    try:
        with tempfile.NamedTemporaryFile("w", prefix="vpipe-traceback-", suffix=".txt", delete=False) as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"the traceback is in {file.name}"
    except OSError:
        where = "no file could be written for the traceback either"
    if (named := RunError.for_want_of_descriptors(error)) is not None:
        print(f"{named}; {where}", file=sys.stderr)
    elif isinstance(error, OSError):
        print(f"error: {error}\nhint: check that the path exists, may be used and has room; {where}", file=sys.stderr)
    else:
        remedy = "fix what raised it" if failure.frames else "this is a defect of vpipe or of a package it loads"
        failure.hint = f"{remedy}; {where}"
        print(failure.with_frames(), file=sys.stderr)
    return 1


class _Version(argparse.Action):
    """Print the version, which is looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"vpipe {PluginGroup.versions_of(['vpipe']).get('vpipe', 'not installed: its folder is on the path')}")
        parser.exit()


def _add(commands: Any, name: str, run: str, *more: Any, **options: Any) -> Any:
    """Add a command whose function is in ``vpipe.app.commands``."""
    return add_command(commands, name, f"vpipe.app.commands.{run}", *more, **options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="vpipe", description="Pipeline-parallel training for PyTorch in which a schedule is data.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.commands()

    train = _add(commands, "train", "train.run_train", "train the model of a config, or resume a run")
    add_config(train, needed=False)
    train.add_argument("--resume", type=Path, metavar="RUN", help="resume from the newest checkpoint in this run "
                       "folder, or from this checkpoint; without CONFIG the run's own config is used")
    train.add_argument("--data", type=Path, metavar="PATH", help="resume with these data, which may differ from those "
                       "of the checkpoint; texts are cut into the run's own tokens")
    train.add_argument("--restarts", type=int, metavar="N", help="restart a failed run from its newest checkpoint up "
                       "to N times (default: 0)")

    families = " or ".join(("gpt, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, bert",
                            *PluginGroup("vpipe.models", "model").names))
    init = _add(commands, "init", "init.run_init", "write a commented config for your data, from a few questions; "
                "an option answers its question, and without a terminal the others take their defaults")
    init.add_argument("path", nargs="?", metavar="PATH", help="your data: a .txt file, or a folder of .txt, .jsonl or "
                      ".hdf5 files, or for translation a .tsv file of pairs (default: what is on this machine)")
    init.add_argument("--data", metavar="PATH", help="the same, as an option")
    init.add_argument("--family", metavar="NAME", help=f"{families} (default: the first that your data suits)")
    init.add_argument("--size", metavar="NAME", help="tiny, mini, or a preset of the family, such as small (default: "
                      "mini, of translation tiny)")
    init.add_argument("--stages", type=int, metavar="P", help="stages, one process or GPU each (default: 4)")
    init.add_argument("--batch-size", type=int, metavar="N", help="samples per batch (default: 32)")
    init.add_argument("--schedule", metavar="KIND", help="synchronous: 1f1b; asynchronous: pipedream, with what late "
                      "gradients need (default: synchronous)")
    length = init.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, metavar="N", help="train for N minutes (default: 10)")
    length.add_argument("--steps", type=int, metavar="N", help="train for N steps")
    init.add_argument("-o", "--output", metavar="FILE", help="write the config to this file (default: train.yaml)")
    init.add_argument("--force", action="store_true", help="overwrite the file")

    slurm = _add(commands, "slurm", "slurm.run_slurm", "write a SLURM batch script for a config, or submit it")
    add_config(slurm)
    slurm.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    slurm.add_argument("--ranks-per-node", type=int, metavar="R", help="default: the schedule's ranks / nodes")
    slurm.add_argument("--partition", metavar="NAME", help="SLURM partition (default: the cluster's)")
    slurm.add_argument("--time", metavar="TIME", help="time limit as sbatch writes it, such as 2:00:00 (default: the "
                       "partition's)")
    slurm.add_argument("--restarts", type=int, metavar="N", help="requeue the job before its time limit, and after up "
                       "to N failures (default: as the cluster is configured)")
    slurm.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the script to this file (default: "
                       "print it)")
    slurm.add_argument("--submit", action="store_true", help="submit the script with sbatch and print the job number")

    verify = _add(commands, "verify", "verify.run_verify",
                  "check that a few training steps of a config give the same numbers as plain PyTorch")
    add_config(verify)
    verify.add_argument("--steps", type=int, default=3, metavar="N", help="updates to compare (default: 3; a schedule "
                        "without a flush may run more, so that every weight version is used)")
    verify.add_argument("--device", default="cpu", metavar="DEVICE",
                        help="compute on the processors, where the numbers are equal to the last bit (cpu, default), "
                        "or on a GPU that all ranks share (cuda, or another kind that torch has)")

    profile = _add(commands, "profile", "profile.run_profile",
                   "measure the time and the memory of every layer on the ranks of a config")
    add_config(profile)
    profile.add_argument("--again", action="store_true", help="measure even if the cache holds a profile")
    profile.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the profile to this file, such "
                         "as profile.json")

    plan = _add(commands, "plan", "plan.run_plan",
                "find the fastest partition, recomputation and schedule that fit in memory, and explain the choice")
    add_config(plan)
    plan.add_argument("--memory", metavar="SIZE", help="memory per rank, such as 8GiB or 500MB (default: the config's "
                      "parallel.memory, else the device's)")
    plan.add_argument("--ranks", type=int, metavar="N", help="plan for N ranks (default: the config's)")
    plan.add_argument("--stages", type=int, metavar="N", help="keep N stages (default: as many as are fastest, with "
                      "replicas on the other ranks)")
    plan.add_argument("--samples", type=int, metavar="N", help="samples per update (default: the config's)")
    plan.add_argument("--solver", choices=("exact", "vpipe"), default="exact", help="exact (default), or the heuristic "
                      "of the VPipe paper")
    plan.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan to this file, such as "
                      "plan.json")

    configs = _add(commands, "configs", "configs.run_configs",
                   "list the configs that come with vpipe, or print or copy one")
    configs.add_argument("name", nargs="?", metavar="NAME", help="print this config, as the beginning of your own")
    configs.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="copy it here, with its JSON files")

    cache = _add(commands, "cache", "cache.run_cache", "list prepared data and measured profiles, or remove them")
    cache.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the dataset.cache_directory of a config "
                       "(default: ~/.cache/vpipe)")
    cache.add_argument("--clear", action="store_true", help="remove all but what a process is preparing")

    trace = _add(commands, "trace", "trace.run_trace",
                 "write the timeline (trace.json, for Perfetto) and the report page (report.html) of a recorded run")
    add_run(trace, "folder of a run that was trained with 'trace: true'")
    trace.add_argument("--lane", type=int, default=0, metavar="N", help="of a run with parallel.tensor: of the ranks "
                       "that split layers those with number N, from 0 (default: 0)")
    add_import(trace)

    watch = _add(commands, "watch", "watch.run_watch", "show how far a run is, while it trains or later: loss, speed, "
                 "time left, and why each rank was idle")
    add_run(watch, "folder of the run; its files are only read")

    evaluate = _add(commands, "evaluate", "evaluate.run_evaluate",
                    "compute the held-out loss of a checkpoint, in one process")
    add_run(evaluate, "folder of a run, or one of its checkpoints; for a run: the newest")
    evaluate.add_argument("--data", type=Path, metavar="PATH", help="other data, of which a part is held out")
    add_import(evaluate)

    _add_checkpoint(_add(commands, "checkpoint", "", "list, show, verify, export or import checkpoints").commands())

    schedule = _add(commands, "schedule", "schedule.run_schedule", "draw a schedule, or compare all schedules")
    schedule.add_argument("name", nargs="?", metavar="NAME|FILE", help="name of a schedule, a CSV file of one, or a "
                          "plan.json")
    schedule.add_argument("--all", action="store_true", help="compare all schedules in one table")
    schedule.add_argument("--ranks", type=int, metavar="N", help="ranks, each a process, replicas too; each holds one "
                          "stage, or as many as --chunks or the schedule says")
    schedule.add_argument("--stages", type=int, metavar="P", help="in place of --ranks: stages, on all ranks together")
    schedule.add_argument("--microbatches", type=int, metavar="M", help="microbatches per update; of a schedule "
                          "without a flush, all microbatches")
    schedule.add_argument("--chunks", type=int, metavar="V", help="stages per rank")
    _add_slices(schedule)
    schedule.add_argument("--widths", metavar="W,W,...", help="replicas at each of the P positions, such as 2,1; a "
                          "single number holds for all positions")
    schedule.add_argument("--update-every", type=int, metavar="K", help="microbatches per update and replica, of a "
                          "schedule without a flush")
    schedule.add_argument("--warmup-depth", dest="warmup", metavar="D,D,...", help="forwards of each "
                          "stage before its first backward, of a schedule without a flush, such as 5,3,1,0")
    schedule.add_argument("--memory", type=int, metavar="N", help="memory limit of a rank for the schedule auto, in "
                          "microbatches of all its stages")
    schedule.add_argument("--format", choices=("text", "csv", "torch", "svg", "json"), default="text",
                          help="output format (default: text); torch: the CSV file that torch.distributed.pipelining "
                          "runs, see docs/torch.md")
    _add_costs(schedule)
    add_import(schedule)

    check = _add(commands, "check", "schedule.run_check",
                 "prove that a schedule in a CSV file is complete, in order and free of deadlock")
    check.add_argument("file", type=Path, metavar="FILE.csv", help="the schedule")
    _add_slices(check)
    add_import(check)

    simulate = _add(commands, "simulate", "schedule.run_simulate", "simulate a schedule in a CSV file and draw it")
    simulate.add_argument("file", type=Path, metavar="FILE.csv", help="the schedule")
    _add_slices(simulate)
    _add_costs(simulate)
    add_import(simulate)

    for describe in COMMANDS.added():
        describe(commands)
    return parser


def _add_slices(command: Any) -> None:
    command.add_argument("--slices", type=int, metavar="N", help="slices of every microbatch, along its "
                         "sequence, for seq1f1b, gpipe and files: the actions are then of slices")


def _add_checkpoint(commands: Any) -> None:
    where = "folder of a run, or one of its checkpoints"

    ls = _add(commands, "ls", "checkpoint.run_ls", "list the checkpoints of a run", aliases=["list"])
    ls.add_argument("folder", type=Path, metavar="RUN", help=where)

    show = _add(commands, "show", "checkpoint.run_show", "show the sizes, layers, files and config of a checkpoint")
    show.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; for a run: the newest")

    verify = _add(commands, "verify", "checkpoint.run_verify",
                  "read every byte of checkpoints and compare it with its hash; exit status 1 if one is damaged")
    verify.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; for a run: all of them")

    export = _add(commands, "export", "checkpoint_convert.run_export", "write the whole model for other programs",
                  new_output=True)
    export.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; for a run: the newest")
    export.add_argument("--format", choices=("safetensors", "torch", "huggingface", "peft"), required=True,
                        help="a safetensors file; a state dict for torch.load; a folder for transformers; the adapters "
                        "of model.lora in a folder for peft")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="file to write, or folder for "
                        "huggingface and peft; must not exist")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--averaged", action="store_true", help="write the average that training.average kept of the "
                       "weights")
    which.add_argument("--uncorrected", action="store_true", help="leave out what training.delay_correction has added "
                       "to the weights")
    add_import(export)

    load = _add(commands, "import", "checkpoint_convert.run_import",
                "make a checkpoint at step 0 from the weights of another program", new_output=True)
    load.add_argument("source", type=Path, metavar="FOLDER", help="a model of Hugging Face, or VPipe's "
                      "checkpoint.<stage>.pth.tar files")
    load.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="folder of the new checkpoint; "
                      "must not exist")
    load.add_argument("--adapter", type=Path, metavar="FOLDER", help="adapter of that model, which peft saved, too")
    load.add_argument("--config", type=Path, help="config to train with; needed for VPipe's files, for Hugging Face "
                      "its model is compared with the folder's")
    add_overrides(load)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--costs", default="1,1,1,0", metavar="F,I,W,TRANSFER,STEP",
                        help="times of a microbatch on a rank: forward, input half and weight half of the backward, "
                             "transfer to another rank, optimizer step (default: 1,1,1,0,0)")


if __name__ == "__main__":
    sys.exit(main())
