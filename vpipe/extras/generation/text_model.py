"""Turn prompts into tokens, and the chosen tokens of a model into texts, as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vpipe import Model, accelerator
from vpipe.app.data.tokenizers import END, PADDING, end_token, ids_in, token_id, token_ids
from vpipe.errors import UserError, counted
from vpipe.extras.generation.decoding import Chosen, Decoding, Request, Text
from vpipe.extras.generation.stage_decoder import DecoderModel, StageDecoder, decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPERATURE = 0.8
"""Temperature of a continuation."""

BEAMS = 4
"""Beams that translate, as in Vaswani et al. 2017, section 6.1."""

_CUT = "\ufffd"
"""Mark of bytes that are no character yet: the next tokens complete it."""


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
