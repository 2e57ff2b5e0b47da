"""The ``vpipe`` command: parse, call, print."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vpipe.errors import UserError, VpipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed run, 2 for a user's mistake, 128 + n for signal n."""
    options = _parser().parse_args(arguments)
    from vpipe.launch.local import Interrupted

    try:
        options.run(options)
    except VpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except Interrupted as interrupted:
        print(f"interrupted ({interrupted}): all ranks have ended", file=sys.stderr)
        return 128 + interrupted.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


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

    def error(self, message: str) -> None:  # type: ignore[override]
        print(UserError(message, hint=f"{self.prog} --help says how"), file=sys.stderr)
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
    port = free_port(config.parallel.master_port)
    job = Job.of(config)
    folder = make_run_folder(config.log_directory, job.config.resolved_yaml())
    stage_of = {rank: stage for stage, ranks in enumerate(job.placement) for rank in ranks}
    print(f"run folder: {folder}\n{job.config.model.name}: {len(job.model)} layers in {len(stage_of)} stages "
          f"{list(job.config.parallel.partition)}, schedule {job.config.parallel.schedule}, one process per stage",
          flush=True)
    try:
        run_ranks(len(stage_of), folder, port=port, threads=config.training.threads,
                  describe=lambda rank: f"rank {rank} (stage {stage_of[rank]})")
    finally:
        print(f"run folder: {folder}", flush=True)


def _build_bert(options: argparse.Namespace) -> None:
    from vpipe.data.bert_corpus import BertText
    from vpipe.data.build_bert import build_bert

    content = build_bert(BertText(options.text, options.sequence_length, options.vocab_size, seed=options.seed),
                         options.out)
    counts = ", ".join(f"{count:,} {what}" for what, count in content["counts"].items())
    print(f"{options.out}: {counts}; {content['vocab_size']:,} tokens")
