"""Run ``vpipe data build-bert``: write shards for BERT pre-training from text."""

from __future__ import annotations

import argparse

from vpipe.app.data.text import BertTextSettings, build_bert
from vpipe.errors import UserError


def run_build_bert(options: argparse.Namespace) -> None:
    """Make the data set that the options describe, and say what is in it."""
    wanted = BertTextSettings(options.text, options.sequence_length, options.vocab_size, seed=options.seed)
    try:
        content = build_bert(wanted, options.out)
    except OSError as error:
        raise UserError(f"cannot write the folder '{options.out}': {error.strerror}",
                        hint="name a folder that can be made and written as --out") from None
    counts = ", ".join(f"{count:,} {what}" for what, count in content["counts"].items())
    print(f"{options.out}: {counts}; {content['vocab_size']:,} tokens")
