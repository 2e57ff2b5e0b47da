"""Train, load and save tokenizers (WordPiece for BERT, byte-level BPE for language models) as ``tokenizer.json``.

Training is deterministic: equal texts give the same tokenizer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe import files
from vpipe.app.progress import message_if_slow, progress
from vpipe.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_VOCAB_SIZE = 8192
_MOST_BYTES = 128 << 20

LARGEST_VOCAB_SIZE = 1 << 24
"""The most tokens that a model may have (:data:`vpipe.app.families.LARGEST_SIZE`)."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer that neither truncates nor pads, whatever the file states. Raises :class:`UserError`.

    A file ``*.txt`` has BERT's words, one per line; texts are made lower-case unless one of these has a capital.
    """
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    try:
        content = files.read_bounded(path, _MOST_BYTES, "a tokenizer")
        if path.suffix == ".txt":
            words = content.decode().splitlines()
            content = BertWordPieceTokenizer({word: number for number, word in enumerate(words)}, lowercase=all(
                word == word.lower() for word in words if word not in SPECIAL)).to_str().encode()
        tokenizer = Tokenizer.from_buffer(content)
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
    """Return one more than the largest id; a tokenizer may have gaps below."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def model_vocab_size(asked: int, words: int, tokenizer: Path | None) -> int:
    """Return the size asked for; for -1 that of the tokenizer, rounded up to a multiple of 8 for the matrix units.

    Raises :class:`UserError` when fewer were asked for than the ``words`` of the tokenizer; ``tokenizer``: its file.
    """
    if asked == -1:
        return -(-words // 8) * 8
    if asked < words:
        raise UserError(f"vocab_size is {asked}, but the tokenizer has {words} tokens",
                        hint="use vocab_size: -1 to take the tokenizer's", where=str(tokenizer))
    return asked


PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LARGEST_ALPHABET = 1000  # rarer characters become [UNK]


def train_wordpiece(documents: Iterable[Sequence[str]], vocab_size: int) -> Tokenizer:
    """Train a lower-casing BERT tokenizer of at most ``vocab_size`` entries, the special tokens first (``[PAD]`` is 0).

    Small texts give fewer entries. Raises :class:`UserError` when the characters alone need more.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def untrained(model: models.Model) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    sentences = [sentence for document in documents for sentence in document]
    learner = untrained(models.WordPiece(unk_token=UNKNOWN))
    counts = Counter(character for sentence in sentences for character in learner.normalizer.normalize_str(sentence))
    characters = [character for character in counts if not character.isspace()]
    alphabet = sorted(sorted(characters, key=lambda character: (-counts[character], character))[:_LARGEST_ALPHABET])
    # The trainer numbers "##c" in the order of a hash map that differs in every process, and breaks ties between
    # merges by number. Given as special tokens, they have fixed numbers, and the result is always the same.
    pinned = [*SPECIAL, *(f"##{character}" for character in alphabet)]
    smallest = len(pinned) + len(alphabet)
    if vocab_size < smallest:
        raise UserError(f"vocab_size is {vocab_size}, but {len(SPECIAL)} special tokens and the {len(alphabet)} "
                        f"characters of the text need {smallest}", hint=f"use at least {smallest}")
    learner.train_from_iterator(sentences, trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=pinned, initial_alphabet=alphabet,
        limit_alphabet=_LARGEST_ALPHABET, show_progress=False))
    # A second tokenizer with the same words, in which "##c" is an ordinary one.
    tokenizer = untrained(models.WordPiece(vocab=learner.get_vocab(), unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def load_wordpiece(path: Path) -> Tokenizer:
    """Load a WordPiece tokenizer. Raises :class:`UserError` when the file is none, or lacks BERT's special tokens."""
    tokenizer = load_tokenizer(path)
    missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
    if missing:
        raise UserError(f"{path.name} has no {', '.join(missing)}", hint="BERT needs all five special tokens",
                        where=str(path))
    if tokenizer.token_to_id(PAD) != 0:
        raise UserError(f"{path.name} gives {PAD} the id {tokenizer.token_to_id(PAD)}",
                        hint=f"padding is 0 in BERT's samples: make {PAD} the first token", where=str(path))
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that :func:`load_wordpiece` or :func:`train_wordpiece` made sure of."""
    number: int | None = tokenizer.token_to_id(token)
    assert number is not None, f"the tokenizer has no {token}"
    return number


END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")  # GPT-2, LLaMA 3, LLaMA 2
_BYTES = 256
_FEWEST = 2  # a pair that occurs once is not worth a token
_LONG_WORD = re.compile(r"[^\W\d_]{256}")  # so many letters without a space or a mark


def train_byte_bpe(texts: Iterable[str], vocab_size: int, *, total: int | None = None,
                   special: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016) of at most ``vocab_size`` tokens: it spells any text.

    Words are divided by GPT-2's pattern (Radford et al. 2019, section 2.2). The first tokens are ``special``, by
    default the end of a text. Small texts give fewer tokens. The order of the texts does not matter. ``total``: number
    of texts, for the progress line. Raises UserError when ``vocab_size`` is too small for the bytes.

    A run of Chinese characters is one such word. Of a word of more than 256 letters, pairs are counted in pieces of
    256, since the time of a merge grows with the length of the words that it is in.
    """
    fewest = _BYTES + len(special)
    if vocab_size < fewest:
        raise UserError(f"vocab_size is {vocab_size}, but {_BYTES} bytes and {' and '.join(special)} are {fewest} "
                        "tokens", hint=f"use at least {fewest}, or -1")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with ExitStack() as merging:
        def counted() -> Iterator[str]:
            for text in progress(texts, "counting words", unit="text", total=total):
                yield from _pieces(text)
            merging.enter_context(message_if_slow(f"training a tokenizer of {vocab_size} tokens"))

        tokenizer.train_from_iterator(counted(), trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(special), min_frequency=_FEWEST,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer


def _pieces(text: str) -> Iterator[str]:
    """Yield a text cut after every 256 letters of a long word."""
    start = 0
    for word in _LONG_WORD.finditer(text):
        yield text[start:word.end()]
        start = word.end()
    yield text[start:]


def load_with_end(path: Path) -> Tokenizer:
    """Load a tokenizer. Raises :class:`UserError` when the file is none, or has no token for the end of a text."""
    tokenizer = load_tokenizer(path)
    if all(tokenizer.token_to_id(end) is None for end in _KNOWN_ENDS):
        raise UserError(f"{path.name} has no {' or '.join(_KNOWN_ENDS)}",
                        hint=f"documents are kept apart by one: add the special token {END_OF_TEXT}", where=str(path))
    return tokenizer


def end_token(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """Return the token that ends a text, and its id; None where a tokenizer has none."""
    return next(((end, number) for end in _KNOWN_ENDS if (number := tokenizer.token_to_id(end)) is not None), None)


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of every text, without special ones.

    Raises:
        UserError: a text has a word that the tokenizer has no token for, not even one for unknown words.
    """
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    except Exception as error:
        if type(error) is not Exception:  # of which the package makes all of its own
            raise
        raise UserError(f"the tokenizer cannot encode the text: {error}", hint="give it a token for unknown words, or "
                        "take a byte-level one, which knows every text") from None


PADDING, END = PAIR_TOKENS = ("<pad>", "</s>")
"""Special tokens of pairs, as Marian's: padding also starts a target."""


def load_for_pairs(path: Path) -> Tokenizer:
    """Load a tokenizer for pairs. Raises :class:`UserError` when the file is none, or lacks one of their tokens."""
    tokenizer = load_tokenizer(path)
    missing = [token for token in PAIR_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        raise UserError(f"{path.name} has no {' and no '.join(missing)}", where=str(path),
                        hint="padding starts a target and fills batches, the other ends a text: add both as special "
                             "tokens")
    return tokenizer
