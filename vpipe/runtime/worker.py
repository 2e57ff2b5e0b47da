"""Execute the actions of one rank's program on its stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.distributed.fault import may_follow
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError, VpipeError
from vpipe.runtime.activations import Record, SpanActivations
from vpipe.runtime.fully_sharded import FullyShardedStages
from vpipe.runtime.layer_errors import hint_of
from vpipe.runtime.microbatches import ForwardKey, Segment, Signature
from vpipe.runtime.optimizer_step import OptimizerSteps
from vpipe.runtime.outputs import Outputs
from vpipe.runtime.p2p import P2PTransfers
from vpipe.runtime.stage import NO_TENSORS, NOTHING, Stage
from vpipe.runtime.stage_usage import StageUsage, peak_memory_bytes
from vpipe.runtime.tied_weights import TiedWeights
from vpipe.runtime.transport.transport import TransferKind, Transport
from vpipe.runtime.values import LOSS, WANTED
from vpipe.schedules import kinds
from vpipe.schedules.kinds import CARRIED, CARRIED_GRADIENT, HALF, OFFLOADED, SAVED, Action, Kind, Op
from vpipe.schedules.schedule import Schedule

Around = Callable[[Action, Callable[[], None]], None]
"""Executes an action by the function that it is given, with something before or after."""


class ForwardInputs(NamedTuple):
    """Inputs of a forward.

    Attributes:
        pins: the weight versions in use; None in an evaluation.
    """

    received: list[Tensor]
    fields: dict[str, Tensor]
    signature: Signature
    key: ForwardKey
    pins: dict[int, int] | None


def check_runnable(present: Collection[Kind]) -> None:
    """Refuse kinds of packages whose functions cannot be found.

    Raises:
        UserError: the module or the function does not exist.
    """
    for kind in sorted(kind for kind in present if not kind.is_own):
        try:
            resolve_name(kind.runs)
        except (ImportError, AttributeError) as error:
            raise UserError(f"an action {kind} is run by {kind.runs}, which cannot be found: {error}",
                            hint="give the kind runs='module:function' of a module that Python finds") from None


class Worker:
    """Execute the actions of one rank. What they make is in its :attr:`values`; none is left at the end of a segment.

    This is the executor ``overlapped``. Another executor is a subclass (:class:`~vpipe.description.Executor`): it adds
    to ``around``, or overrides the parts of a forward and a backward that have public names.

    Attributes:
        values: that actions have made, and others will take.
        around: functions that each action is given to, with a function that executes it; the last one is outermost.

    Args:
        stages: of this rank.
        steps: of their optimizers.
        tied: weights of these stages that other stages share.
        transport: of the rank.
        p2p: transfers between these stages and their neighbours.
        fully_sharded: these stages where lanes share out their weights.
        schedule: of the pipeline.
    """

    def __init__(self, stages: Mapping[int, Stage], steps: OptimizerSteps, tied: TiedWeights, transport: Transport,
                 p2p: P2PTransfers, fully_sharded: FullyShardedStages, schedule: Schedule) -> None:
        self.rank, self.stages, self.transport, self.optimizer_steps = transport.rank, stages, transport, steps
        self.tied, self.fully_sharded, self.last_stage = tied, fully_sharded, schedule.stages - 1
        self._split = schedule.split_backwards
        self._always_split = {stage for stage, _ in self._split} if schedule.stream else set[int]()
        self.p2p, self.values = p2p, p2p.values
        self.wanted: Outputs | None = None  # of an evaluation, beside the loss
        self._holds = False
        self.held: tuple[int, int, BaseException] | None = None  # at which microbatch and stage, and what
        self.passing = False  # whether it passes on stand-ins to the end of the segment
        self._batch: tuple[int, int] | None = None
        self._activations = dict.fromkeys(stages, 0)
        self.seconds: dict[tuple[int, Kind], float] = defaultdict(float)  # by stage
        self.peak_activations = dict.fromkeys(stages, 0)
        self._staleness = dict.fromkeys(stages, 0)
        self.segment: Segment
        self.operations = {kind: self._operation(kind) for kind in kinds.known()}
        self.around: list[Around] = []

    def _operation(self, kind: Kind) -> Callable[[int, int], None]:
        """Return the function that executes a kind of action, given a stage and an index."""
        if ":" in kind.runs:  # of a package, which is imported when it is asked for
            return lambda stage, index: resolve_name(kind.runs)(self, stage, index)
        operation: Callable[[int, int], None] = attrgetter(kind.runs)(self)
        return operation

    # -- what the interpreter calls --------------------------------------------------------------------

    def begin(self, segment: Segment, batch: tuple[int, int] | None = None) -> None:
        """Begin a segment; ``batch``: which all ranks can give up as long as none has stepped."""
        self.segment, self._batch = segment, batch
        if segment.training:
            self._holds, self.passing = batch is not None, self.held is not None
        for stage in self.stages.values():
            stage.use_autocast(segment.autocast)
        self.optimizer_steps.begin(segment)
        self.tied.begin(segment.assignment)
        self.p2p.begin(segment)

    def execute(self, action: Action) -> None:
        """Execute one action.

        Raises:
            RunError: it failed, with the rank, the stage, the microbatch and the action.
        """
        (op, stage, index), transport = action, self.transport
        waited, started = transport.wait_s, perf_counter()
        watch.activity.now = action, started
        try:
            if self.around:
                run = partial(self.operations[op], stage, index)
                for each in self.around:
                    run = partial(each, action, run)
                run()
            else:
                self.operations[op](stage, index)
        except Exception as error:
            late = op.second_half or op.recomputation or op.makes_version or op.host_bytes is not None
            if late and self._gives_up(error, action):
                return
            failure = self._as_ours(error, action)
            if not isinstance(failure, RunError):
                watch.activity.rest()
                watch.failed(failure)
                raise
            first = self.report_failure(failure, action) or failure
            if first is error:
                raise
            raise first from error
        self.seconds[stage, op] += perf_counter() - started - (transport.wait_s - waited)

    def end(self) -> None:
        """End a segment: receive the last tied weights, and check that no transfer, record or pin is left over."""
        self.tied.end(self.segment.training)
        for stage in self.stages.values():
            stage.weights.choose(None)
            stage.use_latest()
            if self.segment.training and not self.segment.assignment.flush:
                stage.check_hooks()  # that a forward has registered: with a flush the next batch sees them
        self.transport.finish()
        left = self.values.left()
        left += [f"pinned weights of stage {s}" for s, stage in self.stages.items()
                 for weights in stage.all_weights if weights.pinned]
        if left:
            raise RunError(f"left over at the end of a segment: {', '.join(left)}", rank=self.rank,
                           hint="this is a defect of the schedule or of vpipe: please report it")

    def abandon(self) -> None:
        """Drop the state of a segment that failed before any stage of this process made a step."""
        self.values.clear()
        self._activations = dict.fromkeys(self.stages, 0)
        self.p2p.forget_specs()
        for part in (self.tied, self.optimizer_steps, self.transport):
            part.abandon()
        for stage in self.stages.values():
            for weights in stage.all_weights:
                weights.abandon()

    @contextmanager
    def evaluating(self, wanted: Outputs | None, holds: bool) -> Iterator[None]:
        """Set modules to evaluation mode; keep the outputs that are wanted; count no seconds and bytes.

        Args:
            holds: whether an error of a layer is :attr:`held`, since other processes go on, as one of ``wanted`` is.
        """
        self.wanted, self._holds, self.held, self.passing = wanted, holds, None, False
        with self.uncounted(), ExitStack() as stack:
            for number, stage in self.stages.items():
                stack.enter_context(stage.evaluating())
                if number in self.fully_sharded:
                    self.fully_sharded.unshard(number)
                    stack.callback(self.fully_sharded.reshard, number)
            stack.enter_context(watch.activity.during("evaluating"))
            try:
                yield
            except BaseException:
                self.values.clear()
                self.held = None
                self.p2p.forget_specs()
                raise

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no seconds and bytes meanwhile."""
        counted = dict(self.seconds), self.transport.wait_s, self.transport.bytes_sent
        try:
            yield
        finally:
            self.seconds.clear()
            self.seconds.update(counted[0])
            self.transport.wait_s, self.transport.bytes_sent = counted[1:]

    def usage(self, stage: int) -> StageUsage:
        """Return a stage's figures of training so far; transfers, waiting and memory are those of the whole rank."""
        own = {op: seconds for (index, op), seconds in self.seconds.items() if index == stage}
        return StageUsage(
            forward_s=own.get(Op.FORWARD, 0.0),
            backward_s=sum(seconds for op, seconds in own.items()
                           if op.computes and op is not Op.FORWARD and op.is_own),
            step_s=sum(own.get(op, 0.0) for op in (Op.STEP, Op.NORM)),
            communication_s=sum(seconds for (_, op), seconds in self.seconds.items()
                                if op.transfer is not None or op.summed or op.host_bytes is not None),
            # Over nccl a stream waits, which the host does not measure.
            idle_s=math.nan if self.transport.ordered and self.stages[stage].device.type != "cpu" else
            self.transport.wait_s, bytes_sent=self.transport.bytes_sent,
            versions=self.stages[stage].weights.most_versions, staleness=self._staleness[stage],
            peak_activations=self.peak_activations[stage],
            peak_memory_bytes=peak_memory_bytes(self.stages[stage].device),
            others_s=sum(seconds for op, seconds in own.items()
                         if not op.is_own and op.transfer is None and op.host_bytes is None),
            state_bytes=self.optimizer_steps.state_bytes(stage))

    def schedule_kernels(self, scheduler: Any) -> None:
        """Let a scheduler gate the kernels of each microbatch, which an executor with streams for them can.

        Raises:
            UserError: all microbatches have one stream.
        """
        raise UserError("the kernels of microbatches are to be scheduled, but the executor has one stream for all",
                        hint="use an executor with a stream for each, such as async_threaded of vpipe/extras")

    # -- forward ---------------------------------------------------------------------------------------

    def forward(self, stage_index: int, microbatch: int) -> None:
        """Execute a forward: receive its inputs, compute, and store what comes of it."""
        inputs = self.forward_inputs(stage_index, microbatch)
        try:
            if not self.passing:
                self.end_forward(stage_index, microbatch, inputs, *self.compute(stage_index, microbatch, inputs))
                return
        except Exception as error:
            if not self._gives_up(error, Action(Op.FORWARD, stage_index, microbatch)):
                raise
        stage = self.stages[stage_index]
        if inputs.pins is not None:
            received = dict(zip(stage.spec.inputs, inputs.received, strict=False))  # a stand-in may have none
            self.values[SAVED, stage_index, microbatch] = Record(
                [SpanActivations(received, None)], {}, inputs.key, inputs.pins, split=False)
        if stage_index < self.last_stage:
            self.p2p.put_stand_ins(stage_index, microbatch, inputs.signature, stage)
        else:
            self.values[LOSS, stage_index, microbatch] = torch.zeros((), device="cpu")

    def _hold(self, error: Exception, action: Action) -> None:
        """Hold an error until all ranks are at the end of the segment, and pass on stand-ins where all can."""
        failure = self._as_ours(error, action)
        if isinstance(failure, RunError):
            self._place(failure, action)
        self.held, self.passing = (self.segment.first + action.index, action.stage, failure), self._holds

    def _gives_up(self, error: Exception, action: Action) -> bool:
        """Hold an error; return False where that cannot be, such as when a rank has stepped, which one asks anew."""
        if not self._holds or (watchdog := watch.watchdog) is None or watchdog.fault is not None:
            return False
        if self._batch in watchdog.abandoned and not action.op.makes_version:  # stand-ins may be the cause
            self.passing = True
        elif self._batch is None or watchdog.give_up(self._batch):
            self._hold(error, action)
        return self.passing

    def compute(self, stage_index: int, microbatch: int, inputs: ForwardInputs) -> tuple[list[Tensor], Record | None]:
        """Run the layers of a stage; return the outputs, and the record for the backward, None in an evaluation."""
        stage = self.stages[stage_index]
        if inputs.pins is None:
            wanted = self.wanted if stage_index == self.last_stage else None
            outputs = stage.evaluate(inputs.received, inputs.fields, inputs.key, wanted.names if wanted else ())
            if wanted is not None and self.held is None:
                ((_, (samples, *_)), *_) = inputs.signature
                try:
                    self.values[WANTED, stage_index, microbatch] = wanted.of(outputs[1:], samples)
                except Exception as error:
                    self._hold(error, Action(Op.FORWARD, stage_index, microbatch))
            return outputs, None
        past = NO_TENSORS if inputs.key.slice is None else self.values.pop(
            (CARRIED, stage_index, microbatch - 1), NO_TENSORS)
        outputs, record = stage.forward(inputs.received, inputs.fields, inputs.key, inputs.pins,
                                        split=self.is_split(stage_index, microbatch), past=past)
        if record.carried:
            self.values[CARRIED, stage_index, microbatch], record.carried = record.carried, {}
        return outputs, record

    def is_split(self, stage_index: int, microbatch: int) -> bool:
        """Return whether a backward comes in two halves."""
        return stage_index in self._always_split or (stage_index, microbatch) in self._split

    def _post_activations(self, stage_index: int, microbatch: int) -> None:
        self.p2p.post_activations(stage_index, microbatch)

    def forward_inputs(self, stage_index: int, microbatch: int) -> ForwardInputs:
        """Return the inputs of a forward; the activations are waited for last."""
        segment, stage = self.segment, self.stages[stage_index]
        signature = segment.loader.signature(segment.first + microbatch)
        key = segment.key_of(microbatch, self.fully_sharded.lanes, self.fully_sharded.place)
        fields = {name: value if value.device == stage.device else accelerator.queued_copy(value, stage.device)
                  for name, value in segment.loader.consume(segment.first + microbatch).items()
                  if name in stage.spec.fields and not self.passing}
        pins: dict[int, int] | None = None
        if segment.training:
            pins = stage.pin({owner: self.tied.install(owner, segment.tied_version_of(owner, microbatch))
                              for owner in stage.borrowed})
        else:
            stage.use_latest()
        return ForwardInputs(self.p2p.receive_activations(stage_index, microbatch), fields, signature, key, pins)

    def end_forward(self, stage_index: int, microbatch: int, inputs: ForwardInputs, outputs: list[Tensor],
                     record: Record | None = None) -> None:
        """Store the record for the backward, and the loss or the outputs."""
        if record is not None and not self.segment.assignment.trains(stage_index):
            self._check_wants_no_gradient(stage_index, outputs)
            self.stages[stage_index].unpin(record.pins)
        elif record is not None:
            self.values[SAVED, stage_index, microbatch] = record
            held = self._activations[stage_index] = self._activations[stage_index] + 1
            if held > self.peak_activations[stage_index]:
                self.peak_activations[stage_index] = held
        if stage_index == self.last_stage:
            self._check_loss(microbatch, outputs[0])
            self.values[LOSS, stage_index, microbatch] = outputs[0].detach()
            if record is not None and not outputs[0].requires_grad:
                self._check_loss_may_be_constant(stage_index, microbatch, inputs)
            return
        self.p2p.put_activations(stage_index, microbatch, inputs.signature, self.stages[stage_index].spec.outputs,
                                 outputs)

    def _check_wants_no_gradient(self, stage_index: int, outputs: list[Tensor]) -> None:
        """Refuse an output that wants a gradient of a stage that has no backward, since nothing is trained up to it."""
        names = self.stages[stage_index].spec.outputs
        if wanting := [name for name, tensor in zip(names, outputs, strict=True) if tensor.requires_grad]:
            raise UserError(f"'{wanting[0]}' requires a gradient, but nothing is trained up to there: it gets none",
                            hint="leave out requires_grad_() of a tensor in a layer or of a batch field; what is "
                                 "to be trained is a parameter")

    def _check_loss_may_be_constant(self, stage_index: int, microbatch: int, inputs: ForwardInputs) -> None:
        """Refuse a loss without a gradient if there is something to train."""
        stage = self.stages[stage_index]
        if stage.weights.names or stage.borrowed or any(tensor.requires_grad for tensor in inputs.received):
            raise UserError(f"the loss of {self.segment.describe(microbatch)} has no gradient: it does not depend on "
                            "any parameter",
                            hint="compute it from what the layers return, without detach(), item() or torch.no_grad()")

    def _check_loss(self, microbatch: int, loss: Tensor) -> None:
        if loss.numel() != 1:
            last, name = list(self.stages[self.last_stage].layer_names.items())[-1]
            raise UserError(f"the loss of layer {last} '{name}' has shape {list(loss.shape)} for "
                            f"{self.segment.describe(microbatch)}",
                            hint="the last layer must return one number: the mean over its samples")

    # -- backward --------------------------------------------------------------------------------------

    def backward(self, stage_index: int, microbatch: int) -> None:
        stage, record = self.stages[stage_index], self.values.pop((SAVED, stage_index, microbatch))
        gradients = self.output_gradients(stage_index, microbatch, record)
        with self.completing(stage_index, microbatch, whole=not (record.split or record.weightless)):
            returned = self._returned(Op.BACKWARD, stage_index, microbatch, record, gradients)
        stage.unpin(record.pins)
        self.end_backward(stage_index, microbatch, returned)

    def _backward_input(self, stage_index: int, microbatch: int) -> None:
        record = self.values.pop((SAVED, stage_index, microbatch))
        gradients = self.output_gradients(stage_index, microbatch, record)
        returned = self._returned(Op.INPUT, stage_index, microbatch, record, gradients)
        self.values[HALF, stage_index, microbatch] = record
        self.end_backward(stage_index, microbatch, returned)

    def _returned(self, op: Kind, stage_index: int, microbatch: int, record: Record,
                  gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradients of a stage's inputs; zeros in a batch that is given up."""
        stage, inputs = self.stages[stage_index], record.spans[0].inputs
        try:
            if not self.passing:
                returned = (stage.backward if op is Op.BACKWARD else stage.backward_input)(record, gradients)
                if record.carried:
                    self.values[CARRIED_GRADIENT, stage_index, microbatch], record.carried = record.carried, {}
                return returned
        except Exception as error:
            if not self._gives_up(error, Action(op, stage_index, microbatch)):
                raise
        return [torch.zeros_like(inputs[name]) for name in stage.spec.inputs
                if name in inputs and inputs[name].requires_grad]

    def _backward_weight(self, stage_index: int, microbatch: int) -> None:
        stage, record = self.stages[stage_index], self.values.pop((HALF, stage_index, microbatch))
        stage.prepare_backward(record.pins)
        with self.completing(stage_index, microbatch, whole=False):
            stage.backward_weight(record)
        stage.unpin(record.pins)

    def completing(self, stage_index: int, microbatch: int, whole: bool) -> AbstractContextManager[None]:
        """Return the context that computes weight gradients; ``whole``: by a backward that is not in two halves."""
        if stage_index not in self.optimizer_steps.reducers:
            return NOTHING
        return self.optimizer_steps.completing(stage_index, microbatch, whole) or NOTHING

    def _reduce(self, stage_index: int, update: int) -> None:
        if stage_index in self.fully_sharded:
            self.fully_sharded.reduce(stage_index, update)
        else:
            self.optimizer_steps.reduce(stage_index, update)

    def _recompute(self, stage_index: int, microbatch: int) -> None:
        self.stages[stage_index].recompute(self.values[SAVED, stage_index, microbatch])

    def _offload(self, stage_index: int, microbatch: int) -> None:
        if (saved := self.values[SAVED, stage_index, microbatch].saved) is not None:  # a stand-in has none
            saved.offload()
        self.values[OFFLOADED, stage_index, microbatch] = self.values.pop((SAVED, stage_index, microbatch))

    def _fetch(self, stage_index: int, microbatch: int) -> None:
        record = self.values[SAVED, stage_index, microbatch] = self.values.pop((OFFLOADED, stage_index, microbatch))
        if record.saved is not None:
            record.saved.fetch()

    def output_gradients(self, stage_index: int, microbatch: int, record: Record) -> dict[str, Tensor]:
        """Prepare a stage for the backward of a microbatch; return the gradients of its outputs, by name."""
        stage = self.stages[stage_index]
        if (staleness := stage.weights.latest - record.pins[stage_index]) > self._staleness[stage_index]:
            self._staleness[stage_index] = staleness
        stage.prepare_backward(record.pins)
        if record.key.slice is not None:
            record.carried = self.values.pop((CARRIED_GRADIENT, stage_index, microbatch + 1), {})
        if stage_index == self.last_stage:
            if not self.segment.weight(microbatch):
                if record.carried:  # the slice is needed by the next one alone
                    return {}
                record.weightless = True
            loss, steps = self.values[LOSS, stage_index, microbatch], self.optimizer_steps
            scale = 1 if steps.scaler is None else steps.scaler.value
            share = torch.full_like(loss, self._share(microbatch, scale))
            # NaN reaches the gradients of every stage, also where the backward alone would give finite ones: the loss
            # less itself is 0 if it is finite, in fewer operations than isfinite.
            return {"loss": share.masked_fill_(loss - loss != 0, math.nan)
                    if steps.skip and self.segment.weight(microbatch) else share}
        return self.p2p.receive_gradients(stage_index, microbatch)

    def _share(self, microbatch: int, scale: float) -> float:
        """Return the share of a microbatch's loss in that of its update, times the scale.

        Without a flush microbatches of the update may not have been read, or never come: their number stands for that
        of their labels, and each stage divides by these when it makes the update.
        """
        segment, lanes = self.segment, self.fully_sharded.lanes
        assignment = segment.assignment
        whole: float = assignment.update_every * lanes
        if segment.loader.labels is None:
            return scale / whole
        if assignment.flush:
            update = assignment.update_of(self.last_stage, microbatch)
            whole = segment.total_weight(assignment.in_update(self.last_stage, update), lanes)
        return scale * (segment.weight(microbatch) / whole)

    def end_backward(self, stage_index: int, microbatch: int, returned: list[Tensor]) -> None:
        """Store the gradients of a stage's inputs for the stage before."""
        self._activations[stage_index] -= 1
        if self.segment.assignment.trains(stage_index - 1):
            self.p2p.put_gradients(stage_index, microbatch, returned)

    # -- failures --------------------------------------------------------------------------------------

    def _as_ours(self, error: Exception, action: Action) -> VpipeError:
        if isinstance(error, VpipeError):
            return error
        who = "the optimizer step raised " if action.op.makes_version else ""
        failure = watch.late(error) or RunError(f"{who}{type(error).__name__}: {error}", hint=hint_of(error))
        failure.__cause__ = error
        return failure

    def report_failure(self, error: RunError, action: Action) -> RunError | None:
        """Add the place to an error, and report it to all ranks; return the error to raise instead where a layer or an
        optimizer only lost its connection with a rank that failed first."""
        watch.activity.rest()
        self._place(error, action)
        watch.failed(error)
        watchdog = watch.watchdog
        if watchdog is None or error.peer is not None or not may_follow(error.what) or \
                (fault := watchdog.fault) is None or watchdog.rank in fault.ranks:
            return None
        first = watchdog.error(fault, f"{watchdog.place(watchdog.rank)} was running {error.action}")
        first.stage, first.action, first.microbatch = error.stage, error.action, error.microbatch
        return first

    def _place(self, error: RunError, action: Action) -> None:
        """Add the place to an error."""
        error.rank = self.rank if watch.watchdog is None else watch.watchdog.rank
        error.stage, error.action = action.stage, str(action)
        if action.op.computes:
            assignment = self.segment.assignment
            error.microbatch = assignment.whole(self.segment.base + action.index)
            error.action += assignment.part_of(self.segment.base + action.index)
            error.action += "" if self.segment.training else " of an evaluation"


_SENT = {Op.SEND_F: TransferKind.ACTIVATIONS, Op.SEND_B: TransferKind.GRADIENTS,
         Op.SEND_W: TransferKind.TIED_WEIGHTS, Op.SEND_G: TransferKind.TIED_GRADIENTS}
"""The kind of transfer that a send makes."""


class NaiveWorker(Worker):
    """Wait for each send, and on a GPU for the device after every action.

    The checker has proved that sends which wait for their posted receives never deadlock
    (:func:`~vpipe.schedules.checker.no_deadlock_rendezvous`). A receiver that waits for a header posts later, so sends
    are not waited for until the first gradient has come back. A send through shared memory ends when it is in there.
    Norms, losses and sums over replicas are no sends of the program; they are waited for where they are received.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.around.append(self._to_its_end)

    def _to_its_end(self, action: Action, run: Callable[[], None]) -> None:
        run()
        here = next(iter(self.stages.values()))
        accelerator.synchronize(here.device)
        if action.op in _SENT:
            self.transport.wait_sent(_SENT[action.op])
