"""Describe ``vpipe sample``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vpipe.app.command_line import add_command, add_import, add_run


def describe(commands: Any) -> None:
    sample = add_command(commands, "sample", "vpipe.extras.generation.command.run_sample",
                         "continue or translate texts with the model of a checkpoint, or let BERT fill in masked words")
    add_run(sample, "folder of a run, or one of its checkpoints; for a run: the newest")
    prompts = sample.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; - reads it from standard "
                         "input; for BERT a text with [MASK] in it, for a translation model the source; may be given "
                         "several times")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="file with one prompt per line")
    sample.add_argument("--tokens", type=int, metavar="N", help="tokens to add at most (default: 100)")
    sample.add_argument("--temperature", type=float, metavar="T", help="how evenly tokens are chosen; 0 takes the most "
                        "probable one (default: 0.8; of translations 0, unless an option of drawing is given)")
    sample.add_argument("--top-k", type=int, metavar="K", help="choose from the K most probable tokens (default: all); "
                        "for BERT the words to show (default: 5)")
    sample.add_argument("--top-p", type=float, metavar="P", help="choose from the fewest most probable tokens whose "
                        "probabilities add up to P (default: all)")
    sample.add_argument("--seed", type=int, metavar="N", help="seed of the choices, the same for every prompt "
                        "(default: 0)")
    sample.add_argument("--step", type=int, metavar="N", help="take the checkpoint of this step (default: the newest)")
    sample.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json (default: that of the run's "
                        "data); needed for imported weights")
    add_import(sample)
