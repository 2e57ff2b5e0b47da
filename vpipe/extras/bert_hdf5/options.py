"""Describe ``vpipe data build-bert``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vpipe.app.command_line import add_command


def describe(commands: Any) -> None:
    data = add_command(commands, "data", "", "make data sets").commands()
    build = add_command(data, "build-bert", "vpipe.extras.bert_hdf5.command.run_build_bert",
                        "write HDF5 shards for BERT pre-training")
    build.add_argument("--text", type=Path, metavar="FOLDER", help="folder of .txt files, documents separated by blank "
                       "lines (default: the English text found on this machine)")
    build.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="write the shards to this folder")
    build.add_argument("--sequence-length", type=int, default=128, metavar="TOKENS", help="default: 128")
    build.add_argument("--vocab-size", type=int, default=8192, metavar="TOKENS", help="default: 8192")
    build.add_argument("--seed", type=int, default=0, help="default: 0")
