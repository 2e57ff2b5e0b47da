"""Samples made once from text and kept: a folder of memory-mapped arrays in the cache directory.

    <cache directory>/bert-<key>/manifest.json  tokenizer.json  train_input_ids.npy  ...  test_next_sentence_labels.npy

The key is a hash of the parameters, the Python version and the state of the text, so other text is another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.bert_corpus import BertText, build_corpus
from vpipe.data.dataset import Split
from vpipe.data.manifest import damage, package_versions, read_manifest, write_manifest
from vpipe.data.plain_text import text_files
from vpipe.errors import UserError

_FORMAT = 1  # raised when the same parameters come to mean other samples


@dataclass(frozen=True)
class BertCache:
    """A whole, checked folder of samples."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def samples(self, split: Split) -> int:
        """How many samples the split holds."""
        return int(self.manifest["counts"][f"{split}_samples"])

    def array(self, split: Split, field: str) -> NDArray[np.generic]:
        """One field of one split ``[N, *shape]``, mapped from disk: only the rows that are indexed are read."""
        array: NDArray[np.generic] = np.load(self.folder / f"{split}_{field}.npy", mmap_mode="r", allow_pickle=False)
        return array


def prepare_text(wanted: BertText, cache_directory: Path | None = None) -> BertCache:
    """The samples that ``wanted`` describes, from the cache or built now (about 20 s for a machine's prose).

    Any number of processes may ask at once: one builds, the others wait. A folder that does not match its manifest
    is built again, and a line on stderr says so. Does not import torch. Raises :class:`UserError` for text that cannot
    work and for a cache directory that cannot be written.
    """
    directory = Path.home() / ".cache" / "vpipe" if cache_directory is None else cache_directory
    key = _key(wanted)
    folder = directory / f"bert-{key}"
    found, _ = _open(folder)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f"bert-{key}.lock"):
            found, trouble = _open(folder)  # another process may have built it while this one waited
            if found is None:
                if trouble:
                    print(f"vpipe: prepared data is built again: {trouble} ({folder})", file=sys.stderr)
                _build(wanted, folder)
                found, trouble = _open(folder)
                assert found is not None, f"the cache that was just built is damaged: {trouble}"
    except OSError as error:
        raise UserError(f"preparing data in {directory} failed: {error}",
                        hint="mend that, or name a folder that can be written as dataset.cache_directory") from error
    return found


def _open(folder: Path) -> tuple[BertCache | None, str | None]:
    """The cache in ``folder`` if it is whole; otherwise what is wrong with it, None meaning that it is not there."""
    if not folder.exists():
        return None, None
    manifest = read_manifest(folder)
    trouble = "manifest.json cannot be read" if manifest is None else damage(folder, manifest)
    return (None, trouble) if manifest is None or trouble else (BertCache(folder, manifest), None)


def _build(wanted: BertText, folder: Path) -> None:
    """Build beside ``folder`` and put the result in its place in one step. The caller holds the lock."""
    growing, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    for leftover in (growing, old):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    corpus = build_corpus(wanted)
    growing.mkdir()
    corpus.tokenizer.save(str(growing / "tokenizer.json"))
    for split, samples in (("train", corpus.train), ("test", corpus.test)):
        for name, array in samples.items():
            np.save(growing / f"{split}_{name}.npy", array, allow_pickle=False)
    write_manifest(growing, parameters=json.loads(json.dumps(asdict(wanted), default=str)),
                   packages=package_versions([*wanted.packages, "tokenizers"]),
                   vocab_size=corpus.vocab_size, sequence_length=wanted.sequence_length,
                   max_predictions=wanted.predictions, counts=corpus.counts)
    if folder.exists():
        folder.rename(old)  # processes that have its arrays mapped keep them
    growing.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _key(wanted: BertText) -> str:
    """A hash of all that decides the samples. Files are known by name, size and time of change, not by content."""
    facts: dict[str, Any] = {**asdict(wanted), "format": _FORMAT, "python": platform.python_version(),
                             "max_predictions": wanted.predictions, "tokenizers": package_versions(["tokenizers"])}
    if wanted.text is None:
        facts["versions"] = package_versions(wanted.packages)
    else:
        facts["text"] = [(str(path.relative_to(wanted.text)), *_state(path)) for path in text_files(wanted.text)]
    if wanted.tokenizer is not None and wanted.tokenizer.is_file():
        facts["tokenizer"] = _state(wanted.tokenizer)
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the system gives it back if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
