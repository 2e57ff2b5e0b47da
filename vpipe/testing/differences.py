"""Compare a pipeline with its oracle, step by step.

With a flush the oracle is plain PyTorch on one device, without one the sequential program of
:mod:`vpipe.testing.reference`. On one CPU thread both give the same bits, in any precision, if sums have the same
order. The pipeline adds the gradients of a weight tied across two stages per stage, those of a stage with several
replicas per replica, and those of microbatches that a schedule from a file completes out of order in that order. The
oracle does the same and must be met to the bit. The replicas of a stage must equal each other in any case.

Where it does so with a flush, there is a second oracle: plain PyTorch, which adds microbatch by microbatch, must be met
within :attr:`Reference.bound`. It makes each update from the state in which the first oracle begins it. Left to itself
it would be another run, to which no distance can be derived: weights that differ in their last bit let a ReLU change
its side, and an adaptive optimizer make a whole step of the rounding of a gradient near 0.

With compression the oracle encodes and decodes at the cuts what the pipeline sends, and there is no second one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vpipe.description import Description
from vpipe.description.transfers import COMPRESSION, TRANSPORTS
from vpipe.errors import RunError
from vpipe.model.model import Model
from vpipe.pipeline import Pipeline
from vpipe.runtime.transport.transport import InProcessTransport, TensorSpec, TransferKey, TransferKind
from vpipe.schedules.assignment import Assignment, Placement
from vpipe.schedules.builder import build
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.testing.reference import FROM_SCRATCH, Batch, ReferenceRun, asynchronous_oracle, flush_oracle
from vpipe.testing.reference_model import ReferencePrecision, compiled_model
from vpipe.testing.reference_optimizer import InitialState, TrainingRecipe, Turn, Versions, version_rule
from vpipe.testing.trajectory import Trajectory

_DEFECT = "this is a defect of vpipe: please report it"


@dataclass(frozen=True)
class Reference:
    """The name and trajectory of an oracle, and how near a run must come to it.

    Attributes:
        bound: largest relative difference of a loss or a norm; 0: losses, norms and weights must be equal. Above 0 the
            weights are not compared, for the optimizer's sake.
        run: what the oracle ended with.
    """

    name: str
    trajectory: Trajectory
    bound: float
    run: ReferenceRun


@dataclass(frozen=True)
class Difference:
    """A step of a run compared with the reference.

    Attributes:
        step: its number.
        loss, gradient_norm: of the run; the norm is before clipping and over all updates of the step: without a flush,
            stages of different widths make several.
        loss_difference, norm_difference: relative to the reference. Two norms that are both not finite do not differ:
            of an update that an overflow prevented, the weights tell the result.
        weight_difference: the largest absolute one of any weight after any update; infinite where one is NaN.
        weight: the weight with that difference; None without a difference.
    """

    step: int
    loss: float
    gradient_norm: float
    loss_difference: float
    norm_difference: float
    weight_difference: float
    weight: str | None

    def within(self, bound: float) -> bool:
        """Return whether the run is as near as it must be; NaN never is."""
        near = self.loss_difference <= bound and self.norm_difference <= bound
        return near and (math.isfinite(self.weight_difference) if bound else self.weight_difference == 0)

    def __str__(self) -> str:
        return (f"loss off by {self.loss_difference:.1e}, gradient norm by {self.norm_difference:.1e}, weights by "
                f"{self.weight_difference:.1e}" + (f" ({self.weight})" if self.weight else ""))


def assert_equals_oracle(pipe: Pipeline, batches: Sequence[Batch]) -> list[Difference]:
    """Train a new pipeline, all ranks in this process, and its oracles; return the differences from the first oracle.

    Set ``torch.set_num_threads(1)`` before, so that PyTorch adds numbers in the same order.

    Raises:
        AssertionError: a step is not what an oracle gives, or the replicas of a stage differ.
    """
    description, schedule = pipe.description, pipe.lowered
    run = record(pipe, batches)
    assert not run.mismatches, f"replicas differ: {run.mismatches[0]}"
    found: list[list[Difference]] = []
    for reference in references(pipe.model, description, schedule, batches, device=pipe.device):
        found.append(list(compare(run, reference.trajectory)))
        for difference in found[-1]:
            assert difference.within(reference.bound), (
                f"step {difference.step} under '{schedule.name}' is not what {reference.name} gives: {difference}; "
                f"allowed are {reference.bound:.1e}")
    return found[0]


def record(pipe: Pipeline, batches: Iterable[Batch]) -> Trajectory:
    """Train a pipeline, and return the trajectory of the ranks of this process."""
    return Trajectory.join(record_ranks(pipe, batches))


def record_ranks(pipe: Pipeline, batches: Iterable[Batch]) -> dict[int, Trajectory]:
    """Train a pipeline, and return the trajectory of each rank of this process."""
    trajectories = {rank: Trajectory() for rank in pipe.local_usage()}
    pipe.observe(trajectories)
    losses = [step.loss for step in pipe.train(batches)]
    for trajectory in trajectories.values():
        trajectory.losses = losses
    return trajectories


def references(model: Model, description: Description, schedule: Schedule, batches: Sequence[Batch], *,
               device: torch.device | str = "cpu", drained_at: Iterable[int] = (),
               start: InitialState = FROM_SCRATCH) -> Iterator[Reference]:
    """Yield the oracles of a pipeline, the exact one first.

    Args:
        schedule: lowered or not.
        batches: from the first of the training on.
        device: on which the oracles compute.
        drained_at: microbatches before which the pipeline was empty, see :func:`~vpipe.testing.asynchronous_oracle`.
        start: the state to begin with, such as that of a checkpoint.
    """
    if (backend := description.execution.backend) is not None:
        model = compiled_model(model, backend)
    partition, update, name = description.cut.partition, description.update, description.order.schedule
    assert name is not None
    widths, microbatches = [len(ranks) for ranks in schedule.placement], len(batches) * description.microbatches
    precision = ReferencePrecision(description.precision.name, description.precision.loss_scale)
    # Where forwards run in threads the backwards are reversed, but gradients are kept apart and added in order.
    turn = None if description.execution.threaded else _turn(schedule)
    codecs = description.transfers.codecs(len(partition))
    compressed = bool(set(codecs) - {"none"})
    compress = CutCompression(model, partition, schedule.placement, codecs,
                              description.seed) if compressed else TrainingRecipe.compress

    def recipe(trajectory: Trajectory) -> TrainingRecipe:
        return TrainingRecipe(update.make_optimizer, description.microbatches, description.seed, update.factor,
                              update.grad_clip, trajectory, compress, update.skip_not_finite, precision, device,
                              description.delay_correction or None, update.counted_labels(model.labels),
                              schedule.slices)

    trajectory = Trajectory()
    if schedule.flush:
        regrouped = [what for what, there in (
            ("tied gradients summed by stage", bool(schedule.ties)), ("gradients summed by replica", max(widths) > 1),
            ("gradients summed in the order of the file", turn is not None),
            ("tensors coded at the cuts", compressed)) if there]
        again = bool(regrouped) and not compressed
        run = flush_oracle(model, batches, recipe(trajectory), partition if regrouped else None,
                           widths if regrouped else None, start, turn, measured=again)
        program = f"plain PyTorch{precision.description} on one device" + ", slice by slice" * (schedule.slices > 1)
        yield Reference(", ".join([program, *regrouped]), trajectory, 0.0, run)
        if again:
            trajectory = Trajectory()
            for batch, state in zip(batches, run.states, strict=True):
                one = Trajectory()
                plain = flush_oracle(model, [batch], recipe(one), start=state)
                trajectory.extend(one)
            bounds = [off / norm for off, updates in zip(run.roundings, trajectory.step_updates, strict=True)
                      if math.isfinite(norm := trajectory.norm(updates)) and norm]
            yield Reference(f"{program}, one update at a time", trajectory, max(bounds, default=0.0), plain)
        return
    in_file = CsvFile.is_path(name)
    ends = range(0, microbatches, schedule.microbatches) if in_file else ()
    closed = not in_file and RegisteredSchedule.named(name).version_of is not None
    versions = version_rule(name, schedule.warmup) if closed else _versions_of_actions(schedule, microbatches)
    run = asynchronous_oracle(model, batches, recipe(trajectory), partition, schedule.update_every,
                              {*ends, *drained_at}, versions, widths, start,
                              None if closed else min(microbatches, schedule.microbatches), turn)
    yield Reference(f"the sequential oracle{precision.description}", trajectory, 0.0, run)


class CutCompression:
    """Encode and at once decode the tensors and gradients that a pipeline would send between ranks.

    It sends them to itself over the transport that encodes them in the pipeline. Where both sides of a cut are on the
    same rank for a microbatch, its tensors are not compressed.

    Args:
        partition: layers per stage.
        placement: ranks per stage.
        compression: the codec of every cut.
        seed: of the pipeline.
    """

    def __init__(self, model: Model, partition: Sequence[int], placement: Placement, compression: Sequence[str],
                 seed: int) -> None:
        [transport] = TRANSPORTS.added(COMPRESSION)
        self._placement, self._compression, self._transport = placement, compression, transport(
            InProcessTransport(0, {}), compression, seed)
        self._cuts = {spec.layers.start: spec for spec in model.split(partition)[1:]}

    def __call__(self, number: int, microbatch: int, layer: int, tensors: dict[str, Tensor]) -> None:
        """Replace the inputs of a layer by their values after compression, if a cut lies before it.

        Args:
            number: of the microbatch in the run.
            microbatch: its number since the pipeline was empty, which decides the replicas that process it.
        """
        spec = self._cuts.get(layer)
        if spec is None:
            return
        sender, receiver = (ranks[Assignment.replica_of(microbatch, len(ranks))]
                            for ranks in self._placement[spec.index - 1:spec.index + 1])
        if sender == receiver or self._compression[spec.index - 1] == "none":
            return
        before = [tensors[name] for name in spec.inputs]
        arrived = self.transfer(TransferKey(TransferKind.ACTIVATIONS, spec.index, number), before)
        wanting = [i for i, tensor in enumerate(before) if tensor.requires_grad]
        if wanting:
            key = TransferKey(TransferKind.GRADIENTS, spec.index - 1, number)
            joined = _CompressedCut.apply(self, key, [arrived[i].detach() for i in wanting],  # type: ignore[no-untyped-call]
                                *(before[i] for i in wanting))
            for i, tensor in zip(wanting, joined, strict=True):
                arrived[i] = tensor
        tensors.update(zip(spec.inputs, arrived, strict=True))

    def transfer(self, key: TransferKey, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as they arrive."""
        self._transport.send(0, key, tensors)
        self._transport.post(0, key, [TensorSpec.from_tensor(tensor) for tensor in tensors])
        received: list[Tensor] = self._transport.receive(0, key)
        return received


class _CompressedCut(torch.autograd.Function):
    """Replace tensors at a cut: forward by those that arrived; backward compresses all gradients of the cut at once."""

    @staticmethod
    def forward(ctx: Any, compression: CutCompression, key: TransferKey, arrived: Sequence[Tensor],
                *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.sender = compression, key
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        compression, key = ctx.sender
        return None, None, None, *compression.transfer(key, [gradient.contiguous() for gradient in gradients])


def compare(trajectory: Trajectory, reference: Trajectory) -> Iterator[Difference]:
    """Yield the difference of every step of a run from the reference.

    Raises:
        RunError: their numbers of steps differ, or of updates of a stage.
    """
    if len(trajectory.losses) != len(reference.losses):
        raise RunError(f"the run made {len(trajectory.losses)} steps, its oracle {len(reference.losses)}", hint=_DEFECT)
    if other := sorted(trajectory.updates() ^ reference.updates()):
        update, name = other[0]
        who = "run, but not its oracle," if other[0] in trajectory.updates() else "oracle, but not the run,"
        raise RunError(f"the {who} made update {update} of {name}", hint=_DEFECT)
    for step, updates in enumerate(reference.step_updates):
        weight, largest = None, 0.0
        for update, name in updates:
            difference = _largest(trajectory.values[update][name], reference.values[update][name])
            if difference > largest:
                weight, largest = name, difference
        loss, norm = trajectory.losses[step], trajectory.norm(updates)
        theirs = reference.norm(updates)
        off = 0.0 if not math.isfinite(norm) and not math.isfinite(theirs) else _relative(norm, theirs)
        yield Difference(step, loss, norm, _relative(loss, reference.losses[step]), off, largest, weight)


def microbatches_of_step(schedule: Schedule) -> int:
    """Return how many microbatches make a step: without a flush, the fewest that are whole updates of every stage."""
    replicas = 1 if schedule.flush else math.lcm(*(len(ranks) for ranks in schedule.placement))
    return schedule.update_every // schedule.slices * replicas


def _versions_of_actions(schedule: Schedule, microbatches: int) -> Versions:
    if schedule.stream:
        schedule = build(schedule.name, schedule.placement, microbatches, schedule.update_every,
                         warmup=schedule.warmup)
    used = schedule.versions_used
    return lambda microbatch, stage, widths, every: used[stage, microbatch]


def _turn(schedule: Schedule) -> Turn | None:
    """Return the order in which a schedule completes the microbatches of every stage; None where that is the order of
    plain PyTorch: that of the microbatches, of each from its last slice on."""
    places, plain = dict[tuple[int, int], int](), True
    for program in schedule.programs:
        latest: dict[int, tuple[int, int]] = {}
        for place, action in enumerate(program):
            if action.op.completes:
                microbatch, part = divmod(action.index, schedule.slices)
                plain = plain and (microbatch, -part) >= latest.get(action.stage, (0, -schedule.slices))
                latest[action.stage], places[action.stage, action.index] = (microbatch, -part), place
    return None if plain else lambda stage, microbatch, part: places[stage, microbatch * schedule.slices + part]


def _largest(ours: Tensor, theirs: Tensor) -> float:
    if torch.equal(ours, theirs):
        return 0.0
    difference = float((ours - theirs).abs().max())
    return math.inf if math.isnan(difference) else difference


def _relative(ours: float, theirs: float) -> float:
    return 0.0 if ours == theirs else abs(ours - theirs) / max(abs(theirs), 1e-30)
