"""The data set ``bert_hdf5``: a folder of HDF5 shards in NVIDIA's format.

Files with ``training`` in their name are the train split, files with ``test`` the test split. Without test files the
last 5 % of the rows of the last training shard (by name; at least one row) are held out instead. A shard is read
whole, needed fields only, and shuffled in memory: reading single rows is over a hundred times slower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vpipe.data.bert_samples import Samples, bert_fields
from vpipe.data.bert_shards import SUFFIXES, Shard, largest_id, open_shard, wrong_value
from vpipe.data.cache import NAME as MANIFEST
from vpipe.data.cache import read_manifest
from vpipe.data.dataset import DatasetSettings, Field, Split
from vpipe.data.epoch import check_batch_size, check_split, needed_fields, seeded_generator, tensors
from vpipe.data.registry import register_dataset
from vpipe.data.tokenizers import LARGEST_VOCAB_SIZE, load_wordpiece
from vpipe.errors import Problem, UserError
from vpipe.files import count_of, read_bounded
from vpipe.progress import progress

if TYPE_CHECKING:
    from torch import Tensor

_MOST_WORDS_BYTES = 64 << 20
_HELD_OUT = 20  # one row in so many of the last shard, when there are no test files


class BertHdf5:
    """A data set of shards; every shard's header is checked when it is made, before any process starts.

    ``vocab_size`` -1 asks ``manifest.json``, ``tokenizer.json`` or ``vocab.txt`` beside the shards; without them all
    ids are read and the largest + 1, rounded up to a multiple of 8, is taken. ``sequence_length`` -1 takes the shards'.
    ``samples`` bounds the training samples. Raises :class:`UserError` that lists every shard at fault, and for
    lengths or sizes that do not fit the shards.
    """

    def __init__(self, folder: Path, *, sequence_length: int = -1, vocab_size: int = -1,
                 samples: int | None = None) -> None:
        train, test = find_shards(folder)
        first = train[0]
        if sequence_length not in (-1, first.sequence_length):
            raise UserError(f"sequence_length is {sequence_length}, but the samples in {first.path.name} have "
                            f"{first.sequence_length} tokens", hint=f"use sequence_length: {first.sequence_length}",
                            where=str(first.path))
        self.sequence_length = first.sequence_length
        self.max_predictions = first.max_predictions
        self.vocab_size = _vocab_size(folder, [*train, *test], vocab_size)
        self.tokenizer_path = folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
        self._shards: dict[Split, list[Shard]] = {
            "train": train if samples is None else _first_rows(train, samples), "test": test}

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Return BERT's six fields."""
        return bert_fields(self.sequence_length, self.max_predictions)

    def samples(self, split: Split) -> int:
        """Return the number of samples in the split."""
        check_split(split)
        return sum(map(len, self._shards[split]))

    def batches(self, split: Split, batch_size: int, *, seed: int,
                fields: Collection[str] | None = None, first: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield one epoch; see :class:`~vpipe.data.dataset.Dataset`.

        Train: shards in an order made from ``seed``, the rows within each too; a batch may cross from one shard to the
        next. While it runs, raises :class:`UserError` for a shard that cannot be read or an id out of the vocabulary.
        """
        check_batch_size(split, self.samples(split), batch_size)
        needed = needed_fields(self.fields, fields)
        return self._epoch(split, batch_size, seed if split == "train" else None, needed, first * batch_size)

    def _epoch(self, split: Split, batch_size: int, seed: int | None, needed: frozenset[str],
               skipped: int) -> Iterator[dict[str, Tensor]]:
        shards = self._shards[split]
        order = np.arange(len(shards)) if seed is None else seeded_generator(seed).permutation(len(shards))
        waiting = 0  # rows of earlier shards that did not fill a batch
        held: Samples = {}
        for number in order.tolist():
            shard = shards[number]
            if skipped >= len(shard):
                skipped -= len(shard)
                continue
            fresh = self._read(shard, needed)
            rows = (slice(skipped, None) if seed is None else
                    seeded_generator(seed, number).permutation(len(shard))[skipped:])
            fresh = {name: array[rows] for name, array in fresh.items()}
            held = {name: np.concatenate([held[name], array]) if waiting else array for name, array in fresh.items()}
            available = waiting + len(shard) - skipped
            skipped = 0
            for start in range(0, available - batch_size + 1, batch_size):
                yield tensors(self.fields, batch_size,
                              {name: array[start:start + batch_size] for name, array in held.items()})
            waiting = available % batch_size
            held = {name: array[available - waiting:] for name, array in held.items()}

    def _read(self, shard: Shard, needed: frozenset[str]) -> Samples:
        """Read the needed fields of a shard; without any the file is not opened."""
        if not needed:
            return {}
        read = shard.read([name for name in self.fields if name in needed])
        if wrong := wrong_value(read, self.vocab_size, self.sequence_length):
            raise UserError(f"the shard {shard.path.name} has {wrong}", where=str(shard.path),
                            hint="use vocab_size: -1 to ask the shards" if "vocab_size" in wrong else
                            "the shard is damaged, or of another format: copy or build it again")
        return read


def find_shards(folder: Path) -> tuple[list[Shard], list[Shard]]:
    """Return train and test shards of a folder, by name, all checked. Raises :class:`UserError` that lists all
    mistakes.
    """
    if not folder.exists():
        raise UserError(f"the folder {folder} does not exist",
                        hint="name the folder of the HDF5 shards as dataset.path (data_dir in a flat file)")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder", hint="name the folder that holds the shard")
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    train_files = [path for path in files if "training" in path.name]
    if not train_files:
        raise UserError(f"no file named *training*.hdf5 or *training*.h5 in {folder} ({len(files)} other HDF5 files)",
                        hint="download or build shards: vpipe data build-bert --text FOLDER --out FOLDER")
    shards, problems = _checked([*train_files, *(path for path in files
                                                 if "test" in path.name and "training" not in path.name)])
    if problems:
        raise UserError.all_of(problems)
    train, test = shards[:len(train_files)], shards[len(train_files):]
    if not test and len(train[-1]) >= 2:
        last = train[-1]
        border = last.stop - max(1, len(last) // _HELD_OUT)
        train, test = [*train[:-1], replace(last, stop=border)], [replace(last, start=border)]
    return train, test


def _checked(paths: Sequence[Path]) -> tuple[list[Shard], list[Problem]]:
    """Return the shards in those files, and all mistakes in them."""
    shards: list[Shard] = []
    problems: list[Problem] = []
    for path in progress(paths, "checking shards", unit="shard"):
        try:
            shard = open_shard(path)
        except UserError as error:
            problems.extend(error.problems)
            continue
        shards.append(shard)
        first = shards[0]
        for what, here, there in (("tokens", shard.sequence_length, first.sequence_length),
                                  ("predictions", shard.max_predictions, first.max_predictions)):
            if here != there:
                problems.append(Problem(f"the samples in {path.name} have {here} {what}, those in {first.path.name} "
                                        f"have {there}", "keep shards of one length in a folder", str(path)))
    return shards, problems


def _first_rows(shards: Sequence[Shard], most: int) -> list[Shard]:
    """Return the first ``most`` rows of all shards."""
    kept: list[Shard] = []
    for shard in shards:
        left = most - sum(map(len, kept))
        if left > 0:
            kept.append(replace(shard, stop=min(shard.stop, shard.start + left)))
    return kept


def _vocab_size(folder: Path, shards: Sequence[Shard], wanted: int) -> int:
    """Return the size that was asked for, if it is enough; for -1 that of a file beside the shards, or what the ids
    need.
    """
    size, by = _vocab_size_beside(folder)
    if wanted == -1:
        size, by = (size, by) if size else (_needed_vocab_size(shards), "the largest token id")
        if not 0 < size <= LARGEST_VOCAB_SIZE:
            raise UserError(f"{by} makes {size:,} tokens, more than {LARGEST_VOCAB_SIZE:,}", where=str(folder),
                            hint="the shards are damaged, or of another format: copy or build them again")
        return size
    if not 0 < wanted <= LARGEST_VOCAB_SIZE:
        raise UserError(f"vocab_size is {wanted}", hint=f"give 1 to {LARGEST_VOCAB_SIZE:,} tokens, or -1")
    if wanted < size:
        raise UserError(f"vocab_size is {wanted}, but the shards were made with {size} tokens",
                        hint=f"use vocab_size: -1 to take what {by} says", where=str(folder / by))
    return wanted


def _vocab_size_beside(folder: Path) -> tuple[int, str]:
    """Return the vocabulary size in a file beside the shards, and the file's name; 0 without such a file."""
    manifest = read_manifest(folder)
    if manifest is not None and manifest.get("vocab_size") is not None:
        try:
            return count_of(manifest["vocab_size"]), MANIFEST
        except ValueError as error:
            raise UserError(f"vocab_size in {MANIFEST}: {error}", hint="build the shards again", where=str(folder)) \
                from None
    if (folder / "tokenizer.json").is_file():
        return int(load_wordpiece(folder / "tokenizer.json").get_vocab_size()), "tokenizer.json"
    if (folder / "vocab.txt").is_file():
        return len(_words(folder / "vocab.txt")), "vocab.txt"
    return 0, ""


def _words(path: Path) -> list[str]:
    try:
        return read_bounded(path, _MOST_WORDS_BYTES, "a vocabulary").decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} cannot be read: {error}", hint="it holds a word per line, in UTF-8",
                        where=str(path)) from None


def _needed_vocab_size(shards: Sequence[Shard]) -> int:
    """Return the largest id in all shards + 1, rounded up to a multiple of 8."""
    largest = max(largest_id(shard.read(["input_ids", "masked_lm_ids"]))
                  for shard in progress(shards, "looking for the largest token id", unit="shard"))
    return -(-(largest + 1) // 8) * 8


@register_dataset("bert_hdf5")
def bert_hdf5(settings: DatasetSettings) -> BertHdf5:
    """Return the data set of the shards in the folder ``path``; P is theirs, whatever ``settings`` say.

    Raises :class:`UserError` without a path or with a tokenizer, and as :class:`BertHdf5` does.
    """
    if settings.path is None:
        raise UserError("the data set 'bert_hdf5' has no path", hint="name the folder of the shards as dataset.path")
    if settings.tokenizer is not None:
        raise UserError(f"dataset.tokenizer is '{settings.tokenizer}', but shards of 'bert_hdf5' hold tokens already",
                        hint="leave it out")
    return BertHdf5(settings.path, sequence_length=settings.sequence_length, vocab_size=settings.vocab_size,
                    samples=settings.samples)
