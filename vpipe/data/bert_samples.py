"""Documents into BERT's pre-training samples: pairs of passages, packed and masked.

    [CLS] passage A [SEP] passage B [SEP] [PAD] ...        segment 0 up to the first [SEP], then 1

After ``create_pretraining_data.py`` of google-research/bert, with three differences, because documents here are
short and the length of B must not betray the label: a random B is as long as the true one that it replaces;
a sentence left alone at the end of a document makes no sample (there it always got a random B), so that labels
are a fair coin; a pair too long loses the front of A and the end of B, so that a true B still follows its A.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np

from vpipe.data.bert_fields import STORAGE, Samples, check_lengths
from vpipe.data.epoch import generator
from vpipe.data.masking import mask_tokens
from vpipe.data.progress import progress
from vpipe.data.wordpiece import CLS, MASK, SEP, SPECIAL, token_id
from vpipe.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Sentence = list[int]
_SHORT_SHARE = 0.1  # of samples that aim at a random shorter length, so that all lengths are seen
_SENTENCES_AT_ONCE = 4096


@dataclass(frozen=True)
class Pair:
    """Token ids of two passages; ``is_random``: B is from another document instead of following A."""

    a: Sentence
    b: Sentence
    is_random: bool


def make_samples(documents: Sequence[Sequence[str]], tokenizer: Tokenizer, *, sequence_length: int,
                 max_predictions: int, seed: int) -> Samples:
    """Every field of :data:`~vpipe.data.bert_fields.SHAPES` as an array ``[N, *shape]``, in the order of the documents.

    The same arguments give the same arrays. Raises :class:`UserError` for impossible lengths, and when fewer than
    two documents have two sentences.
    """
    check_lengths(sequence_length, max_predictions)
    rng = generator(seed)
    encoded = encode(documents, tokenizer)
    pairs = list(sentence_pairs(encoded, sequence_length, rng))
    samples = pack(pairs, sequence_length, cls=token_id(tokenizer, CLS), sep=token_id(tokenizer, SEP))
    special = np.array([token_id(tokenizer, token) for token in SPECIAL], dtype=np.int32)
    words = np.setdiff1d(np.array(list(tokenizer.get_vocab().values()), dtype=np.int32), special)
    mask_tokens(samples, max_predictions, special=special, mask_id=token_id(tokenizer, MASK), words=words, rng=rng)
    return samples


def encode(documents: Sequence[Sequence[str]], tokenizer: Tokenizer) -> list[list[Sentence]]:
    """Token ids of every sentence; documents left with fewer than two sentences are dropped."""
    texts = list(chain.from_iterable(documents))
    starts = range(0, len(texts), _SENTENCES_AT_ONCE)
    ids = [encoding.ids for start in progress(starts, "tokenizing", unit="batch")
           for encoding in tokenizer.encode_batch(texts[start:start + _SENTENCES_AT_ONCE], add_special_tokens=False)]
    ends = list(accumulate(map(len, documents)))
    encoded = [[sentence for sentence in ids[end - len(document):end] if sentence]
               for document, end in zip(documents, ends, strict=True)]
    return [document for document in encoded if len(document) >= 2]


def sentence_pairs(documents: Sequence[Sequence[Sentence]], sequence_length: int,
                   rng: np.random.Generator) -> Iterator[Pair]:
    """Pairs of passages that fill ``sequence_length`` tokens with their three special ones, or as much as there is.

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
            yield Pair(a[len(a) - kept_a:], passages.draw(kept_b, number, rng) if is_random else b[:kept_b], is_random)
            start = middle if is_random else stop


class _Passages:
    """Random passages of documents."""

    def __init__(self, documents: Sequence[Sequence[Sentence]]) -> None:
        self._documents = documents
        self._places = [(number, start) for number, document in enumerate(documents) for start in range(len(document))]
        self._tokens_left = [left for document in documents
                             for left in reversed(list(accumulate(map(len, reversed(document)))))]

    def draw(self, length: int, not_from: int, rng: np.random.Generator) -> Sentence:
        """At most ``length`` tokens from the start of some sentence of another document; ten tries for all of them."""
        best = None
        for place in rng.integers(len(self._places), size=10):
            if self._places[place][0] != not_from and (best is None or self._tokens_left[best] < length):
                best = place if best is None or self._tokens_left[place] > self._tokens_left[best] else best
        if best is None:  # this document is nearly all there is
            number, start = (not_from + 1) % len(self._documents), 0
        else:
            number, start = self._places[best]
        return list(chain.from_iterable(self._documents[number][start:]))[:length]


def pack(pairs: Sequence[Pair], sequence_length: int, *, cls: int, sep: int) -> Samples:
    """The four fields [N, S] and [N] that describe pairs before masking."""
    shape = (len(pairs), sequence_length)
    ids, mask, segments = (np.zeros(shape, dtype=STORAGE[name]) for name in ("input_ids", "input_mask", "segment_ids"))
    for row, pair in enumerate(pairs):
        first, length = len(pair.a) + 2, len(pair.a) + len(pair.b) + 3
        ids[row, :length] = [cls, *pair.a, sep, *pair.b, sep]
        mask[row, :length] = 1
        segments[row, first:length] = 1
    labels = np.array([pair.is_random for pair in pairs], dtype=STORAGE["next_sentence_labels"])
    return {"input_ids": ids, "input_mask": mask, "segment_ids": segments, "next_sentence_labels": labels}
