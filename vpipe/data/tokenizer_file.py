"""A tokenizer as a ``tokenizer.json``, and the vocabulary of a model that goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_VOCAB_SIZE = 8192


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer saved as JSON, which neither cuts texts nor fills them up, whatever the file says: samples are made
    from whole ones. Raises :class:`UserError` when the file is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for every mistake
        raise UserError(f"{path.name} is not a tokenizer: {error}",
                        hint="write it with Tokenizer.save of the package tokenizers", where=str(path)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a ``tokenizer.json``. Raises OSError, where ``Tokenizer.save`` has a bare Exception for a full disk."""
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def ids_in(tokenizer: Tokenizer) -> int:
    """One more than the largest id; a tokenizer may have gaps below."""
    return 1 + max(tokenizer.get_vocab().values())


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
