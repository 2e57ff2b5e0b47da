"""Load batches as microbatches, and number them within a segment of training or an evaluation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.distributed.watchdog import watch
from vpipe.errors import UserError, counted
from vpipe.runtime.label_weights import CLASSES_ALIKE, Weigh
from vpipe.runtime.slices import SequenceSlice
from vpipe.schedules.action import Action
from vpipe.schedules.assignment import Assignment

Batch = Mapping[str, Tensor]
"""A dict of tensors whose dimension 0 counts samples."""

PER_SAMPLE = ("dimension 0 of every field counts the samples: pad fields that differ from sample to sample, such as "
              "the edges of graphs, and expand a field that all have in common")

_END: Batch = {}
"""The end of the batches."""

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""The shapes of a microbatch's fields: the shapes between stages follow from them."""

OnRead = Callable[[int, int, Batch | None, BaseException | None], None]
"""Called when a batch was read, with its first microbatch, its number and the batch; or why there is none
(:class:`~vpipe.runtime.batch_comparison.BatchComparison`)."""


@dataclass
class _OpenBatch:
    """A batch in use; ``uses`` counts those that are left, of all its microbatches by all stages."""

    chunks: list[dict[str, Tensor]]
    signatures: list[Signature]
    uses: int


class _Sizes(NamedTuple):
    """Sizes of the batches from one batch on: its number, the microbatches and samples before it, then of a batch the
    samples and the microbatches. Of ``n`` samples in ``m`` microbatches the first ``n % m`` have one sample more."""

    batch: int
    microbatch: int
    sample: int
    samples: int
    microbatches: int


class MicrobatchLoader:
    """Read each batch when its first microbatch is needed; microbatches count from 0.

    With slices of sequences every slice has an index, ``microbatch * slices + slice``, and is what is called a
    microbatch here but for the argument ``microbatches``.

    Args:
        batches: of the user; a field this process does not need may be on the meta device.
        microbatches: into how many parts a batch is cut along dimension 0.
        fields: names a batch must hold.
        uses: ``microbatch -> how many stages of this process use it``, each once; 0 where training resumes within a
            batch and the microbatch is done.
        used: fields that layers here compute with.
        copy_to: device to which these are copied, where the user may fill the same memory with the next batch while
            they are in use; None: they are not copied.
        on_read: compares batches with those of other ranks; None where there are none.
        labels: the field whose labels are counted, of every microbatch; None: none are.
        weigh: returns how much each of such labels counts.
        over_lanes: returns the sums of such numbers over the lanes that read batches of their own.
        slices: into how many parts a microbatch is cut along dimension 1; ``labels`` are then needed.
        by_label: with slices, whether these count by their labels as microbatches do without. Else microbatches count
            alike, and slices by their shares of the labels of their microbatch.
        equal: whether a batch is refused that cannot be cut into so many equal microbatches. Otherwise their sizes
            differ by at most one sample, and a batch of fewer samples has a microbatch for each.
        read: calls ``next`` under what the user has around the call.

    Attributes:
        batches: the user's, until the loader is closed.
        end: a microbatch at which to pause; what was read after it waits.
        error: raised while a batch was read: the microbatches end before it. Where other ranks wait, KeyboardInterrupt
            and the like are raised at once.
        batches_read: their number.
        fields: names, shapes and dtypes of the latest batch.
        labels: the field whose labels are counted.
        counts: how much the losses of microbatches count, by number, here and over lanes, until their step is done.
    """

    def __init__(self, batches: Iterator[Batch], microbatches: int, fields: tuple[str, ...],
                 uses: Callable[[int], int], used: Collection[str] = (), copy_to: torch.device | None = None,
                 on_read: OnRead | None = None, labels: str | None = None,
                 weigh: Weigh = CLASSES_ALIKE, over_lanes: Callable[[list[float]], list[float]] = list, *,
                 slices: int = 1, by_label: bool = True,
                 equal: bool = True, read: Callable[..., Any] = next, unread: frozenset[str] = frozenset()) -> None:
        self.batches, self._microbatches, self._fields, self._uses = batches, microbatches, fields, uses
        self._used, self._copy_to, self._on_read = used, copy_to, on_read
        self._next, self._equal, self.labels, self._over_lanes = read, equal, labels, over_lanes
        self._weigh, self._unread = weigh, unread
        self.slices, self._by_label = slices, by_label
        self._open: dict[int, _OpenBatch] = {}
        self._exhausted = False
        self.batches_read = self._read = 0  # and their microbatches
        self.fields: list[tuple[str, list[int], str]] = []
        self.end: int | None = None
        self.error: BaseException | None = None
        self.counts: dict[int, tuple[float, float]] = {}
        self._sizes = [_Sizes(0, 0, 0, 0, microbatches * slices)]  # where they change

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
        if self._on_read is not None:
            if self.error is not None and not isinstance(self.error, Exception):
                raise self.error
            self._on_read(self._read, self.batches_read, fields, self.error)
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
        number, first = self.batches_read, self._read
        self.fields = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in fields.items()]
        samples = next(iter(fields.values())).shape[0]
        if samples != self._sizes[-1].samples:
            self._sizes.append(_Sizes(number, first, self._samples_before(first), samples,
                                      min(samples, self._microbatches) * self.slices))
        microbatches = self._sizes[-1].microbatches
        uses = sum(map(self._uses, range(first, first + microbatches)))
        if self.labels is not None:
            own = [1.0] * microbatches if fields[self.labels].is_meta else torch.stack([
                torch.as_tensor(self._weigh(labels)).sum(dtype=torch.float64)
                for labels in self._cut(fields[self.labels])]).tolist()
            counts = self._shares(own) if not self._by_label else zip(own, self._over_lanes(own), strict=True)
            self.counts |= zip(range(first, first + microbatches), counts, strict=True)
        if uses:
            if self._copy_to is not None:
                fields |= {name: accelerator.queued_copy(fields[name], self._copy_to) for name in self._used}
            by_field = {name: self._cut(t) for name, t in fields.items()}
            chunks = [{name: each[i] for name, each in by_field.items()} for i in range(microbatches)]
            signatures = [tuple((name, tuple(t.shape)) for name, t in chunk.items()) for chunk in chunks]
            for whole in range(0, microbatches, self.slices) if self.slices > 1 else ():
                tokens = [shape[1] for (_, shape), *_ in signatures[whole:whole + self.slices]]
                for i in range(self.slices):  # what came before decides shapes, too, such as that of a mask
                    signatures[whole + i] += (("", (sum(tokens[:i]), sum(tokens))),)
            self._open[number] = _OpenBatch(chunks, signatures, uses)
        self.batches_read += 1
        self._read += microbatches

    def _cut(self, field: Tensor) -> Sequence[Tensor]:
        """Cut a field of the batch that is being read."""
        microbatches = field.tensor_split(self._sizes[-1].microbatches // self.slices)
        if self.slices == 1:
            return microbatches
        return [part for microbatch in microbatches for part in microbatch.tensor_split(self.slices, dim=1)]

    def _shares(self, labels: Sequence[float]) -> Iterator[tuple[float, float]]:
        """Yield how much each slice counts, from the labels of each; a microbatch counts 1 with its last slice."""
        [lanes] = self._over_lanes([1])
        for i, own in enumerate(labels):
            number = i % self.slices
            whole = sum(labels[i - number:i - number + self.slices])
            yield own / (whole or 1), lanes if number == self.slices - 1 else 0

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
        """Return the shapes of a microbatch whose batch is still in use."""
        _, number, within = self._locate(microbatch)
        return self._open[number].signatures[within]

    def sliced(self, microbatch: int) -> SequenceSlice | None:
        """Return which slice of sequences it is, of a batch that is still in use; None without slices."""
        if self.slices == 1:
            return None
        *_, (_, (start, length)) = self.signature(microbatch)
        return SequenceSlice(microbatch % self.slices, self.slices, start, length)

    def consume(self, microbatch: int) -> dict[str, Tensor]:
        """Return the fields of a microbatch; free the batch when every stage has used all of it."""
        _, number, within = self._locate(microbatch)
        batch = self._open[number]
        batch.uses -= 1
        if not batch.uses:
            del self._open[number]
        return batch.chunks[within]

    def samples(self, first: int, end: int) -> int:
        """Return the number of samples of the microbatches from ``first`` until before ``end``, which were read."""
        return self._samples_before(end) - self._samples_before(first)

    def _samples_before(self, microbatch: int) -> int:
        sizes, number, within = self._locate(microbatch)
        within //= self.slices
        each, larger = divmod(sizes.samples, sizes.microbatches // self.slices)
        return sizes.sample + (number - sizes.batch) * sizes.samples + within * each + min(within, larger)

    def _locate(self, microbatch: int) -> tuple[_Sizes, int, int]:
        """Return the sizes of a microbatch's batch, its number, and the number of the microbatch within it."""
        sizes = self._sizes[-1]
        if microbatch < sizes.microbatch:
            sizes = self._sizes[bisect_right(self._sizes, microbatch, key=attrgetter("microbatch")) - 1]
        batches, within = divmod(microbatch - sizes.microbatch, sizes.microbatches)
        return sizes, sizes.batch + batches, within

    def close(self) -> None:
        """Drop the reference to the user's iterator."""
        self.batches = iter(())

    def _check(self, batch: Batch) -> dict[str, Tensor]:
        """Return the fields of a batch; refuse one that lacks a field or cannot be cut as it should be."""
        if not isinstance(batch, Mapping):
            names = ", ".join(f"{name!r}: ..." for name in self._fields)
            hint = f"name the fields: {{{names}}}"
            if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Mapping):
                hint = "join its samples: map(torch.utils.data.default_collate, batches)"
            elif isinstance(batch, (list, tuple)) and len(batch) == len(self._fields) > 1:
                names = ", ".join(f"{name!r}: batch[{i}]" for i, name in enumerate(self._fields))
                hint = f"name the fields: ({{{names}}} for batch in batches)"
            raise UserError(f"a batch is {type(batch).__name__}, not a dict of tensors", hint=hint)
        missing = [name for name in self._fields if name not in batch]
        if missing:
            raise UserError(f"a batch holds {sorted(batch, key=str)}, but not {missing}",
                            hint=f"give every batch the fields {list(self._fields)}")
        if others := self._unread & batch.keys():
            raise UserError(f"a batch holds '{min(others)}', which layers made for batches without it do not read",
                            hint=f"make the layers from an example with '{min(others)}', or leave it out of batches")
        tensors = {name: batch[name] for name in self._fields}
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
        if self._equal and samples % self._microbatches:
            down = samples - samples % self._microbatches
            fitting = " or ".join(str(size) for size in (down, down + self._microbatches) if size)
            raise UserError(f"a batch of {samples} samples cannot be cut into {self._microbatches} equal microbatches",
                            hint=f"use batches of {fitting} samples, or drop the incomplete last batch")
        if self.slices > 1:
            self._check_sequences(tensors)
        if self.labels is not None and tensors[self.labels].is_meta:
            who = "per_token_loss counts" if self._by_label else "slices of sequences count"
            raise UserError(f"the field '{self.labels}' of a batch is on the meta device, but {who} its labels on "
                            "every rank", hint="give its values on every rank")
        if unread := [name for name in self._used if tensors[name].is_meta]:
            raise UserError(f"the field '{unread[0]}' of a batch is on the meta device, but layers of this process "
                            "read it", hint="leave out the values of such fields alone as no layer of a rank reads")
        return {name: t.clone() if t.is_inference() else t for name, t in tensors.items()}  # backwards refuse those

    def _check_sequences(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse fields without sequences that can be cut into slices."""
        shapes = {name: list(t.shape) for name, t in tensors.items()}
        if flat := [name for name, shape in shapes.items() if len(shape) < 2]:
            raise UserError(f"the field '{flat[0]}' of a batch has the shape {shapes[flat[0]]}, without sequences to "
                            f"cut into {self.slices} slices",
                            hint="dimension 1 of every field counts tokens: repeat for each what belongs to a whole "
                                 "sequence, or leave the slices out")
        tokens = {name: shape[1] for name, shape in shapes.items()}
        if len(set(tokens.values())) > 1:
            raise UserError(f"the fields of a batch disagree on the number of tokens: {tokens}",
                            hint="with slices dimension 1 of every field counts the tokens")
        if (length := next(iter(tokens.values()))) < self.slices:
            raise UserError(f"sequences of {counted(length, 'token')} cannot be cut into {self.slices} slices",
                            hint=f"use at most {counted(length, 'slice')}, or longer sequences")


class ForwardKey(NamedTuple):
    """Which forward it is: with the index of a layer it fixes the random numbers of the layer."""

    update: int  # of the run; below 0 in an evaluation
    microbatch: int  # within the update
    slice: SequenceSlice | None = None  # None of a whole microbatch


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
    """

    loader: MicrobatchLoader
    first: int
    base: int
    steps_before: int
    assignment: Assignment
    training: bool
    autocast: torch.dtype | None = None
    confirm: Callable[[int], None] = lambda until: None

    def number_of(self, action: Action) -> int:
        """Return the run's number of an action's microbatch, update or version."""
        if action.op.per_microbatch:
            return self.base + action.index
        per_update = self.assignment.per_update(action.stage)
        return self.steps_before * self.assignment.per_step // per_update + action.index

    def key_of(self, microbatch: int, lanes: int = 1, lane: int = 0) -> ForwardKey:
        """Return which forward a microbatch is whose batch is still in use; lanes count as if they took turns."""
        update, within = divmod(self.base + microbatch, self.assignment.update_every)
        return ForwardKey(update if self.training else -1 - update, self.assignment.whole(within) * lanes + lane,
                          self.loader.sliced(self.first + microbatch))

    def describe(self, microbatch: int) -> str:
        """Return a microbatch for messages, counted over all training."""
        return self.assignment.name_of(self.base + microbatch)

    def weight(self, microbatch: int) -> float:
        """Return how much the loss of a microbatch counts: its labels where they are counted, 1 elsewhere."""
        return 1 if self.loader.labels is None else self.loader.counts[self.first + microbatch][0]

    def total_weight(self, microbatches: Sequence[int], lanes: int) -> float:
        """Return the weight of microbatches of all lanes that read batches of their own, so many; without any label 1.
        """
        if self.loader.labels is None:
            return len(microbatches) * lanes
        return sum(self.loader.counts[self.first + number][1] for number in microbatches) or 1
