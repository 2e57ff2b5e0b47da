"""The arguments of ``vpipe checkpoint``; what a command needs is loaded when it is called."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vpipe.commands.parser import add_overrides
from vpipe.slow import LOADING_TORCH, said_when_slow


def add_checkpoint(commands: Any) -> None:
    """The commands of ``vpipe checkpoint``."""
    where = "folder of a run, or one of its checkpoints"

    ls = commands.add_parser("ls", help="the checkpoints of a run")
    ls.add_argument("folder", type=Path, metavar="RUN", help=where)
    ls.set_defaults(run=_ls)

    show = commands.add_parser("show", help="what is in a checkpoint: sizes, layers, files, config")
    show.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; of a run the newest")
    show.set_defaults(run=_show)

    verify = commands.add_parser("verify", help="read every byte and compare; status 1 when one has changed")
    verify.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; of a run all")
    verify.set_defaults(run=_verify)

    export = commands.add_parser("export", help="write the whole model for other programs")
    export.add_argument("folder", type=Path, metavar="RUN|STEP", help=f"{where}; of a run the newest")
    export.add_argument("--format", choices=("safetensors", "torch", "huggingface"), required=True,
                        help="one file of tensors; a state dict for torch.load; a folder for transformers")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="a file; a folder of "
                        "huggingface. It must not exist")
    export.set_defaults(run=_export)

    take = commands.add_parser("import", help="a checkpoint at step 0, of weights alone, from those of others")
    take.add_argument("source", type=Path, metavar="FOLDER", help="one of Hugging Face's, or one with VPipe's "
                      "checkpoint.<stage>.pth.tar")
    take.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="where the checkpoint goes; it "
                      "must not exist")
    take.add_argument("--config", type=Path, help="the config that will train it; needed for VPipe's files, and "
                      "otherwise compared with what the folder says")
    add_overrides(take)
    take.set_defaults(run=_import)


def _ls(options: argparse.Namespace) -> None:
    from vpipe.commands.checkpoint import run_ls

    run_ls(options)


def _show(options: argparse.Namespace) -> None:
    from vpipe.commands.checkpoint import run_show

    run_show(options)


def _verify(options: argparse.Namespace) -> None:
    from vpipe.commands.checkpoint import run_verify

    run_verify(options)


def _export(options: argparse.Namespace) -> None:
    from vpipe.checkpoint.directory import check_free

    check_free(options.output)  # before torch is read from the disk
    with said_when_slow(LOADING_TORCH):
        from vpipe.commands.checkpoint_files import run_export

    run_export(options)


def _import(options: argparse.Namespace) -> None:
    from vpipe.checkpoint.directory import check_free

    check_free(options.output)
    with said_when_slow(LOADING_TORCH):
        from vpipe.commands.checkpoint_files import run_import

    run_import(options)
