"""Make the batches of an epoch from arrays: shuffle rows, cut batches, turn them into tensors, ahead of need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from vpipe.app.data.dataset import SPLITS, Field, HeldOutText, Split
from vpipe.errors import UserError, counted, nearest

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.generic]
Rows = NDArray[np.int64]
INPUT_IDS, LABELS, POSITIONS = "input_ids", "labels", "positions"
NO_LABEL = -100  # where there is none to learn
_COUNTED_AT_ONCE = 1 << 22
_MOST_COUNTED = 1 << 26  # tokens of the training text whose shares are compared with those of the held-out one
_PATIENCE_S = 5.0  # wait for the item in progress at the end: a disk may be out of reach
Item = TypeVar("Item")


def needed_fields(known: Mapping[str, Field], fields: Collection[str] | None) -> frozenset[str]:
    """Return the fields a rank needs, None meaning all. Raises :class:`UserError` for a name that no batch has."""
    for name in fields or ():
        if name not in known:
            raise UserError(f"a batch has no field '{name}'", hint=nearest(name, list(known)))
    return frozenset(known if fields is None else fields)


def check_split(split: str) -> None:
    """Raise :class:`UserError` unless ``split`` is ``train`` or ``test``."""
    if split not in SPLITS:
        raise UserError(f"no split is called '{split}'", hint=nearest(split, SPLITS))


def check_batch_size(split: Split, samples: int, batch_size: int, *, whole: bool = True) -> None:
    """Raise :class:`UserError` unless the split holds at least one batch, or unless ``whole`` one sample."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}", hint="a batch holds at least 1 sample")
    if samples < (batch_size if whole else 1):
        raise UserError(f"the {split} split holds {counted(samples, 'sample')}, fewer than one batch of {batch_size}",
                        hint=f"use a batch size of at most {samples}, or more data" if samples else "add data")


def epoch_rows(samples: int, batch_size: int, *, seed: int | None, whole: bool = True) -> Iterator[Rows]:
    """Yield the row numbers of each batch; shuffled by ``seed``, or in order when it is None.

    Args:
        whole: leave out the last batch if it has fewer samples.
    """
    order = np.arange(samples) if seed is None else seeded_generator(seed).permutation(samples)
    for start in range(0, samples - batch_size + 1 if whole else samples, batch_size):
        yield order[start:start + batch_size]


def seeded_generator(*seeds: int) -> np.random.Generator:
    """Return a random generator of its own for every tuple of integers, negative ones included."""
    return np.random.default_rng([2 * seed if seed >= 0 else -2 * seed - 1 for seed in seeds])  # numpy: not negative


def tensors(fields: Mapping[str, Field], batch_size: int, rows: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return a batch: fields that ``rows`` holds (``[batch_size, *shape]`` each) as data, the others on ``meta``."""
    import torch

    return {name: torch.from_numpy(rows[name]).to(field.dtype) if name in rows
            else torch.empty((batch_size, *field.shape), dtype=field.dtype, device="meta")
            for name, field in fields.items()}


class ArrayDataset:
    """A data set whose samples lie in arrays, in memory or mapped from disk: one array per field.

    ``load(split, field)`` returns an array ``[N, *shape]`` of any integer type; it is called at the start of an epoch,
    for needed fields only. ``counts`` holds the samples of each split, at most as many as the arrays have rows.
    ``describe`` returns the fields; it is called when they are first asked for, since their types are torch's.
    ``tokenizer_path``: of the ``tokenizer.json`` that made the samples; None without one.
    """

    def __init__(self, vocab_size: int, sequence_length: int, describe: Callable[[], Mapping[str, Field]],
                 counts: Mapping[Split, int], load: Callable[[Split, str], Array],
                 tokenizer_path: Path | None = None) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.tokenizer_path = tokenizer_path
        self._describe = describe
        self._counts = dict(counts)
        self._load = load

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """Return the fields of a batch, by name."""
        return self._describe()

    def samples(self, split: Split) -> int:
        """Return the number of samples in the split."""
        check_split(split)
        return self._counts[split]

    def batches(self, split: Split, batch_size: int, *, seed: int,
                fields: Collection[str] | None = None, first: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield one epoch; see :class:`~vpipe.app.data.dataset.Dataset`."""
        check_batch_size(split, self.samples(split), batch_size, whole=split == "train")
        needed = needed_fields(self.fields, fields)
        return self._epoch(split, batch_size, seed if split == "train" else None, needed, first)

    def _epoch(self, split: Split, batch_size: int, seed: int | None, needed: frozenset[str],
               first: int) -> Iterator[dict[str, Tensor]]:
        arrays = {name: self._load(split, name) for name in self.fields if name in needed}
        for rows in islice(epoch_rows(self._counts[split], batch_size, seed=seed, whole=split == "train"), first, None):
            taken = self._taken(arrays, rows)
            self._check(split, taken)
            yield tensors(self.fields, len(rows), taken)

    def _taken(self, arrays: Mapping[str, Array], rows: Rows) -> dict[str, Array]:
        """Return these rows of each field."""
        return {name: array[rows] for name, array in arrays.items()}

    def _check(self, split: Split, taken: Mapping[str, Array]) -> None:
        """Raise :class:`UserError` for impossible values; to be overridden."""


def first_samples(counts: Mapping[Split, int], samples: int | None) -> dict[Split, int]:
    """Return those counts, with at most ``samples`` for training; None = all."""
    return dict(counts) if samples is None else {**counts, "train": min(counts["train"], samples)}


def samples_in(tokens: int, sequence_length: int) -> int:
    """Return the number of samples in so many tokens. Raises :class:`UserError` for a length that no sample can have.
    """
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}", hint="a sample has at least 1 token")
    return max(0, tokens - 1) // sequence_length


class TokenDataset(ArrayDataset):
    """A language model's data set: ``input_ids`` and ``labels`` [S], int64, cut from one long row of tokens per split.

    ``labels[t]`` is the token after ``input_ids[t]``. A batch with a token out of the vocabulary raises
    :class:`UserError`. With ``end`` a sample has several texts, the first and last of which may be parts: ``positions``
    [S] count the tokens of each from 0, and its last token has no label.

    Args:
        counts: samples of each split, at most as many as its tokens have (:func:`samples_in`).
        tokens: split -> its tokens [T], of any type of integers; a map of a file is read where samples are asked for.
        held_out_bytes: of the text that the tokens of ``test`` stand for; None where they stand for none.
        lines: what a run says of it, see :class:`~vpipe.app.data.dataset.Described`.
        end: the token that ends a text, where texts are told apart; None: all tokens are one.
    """

    def __init__(self, vocab_size: int, sequence_length: int, counts: Mapping[Split, int],
                 tokens: Callable[[Split], Array], tokenizer_path: Path | None = None,
                 held_out_bytes: int | None = None, lines: Sequence[str] = (), end: int | None = None) -> None:
        samples_in(0, sequence_length)
        self.lines, self._end = lines, end
        self._tokens, self._held_out_bytes = tokens, held_out_bytes

        def load(split: Split, field: str) -> Array:
            row = tokens(split)
            if end is not None and field != INPUT_IDS:  # made of them and of the token after them
                return np.lib.stride_tricks.sliding_window_view(row, sequence_length + 1)[::sequence_length]
            first, samples = int(field == LABELS), samples_in(len(row), sequence_length)
            return row[first:first + samples * sequence_length].reshape(samples, sequence_length)

        def describe() -> dict[str, Field]:
            import torch

            names = (INPUT_IDS, LABELS) if end is None else (INPUT_IDS, POSITIONS, LABELS)
            return {name: Field((sequence_length,), torch.int64) for name in names}

        super().__init__(vocab_size, sequence_length, describe, counts, load, tokenizer_path)

    @cached_property
    def held_out_text(self) -> HeldOutText | None:
        """Count the tokens of ``test``; None where they stand for no text."""
        if not self._held_out_bytes:
            return None
        tokens, trained = self._tokens("test"), self._tokens("train")
        shares, others = self._shares(tokens, 1), self._shares(trained, max(1, len(trained) // _MOST_COUNTED))
        present = shares[shares > 0]
        return HeldOutText(len(tokens), self._held_out_bytes, float(-(present * np.log(present)).sum()),
                           float(np.minimum(shares, others).sum()))

    def _shares(self, tokens: Array, of: int) -> NDArray[np.float64]:
        """Return the share of each token of the vocabulary; counted in one of so many parts of a text."""
        counts = np.zeros(self.vocab_size, np.int64)
        for start in range(0, len(tokens), of * _COUNTED_AT_ONCE):
            counts += np.bincount(tokens[start:start + _COUNTED_AT_ONCE], minlength=self.vocab_size)
        shares: NDArray[np.float64] = counts / counts.sum()
        return shares

    def _taken(self, arrays: Mapping[str, Array], rows: Rows) -> dict[str, Array]:
        taken = super()._taken(arrays, rows)
        if self._end is not None and (read := taken.get(LABELS)) is not None:
            taken[LABELS] = np.where(read[:, :-1] == self._end, NO_LABEL, read[:, 1:].astype(np.int64))
        if (read := taken.get(POSITIONS)) is not None:
            places = np.arange(self.sequence_length)
            begins = np.where(read[:, :-2] == self._end, places[1:], 0)
            taken[POSITIONS] = places - np.maximum.accumulate(np.pad(begins, ((0, 0), (1, 0))), 1)
        return taken

    def _check(self, split: Split, taken: Mapping[str, Array]) -> None:
        largest = max((int(np.max(values)) for name, values in taken.items() if name != POSITIONS), default=0)
        if largest >= self.vocab_size:
            raise UserError(f"the {split} split has the token {largest}, but the vocabulary ends at "
                            f"{self.vocab_size - 1}: the prepared data is damaged",
                            hint="remove its folder: the next run prepares it again",
                            where=str(self.tokenizer_path.parent) if self.tokenizer_path else None)


@contextmanager
def prefetched(items: Iterable[Item], most: int) -> Iterator[Iterator[Item]]:
    """Iterate over an iterable in a thread, with up to ``most`` items made before they are needed.

    An error of the iterable is raised in its place: after the items made before it. Leaving the context ends the thread
    and drops the items that were not taken.
    """
    assert most >= 1
    ready = SimpleQueue[tuple[Item] | BaseException | None]()  # an item, what was raised in its place, or the end
    room, closed = Semaphore(most), Event()

    def make() -> None:
        source = iter(items)
        try:
            while room.acquire() and not closed.is_set():
                ready.put((next(source),))
        except StopIteration:
            ready.put(None)
        except BaseException as error:  # raised where the item would have been taken
            ready.put(error)

    def take() -> Generator[Item]:
        while (made := ready.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            room.release()
            yield made[0]

    thread, taken = Thread(target=make, name="vpipe-batches", daemon=True), take()
    thread.start()
    try:
        yield taken
    finally:
        taken.close()
        closed.set()
        room.release()
        thread.join(_PATIENCE_S)
