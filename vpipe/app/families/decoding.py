"""Write a text token by token with a model of next tokens: always the most probable one, or drawn by probability.

The first pass over the layers has the prompt, every later one a token per text, with caches of keys and values, where
every layer has a method ``step`` (:mod:`vpipe.app.families.kv_cache`). If one has none, every pass has the whole text.

Shapes, as names end: b batch (texts), s sequence (tokens), v vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from vpipe import Model
from vpipe.app.families.kv_cache import KeyValueCache
from vpipe.app.families.transformer import EmbeddingsAndAttention
from vpipe.errors import UserError

TRANSLATES = frozenset({"source_ids", "source_mask", "target_ids", "labels"})
"""Fields of a batch of a model that translates."""


@dataclass(frozen=True)
class Decoding:
    """How the tokens of a text are chosen.

    Attributes:
        tokens: most tokens of a text, with the one that ends it.
        vocabulary: ids from here on are no tokens, though the model may have scores for them.
        end: the token that ends a text; None: only ``tokens`` does.
        barred: a token that is never chosen, such as padding.
        temperature: divides the scores; 0 takes the most probable token.
        top_k: number of most probable tokens to draw from; None for all.
        top_p: draw from the fewest most probable tokens whose probabilities add up to this share (Holtzman et al. 2020,
            arXiv:1904.09751), after the temperature and ``top_k``; None for all.
        seed: of the draws. Equal seeds and scores give equal tokens.
    """

    tokens: int
    vocabulary: int
    end: int | None = None
    barred: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


class TextDecoder:
    """A model of next tokens with its weights, computed token by token.

    Args:
        modules: its layers, in eval mode.
        window: of a longer text the model reads this many tokens, the last ones. Their positions change with every
            token, so that their keys and values do, too: from there on every pass has all of them.

    Attributes:
        cached: whether all layers keep keys and values.
        passes: over the layers so far, each for a token of every text.

    Raises:
        UserError: it is no model of next tokens.
    """

    def __init__(self, model: Model, modules: nn.ModuleDict, window: int) -> None:
        translates, head = set(model.batch) == TRANSLATES, modules[model.layers[-1].name]
        if not hasattr(head, "scores") or not (translates or set(model.batch) == {"input_ids", "labels"}):
            raise UserError("the model does not predict the next token of a text",
                            hint="sample a model of the family gpt, llama or translation, or another whose last layer "
                                 "is a NextTokenHead")
        self.window, self.passes = window, 0
        self._model, self._modules, self._head = model, modules, head
        self._text = "target_ids" if translates else "input_ids"
        self._growing: list[str] = []  # layers that depend on the text, and not on a source alone
        growing = {self._text}
        for layer in model.layers[:-1]:
            if growing.isdisjoint(layer.inputs):
                growing = growing - {*layer.outputs}
            else:
                self._growing.append(layer.name)
                growing = growing | {*layer.outputs}
        self.cached = all(_has_step(modules[name]) for name in self._growing)

    def tokens(self, prompt_bs: Tensor, decoding: Decoding, source: Mapping[str, Tensor] | None = None
               ) -> Iterator[Tensor]:
        """Yield the next token of every text, int64 [B], until all have ended; what follows an end means nothing.

        Args:
            prompt_bs: what the texts begin with, int64 [B, S].
            source: the other fields of a batch, of a model that translates.

        Raises:
            UserError: a score is not a finite number.
        """
        generator = torch.Generator().manual_seed(decoding.seed)
        text_bs, ended_b = prompt_bs, torch.zeros(len(prompt_bs), dtype=torch.bool)
        caches: dict[str, KeyValueCache] = {}
        for number in range(decoding.tokens):
            begins = number == 0 or not self.cached or text_bs.shape[1] > self.window
            if begins:
                capacity = min(self.window, prompt_bs.shape[1] + decoding.tokens)
                caches = {name: KeyValueCache(capacity) for name in self._growing}
            new_bs = text_bs[:, -self.window:] if begins else text_bs[:, -1:]
            tensors: dict[str, Tensor] = {**(source or {}), self._text: new_bs}
            token_b = _chosen(self._scores(tensors, caches, begins), decoding, generator)
            yield token_b
            ended_b = ended_b | (token_b == decoding.end)
            if ended_b.all():
                return
            text_bs = torch.cat((text_bs, token_b[:, None]), 1)

    def texts(self, prompt_bs: Tensor, decoding: Decoding, source: Mapping[str, Tensor] | None = None
              ) -> list[list[int]]:
        """Return the tokens after each prompt, without the one that ends the text: see :meth:`tokens`."""
        rows = torch.stack([*self.tokens(prompt_bs, decoding, source)], 1).tolist()
        return [row[:row.index(decoding.end)] if decoding.end in row else row for row in rows]

    @torch.inference_mode()
    def _scores(self, tensors: dict[str, Tensor], caches: Mapping[str, KeyValueCache], begins: bool) -> Tensor:
        """Run a pass; return the scores [B, V] of the next tokens."""
        self.passes += 1
        for layer in self._model.layers[:-1]:
            grows, module = layer.name in caches, self._modules[layer.name]
            if not grows and not begins:
                continue  # the caches have what the text needs of the source
            inputs = [tensors.get(name) for name in layer.inputs]
            found = module(*inputs) if not grows or not self.cached else \
                module.step(*inputs, caches[layer.name])  # type: ignore[operator]
            tensors.update(zip(layer.outputs, found if isinstance(found, tuple) else (found,), strict=True))
        h_bsh = tensors[self._model.layers[-1].inputs[0]]
        return self._head.scores(h_bsh[:, -1:])[:, 0]  # type: ignore[operator, no-any-return]


def _has_step(module: nn.Module) -> bool:
    parts = (module.embeddings, module.attention) if isinstance(module, EmbeddingsAndAttention) else (module,)
    return all(hasattr(part, "step") for part in parts)


def _chosen(scores_bv: Tensor, decoding: Decoding, generator: torch.Generator) -> Tensor:
    """Return a token for every text, int64 [B]."""
    scores_bv = finite_scores(scores_bv[:, :decoding.vocabulary])
    if decoding.barred is not None:
        scores_bv = scores_bv.index_fill(1, torch.tensor([decoding.barred]), -inf)
    if decoding.temperature == 0:
        return scores_bv.argmax(1)
    return torch.tensor([_drawn(scores_v, decoding, generator) for scores_v in scores_bv])


def _drawn(scores_v: Tensor, decoding: Decoding, generator: torch.Generator) -> int:
    best, tokens = scores_v, torch.arange(len(scores_v))
    if decoding.top_k is not None or decoding.top_p is not None:
        best, tokens = scores_v.topk(min(len(scores_v), decoding.top_k or len(scores_v)))
    best = (best - best.max()) / decoding.temperature  # the largest is 0: no temperature overflows
    if decoding.top_p is not None:
        shares = best.softmax(0)
        before = shares.cumsum(0) - shares  # the share of those that are more probable
        best = best[before < decoding.top_p]
    return int(tokens[torch.multinomial(best.softmax(0), 1, generator=generator)])


def finite_scores(scores: Tensor) -> Tensor:
    """Return the scores in fp64. Raises UserError where one is not a finite number."""
    scores = scores.double()
    if not scores.abs().max() < inf:
        raise UserError("the model's scores are not finite numbers: its weights are lost",
                        hint="sample an older checkpoint with --step; vpipe checkpoint ls RUN lists them")
    return scores
