"""Time layers one after another, as a stage runs them, and what the runtime takes for an action beside the layers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.description.cut import StageSpec
from vpipe.description.precision import Precision
from vpipe.model.layer import Layer
from vpipe.model.model import Model
from vpipe.plan.profile import Seconds
from vpipe.profiling.layer_runner import LayerInputs, LayerRunner, zero_rate_optimizer
from vpipe.profiling.rank_group import RankGroup
from vpipe.runtime.activations import Record
from vpipe.runtime.microbatches import ForwardKey
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import MakeOptimizer

Samples = dict[str, list[float]]
"""Seconds by what took them: ``forward``, ``backward``, ``input_half``, ``weight_half``, ``recompute``, ``step``."""

_MODES = ("whole", "again", "halves")
LEAST, MOST = 5, 40
"""Rounds of measurement, at least and at most."""

TOLERANCE = 0.01
"""Stop in between when every median is known as precisely as this: half the distance of the quartiles over the root
of the number of samples.
"""


class LayerTimer:
    """Time layers while one microbatch after another passes them forward and backward.

    Measured again and again, one layer would find its weights and its activations in the cache, and memory that was
    just freed. Here every layer comes after the others, and the backward of a microbatch after the forward of the next
    one of its mode, as in the middle of a pipeline. The modes take turns: whole backwards, those after a recompute, and
    halves. The weights' gradients are there already, as after the first microbatch of an update.

    Args:
        runners: in the order of the model.
        given: each one's inputs in a run. Another layer's outputs take their place where they are alike.
        shifted: begin a round with a backward, as every other rank does: in a pipeline neighbours do different things.
    """

    def __init__(self, runners: Sequence[LayerRunner], given: Sequence[LayerInputs], clock: Callable[[], float],
                 shifted: bool) -> None:
        self._runners, self._given, self._clock = runners, given, clock
        self._pending: dict[str, deque[list[Record]]] = {mode: deque() for mode in _MODES}
        first, *rest = ((work, mode) for mode in _MODES for work in (self._forward, self._backward))
        self._ahead, self._order = ([first], [*rest, first]) if shifted else ([], [first, *rest])
        self.samples: list[Samples] = [defaultdict(list) for _ in runners]

    def warm_up(self) -> None:
        """Run a round that does not count: memory is allocated, gradients begin."""
        for mode in _MODES:
            self._forward(mode)
        for work, mode in self._ahead:
            work(mode)
        self.round()
        for samples in self.samples:
            samples.clear()

    def round(self) -> None:
        """Run the forward of one microbatch of each mode, and the backward of another."""
        for work, mode in self._order:
            work(mode)

    def converged(self) -> bool:
        """Return whether all medians are known to the tolerance."""
        return all(summary(seconds).spread < TOLERANCE * len(seconds) ** 0.5
                   for samples in self.samples for seconds in samples.values())

    def steps(self, make_optimizer: MakeOptimizer, times: int = 5) -> None:
        """Time optimizer steps of all layers, one after another."""
        optimizers = [zero_rate_optimizer(make_optimizer, runner.stage) for runner in self._runners]
        seconds: list[list[float]] = [[] for _ in self._runners]
        for _ in range(1 + times):
            for runner, optimizer, own in zip(self._runners, optimizers, seconds, strict=True):
                _timed(self._clock, own, runner.step, optimizer)
        for samples, (_, *own) in zip(self.samples, seconds, strict=True):  # the first makes the optimizer's state
            samples["step"] += own

    def _forward(self, mode: str) -> None:
        made: dict[str, Tensor] = {}
        records = []
        for runner, given, samples in zip(self._runners, self._given, self.samples, strict=True):
            inputs = {name: _made_if_alike(made.get(name), tensor) for name, tensor in given.inputs.items()}
            here = LayerInputs(inputs, given.fields, given.gradients)
            seconds = samples["forward"] if mode != "halves" else []  # which takes a little longer
            outputs, record = _timed(self._clock, seconds, partial(runner.forward, split=mode == "halves"), here)
            if mode == "again":  # as in a layer whose forward drops its graph
                for saved in record.spans:
                    saved.graph = None
            made.update(outputs)
            records.append(record)
        self._pending[mode].append(records)

    def _backward(self, mode: str) -> None:
        records = self._pending[mode].popleft()
        if mode == "again":
            self._pass("recompute", records, lambda runner, record, gradients: runner.recompute(record))
        coming: dict[str, Tensor] = {}

        def backward(runner: LayerRunner, record: Record, gradients: Mapping[str, Tensor]) -> None:
            here = {name: _made_if_alike(coming.get(name), tensor) for name, tensor in gradients.items()}
            coming.update(runner.backward(record, here, split=mode == "halves"))

        # Right after a recompute the activations are still in the cache: that backward does not count.
        figure = {"whole": "backward", "halves": "input_half"}.get(mode)
        self._pass(figure, records, backward, reverse=True)
        if mode == "halves":
            self._pass("weight_half", records, lambda runner, record, gradients: runner.stage.backward_weight(record),
                       reverse=True)

    def _pass(self, figure: str | None, records: Sequence[Record],
              work: Callable[[LayerRunner, Record, Mapping[str, Tensor]], None], *, reverse: bool = False) -> None:
        """Do some work in one layer after another."""
        order = list(zip(self._runners, self._given, records, self.samples, strict=True))
        for runner, given, record, samples in reversed(order) if reverse else order:
            seconds = [] if figure is None else samples[figure]
            _timed(self._clock, seconds, work, runner, record, given.gradients)


def run_rounds(timer: LayerTimer, budget_s: float, group: RankGroup, at_once: int | None,
               tell: Callable[[int], None] = lambda rounds: None) -> None:
    """Run rounds on all ranks at the same time, until all figures are known well or the time is over.

    Args:
        at_once: number of ranks of a host that may work; where there are more, they take turns. None: all.
        tell: called with the number of rounds that are done.
    """
    mine, turns = group.turn(at_once)
    timer.warm_up()
    started, rounds = perf_counter(), 0
    while True:
        group.barrier()
        over = perf_counter() - started > budget_s and rounds >= 3
        if all(group.all_gather(over or rounds >= MOST or (rounds >= LEAST and timer.converged()))):
            return
        for turn in range(turns):
            if turn == mine:
                timer.round()
            if turn + 1 < turns:
                group.barrier()
        rounds += 1
        tell(rounds)


def summary(seconds: Sequence[float]) -> Seconds:
    """Return the median and the spread of samples."""
    middle = median(seconds)
    if len(seconds) < 2 or middle <= 0:
        return Seconds(max(middle, 0.0))
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return Seconds(middle, (high - low) / 2 / middle)


def _made_if_alike(made: Tensor | None, wanted: Tensor) -> Tensor:
    """Return the tensor that was just made where it is like the wanted one: it is in the cache then, as in a run."""
    if made is None or made.requires_grad != wanted.requires_grad or made.dtype != wanted.dtype:
        return wanted
    return made if made.shape == wanted.shape and made.device == wanted.device else wanted


_TIMES, _WARM_UP = 40, 4
"""Calls by which overhead is measured, and how many at first do not count."""


def measure_overhead(device: torch.device, clock: Callable[[], float], make_optimizer: MakeOptimizer,
                     precision: Precision) -> dict[str, float]:
    """Return the seconds that every call takes once, however many layers the stage has, by what is called.

    That is a stage of one layer that does nothing, less what its layer takes: what a second one adds.
    """
    one, two = (_times(layers, device, clock, precision) for layers in (1, 2))
    overhead = {figure: max(0.0, 2 * one[figure] - two[figure]) for figure in one}
    model = Model([Layer("tiny", partial(nn.Linear, 1, 1), ("x",), ("loss",))], batch=("x",))
    runner = LayerRunner(model, 0, device, 0, precision)
    optimizer = zero_rate_optimizer(make_optimizer, runner.stage)
    for leaf in runner.stage.weights.graded():
        leaf.grad = torch.ones_like(leaf)
    steps: list[float] = []
    for _ in range(_TIMES):
        _timed(clock, steps, runner.step, optimizer)
    return overhead | {"step": median(steps[_WARM_UP:])}


def _times(layers: int, device: torch.device, clock: Callable[[], float], precision: Precision) -> dict[str, float]:
    model = Model([Layer("first", nn.Identity, ("x",)), Layer("second", nn.Identity), Layer("third", nn.Identity),
                   Layer("last", nn.Identity, outputs=("loss",))], batch=("x",))
    spec = StageSpec(1, range(1, 1 + layers), ("h",), ("h",), (), {})
    stage = Stage(model, spec, seed=0, device=device, recomputed=(), precision=precision)
    stage.recomputes = True
    gradients = {"h": torch.ones(1, device=device, dtype=precision.dtype)}
    found: Samples = defaultdict(list)
    for _ in range(_TIMES):
        for split in (False, True):
            received = [torch.ones(1, device=device, dtype=precision.dtype, requires_grad=True)]
            _, record = _timed(clock, found["forward"], partial(stage.forward, split=split), received, {},
                               ForwardKey(0, 0), {})
            if split:
                _timed(clock, found["input_half"], stage.backward_input, record, gradients)
                _timed(clock, found["weight_half"], stage.backward_weight, record)
            else:
                for saved in record.spans:
                    saved.graph = None
                _timed(clock, found["recompute"], stage.recompute, record)
                _timed(clock, found["backward"], stage.backward, record, gradients)
    return {figure: median(seconds[_WARM_UP:]) for figure, seconds in found.items()}


def _timed(clock: Callable[[], float], seconds: list[float], work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, note how long that takes, and return its result."""
    started = clock()
    result = work(*arguments)
    seconds.append(clock() - started)
    return result
