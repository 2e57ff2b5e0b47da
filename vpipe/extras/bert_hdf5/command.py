"""Run ``vpipe data build-bert``: write shards for BERT pre-training from text."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from vpipe.app.data.cache import write_manifest
from vpipe.app.data.epoch import seeded_generator
from vpipe.app.data.text import BertTextSettings, build_corpus
from vpipe.errors import UserError
from vpipe.extras.bert_hdf5.shards import write_shards

SAMPLES_PER_SHARD = 16384


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


def build_bert(wanted: BertTextSettings, out: Path, *, samples_per_shard: int = SAMPLES_PER_SHARD) -> dict[str, Any]:
    """Write ``training_00000.hdf5`` ..., ``test_00000.hdf5`` ..., ``tokenizer.json`` and ``manifest.json`` to ``out``.

    ``out`` appears when it is complete and not before. Returns the manifest without the files: counts of
    documents, sentences, words and samples under ``counts``, and ``vocab_size``. Raises :class:`UserError` when ``out``
    holds anything, and for text that cannot work.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        entries = f"holds {sum(1 for _ in out.iterdir())} entries" if out.is_dir() else "is a file"
        raise UserError(f"the output folder {out} {entries}", hint="name a new or an empty folder, or remove this one")
    if samples_per_shard < 1:
        raise UserError(f"samples_per_shard is {samples_per_shard}", hint="a shard holds at least 1 sample")
    corpus = build_corpus(wanted)
    growing = out.with_name(f"{out.name}.new")
    shutil.rmtree(growing, ignore_errors=True)  # of a process that was killed
    growing.mkdir(parents=True)
    corpus.tokenizer.save(str(growing / "tokenizer.json"))
    # Readers shuffle within a shard only; samples of one document should not all lie in one.
    order = seeded_generator(wanted.seed).permutation(corpus.counts["train_samples"])
    shuffled = {name: array[order] for name, array in corpus.samples["train"].items()}
    write_shards(growing, "training", shuffled, samples_per_shard)
    write_shards(growing, "test", corpus.samples["test"], samples_per_shard)
    facts = corpus.facts(wanted, "h5py")
    write_manifest(growing, **facts)
    growing.replace(out)
    return facts
