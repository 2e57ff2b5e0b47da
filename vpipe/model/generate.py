"""Continue a text with a model of next tokens, and fill in masked words with BERT.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, p masked positions, v vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import inf
from typing import Protocol

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.model.bert import BertHead
from vpipe.model.layer import Model, without_random_values
from vpipe.model.transformer import NextTokenHead


def load_weights(model: Model, weights: Mapping[str, Tensor], seed: int, draw: bool = False) -> nn.ModuleDict:
    """Return the whole model with these weights, in eval mode.

    Args:
        weights: of all parameters and buffers, ``<layer>.<parameter>``, tied ones under their owner's name.
        seed: of the run, for what its layers draw beside the weights.
        draw: whether they draw at all; without, building is faster.
    """
    with nullcontext() if draw else without_random_values():
        modules = model.materialize(seed)
    for layer in model.layers:
        module = modules[layer.name]
        module.load_state_dict({name: weights[f"{layer.name}.{name}"] for name in module.state_dict()
                                if name not in layer.ties}, strict=False)
    return modules.eval()


class NextTokenScores(Protocol):
    """Score the next token of a text that grows."""

    def append(self, ids: Sequence[int]) -> Tensor:
        """Add tokens to the end of the text, and return the scores [V] of the token after them."""


class WholeForward:
    """Score the next token by a forward of the whole text, which computes every token again.

    A class with the same :meth:`append` that keeps the keys and values of earlier tokens may stand in for it.

    Args:
        modules: the layers of ``model``, in eval mode.
        window: of a longer text the model reads this many tokens, the last ones.

    Raises:
        UserError: it is no model of next tokens.
    """

    def __init__(self, model: Model, modules: nn.ModuleDict, window: int) -> None:
        head = modules[model.layers[-1].name]
        if not isinstance(head, NextTokenHead) or set(model.batch) != {"input_ids", "labels"}:
            raise UserError("the model does not predict the next token of a text",
                            hint="sample a model of the family gpt or llama, or one whose last layer is a "
                                 "NextTokenHead")
        self._model, self._modules, self._head, self._window = model, modules, head, window
        self._ids: list[int] = []

    def append(self, ids: Sequence[int]) -> Tensor:
        """Add tokens to the end of the text, and return the scores [V] of the token after them."""
        self._ids = [*self._ids, *ids][-self._window:]
        with torch.inference_mode():
            h_bsh = _below_head(self._model, self._modules, {"input_ids": torch.tensor([self._ids])})
            return self._head.scores(h_bsh[:, -1:])[0, 0]


def generate(scores: NextTokenScores, prompt: Sequence[int], vocabulary: int, *, temperature: float = 1.0,
             top_k: int | None = None, seed: int = 0) -> Iterator[int]:
    """Yield the tokens of a continuation of ``prompt`` one by one, without end.

    Equal arguments give equal tokens on the same machine.

    Args:
        vocabulary: ids from here on are no tokens, though the model may have scores for them.
        temperature: divides the scores; 0 takes the most probable token.
        top_k: number of most probable tokens to choose from; None for all.
        seed: of the choices.

    Raises:
        UserError: a score is not a finite number.
    """
    generator, ids = torch.Generator().manual_seed(seed), list(prompt)
    while True:
        token = _choose(_finite(scores.append(ids)[:vocabulary]), temperature, top_k, generator)
        yield token
        ids = [token]


def _choose(scores_v: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(scores_v.argmax())
    best, tokens = scores_v.topk(min(len(scores_v), top_k or len(scores_v)))
    probabilities = ((best - best[0]) / temperature).softmax(0)  # the largest is 0: no temperature overflows
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def fill_masks(model: Model, modules: nn.ModuleDict, ids: Sequence[int], positions: Sequence[int],
               vocabulary: int) -> Tensor:
    """Return the probabilities [P, V] of the tokens at masked positions of a text, by BERT.

    Args:
        modules: the layers of ``model``, in eval mode.
        ids: of the text, with the tokens that begin and end it.
        vocabulary: ids from here on are no tokens.

    Raises:
        UserError: it is no BERT, or a score is not a finite number.
    """
    head = modules[model.layers[-1].name]
    if not isinstance(head, BertHead):
        raise UserError("the model does not predict masked tokens", hint="sample a model of the family bert")
    input_ids = torch.tensor([ids])
    with torch.inference_mode():
        h_bsh = _below_head(model, modules, {"input_ids": input_ids, "segment_ids": torch.zeros_like(input_ids),
                                             "input_mask": torch.ones_like(input_ids)})
        scores_bpv, _ = head.scores(h_bsh, torch.tensor([positions]))
        return _finite(scores_bpv[0, :, :vocabulary]).softmax(-1)


def _below_head(model: Model, modules: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Tensor:
    """Run all layers but the last, and return ``h``, which that one reads."""
    tensors = dict(batch)
    for layer in model.layers[:-1]:
        found = modules[layer.name](*(tensors[name] for name in layer.inputs))
        tensors.update(zip(layer.outputs, found if isinstance(found, tuple) else (found,), strict=True))
    return tensors[model.layers[-1].inputs[0]]


def _finite(scores: Tensor) -> Tensor:
    scores = scores.double()
    if not scores.abs().max() < inf:
        raise UserError("the model's scores are not finite numbers: its weights are lost",
                        hint="sample an older checkpoint with --step; vpipe checkpoint ls RUN lists them")
    return scores
