"""Compute a text in passes over the layers of a stage, or of the whole model.

The first pass has the prompt, every later one a token for each row: the rows are the beams of a beam search; a text
that is drawn has one. :class:`StageDecoder` computes a pass, with caches of keys and values where all layers have a
``step`` (:mod:`vpipe.app.families.kv_cache`); a chooser of :mod:`vpipe.extras.generation.decoding` chooses the next
tokens by its scores; :class:`Rows` makes the next pass of them. :func:`decode` does so in one process,
:mod:`vpipe.extras.generation.pipelined_decoding` on several ranks.

Shapes, as names end: r rows, s sequence (tokens), v vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vpipe import Model
from vpipe.app.families.kv_cache import KeyValueCache
from vpipe.app.families.transformer import EmbeddingsAndAttention
from vpipe.errors import UserError
from vpipe.extras.generation.decoding import Chosen, Request, chooser
from vpipe.units import size_text


class Pass(NamedTuple):
    """What is computed next for a request.

    Attributes:
        rows: the earlier row that each continues, with its caches; None: each begins anew, with all its tokens.
        ids_rs: the tokens of each row, int64 [R, S]; S is 1 where rows continue.
    """

    rows: list[int] | None
    ids_rs: Tensor


class Rows:
    """The rows of a request as they grow, and the passes that they need.

    Args:
        window: of a longer text the model reads this many tokens, the last ones. Their positions change with every
            token, so that their keys and values do, too: from there on every pass begins anew.
        cached: whether layers keep keys and values.
    """

    def __init__(self, request: Request, window: int, cached: bool) -> None:
        self._rows, self._window, self._cached = [list(request.prompt)], window, cached
        self._decoding, self._length = request.decoding, len(request.prompt) + request.decoding.tokens
        self._began = self._pass_began = perf_counter()
        self._kind = 1, True  # of the pass at hand: its rows, whether it began anew
        self._timed = {self._kind}  # a prompt says nothing of the passes after it

    def first(self) -> Pass:
        """Return the pass of the prompt."""
        return self._anew()

    def next(self, chosen: Chosen) -> Pass:
        """Return the pass after a choice.

        Raises:
            UserError: a beam search would take longer than a minute.
        """
        self._check_time()
        self._rows = [[*self._rows[parent], token] for parent, token in zip(chosen.parents, chosen.tokens, strict=True)]
        self._kind = len(self._rows), not self._cached or len(self._rows[0]) > self._window
        return self._anew() if self._kind[1] else Pass(chosen.parents, torch.tensor(chosen.tokens)[:, None])

    def _check_time(self) -> None:
        """Refuse beams that take too long, by the first pass of a kind.

        A pass of fewer rows, most of which is not in proportion to them, tells it only where one pass takes too long.
        """
        now, beams = perf_counter(), self._decoding.beams or 1
        pass_s, self._pass_began = now - self._pass_began, now
        if beams > BEAMS_OF_ANY_TIME and self._kind not in self._timed:
            self._timed.add(self._kind)
            rows, left = len(self._rows), self._length - len(self._rows[0]) - 1
            seconds = now - self._began + pass_s * (left if rows == beams else min(left, 1) * beams / rows)
            if seconds > MOST_SEARCH_S:
                fitting = max(BEAMS_OF_ANY_TIME, int(beams * MOST_SEARCH_S / seconds))
                raise UserError(f"{beams:,} beams would take about {seconds:,.0f} s for a prompt",
                                hint=f"give --beams {fitting} at most, for about a minute; or fewer --tokens")

    def _anew(self) -> Pass:
        return Pass(None, torch.tensor([row[-self._window:] for row in self._rows]))


BEAMS_OF_ANY_TIME, MOST_SEARCH_S = 16, 60.0
"""A search with more beams is refused where a prompt would take longer."""

_SCORE_BYTES = 28
"""For each score of a row at once: in fp32, and three times in fp64."""

TRANSLATES = frozenset({"source_ids", "source_mask", "target_ids", "labels"})
"""Fields of a batch of a model that translates."""


class DecoderModel:
    """A model of next tokens, as it is computed token by token.

    Attributes:
        translates: whether its text is the translation of a source, and not what continues a prompt.
        grows: by layer, whether it depends on the text, and not on a source alone.
        cached: whether every layer of them can keep keys and values (:mod:`vpipe.app.families.kv_cache`).

    Raises:
        UserError: it is no model of next tokens.
    """

    def __init__(self, model: Model) -> None:
        outlines = [layer.outline(number) for number, layer in enumerate(model.layers)]
        self.model, self.translates = model, set(model.batch) == TRANSLATES
        learns_next = set(model.batch) == {"input_ids", "labels"}
        if not hasattr(outlines[-1], "scores") or not (self.translates or learns_next):
            raise UserError("the model does not predict the next token of a text",
                            hint="sample a model of the family gpt, llama or translation, or another whose last layer "
                                 "is a NextTokenHead")
        self.growing = "target_ids" if self.translates else "input_ids"
        self.grows: list[bool] = []
        growing = {self.growing}
        for layer in model.layers:
            self.grows.append(not growing.isdisjoint(layer.inputs))
            growing = growing | set(layer.outputs) if self.grows[-1] else growing - set(layer.outputs)
        self.cached = all(_has_step(outline) for outline, grows in zip(outlines[:-1], self.grows[:-1], strict=True)
                          if grows)

    def crossing(self, cut: int, begins: bool) -> tuple[str, ...]:
        """Return the tensors that cross the cut before a layer, in a pass that begins anew or in another one."""
        writer = {name: number for number, layer in enumerate(self.model.layers[:cut]) for name in layer.outputs}
        return tuple(name for name in self.model.crossing(cut) if begins or self.grows[writer[name]])


def _has_step(module: nn.Module) -> bool:
    parts = (module.embeddings, module.attention) if isinstance(module, EmbeddingsAndAttention) else (module,)
    return all(hasattr(part, "step") for part in parts)


class StageDecoder:
    """Compute the passes of requests with the layers of a stage, or of the whole model.

    Args:
        modules: of these layers, in eval mode.
        layers: their numbers; None for all.
        window: see :class:`Rows`.
        free_bytes: memory for the rows of a request.
    """

    def __init__(self, decoder: DecoderModel, modules: nn.ModuleDict, window: int, layers: range | None = None,
                 free_bytes: float = inf) -> None:
        model = decoder.model
        layers = range(len(model)) if layers is None else layers
        self.window, self.cached, self._decoder, self._free_bytes = window, decoder.cached, decoder, free_bytes
        self.is_last = layers.stop == len(model)
        self._layers = [(decoder.grows[number], model.layers[number], modules[model.layers[number].name])
                        for number in layers]
        self._crossing = {begins: [decoder.crossing(cut, begins) for cut in (layers.start, layers.stop)]
                          for begins in (True, False)}
        self._caches: dict[int, tuple[int, dict[str, KeyValueCache]]] = {}  # by slot: rows, caches by layer

    def run(self, request: Request, slot: int, one: Pass, received: Sequence[Tensor]) -> list[Tensor]:
        """Run a pass; return the tensors for the next stage, on the last one the scores [R, V] of the next tokens.

        Args:
            slot: where the caches of the request are. A pass that begins anew drops what is there.
            received: the tensors of the stage before.

        Raises:
            UserError: the memory has no room for so many beams; after the first pass.
        """
        inputs, outputs = self._crossing[one.rows is None]
        tensors = {self._decoder.growing: one.ids_rs, **dict(zip(inputs, received, strict=True))}
        if self._decoder.translates:
            source_rs = torch.tensor(request.source).expand(len(one.ids_rs), -1)
            tensors |= {"source_ids": source_rs, "source_mask": torch.ones_like(source_rs)}
        with torch.inference_mode():
            caches = self._caches_for(request, slot, one) if self.cached else None
            for grows, layer, module in self._layers:
                if not grows and one.rows is not None:
                    continue
                if layer is self._decoder.model.layers[-1]:
                    scores_rv = module.scores(tensors[layer.inputs[0]][:, -1:])[:, 0]  # type: ignore[operator]
                    self._check_memory(request, caches or {}, scores_rv.shape[1])
                    return [scores_rv]
                arguments = [tensors.get(name) for name in layer.inputs]
                found = module(*arguments) if caches is None or not grows else \
                    module.step(*arguments, caches[layer.name])  # type: ignore[operator]
                tensors.update(zip(layer.outputs, found if isinstance(found, tuple) else (found,), strict=True))
            self._check_memory(request, caches or {}, 0)
            return [tensors[name] for name in outputs]

    def _check_memory(self, request: Request, caches: Mapping[str, KeyValueCache], scores: int) -> None:
        """Refuse more beams than there is memory for, by what a row has; the caches of one layer at a time are copied.
        """
        sizes, beams = [cache.row_bytes for cache in caches.values()], request.decoding.beams or 1
        row_bytes = sum(sizes) + max(sizes, default=0) + _SCORE_BYTES * scores
        if beams > 1 and beams * row_bytes > self._free_bytes:
            raise UserError(f"{beams:,} beams need {size_text(beams * row_bytes)}, but there is room for "
                            f"{size_text(self._free_bytes)}",
                            hint=f"give --beams {max(1, int(self._free_bytes / row_bytes))} at most, or fewer --tokens")

    def _caches_for(self, request: Request, slot: int, one: Pass) -> dict[str, KeyValueCache]:
        if one.rows is None:
            capacity = min(self.window, len(request.prompt) + request.decoding.tokens)
            caches = {layer.name: KeyValueCache(capacity) for grows, layer, _ in self._layers if grows}
        else:
            before, caches = self._caches[slot]
            if one.rows != list(range(before)):
                rows = torch.tensor(one.rows)
                for cache in caches.values():
                    cache.select(rows)
        self._caches[slot] = len(one.ids_rs), caches
        return caches


def decode(stage: StageDecoder, request: Request) -> Iterator[Chosen]:
    """Yield the choices of a request one by one, in this process; the last has its texts.

    Raises:
        UserError: a score is not a finite number.
    """
    rows, choose = Rows(request, stage.window, stage.cached), chooser(request.decoding).choose
    chosen = choose(stage.run(request, 0, rows.first(), ())[0])
    while chosen.texts is None:
        yield chosen
        chosen = choose(stage.run(request, 0, rows.next(chosen), ())[0])
    yield chosen
