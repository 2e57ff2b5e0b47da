"""Describe ``vpipe compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vpipe.app.command_line import add_command, add_config


def describe(commands: Any) -> None:
    compare = add_command(commands, "compare", "vpipe.extras.comparison.command.run_compare",
                          "train models, systems or schedules in turns, each in runs of its own, and compare their "
                          "speed, memory and loss in a table and a CSV")
    add_config(compare, needed=False)
    compare.add_argument("--models", metavar="NAME,...", help="configs to compare: paths of YAML files, or names such "
                         "as gpt_small: of configs/gpt_small.yaml, or one that comes with vpipe")
    compare.add_argument("--systems", metavar="NAME,...", help="systems to compare: gpipe, pipedream, vpipe; each is "
                         "planned with its own rules within the memory")
    compare.add_argument("--memory", metavar="SIZE", help="memory per rank for --systems, such as 8GiB (default: the "
                         "config's parallel.memory, else what the device has)")
    compare.add_argument("--schedules", metavar="NAME,...", help="schedules to compare, each with the partition and "
                         "recomputation of the config; default with --models: each config's own schedule")
    compare.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each, every second round in the "
                         "opposite order (default: 2)")
    compare.add_argument("--steps", type=int, metavar="N", help="training steps of each; default: as the config says")
    compare.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the CSV to this file")
