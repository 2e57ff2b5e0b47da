"""Fill in the masked words of a text with BERT.

Shapes, as names end: b batch (samples), p masked positions, v vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vpipe import Model
from vpipe.app.data.tokenizers import CLS, MASK, SEP, ids_in, token_id
from vpipe.app.families.bert import BertHead
from vpipe.app.families.decoding import finite_scores
from vpipe.errors import UserError, counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BERT = "bert"
"""The model family that fills in masked words."""

CANDIDATES = 5
"""Most probable words of a mask that are shown."""


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


def fill_text(model: Model, modules: nn.ModuleDict, tokenizer: Tokenizer, ids: Sequence[int],
              candidates: int = CANDIDATES) -> list[str]:
    """Return a line for each mask of a text, its most probable words with their probabilities, and the filled text.

    Args:
        modules: the layers of ``model``, in eval mode.
        ids: of the text (:func:`masked_ids`).
        candidates: words of each mask.
    """
    masked = [position for position, token in enumerate(ids) if token == token_id(tokenizer, MASK)]
    probabilities = fill_masks(model, modules, ids, masked, ids_in(tokenizer))
    best = probabilities.topk(min(candidates, probabilities.shape[1]))
    lines, whole = list[str](), list(ids)
    for position, shares, tokens in zip(masked, best.values.tolist(), best.indices.tolist(), strict=True):
        words = (f"{tokenizer.id_to_token(token)} {share:.1%}" for share, token in zip(shares, tokens, strict=True))
        lines.append(f"{MASK} {len(lines) + 1}: {', '.join(words)}")
        whole[position] = tokens[0]
    return [*lines, tokenizer.decode(whole[1:-1])]


def fill_masks(model: Model, modules: nn.ModuleDict, ids: Sequence[int], positions: Sequence[int],
               vocabulary: int) -> Tensor:
    """Return the probabilities [P, V] of the tokens at masked positions of a text, by BERT.

    Args:
        modules: the layers of ``model``, in eval mode.
        ids: of the text, with the tokens that begin and end it.
        vocabulary: ids from here on are no tokens.

    Raises:
        UserError: a score is not a finite number.
    """
    head = modules[model.layers[-1].name]
    assert isinstance(head, BertHead), "a model of the family"
    input_ids = torch.tensor([ids])
    tensors = {"input_ids": input_ids, "segment_ids": torch.zeros_like(input_ids),
               "input_mask": torch.ones_like(input_ids)}
    with torch.inference_mode():
        for layer in model.layers[:-1]:
            found = modules[layer.name](*(tensors[name] for name in layer.inputs))
            tensors.update(zip(layer.outputs, found if isinstance(found, tuple) else (found,), strict=True))
        scores_bpv, _ = head.scores(tensors[model.layers[-1].inputs[0]], torch.tensor([positions]))
        return finite_scores(scores_bpv[0, :, :vocabulary]).softmax(-1)
