"""Train a pipeline and compare it with its oracle, bit for bit: what most tests of this folder say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pipelines import parts
from torch import Tensor, nn

from vpipe import Model, Pipeline
from vpipe.runtime.step_results import Step
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing import (
    InitialState,
    ReferencePrecision,
    ReferenceRun,
    TrainingRecipe,
    asynchronous_oracle,
    flush_oracle,
    version_rule,
)

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


def constant(update: int) -> float:
    return 1.0


DECAY_AND_CLIP: dict[str, Any] = {"learning_rate_factor": decay, "grad_clip": 0.5}
DEFAULTS: dict[str, Any] = {"optimizer": AdamW(), "microbatches": 4, "seed": 2}
_known: dict[str, tuple[ReferenceRun, object]] = {}


def pipeline_of(model: Build | Model, **words: Any) -> Pipeline:
    """Make a pipeline; ``words`` are its arguments by field (:mod:`pipelines`), :data:`DEFAULTS` where left out."""
    return Pipeline(model if isinstance(model, Model) else model(), **parts(**DEFAULTS | words))


def recipe_of(words: Mapping[str, Any], **more: Any) -> TrainingRecipe:
    """Return how the oracle trains what a pipeline made with these words trains."""
    said = DEFAULTS | words
    corrected = said.get("delay_correction", "none") != "none"
    return TrainingRecipe(
        said["optimizer"].from_named, said["microbatches"], said["seed"], **{
            "factor": said.get("learning_rate_factor", constant), "clip": said.get("grad_clip"),
            "skip": said.get("skip_not_finite", False),
            "precision": ReferencePrecision(said.get("precision", "fp32"), said.get("loss_scale")),
            "extrapolation": said.get("delay_correction_strength", 1.0) if corrected else None, **more})


def oracle_of(pipe: Pipeline, model: Build | Model, batches: Batches, recipe: TrainingRecipe, *,
              drained_at: Sequence[int] = (), start: InitialState = FROM_SCRATCH,
              version_of: Callable[..., int] | None = None) -> ReferenceRun:
    """Return what a pipeline must compute. What a function's model gives from the start is computed once.

    With a flush and neither ties nor replicas it is plain PyTorch, whatever the cut.
    """
    schedule, widths = pipe.engine._schedule, tuple(map(len, pipe.placement))
    built = model if isinstance(model, Model) else model()
    arrangement: tuple[Any, ...] = ()
    if not schedule.flush:
        arrangement = (pipe.schedule, pipe.partition, widths, pipe.update_every, schedule.warmup, *drained_at)
    elif max(widths) > 1 or any(layer.ties for layer in built.layers):
        arrangement = (pipe.partition, widths)
    if isinstance(model, Model) or start is not FROM_SCRATCH or version_of is not None:
        return _oracle(pipe, built, batches, recipe, arrangement, drained_at, start, version_of)
    key = f"{model} {recipe} {arrangement} " + " ".join(
        f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}"
        for batch in batches for name, tensor in batch.items())
    if key not in _known:  # what the key names by its address stays
        _known[key] = _oracle(pipe, built, batches, recipe, arrangement, drained_at, start, version_of), (model, recipe)
    return _known[key][0]


def _oracle(pipe: Pipeline, model: Model, batches: Batches, recipe: TrainingRecipe, arrangement: tuple[Any, ...],
            drained_at: Sequence[int], start: InitialState, version_of: Callable[..., int] | None) -> ReferenceRun:
    widths, schedule = list(map(len, pipe.placement)), pipe.engine._schedule
    if schedule.flush:
        return flush_oracle(model, batches, recipe, *(pipe.partition, widths) if arrangement else (None, None), start)
    named = pipe.schedule if pipe.schedule in RegisteredSchedule.names() else "pipedream"
    return asynchronous_oracle(model, batches, recipe, pipe.partition, pipe.update_every or 1, drained_at,
                               version_of or version_rule(named, schedule.warmup), widths, start)


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
    ours = pipe.engine.checkpoint_state()
    assert sorted(ours) == sorted(run.tensors)
    assert not [name for name, value in run.tensors.items()
                if ours[name].dtype != value.dtype or not torch.equal(ours[name], value)]
    assert_same_state(pipe.state_dict(), run.state)


def equals_its_oracle(model: Build | Model, batches: Batches, *more: Batches,
                      version_of: Callable[..., int] | None = None, **words: Any) -> tuple[Pipeline, list[Step]]:
    """Train a pipeline, described by words as for :func:`pipeline_of`, and compare all that it shows with its oracle.

    Args:
        more: batches of further calls of ``train``, with an evaluation before each.
        version_of: of a schedule that is none of vpipe's.
    """
    pipe = pipeline_of(model, **words)
    steps, drained_at = list(pipe.train(batches)), []
    assert list(pipe.train([])) == []  # and changes nothing: the state is looked at after it
    for part in more:
        drained_at.append(pipe.engine.position.microbatches)
        pipe.evaluate(batches[:1])
        steps += pipe.train(part)
    every = [*batches, *(batch for part in more for batch in part)]
    assert_same(pipe, steps, oracle_of(pipe, model, every, recipe_of(words), drained_at=drained_at,
                                       version_of=version_of))
    return pipe, steps
