"""The ``vpipe`` command: parse, call, print."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vpipe.errors import UserError, VpipeError, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed run, 2 for a user's mistake, 128 + n for signal n."""
    options = _parser().parse_args(arguments)
    from vpipe.launch.local import Interrupted

    try:
        options.run(options)
        sys.stdout.flush()
    except VpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except Interrupted as interrupted:
        print(f"interrupted ({interrupted}): all ranks have ended", file=sys.stderr)
        return 128 + interrupted.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `vpipe ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more
        return 1
    except Exception as error:
        return _defect(error)
    return 0


def _defect(error: Exception) -> int:
    """What nobody foresaw: the user gets a line, the traceback goes to a file."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="vpipe-traceback-", suffix=".txt", delete=False) as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"the traceback is in {file.name}"
    except OSError:
        where = "no file could be written for the traceback either"
    if isinstance(error, OSError):
        print(f"error: {error}\nhint: look whether the path exists, may be used and has room; {where}", file=sys.stderr)
    else:
        print(f"error: {type(error).__name__}: {error}\nhint: this is a defect of vpipe or of a package it loads; "
              f"{where}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vpipe", description="Pipeline-parallel training for PyTorch in which a schedule is data.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train as a config says")
    train.add_argument("config", type=Path, help="a YAML file, native or VPipe's flat form")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                       help="override a key of the config, such as training.learning_rate=3e-4; may be repeated")
    train.add_argument("--scheduler", help="OurGPipe's scheduler, instead of the config's")
    train.set_defaults(run=_train)

    data = commands.add_parser("data", help="make data sets").add_subparsers(required=True, metavar="COMMAND")
    build = data.add_parser("build-bert", help="write HDF5 shards for BERT pre-training")
    build.add_argument("--text", type=Path, metavar="FOLDER",
                       help="folder of .txt files, documents separated by blank lines; the English prose found on "
                            "this machine when left out")
    build.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the shards go")
    build.add_argument("--sequence-length", type=int, default=128, metavar="TOKENS")
    build.add_argument("--vocab-size", type=int, default=8192, metavar="TOKENS")
    build.add_argument("--seed", type=int, default=0)
    build.set_defaults(run=_build_bert)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse whose errors look like all others."""

    def error(self, message: str) -> NoReturn:
        self._refuse(message, f"{self.prog} --help says how")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            remedy = nearest(option, [name for name in self._option_string_actions if name.startswith("--")])
            self._refuse(f"{self.prog} knows no '{option}'",
                         remedy if option.startswith("-") else f"{self.prog} --help says how")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self._refuse(f"{self.prog} has no command '{value}'", nearest(str(value), list(action.choices)))

    def _refuse(self, what: str, hint: str) -> NoReturn:
        print(UserError(what, hint=hint), file=sys.stderr)
        sys.exit(UserError.exit_status)


def _train(options: argparse.Namespace) -> None:
    from vpipe.train.config import load_config

    config = load_config(options.config, options.settings, options.scheduler)
    # torch is slow to import: only when the config is worth it.
    from vpipe.launch.folder import make_run_folder
    from vpipe.launch.local import free_port, run_ranks
    from vpipe.launch.machine import check_machine
    from vpipe.train.job import Job

    check_machine(config)
    free_port(config.parallel.master_port)  # refuses early; preparing data may take minutes
    job = Job.of(config)
    folder = make_run_folder(config.log_directory, job.config.resolved_yaml())
    stage_of = {rank: stage for stage, ranks in enumerate(job.placement) for rank in ranks}
    print(f"run folder: {folder}\n{job.config.model.name}: {len(job.model)} layers in {len(stage_of)} stages "
          f"{list(job.config.parallel.partition)}, schedule {job.config.parallel.schedule}, one process per stage",
          flush=True)
    try:
        run_ranks(len(stage_of), folder, port=free_port(config.parallel.master_port),
                  threads=config.training.threads, describe=lambda rank: f"rank {rank} (stage {stage_of[rank]})")
    finally:
        print(f"run folder: {folder}", flush=True)


def _build_bert(options: argparse.Namespace) -> None:
    from vpipe.data.bert_corpus import BertText
    from vpipe.data.build_bert import build_bert

    wanted = BertText(options.text, options.sequence_length, options.vocab_size, seed=options.seed)
    try:
        content = build_bert(wanted, options.out)
    except OSError as error:
        raise UserError(f"cannot write the folder '{options.out}': {error.strerror}",
                        hint="name a folder that can be made and written as --out") from None
    counts = ", ".join(f"{count:,} {what}" for what, count in content["counts"].items())
    print(f"{options.out}: {counts}; {content['vocab_size']:,} tokens")
