"""A tokenizer as a ``tokenizer.json``, and the vocabulary of a model that goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.errors import UserError
from vpipe.files import read_bounded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_VOCAB_SIZE = 8192
_MOST_BYTES = 128 << 20

LARGEST_VOCAB_SIZE = 1 << 24
"""The most tokens that a model may have (:mod:`vpipe.model.limits`)."""


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer saved as JSON, which neither cuts texts nor fills them up, whatever the file says: samples are made
    from whole ones. Raises :class:`UserError` when the file is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(read_bounded(path, _MOST_BYTES, "a tokenizer"))
    except UserError:
        raise
    except BaseException as error:  # the package raises bare Exception for every mistake, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path.name} is not a tokenizer: {error}",
                        hint="write it with Tokenizer.save of the package tokenizers", where=str(path)) from error
    if ids_in(tokenizer) > LARGEST_VOCAB_SIZE:
        raise UserError(f"{path.name} has the token id {ids_in(tokenizer) - 1:,}", where=str(path),
                        hint=f"a model has {LARGEST_VOCAB_SIZE:,} tokens at most")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a ``tokenizer.json``. Raises OSError, where ``Tokenizer.save`` has a bare Exception for a full disk."""
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def ids_in(tokenizer: Tokenizer) -> int:
    """One more than the largest id; a tokenizer may have gaps below."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def model_vocab_size(asked: int, words: int, tokenizer: Path | None) -> int:
    """The size asked for; for -1 that of the tokenizer, rounded up to a multiple of 8 for the matrix units.

    Args:
        words: that the tokenizer has.
        tokenizer: the file that was given; None for one that was trained to fit.

    Raises:
        UserError: fewer were asked for than the tokenizer has.
    """
    if asked == -1:
        return -(-words // 8) * 8
    if asked < words:
        raise UserError(f"vocab_size is {asked}, but the tokenizer has {words} tokens",
                        hint="use vocab_size: -1 to take the tokenizer's", where=str(tokenizer))
    return asked
