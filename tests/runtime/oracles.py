"""Train a pipeline and compare it with its oracle, bit for bit: what most tests of this folder say."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from pipelines import parts
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vpipe import Model, Pipeline
from vpipe.checkpoint.manifest import Position
from vpipe.runtime.step_results import Step
from vpipe.schedules.csv_format import CsvFile
from vpipe.testing import InitialState, ReferenceRun, references

Build = Callable[[], Model]
Batches = Sequence[Mapping[str, Tensor]]
FROM_SCRATCH = InitialState()


@dataclass(frozen=True)
class AdamW:
    """A factory that both sides use; fused, as the run's own optimizers are."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return torch.optim.AdamW(named.values(), lr=3e-3, weight_decay=0.1, fused=True) if named else None


@dataclass(frozen=True)
class Momentum:
    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return torch.optim.SGD(named.values(), lr=0.05, momentum=0.9, foreach=True) if named else None


def decay(update: int) -> float:
    return 1.0 / (1 + update)


DECAY_AND_CLIP: dict[str, Any] = {"learning_rate_factor": decay, "grad_clip": 0.5}
DEFAULTS: dict[str, Any] = {"optimizer": AdamW(), "microbatches": 4, "seed": 2}
_known: dict[str, tuple[ReferenceRun, object]] = {}


@cache
def built(model: Build) -> Model:
    """Return what a function makes, once: by it an oracle is found again."""
    return model()


def pipeline_of(model: Build | Model, **words: Any) -> Pipeline:
    """Make a pipeline; ``words`` are its arguments by field (:mod:`pipelines`), :data:`DEFAULTS` where left out."""
    return Pipeline(model if isinstance(model, Model) else built(model), **parts(**DEFAULTS | words))


def oracle_of(pipe: Pipeline, batches: Batches, *, drained_at: Iterable[int] = (), start: InitialState = FROM_SCRATCH,
              model: Model | None = None, **changes: Any) -> ReferenceRun:
    """Return what a pipeline must compute; ``changes`` are of its description. What is computed from scratch is kept.

    With a flush and neither ties nor replicas it is plain PyTorch, whatever the cut.
    """
    model = model or pipe.model
    description, stream = replace(pipe.description, **changes), not pipe.lowered.flush
    coded = {*description.transfers.codecs(len(pipe.partition))} - {"none"}
    regrouped = coded or max(map(len, pipe.placement)) > 1 or any(layer.ties for layer in model.layers)
    arrangement = (pipe.partition, pipe.placement, description.transfers) if stream or regrouped else ()
    key = repr([id(model), description.update, description.microbatches, description.precision, description.seed,
                description.execution.backend, description.order.slices, arrangement,
                (description.order, [*drained_at]) if stream or CsvFile.is_path(pipe.schedule) else (),
                [(name, tensor.dtype, tensor.shape, hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
                 for batch in batches for name, tensor in batch.items()]])
    if start is FROM_SCRATCH and key in _known:
        return _known[key][0]
    reference = next(references(model, description, pipe.lowered, batches, drained_at=drained_at, start=start))
    run = reference.run
    run.values = reference.trajectory.values  # after every update
    if start is FROM_SCRATCH:
        _known[key] = run, (model, description)  # what the key names by its address stays
    return run


def averages_of(run: ReferenceRun, begin: Mapping[str, Tensor], decay: float) -> dict[str, Tensor]:
    """Follow the weights after every update of an oracle, but for those that were skipped, by torch's own average."""
    average, latest = {name: value.clone() for name, value in begin.items()}, {**begin}
    follow = get_ema_multi_avg_fn(decay)
    for update in sorted(run.values):
        for name, value in run.values[update].items():
            if not torch.equal(value, latest[name]):
                follow([average[name]], [value], 1)
            latest[name] = value
    return average


def saved(pipe: Pipeline) -> tuple[Position, dict[str, Tensor]]:
    """As a checkpoint holds it: training goes on in other memory."""
    tensors = {name: tensor.clone() for name, tensor in pipe.engine.checkpoint_state().items()}  # drains
    return pipe.engine.training.position, tensors


def assert_same_state(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Assert that two states have the same names, in order, and the same bits."""
    assert list(ours) == list(theirs)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def assert_same(pipe: Pipeline, steps: Sequence[Step], run: ReferenceRun) -> None:
    """Compare losses, norms, which steps were skipped, and all that a checkpoint holds; bits, so NaN is itself."""
    assert [repr(step.loss) for step in steps] == list(map(repr, run.losses))
    assert [step.index for step in steps] == list(range(steps[0].index, steps[0].index + len(steps)))
    if run.gradient_norms:
        assert torch.equal(torch.tensor([step.gradient_norm for step in steps]).view(torch.int32),
                           torch.tensor(run.gradient_norms).view(torch.int32))
    assert {step.index for step in steps if step.skipped} == run.skipped
    ours = {name: value for name, value in pipe.engine.checkpoint_state().items()
            if not name.startswith(("average.", "loss."))}
    theirs = {name for name in run.tensors if not re.match(r"buffers\.\d+\.\d+\.loss\.", name)}
    assert {*ours} == theirs or (dist.is_initialized() and {*ours} < theirs)
    assert not [name for name, value in ours.items()
                if value.dtype != run.tensors[name].dtype or not torch.equal(run.tensors[name], value)]
    assert_same_state(pipe.state_dict(), run.state)


def equals_its_oracle(model: Build | Model, batches: Batches, *more: Batches,
                      **words: Any) -> tuple[Pipeline, list[Step]]:
    """Train a pipeline, described by words as for :func:`pipeline_of`, and compare all that it shows with its oracle.

    Args:
        more: batches of further calls of ``train``, with an evaluation before each.
    """
    pipe = pipeline_of(model, **words)
    steps, drained_at = list(pipe.train(batches)), []
    assert list(pipe.train([])) == []  # and changes nothing: the state is looked at after it
    for part in more:
        drained_at.append(pipe.engine.training.position.microbatches)
        pipe.evaluate(batches[:1])
        steps += pipe.train(part)
    every = [*batches, *(batch for part in more for batch in part)]
    assert_same(pipe, steps, oracle_of(pipe, every, drained_at=drained_at))
    return pipe, steps
