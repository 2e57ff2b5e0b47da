"""One rank at work: carries out the actions of its program on its stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from vpipe.distributed.watchdog import announce, at_work, work
from vpipe.errors import RunError, UserError, VpipeError
from vpipe.model.split import Ties
from vpipe.runtime.activations import DropoutKey, Record
from vpipe.runtime.batch_comparison import BatchComparison
from vpipe.runtime.layer_errors import hint_of
from vpipe.runtime.loss_scaler import Scaling
from vpipe.runtime.microbatches import Segment, Signature
from vpipe.runtime.optimizer_step import Update, Updates
from vpipe.runtime.p2p import SCALE, Neighbours
from vpipe.runtime.stage import Stage
from vpipe.runtime.tied_weights import TiedWeights
from vpipe.runtime.transport.transport import Key, Transport
from vpipe.runtime.usage import StageUsage, peak_memory_bytes
from vpipe.schedules.action import COMPUTE, RECEIVES, RETURNS, SENDS, Action, Op
from vpipe.schedules.size import Placement

VersionOf = Callable[[int, int], int]
"""(owning stage, microbatch) -> version of its tied weights, both counted within the segment."""

IsSplit = Callable[[int, int], bool]
"""(stage, microbatch) -> whether its backward comes in two halves."""


class Given(NamedTuple):
    """What a forward is given, and the shapes of the batch that it comes from; ``pins`` are the weight versions in
    use, None in an evaluation."""

    received: list[Tensor]
    fields: dict[str, Tensor]
    signature: Signature
    key: DropoutKey
    pins: dict[int, int] | None


class Worker:
    """The runtime of one rank.

    Every store (records, tensors on their way, pins) is empty again at the end of a segment.
    """

    def __init__(self, rank: int, placement: Placement, stages: Mapping[int, Stage], update: Update,
                 ties: Ties, transport: Transport, factor: Callable[[int], float],
                 comparison: BatchComparison | None = None) -> None:
        """``factor`` tells the learning rate of a step, relative to the optimizer's own; ``comparison`` is there where
        other processes read batches, too."""
        self.rank, self.stages, self.transport, self.update = rank, stages, transport, update
        self._own_scales = update.own_scales
        self.tied = TiedWeights(ties, placement, stages, transport, self._own_scales)
        self._neighbours = Neighbours(transport, scales=self._own_scales is not None)
        self.updates = Updates(rank, placement, stages, update, self.tied, transport, factor)
        self.comparison = comparison
        self._last = len(placement) - 1
        self.records: dict[tuple[int, int], Record] = {}
        self.losses: dict[int, Tensor] = {}  # of the last stage, by microbatch
        self._activations = dict.fromkeys(stages, 0)
        self.seconds: dict[tuple[int, Op], float] = defaultdict(float)  # by stage
        self.peak_activations = dict.fromkeys(stages, 0)
        self._staleness = dict.fromkeys(stages, 0)
        self.segment: Segment
        self._version_of: VersionOf
        self.is_split: IsSplit
        self.operations: dict[Op, Callable[[int, int], None]] = {
            Op.FORWARD: self._forward, Op.BACKWARD: self._backward, Op.RECOMPUTE: self._recompute,
            Op.INPUT: self._input_half, Op.WEIGHT: self._weight_half,
            Op.REDUCE: self._reduce, Op.NORM: self.updates.norm, Op.STEP: self.updates.step,
            Op.USE: self.updates.use,
            Op.SEND_F: self._neighbours.send_forward, Op.RECV_F: self._post_forward,
            Op.SEND_B: self._neighbours.send_backward, Op.RECV_B: self._neighbours.post_backward,
            Op.SEND_W: self.tied.send_version, Op.RECV_W: self.tied.post_version,
            Op.SEND_G: self.tied.send_gradients, Op.RECV_G: self.tied.post_gradients}

    # -- what the engine calls -------------------------------------------------------------------------

    def begin(self, segment: Segment, version_of: VersionOf, is_split: IsSplit) -> None:
        """What the following actions are about: versions of borrowed weights, and which microbatches are split."""
        self.segment, self._version_of, self.is_split = segment, version_of, is_split
        if segment.training:
            for stage in self.stages.values():
                stage.check_frozen()
        self.updates.begin(segment)
        self.tied.begin(segment.rounds)
        self._neighbours.begin(segment)
        if self.comparison is not None:
            self.comparison.begin(segment)

    def execute(self, action: Action) -> None:
        """Carry out one action; a failure is raised with the rank, the stage, the microbatch and the action."""
        waited, started = self.transport.wait_s, perf_counter()
        work.now = action, started
        try:
            self.operations[action.op](action.stage, action.microbatch)
        except RunError as error:
            self._failed(error, action)
            raise
        except VpipeError as error:
            work.rest()
            announce(error)
            raise
        except Exception as error:
            who = "the optimizer step raised " if action.op is Op.STEP else ""
            failure = RunError(f"{who}{type(error).__name__}: {error}", hint=hint_of(error))
            self._failed(failure, action)
            raise failure from error
        self.seconds[action.stage, action.op] += perf_counter() - started - (self.transport.wait_s - waited)

    def waits_for(self, action: Action) -> str | None:
        """What an action lacks, in words; None when it can be carried out without waiting."""
        for peer, key in self._needs(action):
            if not self._ready(peer, key):
                return f"{key} from rank {peer}"
        return self.updates.norms_awaited(action.stage, action.microbatch) if action.op is Op.STEP else None

    def _ready(self, peer: int, key: Key) -> bool:
        if key.kind in "WG":
            return self.tied.ready(peer, key)
        return self._neighbours.ready(peer, key)

    def end(self) -> None:
        """Take in the tied weights still on their way, then check that nothing is left over."""
        self.tied.install_all()
        for stage in self.stages.values():
            stage.weights.choose(None)
        self.transport.finish()
        stores = {"records": self.records, **self._neighbours.stores()}
        left = [name for name, store in stores.items() if store]
        left += [f"pinned weights of stage {s}" for s, stage in self.stages.items()
                 for weights in (stage.weights, *stage.borrowed.values()) if weights.pinned]
        if left:
            raise RunError(f"left over at the end of a segment: {', '.join(left)}", rank=self.rank,
                           hint="this is a defect of the schedule or of vpipe: please report it")

    def abandon(self) -> None:
        """Drop all that is left of a segment that failed before any stage of this process made a step."""
        self.records.clear()
        self.losses.clear()
        self._activations = dict.fromkeys(self.stages, 0)
        for part in (self._neighbours, self.tied, self.updates, self.transport):
            part.abandon()
        for stage in self.stages.values():
            for weights in (stage.weights, *stage.borrowed.values()):
                weights.abandon()

    def forget_batches(self, microbatches: range) -> None:
        """A step of training, or a round of an evaluation, is done with these."""
        if self.comparison is not None:
            self.comparison.compare_replicas(microbatches)
            self.comparison.forget(microbatches.stop)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Modules in evaluation mode, and time that does not count as training's."""
        counted = dict(self.seconds), self.transport.wait_s, self.transport.bytes_sent
        try:
            with ExitStack() as stack:
                for stage in self.stages.values():
                    stack.enter_context(stage.evaluating())
                stack.enter_context(at_work("evaluating"))
                yield
        finally:
            self.seconds.clear()
            self.seconds.update(counted[0])
            self.transport.wait_s, self.transport.bytes_sent = counted[1:]

    def usage(self, stage: int) -> StageUsage:
        """Where the time of training went so far; transfers, waiting and memory are those of the whole rank."""

        def spent(*ops: Op) -> float:
            return sum(self.seconds[stage, op] for op in ops)

        return StageUsage(
            forward_s=spent(Op.FORWARD), backward_s=spent(Op.BACKWARD, Op.INPUT, Op.WEIGHT, Op.RECOMPUTE),
            step_s=spent(Op.STEP, Op.NORM),
            communication_s=sum(seconds for (_, op), seconds in self.seconds.items()
                                if op in SENDS | RECEIVES or op is Op.REDUCE),
            # Over nccl a stream waits, which the host does not see.
            idle_s=math.nan if self.transport.ordered and self.stages[stage].device.type != "cpu" else
            self.transport.wait_s, bytes_sent=self.transport.bytes_sent,
            versions=self.stages[stage].weights.most_held, staleness=self._staleness[stage],
            peak_activations=self.peak_activations[stage],
            peak_memory_bytes=peak_memory_bytes(self.stages[stage].device))

    # -- forward and backward --------------------------------------------------------------------------

    def _forward(self, stage_index: int, microbatch: int) -> None:
        given, stage = self._begin_forward(stage_index, microbatch), self.stages[stage_index]
        if given.pins is None:
            self._end_forward(stage_index, microbatch, given,
                              stage.evaluate(given.received, given.fields, given.key))
        else:
            outputs, record = stage.forward(given.received, given.fields, given.key, given.pins,
                                            split=self.is_split(stage_index, microbatch))
            self._end_forward(stage_index, microbatch, given, outputs, record)

    def _post_forward(self, stage_index: int, microbatch: int) -> None:
        if self.comparison is not None:
            self.comparison.post(stage_index, microbatch)
        self._neighbours.post_forward(stage_index, microbatch)

    def _begin_forward(self, stage_index: int, microbatch: int) -> Given:
        segment, stage = self.segment, self.stages[stage_index]
        number, signature = segment.number(microbatch), segment.signature(microbatch)
        # What needs no activations comes before waiting for them.
        fields = {name: value.to(stage.device, non_blocking=True) for name, value in
                  segment.feed.take(segment.first + microbatch).items() if name in stage.spec.fields}
        if self.comparison is not None:
            self.comparison.compare(stage_index, microbatch)
        key = (number // segment.every, number % segment.every)
        if segment.training:
            versions = {owner: self._version_of(owner, microbatch) for owner in stage.borrowed}
            for owner, version in versions.items():
                self.tied.install(owner, version)
            pins = stage.pin({owner: self.tied.version(owner, version) for owner, version in versions.items()})
            return Given(self._neighbours.take_activations(stage_index, microbatch), fields, signature, key, pins)
        stage.use_latest()
        return Given(self._neighbours.take_activations(stage_index, microbatch), fields, signature,
                     (-1 - key[0], key[1]), None)

    def _end_forward(self, stage_index: int, microbatch: int, given: Given, outputs: list[Tensor],
                     record: Record | None = None) -> None:
        if record is not None:
            self.records[stage_index, microbatch] = record
            self._activations[stage_index] += 1
            self.peak_activations[stage_index] = max(self.peak_activations[stage_index],
                                                     self._activations[stage_index])
        if stage_index == self._last:
            self._keep_loss(self.segment.number(microbatch), outputs[0])
            if record is not None and not outputs[0].requires_grad:
                self._check_loss_may_be_constant(stage_index, microbatch, given)
            return
        self._neighbours.pass_activations(stage_index, microbatch, given.signature,
                                          self.stages[stage_index].spec.outputs, outputs)

    def _check_loss_may_be_constant(self, stage_index: int, microbatch: int, given: Given) -> None:
        """Refuse a loss without a gradient where one could have flowed back: nothing would be trained."""
        stage = self.stages[stage_index]
        if stage.weights.names or stage.borrowed or any(tensor.requires_grad for tensor in given.received):
            raise UserError(f"the loss of microbatch {self.segment.number(microbatch)} has no gradient: it does not "
                            "depend on any parameter", hint="compute it from what the layers return, without "
                                                            "detach(), item() or torch.no_grad()")

    def _keep_loss(self, number: int, loss: Tensor) -> None:
        if loss.numel() != 1:
            last, name = list(self.stages[self._last].layer_names.items())[-1]
            raise UserError(f"the loss of layer {last} '{name}' has shape {list(loss.shape)} for microbatch {number}",
                            hint="the last layer must return one number: the mean over its samples")
        self.losses[number] = loss.detach()

    def _backward(self, stage_index: int, microbatch: int) -> None:
        stage, record = self.stages[stage_index], self.records.pop((stage_index, microbatch))
        gradients = self._begin_return(stage_index, microbatch, record)
        with self._completing(stage_index, microbatch, whole=not record.split):
            returned = (stage.backward(record, gradients) if self._own_scales is None
                        else self._watched(stage, record, gradients, self._own_scales))
        stage.unpin(record.pins)
        self._end_return(stage_index, microbatch, returned)

    def _input_half(self, stage_index: int, microbatch: int) -> None:
        record = self.records[stage_index, microbatch]
        gradients = self._begin_return(stage_index, microbatch, record)
        self._end_return(stage_index, microbatch, self.stages[stage_index].backward_input(record, gradients))

    def _weight_half(self, stage_index: int, microbatch: int) -> None:
        stage, record = self.stages[stage_index], self.records.pop((stage_index, microbatch))
        stage.prepare_backward(record.pins)
        with self._completing(stage_index, microbatch, whole=False):
            stage.backward_weight(record)
        stage.unpin(record.pins)

    def _watched(self, stage: Stage, record: Record, gradients: Mapping[str, Tensor], scales: Scaling) -> list[Tensor]:
        """A backward, where stages differ in their scales: it is seen whether all that leaves the stage is finite."""
        with ExitStack() as alone:
            borrowed = stage.borrowed.values()
            for weights in borrowed:
                alone.enter_context(weights.added_at_once(weights.names))
            returned = stage.backward(record, gradients)
            lent = [gradient for weights in borrowed for gradient in weights.gradients if gradient is not None]
            scales.watch(stage.spec.index, [*returned, *lent])
        return returned

    def _completing(self, stage_index: int, microbatch: int, whole: bool) -> AbstractContextManager[None]:
        """While weight gradients are made; ``whole``: by a backward that is not in two halves."""
        return self.updates.completing(stage_index, microbatch, whole)

    def _reduce(self, stage_index: int, update: int) -> None:
        if self.comparison is not None and stage_index == self._last:
            self.comparison.compare_replicas(self.segment.rounds.of_update(stage_index, update))
        self.updates.reduce(stage_index, update)

    def _recompute(self, stage_index: int, microbatch: int) -> None:
        self.stages[stage_index].recompute(self.records[stage_index, microbatch])

    def _begin_return(self, stage_index: int, microbatch: int, record: Record) -> dict[str, Tensor]:
        """Get a stage ready for a gradient to pass through it; the gradients of its outputs, by name."""
        stage, number = self.stages[stage_index], self.segment.number(microbatch)
        staleness = stage.weights.latest - record.pins[stage_index]
        self._staleness[stage_index] = max(self._staleness[stage_index], staleness)
        stage.prepare_backward(record.pins)
        if stage_index == self._last:
            loss = self.losses[number]
            scale = 1 if self.update.scaling is None else self.update.scaling[stage_index].value
            share = torch.full_like(loss, scale / self.segment.every)
            # So every stage sees it in its gradients, also where the backward alone would give finite ones.
            return {"loss": share.masked_fill_(~loss.isfinite(), math.nan) if self.update.skip else share}
        gradients = self._neighbours.take_gradients(stage_index, microbatch)
        if self._own_scales is not None:
            factor = self._own_scales.factor(stage_index, float(gradients.pop(SCALE)))
            if factor != 1:
                gradients = {name: gradient * factor for name, gradient in gradients.items()}
        return gradients

    def _end_return(self, stage_index: int, microbatch: int, returned: list[Tensor]) -> None:
        self._activations[stage_index] -= 1
        if stage_index > 0:
            if self._own_scales is not None:
                returned = [*returned, self._own_scales.sent(stage_index, self.stages[stage_index].device)]
            self._neighbours.pass_gradients(stage_index, microbatch, returned)

    # -- what is awaited, what failed ------------------------------------------------------------------

    def _needs(self, action: Action) -> Iterator[tuple[int, Key]]:
        """The transfers that an action takes, with the rank they come from."""
        stage, index = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            if stage > 0:
                yield self._neighbours.activations(stage, index)
            if self.segment.training:
                for owner in self.stages[stage].borrowed:
                    yield from self.tied.versions_needed(owner, self._version_of(owner, index))
        elif action.op in RETURNS and stage < self._last:
            yield self._neighbours.gradients(stage, index)
        else:
            yield from self.updates.needs(action)

    def _failed(self, error: RunError, action: Action) -> None:
        """Add to an error where it happened, and let all ranks know of it."""
        work.rest()
        error.rank, error.stage, error.action = self.rank, action.stage, str(action)
        if action.op in COMPUTE:
            error.microbatch = self.segment.number(action.microbatch)
            error.action += "" if self.segment.training else " of an evaluation"
        announce(error)
