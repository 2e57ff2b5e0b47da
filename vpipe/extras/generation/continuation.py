"""Turn prompts into tokens, and the tokens that a model chooses into text, as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vpipe.app.data.tokenizers import END, PADDING, end_token, ids_in, token_id, token_ids
from vpipe.app.families.decoding import Decoding, TextDecoder
from vpipe.errors import UserError, counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CUT = "\ufffd"
"""Mark of bytes that are no character yet: the next tokens complete it."""


def continuation(decoder: TextDecoder, tokenizer: Tokenizer, prompt: Sequence[int], tokens: int, **choice: Any
                 ) -> Iterator[str]:
    """Yield what continues a prompt (:func:`prompt_ids`) as it comes, at most to the end of the text.

    Args:
        tokens: most tokens.
        choice: fields of :class:`Decoding`.
    """
    end = end_token(tokenizer)
    decoding = Decoding(tokens, ids_in(tokenizer), None if end is None else end[1], **choice)
    found = (int(token_b) for token_b in decoder.tokens(torch.tensor([prompt]), decoding))
    yield from texts(tokenizer, prompt, found, decoding.end)


def translation(decoder: TextDecoder, tokenizer: Tokenizer, source: Sequence[int], tokens: int, **choice: Any) -> str:
    """Return the translation of a source (:func:`source_ids`) as one line; padding, which starts it, is never chosen.
    """
    start = token_id(tokenizer, PADDING)
    decoding = Decoding(tokens, ids_in(tokenizer), token_id(tokenizer, END), start, **choice)
    source_bs = torch.tensor([source])
    [ids] = decoder.texts(torch.tensor([[start]]), decoding,
                          {"source_ids": source_bs, "source_mask": torch.ones_like(source_bs)})
    return " ".join(str(tokenizer.decode(ids)).split("\n"))


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
