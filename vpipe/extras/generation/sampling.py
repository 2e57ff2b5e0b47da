"""Continue texts, and fill in masked words, with a model and its tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vpipe import Model, accelerator
from vpipe.app.data.tokenizers import CLS, END, MASK, PADDING, SEP, end_token, ids_in, token_id, token_ids
from vpipe.errors import UserError, counted
from vpipe.extras.generation.generate import (
    Chosen,
    DecoderModel,
    Decoding,
    Request,
    StageDecoder,
    Text,
    decode,
    fill_masks,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BERT = "bert"
"""The model family that fills in masked words."""

TEMPERATURE, CANDIDATES = 0.8, 5
"""Temperature of a continuation; most probable words of a mask."""

BEAMS = 4
"""Beams that translate, as in Vaswani et al. 2017, section 6.1."""

_CUT = "\ufffd"
"""Stands for bytes that are no character yet: the next tokens complete it."""


@dataclass(frozen=True)
class TextModel:
    """A model with its weights, and the tokenizer of its texts.

    Attributes:
        modules: the layers of ``model``, in eval mode.
        window: of a longer text the model reads this many tokens, the last ones.
    """

    model: Model
    modules: nn.ModuleDict
    tokenizer: Tokenizer
    window: int

    def choices(self, requests: Sequence[Request]) -> Iterator[tuple[int, Chosen]]:
        """Yield the choices for requests, one request after the other, with its number."""
        stage = StageDecoder(DecoderModel(self.model), self.modules, self.window,
                             free_bytes=accelerator.free_bytes(torch.device("cpu")))
        for number, request in enumerate(requests):
            for chosen in decode(stage, request):
                yield number, chosen

    def continued(self, ids: Sequence[int], decoding: Decoding) -> Iterator[str]:
        """Yield a continuation of a prompt as it comes, at most to the end of the text.

        Args:
            ids: of the prompt (:func:`prompt_ids`).
            decoding: see :func:`decoding_for`.
        """
        found = ChosenTokens(self.choices([Request(tuple(ids), decoding)]))
        yield from texts(self.tokenizer, ids, found.tokens(0), decoding.end)

    def translated(self, sentences: Sequence[str], tokens: int) -> Iterator[str]:
        """Yield the translations of sentences by a beam search of :data:`BEAMS` beams, of at most so many tokens each.

        Raises:
            UserError: a sentence is longer than what the model reads.
        """
        decoding = translation_decoding(self.tokenizer, min(tokens, self.window), beams=BEAMS)
        found = ChosenTokens(self.choices([translation_request(decoding, source_ids(
            self.tokenizer, sentence, self.window)) for sentence in sentences]))
        for number in range(len(sentences)):
            yield line_of(self.tokenizer, found.texts(number)[0])

    def filled(self, ids: Sequence[int], candidates: int = CANDIDATES) -> Filled:
        """Find the most probable words of the masks of a text.

        Args:
            ids: of the text (:func:`masked_ids`).
        """
        masked = [position for position, token in enumerate(ids) if token == token_id(self.tokenizer, MASK)]
        probabilities = fill_masks(self.model, self.modules, ids, masked, ids_in(self.tokenizer))
        best = probabilities.topk(min(candidates, probabilities.shape[1]))
        words = [[(str(self.tokenizer.id_to_token(token)), share) for share, token in zip(shares, tokens, strict=True)]
                 for shares, tokens in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        whole = list(ids)
        for position, tokens in zip(masked, best.indices.tolist(), strict=True):
            whole[position] = tokens[0]
        return Filled(words, self.tokenizer.decode(whole[1:-1]))


@dataclass(frozen=True)
class Filled:
    """A text with its masked words filled in.

    Attributes:
        words: of each mask the most probable words with their probabilities, the best first.
        text: with the best ones.
    """

    words: list[list[tuple[str, float]]]
    text: str

    def lines(self) -> list[str]:
        """Return a line for each mask, and the text."""
        return [*(f"{MASK} {number}: {', '.join(f'{word} {share:.1%}' for word, share in words)}"
                  for number, words in enumerate(self.words, 1)), self.text]


class ChosenTokens:
    """The tokens of several requests, taken from the choices as they come, in whatever order.

    Args:
        choices: with the numbers of their requests.

    Attributes:
        steps: tokens so far; of a beam search those of a row.
    """

    def __init__(self, choices: Iterator[tuple[int, Chosen]]) -> None:
        self._choices, self.steps = choices, 0
        self._waiting: dict[int, deque[int]] = {}
        self._texts: dict[int, list[Text]] = {}

    def tokens(self, number: int) -> Iterator[int]:
        """Yield the tokens of a request that draws, as they come."""
        while True:
            waiting = self._waiting.get(number)
            if waiting:
                yield waiting.popleft()
            elif number in self._texts:
                return
            else:
                self._take()

    def texts(self, number: int) -> list[Text]:
        """Return the finished texts of a request."""
        while number not in self._texts:
            self._take()
        return self._texts[number]

    def _take(self) -> None:
        number, chosen = next(self._choices)
        self.steps += 1
        self._waiting.setdefault(number, deque()).append(chosen.tokens[0] if chosen.tokens else -1)
        if chosen.texts is not None:
            self._texts[number] = chosen.texts


def decoding_for(tokenizer: Tokenizer, tokens: int, **choice: Any) -> Decoding:
    """Return the decoding whose texts end as those of a tokenizer do; ``choice``: fields of :class:`Decoding`."""
    end = end_token(tokenizer)
    return Decoding(tokens, ids_in(tokenizer), None if end is None else end[1],
                    **{"temperature": TEMPERATURE, **choice})


def translation_decoding(tokenizer: Tokenizer, tokens: int, **choice: Any) -> Decoding:
    """Return the decoding of translations with a tokenizer of pairs; padding, which starts them, is never chosen."""
    return Decoding(tokens, ids_in(tokenizer), token_id(tokenizer, END), token_id(tokenizer, PADDING), **choice)


def translation_request(decoding: Decoding, source: Sequence[int]) -> Request:
    """Return the request to translate a source (:func:`source_ids`)."""
    assert decoding.barred is not None, "it starts a translation"
    return Request((decoding.barred,), decoding, tuple(source))


def source_ids(tokenizer: Tokenizer, sentence: str, window: int) -> list[int]:
    """Return the tokens of a sentence to translate, with its end.

    Raises:
        UserError: they are more than what the model reads.
    """
    tokenizer.encode_special_tokens = True  # as in training
    ids = [*token_ids(tokenizer, [sentence])[0], token_id(tokenizer, END)]
    if len(ids) > window:
        raise UserError(f"the prompt has {counted(len(ids), 'token')} with its end, but the model reads {window}",
                        hint="translate its sentences one by one")
    return ids


def line_of(tokenizer: Tokenizer, text: Text) -> str:
    """Return a finished text as one line."""
    return " ".join(str(tokenizer.decode(list(text.tokens))).split("\n"))


def prompt_ids(tokenizer: Tokenizer, prompt: str, own_beginning: bool = False) -> list[int]:
    """Return the tokens of a prompt, after the token that begins a text.

    In training that is the one that ends the text before it.

    Args:
        own_beginning: whether the tokenizer, of other weights, may add its own.
    """
    tokenizer.encode_special_tokens = True  # as in training: a text that spells such a token means its letters
    end = end_token(tokenizer)
    ids = token_ids(tokenizer, [prompt])[0]
    marked: list[int] = tokenizer.encode(prompt).ids if own_beginning else ids
    if len(marked) > len(ids) and marked[len(marked) - len(ids):] == ids:
        return marked
    if end is not None:
        return [end[1], *ids]
    if not ids:
        raise UserError("the prompt is empty, and the tokenizer has no token that begins a text",
                        hint="give a --prompt")
    return ids


def masked_ids(tokenizer: Tokenizer, prompt: str, window: int) -> list[int]:
    """Return the tokens of a text with masks, and the two around it.

    Raises:
        UserError: it has no mask, or is longer than what the model reads.
    """
    encoding = tokenizer.encode(prompt, add_special_tokens=False)
    ids = [token_id(tokenizer, CLS), *encoding.ids, token_id(tokenizer, SEP)]
    if token_id(tokenizer, MASK) not in encoding.ids:
        raise UserError(f"the prompt has no {MASK}, and BERT fills in masked words alone",
                        hint=f'write {MASK} for a word, such as "The {MASK} of a list"')
    if len(ids) > window:
        raise UserError(f"the prompt has {counted(len(ids), 'token')} with the two around it, but the model reads "
                        f"{window}", hint="shorten it")
    return ids


def texts(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[int], end: int | None) -> Iterator[str]:
    """Yield the text of tokens as they come, up to the end of the text; a character that is cut waits for its rest."""
    ids, shown = list(prompt), len(tokenizer.decode(list(prompt)))
    text = ""
    for token in tokens:
        if token == end:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(_CUT):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]
