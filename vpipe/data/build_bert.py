"""Text into a folder of HDF5 shards: what ``vpipe data build-bert`` does."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vpipe.data.bert_corpus import BertText, build_corpus
from vpipe.data.bert_fields import Samples
from vpipe.data.epoch import generator
from vpipe.data.hdf5_shard import write_shard
from vpipe.data.manifest import package_versions, write_manifest
from vpipe.data.progress import progress
from vpipe.errors import UserError

SAMPLES_PER_SHARD = 16384


def build_bert(wanted: BertText, out: Path, *, samples_per_shard: int = SAMPLES_PER_SHARD) -> dict[str, Any]:
    """Write ``training_00000.hdf5`` ..., ``test_00000.hdf5`` ..., ``tokenizer.json`` and ``manifest.json`` to ``out``.

    ``out`` appears when it is complete and not before. Returns what the manifest says besides the files: counts of
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
    order = generator(wanted.seed).permutation(corpus.counts["train_samples"])
    shuffled = {name: array[order] for name, array in corpus.train.items()}
    write_shards(growing, "training", shuffled, samples_per_shard)
    write_shards(growing, "test", corpus.test, samples_per_shard)
    facts = {"parameters": json.loads(json.dumps(asdict(wanted), default=str)),
             "packages": package_versions([*wanted.packages, "tokenizers", "h5py"]), "vocab_size": corpus.vocab_size,
             "sequence_length": wanted.sequence_length, "max_predictions": wanted.predictions, "counts": corpus.counts}
    write_manifest(growing, **facts)
    growing.replace(out)
    return facts


def write_shards(folder: Path, name: str, samples: Samples, samples_per_shard: int) -> list[Path]:
    """Write arrays ``[N, *shape]`` as ``<name>_00000.hdf5``, ... of at most ``samples_per_shard`` rows; their paths."""
    starts = range(0, len(samples["input_ids"]), samples_per_shard)
    paths = [folder / f"{name}_{number:05d}.hdf5" for number in range(len(starts))]
    for path, start in zip(paths, progress(starts, f"writing {name} shards", unit="shard"), strict=True):
        write_shard(path, {field: array[start:start + samples_per_shard] for field, array in samples.items()})
    return paths
