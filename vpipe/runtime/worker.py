"""One rank at work: carries out the actions of its program on its stages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from vpipe.errors import RunError, UserError, VpipeError
from vpipe.model.split import Ties
from vpipe.runtime.feed import Feed, Signature
from vpipe.runtime.record import Record
from vpipe.runtime.stage import Stage
from vpipe.runtime.tied import TiedWeights
from vpipe.runtime.transport import Key, Spec, Transport
from vpipe.runtime.update import Update
from vpipe.runtime.usage import StageUsage, peak_memory_bytes
from vpipe.schedules.action import RECEIVES, RETURNS, SENDS, Action, Op
from vpipe.schedules.size import Placement

VersionOf = Callable[[int, int], int]
"""(owning stage, microbatch) -> version of its tied weights, both counted within the segment."""

IsSplit = Callable[[int, int], bool]
"""(stage, microbatch) -> whether its backward comes in two halves."""


class Observer(Protocol):
    """Sees what every update does to a stage: for comparison with an oracle."""

    def gradients(self, update: int, named: Mapping[str, Tensor | None]) -> None:
        """The gradients about to be applied, before clipping."""

    def weights(self, update: int, named: Mapping[str, Tensor]) -> None:
        """The weights that the update made; they must not be kept but as copies."""


@dataclass
class Segment:
    """A stretch of work from an empty pipeline to an empty pipeline.

    Attributes:
        feed: where microbatches come from.
        first: the feed's number of the segment's microbatch 0.
        base: the run's number of the segment's microbatch 0, counted over all training.
        every: microbatches per update.
        training: False for forward only.
    """

    feed: Feed
    first: int
    base: int
    every: int
    training: bool


class Worker:
    """The runtime of one rank.

    Every store (records, tensors on their way, pins) is empty again at the end of a segment.
    """

    def __init__(self, rank: int, placement: Placement, stages: Mapping[int, Stage], update: Update,
                 ties: Ties, transport: Transport) -> None:
        self.rank, self.stages, self.transport, self.update = rank, stages, transport, update
        self._placement = placement
        self.tied = TiedWeights(ties, placement, stages, transport)
        self._last = len(placement) - 1
        self._records: dict[tuple[int, int], Record] = {}
        self._arrived: dict[Key, list[Tensor]] = {}  # from a stage on this same rank
        self._leaving: dict[Key, list[Tensor]] = {}
        self._shapes: dict[Key, Signature] = {}  # of the batch that the activations about to leave come from
        self._returning: dict[tuple[int, int], tuple[list[str], list[Spec]]] = {}  # gradients that will come back
        self._incoming: dict[tuple[int, bool, Signature], list[Spec]] = {}
        # Receives in order, by stage: the first one's shapes are being announced, the others are posted after it.
        self._queued: dict[int, deque[tuple[Key, tuple[int, bool, Signature]]]] = defaultdict(deque)
        self._announced: dict[tuple[int, bool, Signature], list[Spec]] = {}
        self.losses: dict[int, Tensor] = {}  # of the last stage, by microbatch
        self._activations = dict.fromkeys(stages, 0)
        self.observer: Observer | None = None
        self.seconds: dict[tuple[int, Op], float] = defaultdict(float)  # by stage
        self.peak_activations = dict.fromkeys(stages, 0)
        self._staleness = dict.fromkeys(stages, 0)
        self._segment: Segment
        self._version_of: VersionOf
        self._is_split: IsSplit
        self._operations: dict[Op, Callable[[int, int], None]] = {
            Op.FORWARD: self._forward, Op.BACKWARD: self._backward, Op.STEP: self._step, Op.NORM: self._norm,
            Op.INPUT: self._input_half, Op.WEIGHT: self._weight_half, Op.RECOMPUTE: self._recompute, Op.USE: self._use,
            Op.SEND_F: self._send_forward, Op.RECV_F: self._post_forward,
            Op.SEND_B: self._send_backward, Op.RECV_B: self._post_backward,
            Op.SEND_W: self._numbered(self.tied.send_version), Op.RECV_W: self._numbered(self.tied.post_version),
            Op.SEND_G: self._numbered(self.tied.send_gradients), Op.RECV_G: self._numbered(self.tied.post_gradients)}

    # -- what the engine calls -------------------------------------------------------------------------

    def begin(self, segment: Segment, version_of: VersionOf, is_split: IsSplit) -> None:
        """What the following actions are about: versions of borrowed weights, and which microbatches are split."""
        self._segment, self._version_of, self._is_split = segment, version_of, is_split

    def execute(self, action: Action) -> None:
        """Carry out one action; a failure is raised with the rank, the stage and the action."""
        waited, started = self.transport.wait_s, perf_counter()
        try:
            self._operations[action.op](action.stage, action.microbatch)
        except RunError as error:
            raise self._failed(error.what, error.hint, action, error.peer) from error
        except VpipeError:
            raise
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}", "the log of the rank has the traceback",
                               action) from error
        self.seconds[action.stage, action.op] += perf_counter() - started - (self.transport.wait_s - waited)

    def waits_for(self, action: Action) -> str | None:
        """What an action lacks, in words; None when it can be carried out without waiting."""
        for peer, key in self._needs(action):
            if key not in self._arrived and not self._ready(peer, key):
                return f"{key} from rank {peer}"
        if action.op is Op.STEP and not self.update.ready(self.transport, self._update_number(action.microbatch)):
            return f"the gradient norms of update {self._update_number(action.microbatch)}"
        return None

    def _ready(self, peer: int, key: Key) -> bool:
        if key.kind in "WG":
            return self.tied.ready(peer, key)
        return peer != self.rank and self.transport.ready(peer, key)

    def end(self) -> None:
        """Take in the tied weights still on their way, then check that nothing is left over."""
        self.tied.install_all()
        for stage in self.stages.values():
            stage.weights.choose(None)
        self.transport.finish()
        stores = {"records": self._records, "arrived tensors": self._arrived, "unsent tensors": self._leaving,
                  "expected gradients": self._returning,
                  "receives of unknown shape": [key for queue in self._queued.values() for key in queue]}
        left = [name for name, store in stores.items() if store]
        left += [f"pinned weights of stage {s}" for s, stage in self.stages.items()
                 for weights in (stage.weights, *stage.borrowed.values()) if weights.pinned]
        if left:
            raise RunError(f"left over at the end of a segment: {', '.join(left)}", rank=self.rank,
                           hint="this is a defect of the schedule or of vpipe: please report it")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Modules in evaluation mode, and time that does not count as training's."""
        counted = dict(self.seconds), self.transport.wait_s, self.transport.bytes_sent
        with ExitStack() as stack:
            for stage in self.stages.values():
                stack.enter_context(stage.evaluating())
            yield
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
            communication_s=sum(seconds for (_, op), seconds in self.seconds.items() if op in SENDS | RECEIVES),
            idle_s=self.transport.wait_s, bytes_sent=self.transport.bytes_sent,
            versions=self.stages[stage].weights.most_held, staleness=self._staleness[stage],
            peak_activations=self.peak_activations[stage],
            peak_memory_bytes=peak_memory_bytes(self.stages[stage].device))

    # -- forward and backward --------------------------------------------------------------------------

    def _forward(self, stage_index: int, microbatch: int) -> None:
        segment, stage = self._segment, self.stages[stage_index]
        number, signature = self._number(microbatch), self._signature(microbatch)
        # What needs no activations comes before waiting for them.
        fields = {name: value.to(stage.device, non_blocking=True) for name, value in
                  segment.feed.take(segment.first + microbatch).items() if name in stage.spec.fields}
        key = (number // segment.every, number % segment.every)
        if segment.training:
            versions = {owner: self._version_for(owner, microbatch) for owner in stage.borrowed}
            for owner, version in versions.items():
                self.tied.install(owner, version)
            pins = stage.pin(versions)
            received = self._take_activations(stage_index, number)
            outputs, record = stage.forward(received, fields, key, pins,
                                            split=self._is_split(stage_index, microbatch))
            self._records[stage_index, microbatch] = record
            self._activations[stage_index] += 1
            self.peak_activations[stage_index] = max(self.peak_activations[stage_index],
                                                     self._activations[stage_index])
        else:
            stage.use_latest()
            received = self._take_activations(stage_index, number)
            outputs = stage.evaluate(received, fields, (-1 - key[0], key[1]))
        if stage_index == self._last:
            self._keep_loss(number, outputs[0])
            return
        if segment.training:
            wanted = [(name, Spec.of(t)) for name, t in zip(stage.spec.outputs, outputs, strict=True)
                      if t.requires_grad]
            self._returning[stage_index, microbatch] = ([n for n, _ in wanted], [spec for _, spec in wanted])
        key_out = Key("F", stage_index + 1, number)
        self._pass_on(key_out, microbatch, outputs)
        if key_out in self._leaving:
            self._shapes[key_out] = signature

    def _keep_loss(self, number: int, loss: Tensor) -> None:
        if loss.numel() != 1:
            raise UserError(f"the loss of microbatch {number} has shape {list(loss.shape)}",
                            hint="the last layer must return one number: the mean over its samples")
        self.losses[number] = loss.detach()

    def _backward(self, stage_index: int, microbatch: int) -> None:
        stage, record = self.stages[stage_index], self._records.pop((stage_index, microbatch))
        returned = stage.backward(record, self._begin_return(stage_index, microbatch, record))
        stage.unpin(record.pins)
        self._end_return(stage_index, microbatch, returned)

    def _input_half(self, stage_index: int, microbatch: int) -> None:
        record = self._records[stage_index, microbatch]
        gradients = self._begin_return(stage_index, microbatch, record)
        self._end_return(stage_index, microbatch, self.stages[stage_index].backward_input(record, gradients))

    def _weight_half(self, stage_index: int, microbatch: int) -> None:
        stage, record = self.stages[stage_index], self._records.pop((stage_index, microbatch))
        stage.prepare_backward(record.pins)
        stage.backward_weight(record)
        stage.unpin(record.pins)

    def _recompute(self, stage_index: int, microbatch: int) -> None:
        self.stages[stage_index].recompute(self._records[stage_index, microbatch])

    def _begin_return(self, stage_index: int, microbatch: int, record: Record) -> dict[str, Tensor]:
        """Get a stage ready for a gradient to pass through it; the gradients of its outputs, by name."""
        stage, number = self.stages[stage_index], self._number(microbatch)
        staleness = stage.weights.latest - record.pins[stage_index]
        self._staleness[stage_index] = max(self._staleness[stage_index], staleness)
        stage.prepare_backward(record.pins)
        if stage_index == self._last:
            return {"loss": torch.full_like(self.losses[number], 1 / self._segment.every)}
        names, _ = self._returning.pop((stage_index, microbatch))
        return dict(zip(names, self._take(self._rank_of(stage_index + 1, microbatch), Key("B", stage_index, number)),
                        strict=True))

    def _end_return(self, stage_index: int, microbatch: int, returned: list[Tensor]) -> None:
        self._activations[stage_index] -= 1
        if stage_index > 0:
            self._pass_on(Key("B", stage_index - 1, self._number(microbatch)), microbatch, returned)

    def _pass_on(self, key: Key, microbatch: int, tensors: list[Tensor]) -> None:
        here = self._rank_of(key.stage, microbatch) == self.rank
        (self._arrived if here else self._leaving)[key] = tensors

    # -- transfers between stages ----------------------------------------------------------------------

    def _send_forward(self, stage: int, microbatch: int) -> None:
        key = Key("F", stage + 1, self._number(microbatch))
        tensors = self._leaving.pop(key)
        specs = [Spec.of(t) for t in tensors]
        seen = (key.stage, self._segment.training, self._shapes.pop(key))
        known = self._announced.setdefault(seen, specs)
        if known != specs:
            raise UserError(f"stage {stage} sends {', '.join(map(str, specs))} for microbatch {key.number}, but sent "
                            f"{', '.join(map(str, known))} for another with fields of the same shapes",
                            hint="shapes between stages must follow from the shapes of the batch: pad where they "
                                 "depend on the values")
        self.transport.send(self._rank_of(key.stage, microbatch), key, tensors, announce=known is specs)

    def _post_forward(self, stage: int, microbatch: int) -> None:
        key = Key("F", stage, self._number(microbatch))
        seen, queue = (stage, self._segment.training, self._signature(microbatch)), self._queued[stage]
        specs = self._incoming.get(seen)
        if not queue:
            self.transport.post(self._rank_of(stage - 1, microbatch), key, specs)
        if queue or specs is None:
            queue.append((key, seen))

    def _take_activations(self, stage: int, number: int) -> list[Tensor]:
        """What the stage before made; nothing where the pipeline begins."""
        if stage == 0:
            return []
        key, queue = Key("F", stage, number), self._queued[stage]
        peer = self._rank_of(stage - 1, number - self._segment.base)
        while any(key == queued for queued, _ in queue):
            self._learn_shapes(peer, queue)
        return self._take(peer, key)

    def _learn_shapes(self, peer: int, queue: deque[tuple[Key, tuple[int, bool, Signature]]]) -> None:
        """Wait for the announcement at the head of the queue; post what it held up, up to the next unknown shapes.

        In the order of the program, which is that of sending: a transport without tags knows no other.
        """
        key, seen = queue.popleft()
        self._incoming[seen] = self.transport.learn(peer, key)
        while queue:
            key, seen = queue[0]
            specs = self._incoming.get(seen)
            self.transport.post(peer, key, specs)
            if specs is None:
                return
            queue.popleft()

    def _send_backward(self, stage: int, microbatch: int) -> None:
        key = Key("B", stage - 1, self._number(microbatch))
        self.transport.send(self._rank_of(key.stage, microbatch), key, self._leaving.pop(key))

    def _post_backward(self, stage: int, microbatch: int) -> None:
        _, specs = self._returning[stage, microbatch]
        self.transport.post(self._rank_of(stage + 1, microbatch), Key("B", stage, self._number(microbatch)),
                            [Spec(spec.shape, spec.dtype, wants_gradient=False) for spec in specs])

    def _take(self, peer: int, key: Key) -> list[Tensor]:
        return self._arrived.pop(key) if key in self._arrived else self.transport.take(peer, key)

    # -- updates ---------------------------------------------------------------------------------------

    def _norm(self, stage: int, update: int) -> None:
        self.tied.add_gradients(stage, self._update_number(update))
        self.update.publish_norms(self.transport, stage, self.stages[stage].weights, self._update_number(update))

    def _step(self, stage: int, update: int) -> None:
        weights, number = self.stages[stage].weights, self._update_number(update)
        if not self.update.global_norm:
            self.tied.add_gradients(stage, number)
        if self.observer is not None:
            self.observer.gradients(number, dict(zip(weights.names, weights.gradients, strict=True)))
        self.update.step(self.transport, stage, weights, number)
        if self.observer is not None:
            self.observer.weights(number, dict(zip(weights.names, weights.values(weights.names), strict=True)))

    def _use(self, stage: int, version: int) -> None:
        self.stages[stage].weights.choose(self._update_number(version))

    # -- names and numbers -----------------------------------------------------------------------------

    def _needs(self, action: Action) -> Iterator[tuple[int, Key]]:
        """The transfers that an action takes, with the rank they come from."""
        stage, index = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            if stage > 0:
                yield self._rank_of(stage - 1, index), Key("F", stage, self._number(index))
            if self._segment.training:
                for owner in self.stages[stage].borrowed:
                    yield from self.tied.versions_needed(owner, self._version_for(owner, index))
        elif action.op in RETURNS and stage < self._last:
            yield self._rank_of(stage + 1, index), Key("B", stage, self._number(index))
        elif action.op is (Op.NORM if self.update.global_norm else Op.STEP):
            yield from self.tied.gradients_needed(stage, self._update_number(index))

    def _rank_of(self, stage: int, microbatch: int) -> int:
        ranks = self._placement[stage]
        return ranks[microbatch % len(ranks)]

    def _number(self, microbatch: int) -> int:
        return self._segment.base + microbatch

    def _version_for(self, owner: int, microbatch: int) -> int:
        """The version of the owner's weights that a microbatch uses."""
        return self._update_number(self._version_of(owner, microbatch))

    def _numbered(self, operation: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """The operation with the run's number of an update or version instead of the segment's."""
        return lambda stage, index: operation(stage, self._update_number(index))

    def _update_number(self, update: int) -> int:
        return self._segment.base // self._segment.every + update

    def _signature(self, microbatch: int) -> Signature:
        return self._segment.feed.signature(self._segment.first + microbatch)

    def _failed(self, what: str, hint: str, action: Action, peer: int | None = None) -> RunError:
        return RunError(what, hint=hint, rank=self.rank, stage=action.stage, action=str(action), peer=peer)
