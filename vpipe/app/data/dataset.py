"""Define the interface of data sets, and the settings that one is made from.

No module of this room imports torch before the first tensor is asked for, so that a launcher can prepare
data without paying for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True)
class Field:
    """One field of a batch: ``shape`` of one sample (without the batch dimension) and ``dtype`` of the tensor.

    A length of -1 is that of the longest sample of a batch, and differs between batches.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class Dataset(Protocol):
    """A finite, repeatable source of batches, split into ``train`` and ``test``."""

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest token id that may occur."""

    @property
    def sequence_length(self) -> int:
        """Return the tokens per sample, S."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """Return the fields of a batch, by name."""

    def samples(self, split: Split) -> int:
        """Return the number of samples in the split."""

    def batches(self, split: Split, batch_size: int, *, seed: int,
                fields: Collection[str] | None = None, first: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield one epoch, from the batch ``first`` on.

        Every tensor is ``[batch_size, *Field.shape]`` (with :class:`VaryingBatches` any number of samples that
        ``batch_size`` divides). ``train`` is shuffled by ``seed`` alone, in the same order in
        every process, and an incomplete last batch is dropped; ``test`` keeps its order, and its last batch may have
        fewer samples. Fields outside ``fields`` (None = all are needed) are tensors on the ``meta`` device and are not
        read. Raises :class:`UserError` at once, not at the first ``next``, when a batch is larger than the ``train``
        split, there is no sample, or a field is unknown.
        """


@dataclass(frozen=True)
class HeldOutText:
    """What the losses on a held-out text compare with.

    Attributes:
        tokens: of the text, a token at the end of each document included.
        bytes: of the text in UTF-8.
        unigram_entropy: of the text, in nats per token: the lowest loss of a model that sees no context.
        alike: share of its tokens that the training text has as often, from 0 to 1; English prose of 2,000 tokens has
            0.6 in common with much of the same.
    """

    tokens: int
    bytes: int
    unigram_entropy: float
    alike: float = 1.0

    def bits_per_byte(self, loss: float) -> float:
        """Return what a byte of the text costs at a loss in nats per token; it does not depend on the tokenizer."""
        return loss / log(2) * self.tokens / self.bytes


@runtime_checkable
class Tokenized(Protocol):
    """A data set that may have the tokenizer of its samples."""

    @property
    def tokenizer_path(self) -> Path | None:
        """Return the path of a ``tokenizer.json``; None when there is none."""


@runtime_checkable
class VaryingBatches(Protocol):
    """A data set whose batches for training differ in length, and maybe in their number of samples.

    Every epoch has equally many batches, and the same sizes in another order.
    """

    def batch_tokens(self, batch_size: int, *, seed: int) -> Sequence[NDArray[np.int64]]:
        """Return, for every batch of the epoch of this ``seed``, the tokens of each sample that the loss counts."""

    def largest_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        """Return all fields of the batch with the longest samples, whose memory is planned for."""


@runtime_checkable
class Padded(Protocol):
    """A data set whose batches for training have padding."""

    def padding_share(self, batch_size: int) -> float:
        """Return the share of padding in the tokens of an epoch of training."""


@runtime_checkable
class Comparable(Protocol):
    """A data set of texts, with whose held-out one the losses of a model that learns next tokens are compared."""

    @property
    def held_out_text(self) -> HeldOutText | None:
        """Return what they compare with; None where the samples stand for no text."""


@runtime_checkable
class Described(Protocol):
    """A data set that says at the beginning of a run what it is made of."""

    @property
    def lines(self) -> Sequence[str]:
        """Return the lines to print."""


@dataclass(frozen=True)
class DatasetSettings:
    """The data of a config file; every registered factory takes one.

    ``path``: file or folder of the data, or None. ``sequence_length``: tokens per sample; -1 = the data set's.
    ``vocab_size``: -1 = the data set's; a run's ranks pass the number that the launcher got.
    ``samples``: at most so many training samples (synthetic: exactly so many); None = all.
    ``seed``: of whatever the data set makes up (masks, pairs); shuffling has the seed of the epoch.
    ``cache_directory``: for prepared data; None = ``.cache/vpipe`` in the user's home.
    ``max_predictions``: most masked tokens per sample, P; None = 15 % of the sequence, rounded up.
    ``tokenizer``: a ``tokenizer.json`` to use; None = train one on the data.
    ``fields``: of a batch, that the model reads. A data set that can be made for several kinds of model chooses by
    them: with ``labels`` among them the samples are those of a language model (:mod:`vpipe.app.data.corpus`),
    otherwise BERT's. ``batch_size``: samples of a batch; a data set that is made up has enough for some batches.
    ``max_tokens``: of a batch, of a data set with :class:`VaryingBatches`; None = batches of ``batch_size`` samples.
    ``language``: of the text of this machine, such as ``zh_CN``; None = English.
    ``source_language``, ``target_language``: of pairs, where the data have several languages; None = the data set's.
    """

    path: Path | None = None
    sequence_length: int = 128
    vocab_size: int = -1
    samples: int | None = None
    seed: int = 0
    cache_directory: Path | None = None
    max_predictions: int | None = None
    tokenizer: Path | None = None
    fields: tuple[str, ...] = ()
    batch_size: int = 1
    max_tokens: int | None = None
    language: str | None = None
    source_language: str | None = None
    target_language: str | None = None
