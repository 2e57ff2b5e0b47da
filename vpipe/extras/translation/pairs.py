"""The data set ``pairs``: sentences with their translations, for an encoder-decoder.

Sources are tab-separated files with a pair per line, ``source TAB target``; folders that ``save_to_disk`` of the
package ``datasets`` wrote, with a field ``translation``; and what other extras or packages read
(:class:`~vpipe.app.data.corpus.Source`).

The cache directory keeps the tokens:

    pairs-<key>/  manifest.json  tokenizer.json  train_source.bin  train_target.bin  train_lengths.npy
                  test.jsonl                     test_source.bin   test_target.bin   test_lengths.npy

One byte-level BPE serves both sides. ``test.jsonl`` has the held-out pairs as texts.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vpipe.app.data.cache import CachedFolder, cached_folder, file_state, file_states
from vpipe.app.data.corpus import PARTS, SOURCES, Corpus, Pair, Part, SplitCorpus
from vpipe.app.data.dataset import SPLITS, DatasetSettings, Split
from vpipe.app.data.huggingface import is_saved, saved_facts, saved_splits
from vpipe.app.data.line_files import line_files, read_records
from vpipe.app.data.plain_text import decoded
from vpipe.app.data.registry import register_dataset
from vpipe.app.data.tokenizers import (
    DEFAULT_VOCAB_SIZE,
    END,
    PADDING,
    PAIR_TOKENS,
    ids_in,
    load_for_pairs,
    load_tokenizer,
    model_vocab_size,
    save_tokenizer,
    token_id,
    token_ids,
    train_byte_bpe,
)
from vpipe.app.progress import progress
from vpipe.errors import UserError, nearest
from vpipe.extras.translation.length_buckets import LengthBuckets, PairDataset, TokenPairs
from vpipe.plugins import PluginGroup

if TYPE_CHECKING:
    from tokenizers import Tokenizer


SUFFIXES = (".tsv", ".tsv.gz")
_FORMAT = 4  # raised when the same facts come to mean other tokens, or another manifest
_TEXTS_AT_ONCE = 1024


def _pair(line: bytes, part: Part | None) -> Pair:
    """Return the source and the target of a line. Raises ValueError with the mistake in it."""
    try:
        columns = [column.strip() for column in decoded(line).rstrip("\r\n").split("\t")]
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 (byte {error.start})") from error
    if len(columns) != 2:
        raise ValueError("the line has no tab" if len(columns) == 1 else f"the line has {len(columns)} columns")
    for name, side in zip(("source", "target"), columns, strict=True):
        if not side:
            raise ValueError(f"the {name} is empty")
    return Pair(columns[0], part, target=columns[1])


def tab_separated(path: Path) -> Corpus:
    """Return the pairs in a file or folder. Raises :class:`UserError` without any file."""
    files, root = line_files(path, SUFFIXES, "a source, a tab and a target per line"), \
        path.parent if path.is_file() else path
    return Corpus(str(path), {"pairs": file_states(files, root)}, partial(
        read_records, files, root, _pair, "a line is a source, a tab and a target; correct or remove it"))


def saved_translations(path: Path, source: str | None, target: str | None) -> Corpus:
    """Return the pairs in a folder that ``save_to_disk`` wrote: its field ``translation`` has a text per language.

    ``source``, ``target``: languages; None = the first, and the other one.
    """
    def read() -> Iterator[Pair]:
        for name, rows in saved_splits(path).items():
            if _TRANSLATION not in rows.column_names:
                raise UserError(f"the data set in {path} has no column '{_TRANSLATION}' (its columns: "
                                f"{', '.join(rows.column_names)})", where=str(path),
                                hint=f"{_LOOK}; others can be saved as .tsv")
            for number, row in enumerate(rows.select_columns([_TRANSLATION])):
                texts = row[_TRANSLATION] or {}
                if not isinstance(texts, dict) or not all(isinstance(text, str | None) for text in texts.values()):
                    raise UserError(f"row {number} of the column '{_TRANSLATION}' is no text per language",
                                    hint=_LOOK, where=str(path))
                sides = _languages(tuple(texts), source, target, path) if texts else ("", "")
                yield Pair((texts.get(sides[0]) or "").strip(), PARTS.get(name), " to ".join(sides),
                           (texts.get(sides[1]) or "").strip())

    return Corpus(str(path), {**saved_facts(path), "languages": [source, target]}, read)


_TRANSLATION, _LOOK = "translation", 'pairs are {"translation": {"en": ..., "de": ...}}'


def _languages(known: tuple[str, ...], source: str | None, target: str | None, path: Path) -> tuple[str, str]:
    """Return source and target among the languages of a row."""
    for side, language in (("source", source), ("target", target)):
        if language is not None and language not in known:
            raise UserError(f"dataset.{side}_language is {language}, but the languages in {path} are "
                            f"{', '.join(known)}", hint=nearest(language, known))
    if len(known) > 2 and (source is None or target is None):
        raise UserError(f"{path} has the languages {', '.join(known)}",
                        hint="choose two: dataset.source_language and dataset.target_language")
    first = source or next((language for language in known if language != target), "")
    second = target or next((language for language in known if language != first), "")
    if first == second or not second:
        raise UserError(f"the pairs in {path} would be from {first} to {second or 'no other language'}",
                        hint="choose two different languages of the data")
    return first, second


class PairCache(CachedFolder):
    """A complete, checked folder of pairs."""

    def count(self, name: str) -> int:
        """Return a number from the counts of the manifest."""
        return self.manifest_count("counts", name)

    def pairs(self, split: Split) -> TokenPairs:
        """Map the tokens of a split from disk; its lengths are read."""
        name = self.manifest.get("dtype")
        try:
            lengths = np.load(self.folder / f"{split}_lengths.npy", allow_pickle=False).astype(np.int64)
        except ValueError as error:
            raise self.damaged(f"{split}_lengths.npy: {error}") from None
        rows = []
        for number, side in enumerate(("source", "target")):
            path = self.folder / f"{split}_{side}.bin"
            if name not in ("uint16", "uint32") or lengths.shape != (self.count(f"{split}_pairs"), 2) \
                    or path.stat().st_size != lengths[:, number].sum() * np.dtype(name).itemsize:
                raise self.damaged(f"{path.name} does not hold the tokens of {split}_lengths.npy")
            rows.append(np.memmap(path, np.dtype(name), "r") if path.stat().st_size else np.empty(0, np.dtype(name)))
        return TokenPairs.from_lengths(rows[0], rows[1], lengths)

    def held_out(self) -> list[tuple[str, str]]:
        """Return source and target of the held-out pairs."""
        lines = (self.folder / "test.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        found = [(source, target) for source, target in map(json.loads, lines)]
        if len(found) != self.count("test_pairs"):
            raise self.damaged(f"test.jsonl has {len(found)} lines, not {self.count('test_pairs')}")
        return found


def pair_dataset(corpus: Corpus, settings: DatasetSettings) -> PairDataset:
    """Prepare (or find prepared) the tokens of a corpus of pairs and open them: the folder may go while in use.

    A side has at most ``sequence_length`` tokens (-1 means 128), its end included; longer pairs are left out. Does not
    import torch. Raises :class:`UserError` for a corpus or sizes that cannot work, and as
    :func:`~vpipe.app.data.cache.cached_folder` does.
    """
    longest = 128 if settings.sequence_length == -1 else settings.sequence_length
    cache = prepare_pairs(corpus, settings.vocab_size, settings.tokenizer, settings.cache_directory)
    pairs, too_long, fitting = {}, 0, {}
    for split in SPLITS:
        every = cache.pairs(split)
        fitting[split] = np.flatnonzero(every.widths <= longest)
        too_long += len(every) - len(fitting[split])
        if split == "train" and settings.samples is not None:
            fitting[split] = fitting[split][:settings.samples]
        pairs[split] = every.select(fitting[split])
        if not len(pairs[split]):
            raise UserError(f"{corpus.name}: all {len(every)} pairs of the {split} split have more than {longest} "
                            "tokens on a side", hint="raise model.sequence_length")
    LengthBuckets(pairs["train"].widths, settings.batch_size, settings.max_tokens)  # which checks the sizes
    tokenizer, texts = load_tokenizer(cache.tokenizer_path), cache.held_out()
    return PairDataset(cache.vocab_size, longest, pairs, (token_id(tokenizer, PADDING), token_id(tokenizer, END)),
                       settings.max_tokens, cache.tokenizer_path, tuple(texts[row] for row in fitting["test"]),
                       _lines(cache, longest, too_long))


def _lines(cache: PairCache, longest: int, too_long: int) -> tuple[str, ...]:
    """Return what the pairs are, and what was left out."""
    manifest, left_out = cache.manifest, []
    kinds = sorted((manifest.get("languages") or {}).items(), key=lambda each: (-each[1], each[0]))
    most = ", ".join(f"{name} {count:,}" for name, count in kinds[:_SHOWN_KINDS])
    of = f" ({most}{', ...' if len(kinds) > _SHOWN_KINDS else ''})" if kinds else ""
    for count, why in ((too_long, f"with more than {longest} tokens on a side"),
                       *((cache.count(key), why) for key, why in _LEFT_OUT.items())):
        if count:
            left_out.append(f"{count:,} {why}")
    held_out = f"{cache.count('test_pairs'):,} held out"
    return (f"pairs: {cache.count('documents'):,} of {manifest.get('corpus')}{of}; {held_out}",
            *([f"left out: {', '.join(left_out)}"] if left_out else []))


_SHOWN_KINDS = 5
_LEFT_OUT = {"duplicates": "duplicates", "empty": "with an empty side", "in_both": "whose source is also held out",
             "left_out_documents": "marked valid, as others are marked test"}


def prepare_pairs(corpus: Corpus, vocab_size: int = -1, tokenizer: Path | None = None,
                  cache_directory: Path | None = None) -> PairCache:
    """Find the tokens of a corpus of pairs in the cache or make them now.

    ``vocab_size``: of the tokenizer to train on both sides of the training pairs; -1 = 8192, or that of ``tokenizer``.
    """
    facts = {"corpus": dict(corpus.facts), "vocab_size": vocab_size, "format": _FORMAT,
             "python": platform.python_version(), "tokenizers": PluginGroup.versions_of(["tokenizers"]),
             "tokenizer": file_state(tokenizer) if tokenizer is not None and tokenizer.is_file() else tokenizer}
    return PairCache(*cached_folder("pairs", facts, partial(_build, corpus, vocab_size, tokenizer), cache_directory))


class _Distinct:
    """The pairs of a corpus without those with an empty side and duplicates within a part, which are counted.

    A pair of the training that is also in the held-out part is no duplicate: it is left out for its source.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self.duplicates, self.empty = corpus, 0, 0

    def __call__(self) -> Iterator[Pair]:
        known: set[bytes] = set()
        self.duplicates = self.empty = 0
        for pair in self._corpus.read():
            assert isinstance(pair, Pair), "a corpus of pairs"
            if not pair.text or not pair.target:
                self.empty += 1
                continue
            part = pair.part or "train"
            digest = hashlib.sha256(f"{part}\t{pair.text}\t{pair.target}".encode()).digest()[:12]
            if digest in known:
                self.duplicates += 1
                continue
            known.add(digest)
            yield pair


def _build(corpus: Corpus, vocab_size: int, given: Path | None, folder: Path) -> dict[str, Any]:
    """Write the tokens of both splits, the held-out texts and the tokenizer; return the entries of the manifest."""
    distinct = _Distinct(corpus)
    divided = SplitCorpus.build(replace(corpus, read=distinct))
    counts = {**divided.counts, "duplicates": distinct.duplicates, "empty": distinct.empty}
    held_out = [pair for pair in distinct() if divided.split_of(pair) == "test"]
    sources = {pair.text for pair in held_out}
    if divided.held_out is None:  # in an order that has nothing to do with the files'
        held_out.sort(key=lambda pair: hashlib.sha256(pair.text.encode()).digest())

    def training() -> Iterator[Pair]:
        return (pair for pair in distinct() if divided.split_of(pair) == "train" and pair.text not in sources)

    tokenizer = load_for_pairs(given) if given is not None else train_byte_bpe(
        (side for pair in training() for side in (pair.text, pair.target)),
        DEFAULT_VOCAB_SIZE if vocab_size == -1 else vocab_size, total=2 * counts["documents"], special=PAIR_TOKENS)
    words = ids_in(tokenizer)
    dtype = np.dtype("uint16" if words <= 1 << 16 else "uint32")
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    tokenizer.encode_special_tokens = True  # a text that spells such a token means its letters
    for split, pairs in (("train", training()), ("test", iter(held_out))):
        counts |= _write_tokens(progress(pairs, f"tokenizing for {'training' if split == 'train' else split}",
                                         unit="pair"), tokenizer, dtype, folder, split)
    counts["in_both"] = counts["documents"] - counts["left_out_documents"] - sum(
        counts[f"{split}_pairs"] for split in SPLITS)
    if not counts["train_pairs"]:
        raise UserError(f"{corpus.name}: the sources of all pairs to train on are also held out", hint="add pairs")
    with (folder / "test.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps([pair.text, pair.target], ensure_ascii=False) + "\n" for pair in held_out)
    return {"corpus": corpus.name, "tokenizer": None if given is None else str(given),
            "vocab_size": model_vocab_size(vocab_size, words, given), "dtype": dtype.name, "counts": counts,
            "languages": divided.languages,
            "packages": PluginGroup.versions_of(["tokenizers"])}


def _write_tokens(pairs: Iterable[Pair], tokenizer: Tokenizer, dtype: np.dtype[Any], folder: Path,
                  split: str) -> Mapping[str, int]:
    """Write the tokens of the pairs of a split, and their lengths; return the counts."""
    source_path, target_path = (folder / f"{split}_{side}.bin" for side in ("source", "target"))
    rest, lengths = iter(pairs), []
    with source_path.open("wb") as sources, target_path.open("wb") as targets:
        while batch := list(islice(rest, _TEXTS_AT_ONCE)):
            sides = [token_ids(tokenizer, texts) for texts in
                     ([pair.text for pair in batch], [pair.target for pair in batch])]
            for file, side in zip((sources, targets), sides, strict=True):
                for ids in side:
                    file.write(np.array(ids, dtype).tobytes())
            lengths += [(len(source), len(target)) for source, target in zip(*sides, strict=True)]
    np.save(folder / f"{split}_lengths.npy", np.array(lengths, np.int32).reshape(-1, 2), allow_pickle=False)
    return {f"{split}_pairs": len(lengths), f"{split}_source_tokens": sum(source for source, _ in lengths),
            f"{split}_target_tokens": sum(target for _, target in lengths)}


@register_dataset("pairs", files=("*.tsv", "*.tsv.gz", *(("*.mo", "*.po") if "catalogues" in SOURCES.names else ()),
                                  "dataset_info.json"),
                  reads=("path", "samples", "tokenizer", "max_tokens", "source_language", "target_language"))
def pairs(settings: DatasetSettings) -> PairDataset:
    """Return the pairs in the file or folder ``path``; without one, those of this machine.

    Raises :class:`UserError` for pairs that cannot work.
    """
    path, source, target = settings.path, settings.source_language, settings.target_language
    if path is not None and is_saved(path):
        return pair_dataset(saved_translations(path, source, target), settings)
    if path is None or not (path.is_dir() and any(file.name.endswith(SUFFIXES) for file in path.rglob("*.tsv*"))):
        for kind in SOURCES.added():
            corpus: Corpus | None = kind().pairs(path, source, target)
            if corpus is not None:
                return pair_dataset(corpus, settings)
    if path is None:
        raise UserError("the data set 'pairs' has no path",
                        hint="name a file or a folder of *.tsv files as dataset.path")
    for side, language in (("source", source), ("target", target)):
        if language is not None:
            raise UserError(f"dataset.{side}_language is {language}, but tab-separated files do not name languages",
                            hint="leave it out: the first column is the source, the second the target")
    return pair_dataset(tab_separated(path), settings)
