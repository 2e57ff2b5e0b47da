"""The data set ``bert_hdf5``: a folder of HDF5 shards in NVIDIA's format; their reading, checks and writing.

A shard is a file with the six fields of :data:`~vpipe.app.data.bert_samples.SHAPES` as arrays of N rows. Files with
``training`` in their name are the train split, files with ``test`` the test split. Without test files the last 5 % of
the rows of the last training shard (by name; at least one row) are held out instead. A shard is read whole, needed
fields only, and shuffled in memory: reading single rows is over a hundred times slower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vpipe import files
from vpipe.app.data.bert_samples import SHAPES, STORAGE, Samples, bert_fields
from vpipe.app.data.cache import MANIFEST, read_manifest
from vpipe.app.data.dataset import DatasetSettings, Field, Split
from vpipe.app.data.epoch import check_batch_size, check_split, needed_fields, seeded_generator, tensors
from vpipe.app.data.registry import register_dataset
from vpipe.app.data.tokenizers import LARGEST_VOCAB_SIZE, load_wordpiece
from vpipe.app.progress import progress
from vpipe.errors import Problem, UserError

if TYPE_CHECKING:
    import h5py
    from torch import Tensor

SUFFIXES = (".hdf5", ".h5")
_SMALL_BYTES, _MOST_PACKED = 64 << 20, 100  # a shard is read whole: compressed 10 times is usual, 1000 times is a bomb
_OWN_ARRAYS = "a shard holds its six arrays itself: build it again"
_AXES = {"N": "rows", "S": "tokens per row", "P": "predictions per row"}
_MOST_WORDS_BYTES = 64 << 20
_HELD_OUT = 20  # one row in so many of the last shard, when there are no test files


@dataclass(frozen=True)
class Shard:
    """Rows ``start`` to ``stop`` of a file whose samples have S = ``sequence_length`` and P = ``max_predictions``."""

    path: Path
    start: int
    stop: int
    sequence_length: int
    max_predictions: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, fields: Collection[str]) -> Samples:
        """Read all rows of those fields: ``[len(shard), *shape]`` each. Raises :class:`UserError` if it cannot."""
        with _opened(self.path) as file:
            read = {name: np.asarray(file[name][self.start:self.stop]) for name in fields}
        return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in read.items()}


def open_shard(path: Path) -> Shard:
    """Return a shard with all rows of its file, after checking the header: keys, shapes and types.

    Raises :class:`UserError` when the file is no HDF5 or truncated, a key is missing, or sizes disagree.
    """
    import h5py

    def wrong(name: str, what: str, hint: str) -> UserError:
        return UserError(f"'{name}' in the shard {path.name} {what}", hint=hint, where=str(path))

    with _opened(path) as file:
        missing = [name for name in SHAPES if name not in file]
        if missing:
            raise UserError(f"the shard {path.name} has no key '{missing[0]}'; its keys are: "
                            f"{', '.join(sorted(map(str, file))) or 'none'}",
                            hint=f"BERT shards have {', '.join(SHAPES)}", where=str(path))
        for name in SHAPES:
            found = file[name]
            if not isinstance(found, h5py.Dataset) or found.shape is None:
                raise wrong(name, "is no array", _OWN_ARRAYS)
            if isinstance(file.get(name, getlink=True), h5py.ExternalLink) or found.external or found.is_virtual:
                raise wrong(name, "leads to another file", _OWN_ARRAYS)
        shapes: dict[str, tuple[int, ...]] = {name: file[name].shape for name in SHAPES}
        types = {name: file[name].dtype for name in SHAPES}
        # Also of a chunk, which may be larger than what is used of it.
        stated = sum(max(prod(shapes[name]), prod(file[name].chunks or ())) * types[name].itemsize for name in SHAPES)
    most = max(_SMALL_BYTES, _MOST_PACKED * path.stat().st_size)
    if stated > most:
        raise UserError(f"the shard {path.name} has {path.stat().st_size:,} bytes, but states that it holds "
                        f"{stated:,}, more than {most:,}", hint="copy or build it again", where=str(path))
    texts = {name: f"[{', '.join(('N', *axes))}]" for name, axes in SHAPES.items()}
    sizes: dict[str, tuple[int, str]] = {}  # of N, S, P: the number, and the first key that has it
    for name, axes in SHAPES.items():
        if len(shapes[name]) != 1 + len(axes):
            raise wrong(name, f"has {len(shapes[name])} dimensions instead of {1 + len(axes)}",
                        f"its shape is {list(shapes[name])}, not {texts[name]}")
        if types[name].kind not in "iub":
            raise wrong(name, f"holds {types[name]}, not integers",
                        "token ids, positions, masks and labels are integers")
        for axis, size in zip(("N", *axes), shapes[name], strict=True):
            expected, first = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise wrong(name, f"has {size} {_AXES[axis]}, but '{first}' has {expected}",
                            f"the shapes must be {texts[first]} and {texts[name]} with the same {axis}")
    return Shard(path, 0, sizes["N"][0], sizes["S"][0], sizes["P"][0])


def write_shard(path: Path, samples: Samples) -> None:
    """Write a file of the six fields, uncompressed (a compressed shard takes six times as long to read)."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, dtype in STORAGE.items():
            file.create_dataset(name, data=samples[name], dtype=dtype)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file for reading and close it again; a file that the library cannot read is a UserError."""
    import h5py

    if path.exists() and not path.is_file():
        raise UserError(f"{path.name} is no file", where=str(path),
                        hint="a shard is an HDF5 file: remove or rename this")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, RuntimeError) as error:  # the library raises each of them for damaged files
        size = f"{path.stat().st_size} bytes" if path.exists() else "missing"
        raise UserError(f"the shard {path.name} ({size}) is not an HDF5 file or is truncated: {error}",
                        hint="copy or build it again", where=str(path)) from error


def wrong_value(samples: Samples, vocab_size: int, sequence_length: int) -> str | None:
    """Return the first mistake in the values of a shard, or None: every field has a range."""
    for name, array in samples.items():
        least, largest = (int(array.min()), int(array.max())) if array.size else (0, 0)
        wrong = least if least < 0 else largest
        if name in ("input_ids", "masked_lm_ids"):
            end, text = vocab_size, f"the token id {wrong}, but vocab_size is {vocab_size}"
        elif name == "masked_lm_positions":
            end, text = sequence_length, f"the masked position {wrong} in a row of {sequence_length} tokens"
        else:
            end, text = 2, f"{wrong} in '{name}', which is 0 or 1"
        if not 0 <= wrong < end:
            return text
    return None


def write_shards(folder: Path, name: str, samples: Samples, samples_per_shard: int) -> list[Path]:
    """Write arrays ``[N, *shape]`` as ``<name>_00000.hdf5``, ...; return the paths."""
    starts = range(0, len(samples["input_ids"]), samples_per_shard)
    paths = [folder / f"{name}_{number:05d}.hdf5" for number in range(len(starts))]
    for path, start in zip(paths, progress(starts, f"writing {name} shards", unit="shard"), strict=True):
        write_shard(path, {field: array[start:start + samples_per_shard] for field, array in samples.items()})
    return paths


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
        tokenizers = (folder / name for name in ("tokenizer.json", "vocab.txt"))
        self.tokenizer_path = next(filter(Path.is_file, tokenizers), None)
        if samples is not None:
            before = [0, *accumulate(map(len, train))]
            train = [replace(shard, stop=min(shard.stop, shard.start + samples - rows))
                     for shard, rows in zip(train, before, strict=False) if rows < samples]
        self._shards: dict[Split, list[Shard]] = {"train": train, "test": test}

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
        """Yield one epoch; see :class:`~vpipe.app.data.dataset.Dataset`.

        Train: shards in an order made from ``seed``, the rows within each too; a batch may cross from one shard to the
        next. While it runs, raises :class:`UserError` for a shard that cannot be read or an id out of the vocabulary.
        """
        check_batch_size(split, self.samples(split), batch_size, whole=split == "train")
        needed = needed_fields(self.fields, fields)
        return self._epoch(split, batch_size, seed if split == "train" else None, needed, first * batch_size)

    def _epoch(self, split: Split, batch_size: int, seed: int | None, needed: frozenset[str],
               skipped: int) -> Iterator[dict[str, Tensor]]:
        shards = self._shards[split]
        order = np.arange(len(shards)) if seed is None else seeded_generator(seed).permutation(len(shards))
        waiting = 0  # rows of earlier shards that did not fill a batch
        left: Samples = {}
        for number in order.tolist():
            shard = shards[number]
            if skipped >= len(shard):
                skipped -= len(shard)
                continue
            chosen = (slice(skipped, None) if seed is None else
                      seeded_generator(seed, number).permutation(len(shard))[skipped:])
            for name, array in self._read(shard, needed).items():
                left[name] = np.concatenate([left[name], array[chosen]]) if waiting else array[chosen]
            available = waiting + len(shard) - skipped
            skipped = 0
            for start in range(0, available - batch_size + 1, batch_size):
                yield tensors(self.fields, batch_size,
                              {name: array[start:start + batch_size] for name, array in left.items()})
            waiting = available % batch_size
            left = {name: array[available - waiting:] for name, array in left.items()}
        if waiting and split == "test":
            yield tensors(self.fields, waiting, left)

    def _read(self, shard: Shard, needed: frozenset[str]) -> Samples:
        """Read the needed fields of a shard; without any the file is not opened."""
        if not needed:
            return {}
        read = shard.read([name for name in self.fields if name in needed])
        if wrong := wrong_value(read, self.vocab_size, self.sequence_length):
            raise UserError(f"the shard {shard.path.name} has {wrong}", where=str(shard.path),
                            hint="use vocab_size: -1 to take the shards' size" if "vocab_size" in wrong else
                            "the shard is damaged, or of another format: copy or build it again")
        return read


def find_shards(folder: Path) -> tuple[list[Shard], list[Shard]]:
    """Return the train and test shards of a folder, by name. Raises one :class:`UserError` with all mistakes."""
    if not folder.exists():
        raise UserError(f"the folder {folder} does not exist",
                        hint="name the folder of the HDF5 shards as dataset.path (data_dir in a flat file), or for "
                        "a run that has begun as --data")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder", hint="name the folder that holds the shard")
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    train_files = [path for path in files if "training" in path.name]
    if not train_files:
        raise UserError(f"no file named *training*.hdf5 or *training*.h5 in {folder} ({len(files)} other HDF5 files)",
                        hint="download or build shards: vpipe data build-bert --text FOLDER --out FOLDER")
    test_files = [path for path in files if "test" in path.name and "training" not in path.name]
    shards = _open_all([*train_files, *test_files])
    train, test = shards[:len(train_files)], shards[len(train_files):]
    if not test and len(train[-1]) >= 2:
        last = train[-1]
        border = last.stop - max(1, len(last) // _HELD_OUT)
        train, test = [*train[:-1], replace(last, stop=border)], [replace(last, start=border)]
    return train, test


def _open_all(paths: Sequence[Path]) -> list[Shard]:
    """Open those files. Raises one :class:`UserError` with all mistakes in them."""
    shards: list[Shard] = []
    problems: list[Problem] = []
    for path in progress(paths, "checking shards", unit="shard"):
        try:
            shards.append(shard := open_shard(path))
        except UserError as error:
            problems.extend(error.problems)
            continue
        first = shards[0]
        for what, here, there in (("tokens", shard.sequence_length, first.sequence_length),
                                  ("predictions", shard.max_predictions, first.max_predictions)):
            if here != there:
                problems.append(Problem(f"the samples in {path.name} have {here} {what}, those in {first.path.name} "
                                        f"have {there}", "keep shards of one length in a folder", str(path)))
    if problems:
        raise UserError.all_of(problems)
    return shards


def _vocab_size(folder: Path, shards: Sequence[Shard], wanted: int) -> int:
    """Return the size that was asked for, if it is enough; for -1 that of a file beside the shards, or of the ids."""
    size, by = _vocab_size_beside(folder)
    if wanted == -1:
        if not size:
            largest = max((int(ids.max()) for shard in progress(shards, "finding the largest token id", unit="shard")
                           for ids in shard.read(["input_ids", "masked_lm_ids"]).values() if ids.size), default=-1)
            size, by = -(-(largest + 1) // 8) * 8, "the largest token id"
        if not 0 < size <= LARGEST_VOCAB_SIZE:
            raise UserError(f"{by} makes {size:,} tokens, more than {LARGEST_VOCAB_SIZE:,}", where=str(folder),
                            hint="the shards are damaged, or of another format: copy or build them again")
        return size
    if not 0 < wanted <= LARGEST_VOCAB_SIZE:
        raise UserError(f"vocab_size is {wanted}", hint=f"give 1 to {LARGEST_VOCAB_SIZE:,} tokens, or -1")
    if wanted < size:
        raise UserError(f"vocab_size is {wanted}, but the shards were made with {size} tokens",
                        hint=f"use vocab_size: -1 to take that of {by}", where=str(folder / by))
    return wanted


def _vocab_size_beside(folder: Path) -> tuple[int, str]:
    """Return the vocabulary size in a file beside the shards, and the file's name; 0 without such a file."""
    manifest = read_manifest(folder)
    if manifest is not None and manifest.get("vocab_size") is not None:
        try:
            return files.count_of(manifest["vocab_size"]), MANIFEST
        except ValueError as error:
            raise UserError(f"vocab_size in {MANIFEST}: {error}", hint="build the shards again", where=str(folder)) \
                from None
    if (folder / "tokenizer.json").is_file():
        return int(load_wordpiece(folder / "tokenizer.json").get_vocab_size()), "tokenizer.json"
    if (folder / "vocab.txt").is_file():
        try:
            words = files.read_bounded(folder / "vocab.txt", _MOST_WORDS_BYTES, "a vocabulary").decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"vocab.txt cannot be read: {error}", hint="it holds a word per line, in UTF-8",
                            where=str(folder / "vocab.txt")) from None
        return len(words.splitlines()), "vocab.txt"
    return 0, ""


@register_dataset("bert_hdf5", files=("*.hdf5",))
def bert_hdf5(settings: DatasetSettings) -> BertHdf5:
    """Return the data set of the shards in the folder ``path``; P is theirs. Raises as :class:`BertHdf5` does."""
    if settings.path is None:
        raise UserError("the data set 'bert_hdf5' has no path", hint="name the folder of the shards as dataset.path")
    return BertHdf5(settings.path, sequence_length=settings.sequence_length, vocab_size=settings.vocab_size,
                    samples=settings.samples)
