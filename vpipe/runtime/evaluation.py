"""Evaluate: run batches forward through all stages, with the weights that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import gt

from torch import Tensor

from vpipe.distributed.value_exchange import SAME_CALLS
from vpipe.errors import UserError
from vpipe.runtime.action_recorder import Recorder
from vpipe.runtime.collectives import Collectives
from vpipe.runtime.interpreter import Interpreter, RankPrograms
from vpipe.runtime.loaders import Loaders
from vpipe.runtime.microbatches import Batch, MicrobatchLoader, Segment
from vpipe.runtime.outputs import Outputs, interleaved, joined
from vpipe.runtime.step_results import read_at_once
from vpipe.runtime.surroundings import Surroundings
from vpipe.runtime.values import LOSS, WANTED
from vpipe.schedules.assignment import Assignment, Placement


class Evaluation:
    """Evaluate while nothing is in flight.

    Args:
        microbatches: of a batch, at most.
    """

    def __init__(self, interpreter: Interpreter, programs: RankPrograms, collectives: Collectives, loaders: Loaders,
                 placement: Placement, microbatches: int, surroundings: Surroundings) -> None:
        self._interpreter, self._programs, self._collectives, self._loaders = (
            interpreter, programs, collectives, loaders)
        self._placement, self._microbatches = placement, microbatches
        self._surroundings, self._workers, lanes = surroundings, interpreter.workers, collectives.lanes
        self._holds = lanes.count == 1 < len(lanes.own)  # lanes wait for one another within a layer

    def run(self, batches: Iterator[Batch], wanted: Outputs | None,
            recorders: Iterable[Recorder]) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over samples, or labels if the model says so, and the outputs that are wanted.

        See :meth:`vpipe.Pipeline.evaluate`.
        """
        losses: dict[int, list[float]] = {rank: [] for rank in self._placement[-1] if rank in self._workers}
        outputs: dict[int, list[dict[str, Tensor]]] = {rank: [] for rank in losses}
        weights: list[float] = []  # of the labels, where the last stage is
        samples: list[int] = []
        # Only as many batches at a time as keep every stage busy: in one process nothing else bounds how far the first
        # stage runs ahead. Every replica takes equally many of them, so that the next ones are in order.
        most = (-(-2 * len(self._placement) // self._microbatches) * len(self._placement[-1])
                * self._microbatches)
        loader, first = self._loaders.make(batches, most, self._surroundings.calling(next), training=False), 0
        with self._interpreter.interrupts, self._interpreter.taken_back(), ExitStack() as stack:
            for worker in self._workers.values():
                stack.enter_context(worker.evaluating(wanted, self._holds))
            for recorder in recorders:
                stack.enter_context(recorder.evaluating())
            stack.enter_context(self._collectives.first_buffers())
            read = self._read_ahead(loader, first + most)
            while (end := read()) > first:
                read = self._read_ahead(loader, end + most)  # what all have read, none waits for
                assignment = self._assignment(end - first)
                if loader.labels is not None:
                    weights += [loader.counts.pop(number)[0] for number in range(first, end)]
                segment = Segment(loader, first, 0, 0, assignment, training=False, autocast=self._surroundings.autocast)
                for _ in self._interpreter.run(segment, self._programs.for_evaluation(end - first)):
                    pass
                for rank, own in losses.items():
                    values, last = self._workers[rank].values, len(self._placement) - 1
                    own += read_at_once(values.take_all(LOSS, last))
                    outputs[rank] += values.take_all(WANTED, last)
                samples += [loader.samples(i, i + 1) for i in range(first, end)]
                first = end
            self._loaders.end(loader)
            self._interpreter.raise_held()
        if not samples:
            raise UserError("there is nothing to evaluate on", hint="give evaluate at least one batch")
        results, exchange = self._interpreter.results, self._collectives.exchange
        in_order = results.gather(losses, range(len(samples)), self._assignment(len(samples)), exchange)
        weights = list(samples) if self._loaders.labels is None else exchange.from_rank(weights, self._placement[-1][0])
        # The loss of a microbatch without a label may be NaN: it does not count.
        total, weight = sum(loss * size for loss, size in zip(in_order, weights, strict=True) if size), sum(weights)
        self._interpreter.finish()
        total, weight = self._collectives.over_lanes([total, weight])
        return total / (weight or 1.0), {} if wanted is None else self._in_order(outputs, samples)

    def _assignment(self, microbatches: int) -> Assignment:
        return Assignment(self._placement, microbatches, True, partial(gt, microbatches))

    def _read_ahead(self, loader: MicrobatchLoader, end: int) -> Callable[[], int]:
        """Read what an evaluation runs next; return a function that returns its end when all ranks have. A batch that
        one cannot read, or lacks, is refused on all of them before anything is under way."""
        end = end if loader.has(end - 1) else loader.total
        held = any(worker.held is not None for worker in self._workers.values())
        told = self._collectives.job.begin([held, self._surroundings.words], error=loader.error,
                                           batches=self._loaders.comparison.take())

        def wait() -> int:
            holds, under = zip(*told(), strict=True)
            for rank, each in enumerate(under):
                if each != under[0]:
                    raise UserError(f"rank 0 is at evaluate(){under[0]}, rank {rank} at evaluate(){each}",
                                    hint=SAME_CALLS)
            if any(holds):
                self._interpreter.raise_held()
            return end
        return wait

    def _in_order(self, outputs: Mapping[int, Sequence[Mapping[str, Tensor]]],
                  samples: Sequence[int]) -> dict[str, Tensor]:
        """Return the outputs of an evaluation that is done, on every rank.

        Args:
            outputs: by rank of the last stage in this process.
            samples: of every microbatch.
        """
        parts = self._collectives.of_last_stage({rank: joined(own) for rank, own in outputs.items()})
        return interleaved(parts, samples) if len(self._placement[-1]) > 1 else joined(parts)
