"""A WordPiece tokenizer trained on documents, the same one every time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.data.tokenizer_file import load_tokenizer
from vpipe.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LARGEST_ALPHABET = 1000  # rarer characters become [UNK]


def train_wordpiece(documents: Iterable[Sequence[str]], vocab_size: int) -> Tokenizer:
    """A lower-casing BERT tokenizer with at most ``vocab_size`` entries, the special tokens first (``[PAD]`` is 0).

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
    counts: dict[str, int] = {}
    for sentence in sentences:
        for character in learner.normalizer.normalize_str(sentence):
            counts[character] = counts.get(character, 0) + 1
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
    """A tokenizer saved as JSON. Raises :class:`UserError` when the file is none, or lacks BERT's special tokens."""
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
    """The id of a token that :func:`load_wordpiece` or :func:`train_wordpiece` made sure of."""
    number: int | None = tokenizer.token_to_id(token)
    assert number is not None, f"the tokenizer has no {token}"
    return number
