"""Choose the tokens of a text by the model's scores: drawn one by one, or by a beam search.

Shapes, as names end: r rows (the beams of a search; a text that is drawn has one), v vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from vpipe.errors import UserError


@dataclass(frozen=True)
class Decoding:
    """How the tokens of a text are chosen: drawn one by one, or by a beam search.

    Attributes:
        tokens: most tokens of a text, with the one that ends it.
        vocabulary: ids from here on are no tokens, though the model may have scores for them.
        end: the token that ends a text; None: only ``tokens`` does.
        barred: a token that is never chosen, such as padding.
        temperature: divides the scores; 0 takes the most probable token.
        top_k: number of most probable tokens to draw from; None for all.
        top_p: draw from the fewest most probable tokens whose probabilities add up to this share (Holtzman et al. 2020,
            arXiv:1904.09751), after the temperature and ``top_k``; None for all.
        seed: of the draws.
        beams: rows of a beam search, which draws nothing; None draws.
        length_penalty: exponent of the length by which a beam search divides, see :class:`BeamSearch`.
        best: texts that a beam search returns.
    """

    tokens: int
    vocabulary: int
    end: int | None = None
    barred: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    beams: int | None = None
    length_penalty: float = 0.6
    best: int = 1


@dataclass(frozen=True)
class Request:
    """A prompt, and how its text is chosen.

    Attributes:
        prompt: tokens that the text continues; of a translation the one that starts it.
        source: tokens of the sentence to translate.
    """

    prompt: tuple[int, ...]
    decoding: Decoding
    source: tuple[int, ...] = ()


class Text(NamedTuple):
    """A finished text: its tokens after the prompt, without the one that ends it, and its score in a beam search."""

    tokens: tuple[int, ...]
    score: float | None = None


class Chosen(NamedTuple):
    """The next token of every row, the earlier row that each continues, and at the end the texts, the best first."""

    tokens: list[int]
    parents: list[int]
    texts: list[Text] | None = None


class Sampler:
    """Draw the tokens of a text one by one. Equal seeds and scores give equal tokens."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding, self._tokens = decoding, list[int]()
        self._generator = torch.Generator().manual_seed(decoding.seed)

    def choose(self, scores_rv: Tensor) -> Chosen:
        """Choose the next token by the scores [1, V].

        Raises:
            UserError: a score is not a finite number.
        """
        decoding = self._decoding
        token = self._draw(_allowed(scores_rv, decoding)[0])
        self._tokens.append(token)
        ended = token == decoding.end
        return Chosen([token], [0], [Text(tuple(self._tokens[:-1] if ended else self._tokens))]
                      if ended or len(self._tokens) == decoding.tokens else None)

    def _draw(self, scores_v: Tensor) -> int:
        decoding = self._decoding
        if decoding.temperature == 0:
            return int(scores_v.argmax())
        if decoding.top_k is None and decoding.top_p is None:
            return self._draw_from(scores_v - scores_v.max())
        best, tokens = scores_v.topk(min(len(scores_v), decoding.top_k or len(scores_v)))
        best = best - best[0]
        if decoding.top_p is not None:
            shares = (best / decoding.temperature).softmax(0)
            before = shares.cumsum(0) - shares  # the share of those that are more probable
            best = best[before < decoding.top_p]
        return int(tokens[self._draw_from(best)])

    def _draw_from(self, scores: Tensor) -> int:
        """Return a place; the largest score is 0: no temperature overflows."""
        return int(torch.multinomial((scores / self._decoding.temperature).softmax(0), 1, generator=self._generator))


class BeamSearch:
    """Keep the ``beams`` most probable beginnings of a text; return the best texts that have ended.

    The score of a text Y of a prompt X is log P(Y | X) / ((5 + |Y|) / 6)^a with the length penalty a, as in section 7
    of Wu et al. 2016 (arXiv:1609.08144), without their coverage penalty; |Y| counts the token that ends it. A text ends
    where its end is among the best ``beams`` candidates. The search ends when no beginning could still give a better
    text than the worst of ``beams`` ended ones; texts that are cut at their greatest length count as ended.
    """

    def __init__(self, decoding: Decoding) -> None:
        assert decoding.beams is not None, "a beam search"
        self._decoding, self._beams = decoding, decoding.beams
        self._rows: list[tuple[int, ...]] = [()]
        self._sums_r = torch.zeros(1, dtype=torch.float64)  # log probabilities of the rows
        self._ended: list[Text] = []

    def choose(self, scores_rv: Tensor) -> Chosen:
        """Choose the next tokens of all rows by their scores [R, V].

        Raises:
            UserError: a score is not a finite number.
        """
        decoding = self._decoding
        logs_rv = self._sums_r[:, None] + _allowed(scores_rv, decoding).log_softmax(-1)
        best, places = logs_rv.flatten().topk(min(2 * self._beams, logs_rv.numel()))  # half of them may be ends
        length = len(self._rows[0]) + 1
        rows, tokens, parents, sums = list[tuple[int, ...]](), list[int](), list[int](), list[float]()
        for rank, (total, place) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            parent, token = divmod(place, logs_rv.shape[1])
            if total == -inf:
                break
            if token == decoding.end:
                if rank < self._beams:
                    self._ended.append(Text(self._rows[parent], total / self._penalty(length)))
            elif len(rows) < self._beams:
                rows.append((*self._rows[parent], token))
                tokens.append(token)
                parents.append(parent)
                sums.append(total)
        last = length == decoding.tokens
        if last:
            self._ended += [Text(row, total / self._penalty(length)) for row, total in zip(rows, sums, strict=True)]
        self._ended = sorted(self._ended, key=lambda text: -(text.score or 0.0))[:self._beams]
        self._rows, self._sums_r = rows, torch.tensor(sums, dtype=torch.float64)
        done = last or not rows or (len(self._ended) == self._beams and sums[0] / self._penalty(
            decoding.tokens) <= (self._ended[-1].score or 0.0))
        return Chosen(tokens, parents, self._ended[:decoding.best] if done else None)

    def _penalty(self, length: int) -> float:
        return float(((5 + length) / 6) ** self._decoding.length_penalty)


def chooser(decoding: Decoding) -> Sampler | BeamSearch:
    """Return what chooses the tokens of one text."""
    return Sampler(decoding) if decoding.beams is None else BeamSearch(decoding)


def _allowed(scores_rv: Tensor, decoding: Decoding) -> Tensor:
    """Return the scores of what may be chosen, in fp64."""
    scores_rv = finite_scores(scores_rv[:, :decoding.vocabulary])
    return scores_rv if decoding.barred is None else scores_rv.index_fill(1, torch.tensor([decoding.barred]), -inf)


def finite_scores(scores: Tensor) -> Tensor:
    """Return the scores in fp64. Raises UserError where one is not a finite number."""
    scores = scores.double()
    if not scores.abs().max() < inf:
        raise UserError("the model's scores are not finite numbers: its weights are lost",
                        hint="sample an older checkpoint with --step; vpipe checkpoint ls RUN lists them")
    return scores
