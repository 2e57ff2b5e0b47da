"""Read and write HDF5 shards of BERT samples: files with the six fields of NVIDIA's format as datasets of N rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.bert_samples import SHAPES, STORAGE, Samples
from vpipe.data.bert_text import BertTextSettings, build_corpus
from vpipe.data.cache import write_manifest
from vpipe.data.epoch import seeded_generator
from vpipe.errors import UserError
from vpipe.plugins import package_versions
from vpipe.progress import progress

if TYPE_CHECKING:
    import h5py

SUFFIXES = (".hdf5", ".h5")
_SMALL_BYTES, _MOST_PACKED = 64 << 20, 100  # a shard is read whole: compressed 10 times is usual, 1000 times is a bomb
_AXES = {"N": "rows", "S": "tokens per row", "P": "predictions per row"}


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
    with _opened(path) as file:
        missing = [name for name in SHAPES if name not in file]
        if missing:
            raise UserError(f"the shard {path.name} has no key '{missing[0]}'; its keys are: "
                            f"{', '.join(sorted(map(str, file))) or 'none'}",
                            hint=f"BERT shards have {', '.join(SHAPES)}", where=str(path))
        for name in SHAPES:
            _check_dataset(file, name, path)
        shapes: dict[str, tuple[int, ...]] = {name: file[name].shape for name in SHAPES}
        types = {name: file[name].dtype for name in SHAPES}
        # Also of a chunk, which may be larger than what is used of it.
        sizes_bytes = [max(prod(file[name].shape), prod(file[name].chunks or ())) * types[name].itemsize
                       for name in SHAPES]
    most = max(_SMALL_BYTES, _MOST_PACKED * path.stat().st_size)
    if sum(sizes_bytes) > most:
        raise UserError(f"the shard {path.name} has {path.stat().st_size:,} bytes, but says that it holds "
                        f"{sum(sizes_bytes):,}, more than {most:,}", hint="copy or build it again", where=str(path))
    sizes: dict[str, tuple[int, str]] = {}  # of N, S, P: the number, and the first key that has it
    for name, axes in SHAPES.items():
        if len(shapes[name]) != 1 + len(axes):
            raise UserError(f"'{name}' in the shard {path.name} has {len(shapes[name])} dimensions instead of "
                            f"{1 + len(axes)}", hint=f"its shape is {list(shapes[name])}, not {_text(axes)}",
                            where=str(path))
        if types[name].kind not in "iub":
            raise UserError(f"'{name}' in the shard {path.name} holds {types[name]}, not integers",
                            hint="token ids, positions, masks and labels are integers", where=str(path))
        for axis, size in zip(("N", *axes), shapes[name], strict=True):
            expected, first = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise UserError(f"'{name}' in the shard {path.name} has {size} {_AXES[axis]}, but '{first}' has "
                                f"{expected}", hint=f"the shapes must be {_text(SHAPES[first])} and {_text(axes)} "
                                f"with the same {axis}", where=str(path))
    return Shard(path, 0, sizes["N"][0], sizes["S"][0], sizes["P"][0])


def _check_dataset(file: h5py.File, name: str, path: Path) -> None:
    """Refuse a key that is no array in the file itself."""
    import h5py

    found = file[name]
    what = None
    if not isinstance(found, h5py.Dataset) or found.shape is None:
        what = "is no array"
    elif isinstance(file.get(name, getlink=True), h5py.ExternalLink) or found.external or found.is_virtual:
        what = "leads to another file"
    if what:
        raise UserError(f"'{name}' in the shard {path.name} {what}", where=str(path),
                        hint="a shard holds its six arrays itself: build it again")


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
        ids, positions = name in ("input_ids", "masked_lm_ids"), name == "masked_lm_positions"
        if least >= 0 and largest < (vocab_size if ids else sequence_length if positions else 2):
            continue
        wrong = least if least < 0 else largest
        if ids:
            return f"the token id {wrong}, but vocab_size is {vocab_size}"
        return f"the masked position {wrong} in a row of {sequence_length} tokens" if positions else \
            f"{wrong} in '{name}', which is 0 or 1"
    return None


def largest_id(samples: Samples) -> int:
    """Return the largest token id among the fields that hold token ids; -1 without such a field."""
    ids: list[NDArray[np.generic]] = [samples[name] for name in ("input_ids", "masked_lm_ids") if name in samples]
    return max((int(array.max()) for array in ids if array.size), default=-1)


def _text(axes: tuple[str, ...]) -> str:
    return f"[{', '.join(('N', *axes))}]"


SAMPLES_PER_SHARD = 16384


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
    """Write arrays ``[N, *shape]`` as ``<name>_00000.hdf5``, ... of at most ``samples_per_shard`` rows; return their
    paths.
    """
    starts = range(0, len(samples["input_ids"]), samples_per_shard)
    paths = [folder / f"{name}_{number:05d}.hdf5" for number in range(len(starts))]
    for path, start in zip(paths, progress(starts, f"writing {name} shards", unit="shard"), strict=True):
        write_shard(path, {field: array[start:start + samples_per_shard] for field, array in samples.items()})
    return paths
