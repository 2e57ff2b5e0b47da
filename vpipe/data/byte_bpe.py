"""A byte-level BPE tokenizer as GPT-2's, trained on texts; the same one every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.data.progress import progress
from vpipe.data.tokenizer_file import load_tokenizer
from vpipe.errors import UserError
from vpipe.slow import said_when_slow

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # GPT-2, LLaMA 3, LLaMA 2
_BYTES = 256
_FEWEST = 2  # a pair that occurs once is not worth a token


def train_byte_bpe(texts: Iterable[str], vocab_size: int, *, total: int | None = None) -> Tokenizer:
    """A tokenizer of at most ``vocab_size`` tokens that spells any text: 256 bytes, pairs of them, pairs of pairs.

    Sennrich et al. 2016 on bytes, words told apart by GPT-2's pattern (Radford et al. 2019, section 2.2). Token 0 is
    the end of a text. Small texts give fewer tokens. The order of the texts does not matter.

    Args:
        total: how many texts there are, for the line of progress.

    Raises:
        UserError: ``vocab_size`` is too small for the bytes.
    """
    if vocab_size < _BYTES + 1:
        raise UserError(f"vocab_size is {vocab_size}, but {_BYTES} bytes and the end of a text are {_BYTES + 1} tokens",
                        hint=f"use at least {_BYTES + 1}, or -1")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with ExitStack() as merging:
        def counted() -> Iterator[str]:
            yield from progress(texts, "counting words", unit="text", total=total)
            merging.enter_context(said_when_slow(f"training a tokenizer of {vocab_size} tokens"))

        tokenizer.train_from_iterator(counted(), trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], min_frequency=_FEWEST,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer


def load_with_end(path: Path) -> Tokenizer:
    """A tokenizer saved as JSON. Raises :class:`UserError` when the file is none, or knows no end of a text."""
    tokenizer = load_tokenizer(path)
    if all(tokenizer.token_to_id(end) is None for end in _KNOWN_ENDS):
        raise UserError(f"{path.name} has no {' or '.join(_KNOWN_ENDS)}",
                        hint=f"documents are kept apart by one: add the special token {END_OF_TEXT}", where=str(path))
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a text, of a tokenizer made here."""
    end = end_token(tokenizer)
    assert end is not None, "no token ends a text"
    return end[1]


def end_token(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """The token that ends a text, and its id; None where a tokenizer has none."""
    return next(((end, number) for end in _KNOWN_ENDS if (number := tokenizer.token_to_id(end)) is not None), None)
