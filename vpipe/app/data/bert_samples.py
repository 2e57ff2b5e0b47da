"""Make BERT's pre-training samples from documents: pairs of passages, packed and masked.

    [CLS] passage A [SEP] passage B [SEP] [PAD] ...        segment 0 up to the first [SEP], then 1

After ``create_pretraining_data.py`` of google-research/bert, with three differences, because documents here are
short and the length of B must not betray the label: a random B is as long as the true one that it replaces;
a sentence left alone at the end of a document makes no sample (there it always got a random B), so that labels
are a fair coin; a pair too long loses the front of A and the end of B, so that a true B still follows its A.

The fields have the names that NVIDIA's shards made common. S = sequence length, P = most masked tokens per sample. Ids
are 0 where there is no token; in ``masked_lm_ids`` a 0 marks an unused prediction slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vpipe.app.data.dataset import Field
from vpipe.app.data.epoch import Array, seeded_generator
from vpipe.app.data.tokenizers import CLS, MASK, SEP, SPECIAL, token_id
from vpipe.app.progress import progress
from vpipe.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Samples = dict[str, Array]  # name -> [N, *shape]

SHAPES: Mapping[str, tuple[str, ...]] = {
    "input_ids": ("S",),
    "input_mask": ("S",),              # 1 where there is a token
    "segment_ids": ("S",),             # 1 in segment B
    "masked_lm_positions": ("P",),
    "masked_lm_ids": ("P",),           # the original tokens at those positions
    "next_sentence_labels": (),        # 0: B follows A; 1: B is from elsewhere
}
STORAGE: Mapping[str, type[np.signedinteger]] = {
    "input_ids": np.int32, "input_mask": np.int8, "segment_ids": np.int8,
    "masked_lm_positions": np.int32, "masked_lm_ids": np.int32, "next_sentence_labels": np.int8,
}
MASKED_SHARE = 0.15
LONGEST = 8192
SHORTEST = 8  # [CLS] a [SEP] b [SEP] and a few words to learn from


def default_max_predictions(sequence_length: int) -> int:
    """Return P for S: 15 % rounded up (20 for 128, 77 for 512)."""
    return int(np.ceil(MASKED_SHARE * sequence_length))


def shape_of(name: str, sequence_length: int, max_predictions: int) -> tuple[int, ...]:
    """Return the shape of one sample of a field."""
    return tuple({"S": sequence_length, "P": max_predictions}[axis] for axis in SHAPES[name])


def bert_fields(sequence_length: int, max_predictions: int) -> dict[str, Field]:
    """Return the six fields by name, all int64 as tensors."""
    import torch

    return {name: Field(shape_of(name, sequence_length, max_predictions), torch.int64) for name in SHAPES}


def check_lengths(sequence_length: int, max_predictions: int) -> None:
    """Raise :class:`UserError` for lengths that no sample can have."""
    if not SHORTEST <= sequence_length <= LONGEST:
        raise UserError(f"sequence_length is {sequence_length}",
                        hint=f"BERT samples need at least {SHORTEST} tokens" if sequence_length < SHORTEST else
                        f"BERT samples have at most {LONGEST:,} tokens: all of them are padded to it, and in memory")
    if not 1 <= max_predictions <= sequence_length:
        raise UserError(f"max_predictions is {max_predictions} in sequences of {sequence_length} tokens",
                        hint=f"the usual value is 15 %: {default_max_predictions(sequence_length)}")


_ROWS_AT_ONCE = 4096  # bounds the memory of the random numbers


def mask_tokens(samples: Samples, max_predictions: int, *, special: NDArray[np.int32], mask_id: int,
                words: NDArray[np.int32], rng: np.random.Generator) -> None:
    """Hide 15 % of the tokens of each row of ``input_ids`` [N, S], in place; add the two fields of predictions [N, P].

    A row of n tokens has ``min(max_predictions, max(1, round(0.15 n)))`` hidden, none of them ``special``, in the
    order of their positions. A hidden token is replaced by ``mask_id`` in 80 % of cases and by one of ``words`` in
    10 %, and stays as it is in 10 %.
    """
    count, _ = samples["input_ids"].shape
    for name in ("masked_lm_positions", "masked_lm_ids"):
        samples[name] = np.zeros((count, max_predictions), dtype=STORAGE[name])
    for start in range(0, count, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        ids, length = samples["input_ids"][rows], samples["input_mask"][rows].sum(axis=1)
        candidate = (samples["input_mask"][rows] == 1) & ~np.isin(ids, special)
        positions, used = _choose(candidate, length, max_predictions, rng)
        originals = np.take_along_axis(ids, positions, axis=1)
        samples["masked_lm_positions"][rows] = np.where(used, positions, 0)
        samples["masked_lm_ids"][rows] = np.where(used, originals, 0)

        dice = rng.random(positions.shape)
        drawn = words[rng.integers(len(words), size=positions.shape)]
        shown = np.where(dice < 0.8, mask_id, np.where(dice < 0.9, drawn, originals))
        row, slot = np.nonzero(used)
        ids[row, positions[row, slot]] = shown[row, slot]


def _choose(candidate: NDArray[np.bool_], length: NDArray[np.int64], most: int,
            rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return positions [n, P] of random candidates, ascending in each row and else 0, and a mask of the used slots."""
    rows, width = candidate.shape
    wanted = np.clip(np.rint(MASKED_SHARE * length), 1, most)
    wanted = np.minimum(wanted, candidate.sum(axis=1)).astype(np.int64)
    lottery = np.where(candidate, rng.random((rows, width), dtype=np.float32), np.float32(2))
    positions = np.argsort(lottery, axis=1, kind="stable")[:, :most]
    used = np.arange(most) < wanted[:, None]
    positions = np.sort(np.where(used, positions, width), axis=1)
    return np.where(used, positions, 0), used


Sentence = list[int]
_SHORT_SHARE = 0.1  # of samples that aim at a random shorter length, so that all lengths are seen
_SENTENCES_AT_ONCE = 4096


class SentencePair(NamedTuple):
    """Token ids of two passages; ``is_random``: B is from another document instead of following A."""

    a: Sentence
    b: Sentence
    is_random: bool


def make_samples(documents: Sequence[Sequence[str]], tokenizer: Tokenizer, *, sequence_length: int,
                 max_predictions: int, seed: int) -> Samples:
    """Return every field of :data:`SHAPES` as an array ``[N, *shape]``, in the order of the documents.

    The same arguments give the same arrays. Raises :class:`UserError` for impossible lengths, and when fewer than
    two documents have two sentences.
    """
    check_lengths(sequence_length, max_predictions)
    rng = seeded_generator(seed)
    encoded = encode(documents, tokenizer)
    pairs = list(sentence_pairs(encoded, sequence_length, rng))
    samples = pack(pairs, sequence_length, cls=token_id(tokenizer, CLS), sep=token_id(tokenizer, SEP))
    special = np.array([token_id(tokenizer, token) for token in SPECIAL], dtype=np.int32)
    words = np.setdiff1d(np.array(list(tokenizer.get_vocab().values()), dtype=np.int32), special)
    mask_tokens(samples, max_predictions, special=special, mask_id=token_id(tokenizer, MASK), words=words, rng=rng)
    return samples


def encode(documents: Sequence[Sequence[str]], tokenizer: Tokenizer) -> list[list[Sentence]]:
    """Return the token ids of every sentence; documents left with fewer than two sentences are dropped."""
    texts = list(chain.from_iterable(documents))
    starts = range(0, len(texts), _SENTENCES_AT_ONCE)
    ids = [encoding.ids for start in progress(starts, "tokenizing", unit="batch")
           for encoding in tokenizer.encode_batch(texts[start:start + _SENTENCES_AT_ONCE], add_special_tokens=False)]
    ends = list(accumulate(map(len, documents)))
    encoded = [[sentence for sentence in ids[end - len(document):end] if sentence]
               for document, end in zip(documents, ends, strict=True)]
    return [document for document in encoded if len(document) >= 2]


def sentence_pairs(documents: Sequence[Sequence[Sentence]], sequence_length: int,
                   rng: np.random.Generator) -> Iterator[SentencePair]:
    """Yield pairs of passages that fill ``sequence_length`` tokens with their three special ones, where there is text.

    When B is taken from elsewhere, the sentences that it replaced are used again for the next pair.
    Raises :class:`UserError` for fewer than two documents.
    """
    if len(documents) < 2:
        raise UserError(f"{len(documents)} document with at least 2 sentences; a random next passage needs 2 documents",
                        hint="give more text, documents separated by blank lines")
    room = sequence_length - 3
    passages = _Passages(documents)
    for number, document in enumerate(progress(documents, "pairing sentences", unit="document")):
        start = 0
        while start < len(document) - 1:
            target = room if rng.random() >= _SHORT_SHARE else int(rng.integers(2, room + 1))
            stop, tokens = start, 0
            while stop < len(document) and (tokens < target or stop < start + 2):
                tokens += len(document[stop])
                stop += 1
            middle = start + int(rng.integers(1, stop - start))
            a = list(chain.from_iterable(document[start:middle]))
            b = list(chain.from_iterable(document[middle:stop]))
            kept_b = min(len(b), max(room - len(a), room // 2))
            kept_a = min(len(a), room - kept_b)
            is_random = bool(rng.random() < 0.5)
            second = passages.draw(kept_b, number, rng) if is_random else b[:kept_b]
            yield SentencePair(a[len(a) - kept_a:], second, is_random)
            start = middle if is_random else stop


class _Passages:
    """Random passages of documents."""

    def __init__(self, documents: Sequence[Sequence[Sentence]]) -> None:
        self._documents = documents
        self._places = [(number, start) for number, document in enumerate(documents) for start in range(len(document))]
        self._tokens_left = [left for document in documents
                             for left in reversed(list(accumulate(map(len, reversed(document)))))]

    def draw(self, length: int, not_from: int, rng: np.random.Generator) -> Sentence:
        """Return at most ``length`` tokens from the start of a random sentence of another document, in ten tries."""
        best = None
        for place in rng.integers(len(self._places), size=10):
            if self._places[place][0] != not_from and (best is None or self._tokens_left[best] < length):
                best = place if best is None or self._tokens_left[place] > self._tokens_left[best] else best
        # Without a best one this document is nearly all there is.
        number, start = self._places[best] if best is not None else ((not_from + 1) % len(self._documents), 0)
        return list(chain.from_iterable(self._documents[number][start:]))[:length]


def pack(pairs: Sequence[SentencePair], sequence_length: int, *, cls: int, sep: int) -> Samples:
    """Return the four fields [N, S] and [N] that describe pairs before masking."""
    shape = (len(pairs), sequence_length)
    ids, mask, segments = (np.zeros(shape, dtype=STORAGE[name]) for name in ("input_ids", "input_mask", "segment_ids"))
    for row, pair in enumerate(pairs):
        first, length = len(pair.a) + 2, len(pair.a) + len(pair.b) + 3
        ids[row, :length] = [cls, *pair.a, sep, *pair.b, sep]
        mask[row, :length] = 1
        segments[row, first:length] = 1
    labels = np.array([pair.is_random for pair in pairs], dtype=STORAGE["next_sentence_labels"])
    return {"input_ids": ids, "input_mask": mask, "segment_ids": segments, "next_sentence_labels": labels}
