"""Cut batches into microbatches, and number these within a segment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.description import Description
from vpipe.distributed.watchdog import watch
from vpipe.errors import UserError
from vpipe.model.model import Model
from vpipe.runtime.label_weights import LabelCount
from vpipe.runtime.slices import SequenceSlice, check_sequences, check_slices
from vpipe.schedules.assignment import Assignment, TiedVersionOf
from vpipe.schedules.kinds import Action
from vpipe.schedules.schedule import Schedule

Batch = Mapping[str, Tensor]
"""A dict of tensors whose dimension 0 counts samples."""

PER_SAMPLE = ("dimension 0 of every field counts the samples: pad fields that differ from sample to sample, such as "
              "the edges of graphs, and expand a field that all have in common")

_END: Batch = {}  # of the batches

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""The shapes of a microbatch's fields, and of a slice which one it is: the shapes between stages follow from them."""

@dataclass
class _InUse:
    """A microbatch that stages of this process use, so many times from now on."""

    fields: dict[str, Tensor]
    signature: Signature
    uses: int


class _Sizes(NamedTuple):
    """Sizes of the batches from one batch on: the microbatches and samples before it, then of a batch the samples and
    the microbatches. Of ``n`` samples in ``m`` microbatches the first ``n % m`` have one sample more."""

    microbatch: int
    sample: int
    samples: int
    microbatches: int


@dataclass(frozen=True)
class BatchForm:
    """What a batch must hold, and how it is cut.

    Attributes:
        fields: names that it must hold.
        microbatches: into how many parts it is cut along dimension 0.
        slices: into how many parts a microbatch is cut along dimension 1.
        equal: whether a batch is refused that cannot be cut into so many equal microbatches. Otherwise their sizes
            differ by at most one sample, and a batch of fewer samples has a microbatch for each.
        unread: names that it must not hold.
    """

    fields: tuple[str, ...]
    microbatches: int
    slices: int = 1
    equal: bool = True
    unread: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Model, schedule: Schedule, description: Description) -> BatchForm:
        """Return the form of batches that a pipeline trains on.

        Raises:
            UserError: a microbatch cannot be cut into the slices of the schedule.
        """
        check_slices(model, description, schedule.slices)
        return cls(model.batch, description.microbatches, schedule.slices, unread=model.unread)

    @property
    def of_evaluations(self) -> BatchForm:
        """The form of batches that it evaluates on: of any size, and of whole sequences."""
        return replace(self, slices=1, equal=False)


class MicrobatchLoader:
    """Read each batch when its first microbatch is needed; microbatches count from 0.

    With slices of sequences every slice has an index, ``microbatch * slices + slice``, and is what is called a
    microbatch here but for ``BatchForm.microbatches``.

    Args:
        batches: of the user; a field this process does not need may be on the meta device.
        uses: ``microbatch -> how many stages of this process use it``, each once; 0 where training resumes within a
            batch and the microbatch is done.
        used: fields that layers here compute with.
        copy_to: device to which these are copied, where the user may fill the same memory with the next batch while
            they are in use; None: they are not copied.
        labels: says how the labels of microbatches count; None: microbatches count alike. With slices it is needed.
        told: called with the first microbatch, the number, the fields and the error of every batch that was read.
        read: calls ``next`` under what the user has around the call.

    Attributes:
        batches: the user's, until the loader is closed.
        end: a microbatch at which to pause; what was read after it waits.
        error: raised while a batch was read: the microbatches end before it. Where other ranks wait, KeyboardInterrupt
            and the like are raised at once.
        batches_read: their number.
        fields: names, shapes and dtypes of the latest batch.
        counts: how much the losses of microbatches count, by number, here and over lanes, until their step is done.
    """

    def __init__(self, batches: Iterator[Batch], form: BatchForm, uses: Callable[[int], int],
                 used: Collection[str] = (), copy_to: torch.device | None = None, labels: LabelCount | None = None,
                 told: Callable[[int, int, Batch | None, BaseException | None], None] | None = None,
                 read: Callable[..., Any] = next) -> None:
        self.batches, self._form, self._uses, self._used, self._copy_to = batches, form, uses, used, copy_to
        self.labels, self._told, self._next = labels, told, read
        self._open: dict[int, _InUse] = {}
        self._exhausted = False
        self.batches_read = self._read = 0  # and their microbatches
        self.fields: list[tuple[str, list[int], str]] = []
        self.end: int | None = None
        self.error: BaseException | None = None
        self.counts: dict[int, tuple[float, float]] = {}
        self._sizes = [_Sizes(0, 0, 0, form.microbatches * form.slices)]  # where they change

    def has(self, microbatch: int) -> bool:
        """Return whether this microbatch exists and lies before the pause."""
        if self.end is not None and microbatch >= self.end:
            return False
        while microbatch >= self._read and not self._exhausted:
            self._read_batch()
        return microbatch < self._read

    def _read_batch(self) -> None:
        try:
            with watch.activity.during("reading a batch"):
                batch = self._next(self.batches, _END)
            fields = None if batch is _END else self._check(batch)
        except BaseException as error:  # raised when the batches before are done
            self.error, fields = error, None
        if self._told is not None:
            if self.error is not None and not isinstance(self.error, Exception):
                raise self.error
            self._told(self._read, self.batches_read, fields, self.error)
        if fields is None:
            self._exhausted = True
            return
        self._take(fields)

    def stand_in(self, fields: Sequence[tuple[str, list[int], str]]) -> None:
        """Go on, in place of a batch that is lacking here, with tensors without values, as another rank describes."""
        self.error = None
        self._take({name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                    for name, shape, dtype in fields})

    def _take(self, fields: dict[str, Tensor]) -> None:
        first = self._read
        self.fields = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in fields.items()]
        samples = next(iter(fields.values())).shape[0]
        if samples != self._sizes[-1].samples:
            self._sizes.append(_Sizes(first, self._samples_before(first), samples,
                                      min(samples, self._form.microbatches) * self._form.slices))
        microbatches = self._sizes[-1].microbatches
        uses = list(map(self._uses, range(first, first + microbatches)))
        if self.labels is not None:
            counts = self.labels.of(self._cut(fields[self.labels.field]))
            self.counts |= zip(range(first, first + microbatches), counts, strict=True)
        if any(uses):
            if self._copy_to is not None:
                fields |= {name: accelerator.queued_copy(fields[name], self._copy_to) for name in self._used}
            by_field = {name: list(chain.from_iterable(self._cut(t))) for name, t in fields.items()}
            chunks = [{name: each[i] for name, each in by_field.items()} for i in range(microbatches)]
            signatures = [tuple((name, tuple(t.shape)) for name, t in chunk.items()) for chunk in chunks]
            slices = self._form.slices
            for whole in range(0, microbatches, slices) if slices > 1 else ():
                tokens = [shape[1] for (_, shape), *_ in signatures[whole:whole + slices]]
                for i in range(slices):  # what came before decides shapes, too, such as that of a mask
                    signatures[whole + i] += (("", SequenceSlice(i, slices, sum(tokens[:i]), sum(tokens))),)
            self._open |= {first + i: _InUse(chunks[i], signatures[i], uses[i]) for i in range(microbatches) if uses[i]}
        self.batches_read += 1
        self._read += microbatches

    def _cut(self, field: Tensor) -> list[Sequence[Tensor]]:
        """Cut a field of the batch that is being read; return the parts of every microbatch."""
        slices = self._form.slices
        microbatches = field.tensor_split(self._sizes[-1].microbatches // slices)
        return [whole.tensor_split(slices, dim=1) if slices > 1 else (whole,) for whole in microbatches]

    @property
    def total(self) -> int:
        """Return the number of microbatches up to the pause, after :meth:`has` returned False."""
        read = self._read if self._exhausted else None
        return min(end for end in (self.end, read) if end is not None)

    @property
    def rest(self) -> int:
        """Return how many microbatches that were read wait after :attr:`total`."""
        return self._read - self.total

    @property
    def ended(self) -> bool:
        """Return whether the batches have ended, or reading one failed, before the pause."""
        return self._exhausted and (self.end is None or self._read < self.end)

    def signature(self, microbatch: int) -> Signature:
        """Return the shapes of a microbatch that is still in use."""
        return self._open[microbatch].signature

    def consume(self, microbatch: int) -> dict[str, Tensor]:
        """Return the fields of a microbatch; let go of it when every stage has used it."""
        found = self._open[microbatch]
        found.uses -= 1
        if not found.uses:
            del self._open[microbatch]
        return found.fields

    def samples(self, first: int, end: int) -> int:
        """Return the number of samples of the microbatches from ``first`` until before ``end``, which were read."""
        return self._samples_before(end) - self._samples_before(first)

    def _samples_before(self, microbatch: int) -> int:
        sizes = self._sizes[bisect_right(self._sizes, microbatch, key=attrgetter("microbatch")) - 1]
        batches, within = divmod((microbatch - sizes.microbatch) // self._form.slices,
                                 whole := sizes.microbatches // self._form.slices)
        each, larger = divmod(sizes.samples, whole)
        return sizes.sample + batches * sizes.samples + within * each + min(within, larger)

    def close(self) -> None:
        """Drop the reference to the user's iterator."""
        self.batches = iter(())

    def _check(self, batch: Batch) -> dict[str, Tensor]:
        """Return the fields of a batch; refuse one that lacks a field or cannot be cut as it should be."""
        form = self._form
        if not isinstance(batch, Mapping):
            names = ", ".join(f"{name!r}: ..." for name in form.fields)
            hint = f"name the fields: {{{names}}}"
            if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Mapping):
                hint = "join its samples: map(torch.utils.data.default_collate, batches)"
            elif isinstance(batch, (list, tuple)) and len(batch) == len(form.fields) > 1:
                names = ", ".join(f"{name!r}: batch[{i}]" for i, name in enumerate(form.fields))
                hint = f"name the fields: ({{{names}}} for batch in batches)"
            raise UserError(f"a batch is {type(batch).__name__}, not a dict of tensors", hint=hint)
        if missing := [name for name in form.fields if name not in batch]:
            raise UserError(f"a batch holds {sorted(batch, key=str)}, but not {missing}",
                            hint=f"give every batch the fields {list(form.fields)}")
        if others := form.unread & batch.keys():
            raise UserError(f"a batch holds '{min(others)}', which layers made for batches without it do not read",
                            hint=f"make the layers from an example with '{min(others)}', or leave it out of batches")
        tensors = {name: batch[name] for name in form.fields}
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise UserError(f"the field '{name}' of a batch is {type(value).__name__}, not a tensor",
                                hint="give tensors; torch.as_tensor makes one of an array or of numbers")
            if value.is_nested or value.layout is not torch.strided:
                raise UserError(f"the field '{name}' of a batch is {'nested' if value.is_nested else value.layout}, "
                                "which is not cut into samples", hint=PER_SAMPLE)
            if not value.dim():
                raise UserError(f"the field '{name}' of a batch is a tensor without dimensions", hint=PER_SAMPLE)
        sizes = {name: t.shape[0] for name, t in tensors.items()}
        samples = next(iter(sizes.values()), 0)
        if len(set(sizes.values())) > 1:
            raise UserError(f"the fields of a batch disagree on the number of samples: {sizes}", hint=PER_SAMPLE)
        if not samples:
            raise UserError("a batch has no samples", hint="leave it out")
        if form.equal and samples % form.microbatches:
            down = samples - samples % form.microbatches
            fitting = " or ".join(str(size) for size in (down, down + form.microbatches) if size)
            raise UserError(f"a batch of {samples} samples cannot be cut into {form.microbatches} equal microbatches",
                            hint=f"use batches of {fitting} samples, or drop the incomplete last batch")
        if form.slices > 1:
            check_sequences(tensors, form.slices)
        if self.labels is not None and tensors[self.labels.field].is_meta:
            who = "per_token_loss counts" if self.labels.by_label else "slices of sequences count"
            raise UserError(f"the field '{self.labels.field}' of a batch is on the meta device, but {who} its labels "
                            "on every rank", hint="give its values on every rank")
        if unread := [name for name in self._used if tensors[name].is_meta]:
            raise UserError(f"the field '{unread[0]}' of a batch is on the meta device, but layers of this process "
                            "read it", hint="leave out the values of such fields alone as no layer of a rank reads")
        return {name: t.clone() if t.is_inference() else t for name, t in tensors.items()}  # backwards refuse those


class ForwardKey(NamedTuple):
    """Which forward it is: with the index of a layer it fixes the random numbers of the layer."""

    update: int  # of the run; below 0 in an evaluation
    microbatch: int  # within the update
    slice: SequenceSlice | None = None  # None of a whole microbatch

    @classmethod
    def of_first_slice(cls, tokens: int) -> ForwardKey:
        """Return the key of a forward of sequences of so many tokens that carries on what it makes of all of them."""
        return cls(0, 0, SequenceSlice(0, 2, 0, tokens))


@dataclass
class Segment:
    """The microbatches from one empty pipeline to the next, numbered from 0.

    Attributes:
        loader: of the microbatches.
        first: the loader's number of the segment's microbatch 0.
        base: the run's number of the segment's microbatch 0, counted over all training.
        steps_before: steps of the run before the segment.
        assignment: which rank takes each microbatch, and which update uses it.
        training: False for forward only.
        autocast: the dtype of that which the script has around it.
        confirm: waits until all ranks have read the same batches, up to a microbatch of the loader; called before a
            stage makes an update with them.
        tied_version_of: the version of borrowed weights that a microbatch uses in training.
    """

    loader: MicrobatchLoader
    first: int
    base: int
    steps_before: int
    assignment: Assignment
    training: bool
    autocast: torch.dtype | None = None
    confirm: Callable[[int], None] = lambda until: None
    tied_version_of: TiedVersionOf = lambda owner, microbatch: 0

    def number_of(self, action: Action) -> int:
        """Return the run's number of an action's microbatch, update or version."""
        if action.op.per_microbatch:
            return self.base + action.index
        per_update = self.assignment.per_update(action.stage)
        return self.steps_before * self.assignment.per_step // per_update + action.index

    def key_of(self, microbatch: int, lanes: int = 1, lane: int = 0) -> ForwardKey:
        """Return which forward a microbatch in use is; lanes count as if they took turns."""
        update, within = divmod(self.base + microbatch, self.assignment.update_every)
        last = self.loader.signature(self.first + microbatch)[-1][1]
        return ForwardKey(update if self.training else -1 - update, self.assignment.whole(within) * lanes + lane,
                          last if isinstance(last, SequenceSlice) else None)

    def describe(self, microbatch: int) -> str:
        """Return a microbatch for messages, counted over all training."""
        return self.assignment.name_of(self.base + microbatch)

    def weight(self, microbatch: int) -> float:
        """Return how much the loss of a microbatch counts: its labels where they are counted, 1 elsewhere."""
        return 1 if self.loader.labels is None else self.loader.counts[self.first + microbatch][0]

    def total_weight(self, microbatches: Sequence[int], lanes: int) -> float:
        """Return the weight of microbatches of so many lanes that read batches of their own; without any label 1."""
        if self.loader.labels is None:
            return len(microbatches) * lanes
        return sum(self.loader.counts[self.first + number][1] for number in microbatches) or 1
