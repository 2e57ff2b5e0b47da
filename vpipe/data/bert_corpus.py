"""From text to everything that BERT pre-training reads: documents, split, tokenizer, samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.data.bert_fields import Samples, check_lengths, default_max_predictions
from vpipe.data.bert_samples import make_samples
from vpipe.data.plain_text import read_documents
from vpipe.data.prose import PACKAGES, Document, machine_prose
from vpipe.data.tokenizer_file import DEFAULT_VOCAB_SIZE, model_vocab_size
from vpipe.data.wordpiece import load_wordpiece, train_wordpiece
from vpipe.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEST_SHARE = 20  # one document in so many is held out
_FEWEST_DOCUMENTS = 4  # two a split: a random next passage comes from another document of the same split


@dataclass(frozen=True)
class BertText:
    """What to make samples from, and how; equal values give equal samples on the same machine.

    ``text``: a folder of .txt files, or None for the prose inside the installed ``packages``. ``vocab_size``: of the
    tokenizer to train; -1 = 8192, or what ``tokenizer`` (a ``tokenizer.json``) has. ``max_predictions``: None = 15 %.
    """

    text: Path | None = None
    sequence_length: int = 128
    vocab_size: int = -1
    max_predictions: int | None = None
    seed: int = 0
    tokenizer: Path | None = None
    packages: tuple[str, ...] = PACKAGES

    @property
    def predictions(self) -> int:
        """P, with the default filled in."""
        return default_max_predictions(self.sequence_length) if self.max_predictions is None else self.max_predictions


@dataclass(frozen=True)
class BertCorpus:
    """Samples of both splits, the tokenizer that made them, its size as a model should have it, and counts."""

    train: Samples
    test: Samples
    tokenizer: Tokenizer
    vocab_size: int
    counts: dict[str, int]


def build_corpus(wanted: BertText) -> BertCorpus:
    """Gather, split, tokenize, pair and mask; about 20 s for the prose of a machine, with progress lines on stderr.

    The tokenizer is trained on the training documents only. Raises :class:`UserError` for text, lengths or sizes that
    cannot work.
    """
    check_lengths(wanted.sequence_length, wanted.predictions)
    documents = machine_prose(wanted.packages) if wanted.text is None else read_documents(wanted.text)
    train, test = split_documents(documents)
    if wanted.tokenizer is not None:
        tokenizer = load_wordpiece(wanted.tokenizer)
    else:
        tokenizer = train_wordpiece(train, DEFAULT_VOCAB_SIZE if wanted.vocab_size == -1 else wanted.vocab_size)
    train_samples, test_samples = (
        make_samples(part, tokenizer, sequence_length=wanted.sequence_length, max_predictions=wanted.predictions,
                     seed=wanted.seed) for part in (train, test))
    counts = {"documents": len(documents), "test_documents": len(test), "sentences": sum(map(len, documents)),
              "words": sum(len(sentence.split()) for document in documents for sentence in document),
              "train_samples": len(train_samples["input_ids"]), "test_samples": len(test_samples["input_ids"])}
    vocab_size = model_vocab_size(wanted.vocab_size, tokenizer.get_vocab_size(), wanted.tokenizer)
    return BertCorpus(train_samples, test_samples, tokenizer, vocab_size, counts)


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Train and test: the twentieth of the documents (two at least) whose text has the smallest SHA-256 is held out.

    So the choice depends on the texts alone, not on their order. Raises :class:`UserError` for fewer than four.
    """
    if len(documents) < _FEWEST_DOCUMENTS:
        raise UserError(f"the text has {len(documents)} documents of at least 2 sentences; to train and to test, "
                        f"{_FEWEST_DOCUMENTS} are needed", hint="give more text, documents separated by blank lines")
    digests = [hashlib.sha256("\n".join(document).encode()).digest() for document in documents]
    by_digest = sorted(range(len(documents)), key=digests.__getitem__)
    held_out = set(by_digest[:max(_FEWEST_DOCUMENTS // 2, len(documents) // _TEST_SHARE)])
    return ([document for number, document in enumerate(documents) if number not in held_out],
            [documents[number] for number in sorted(held_out)])
