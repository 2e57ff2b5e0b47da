"""Load batches as microbatches, compare them between ranks, and number microbatches within a segment.

With different batches, inputs would be trained with the labels of others. So a rank that reads a batch computes a
checksum of every field whose values it has, and tells rank 0 before it uses the batch. When two ranks have told
something different, all fail at once, since one may wait for a transfer of another size than is sent. Before a rank
makes an update, it waits until all ranks have told the same of all batches of the update; as a rule they have by then.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.distributed.read_batches import ReadBatch
from vpipe.distributed.value_exchange import Exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError, counted
from vpipe.runtime.label_weights import CLASSES_ALIKE, Weigh
from vpipe.runtime.slices import SequenceSlice
from vpipe.schedules.assignment import Assignment, TiedVersionOf
from vpipe.schedules.kinds import Action

Batch = Mapping[str, Tensor]
"""A dict of tensors whose dimension 0 counts samples."""

PER_SAMPLE = ("dimension 0 of every field counts the samples: pad fields that differ from sample to sample, such as "
              "the edges of graphs, and expand a field that all have in common")

_END: Batch = {}
"""The end of the batches."""

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""The shapes of a microbatch's fields: the shapes between stages follow from them."""

WHOLE_BYTES = 1 << 18
"""Size of the largest field of which all values are compared; of a larger one some values of every sample are."""

SPREAD_VALUES = 1 << 15
FIRST_VALUES = 64
"""Values at the beginning of every sample that are compared besides values spread over it: a short sequence fills
only the beginning."""


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


@dataclass(frozen=True)
class LabelCount:
    """How the labels of microbatches count.

    Attributes:
        field: that has them.
        weigh: returns how much each of them counts.
        over_lanes: returns the sums of such numbers over the lanes that read batches of their own.
        by_label: with slices, whether these count by their labels as microbatches do without. Else microbatches count
            alike, and slices by their shares of the labels of their microbatch.
    """

    field: str
    weigh: Weigh = CLASSES_ALIKE
    over_lanes: Callable[[list[float]], list[float]] = list
    by_label: bool = True


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
        comparison: with the batches of other ranks; None where there are none.
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
                 comparison: BatchComparison | None = None, read: Callable[..., Any] = next) -> None:
        self.batches, self._form, self._uses, self._used, self._copy_to = batches, form, uses, used, copy_to
        self.labels, self._comparison, self._next = labels, comparison, read
        self._open: dict[int, _OpenBatch] = {}
        self._exhausted = False
        self.batches_read = self._read = 0  # and their microbatches
        self.fields: list[tuple[str, list[int], str]] = []
        self.end: int | None = None
        self.error: BaseException | None = None
        self.counts: dict[int, tuple[float, float]] = {}
        self._sizes = [_Sizes(0, 0, 0, 0, form.microbatches * form.slices)]  # where they change

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
        if self._comparison is not None:
            if self.error is not None and not isinstance(self.error, Exception):
                raise self.error
            self._comparison.read(self._read, self.batches_read, fields, self.error)
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
                                      min(samples, self._form.microbatches) * self._form.slices))
        microbatches = self._sizes[-1].microbatches
        uses = sum(map(self._uses, range(first, first + microbatches)))
        if self.labels is not None:
            field = fields[self.labels.field]
            own = [1.0] * microbatches if field.is_meta else torch.stack([
                torch.as_tensor(self.labels.weigh(labels)).sum(dtype=torch.float64)
                for labels in self._cut(field)]).tolist()
            counts = (zip(own, self.labels.over_lanes(own), strict=True) if self.labels.by_label
                      else self._shares(own, *self.labels.over_lanes([1])))
            self.counts |= zip(range(first, first + microbatches), counts, strict=True)
        if uses:
            if self._copy_to is not None:
                fields |= {name: accelerator.queued_copy(fields[name], self._copy_to) for name in self._used}
            by_field = {name: self._cut(t) for name, t in fields.items()}
            chunks = [{name: each[i] for name, each in by_field.items()} for i in range(microbatches)]
            signatures = [tuple((name, tuple(t.shape)) for name, t in chunk.items()) for chunk in chunks]
            slices = self._form.slices
            for whole in range(0, microbatches, slices) if slices > 1 else ():
                tokens = [shape[1] for (_, shape), *_ in signatures[whole:whole + slices]]
                for i in range(slices):  # what came before decides shapes, too, such as that of a mask
                    signatures[whole + i] += (("", (sum(tokens[:i]), sum(tokens))),)
            self._open[number] = _OpenBatch(chunks, signatures, uses)
        self.batches_read += 1
        self._read += microbatches

    def _cut(self, field: Tensor) -> Sequence[Tensor]:
        """Cut a field of the batch that is being read."""
        slices = self._form.slices
        microbatches = field.tensor_split(self._sizes[-1].microbatches // slices)
        if slices == 1:
            return microbatches
        return [part for microbatch in microbatches for part in microbatch.tensor_split(slices, dim=1)]

    def _shares(self, labels: Sequence[float], lanes: float) -> Iterator[tuple[float, float]]:
        """Yield how much each slice counts, from the labels of each; a microbatch counts 1 with its last slice."""
        slices = self._form.slices
        for i, own in enumerate(labels):
            number = i % slices
            whole = sum(labels[i - number:i - number + slices])
            yield own / (whole or 1), lanes if number == slices - 1 else 0

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
        if self._form.slices == 1:
            return None
        *_, (_, (start, length)) = self.signature(microbatch)
        return SequenceSlice(microbatch % self._form.slices, self._form.slices, start, length)

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
        within //= self._form.slices
        each, larger = divmod(sizes.samples, sizes.microbatches // self._form.slices)
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
        missing = [name for name in form.fields if name not in batch]
        if missing:
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
            self._check_sequences(tensors)
        if self.labels is not None and tensors[self.labels.field].is_meta:
            who = "per_token_loss counts" if self.labels.by_label else "slices of sequences count"
            raise UserError(f"the field '{self.labels.field}' of a batch is on the meta device, but {who} its labels "
                            "on every rank", hint="give its values on every rank")
        if unread := [name for name in self._used if tensors[name].is_meta]:
            raise UserError(f"the field '{unread[0]}' of a batch is on the meta device, but layers of this process "
                            "read it", hint="leave out the values of such fields alone as no layer of a rank reads")
        return {name: t.clone() if t.is_inference() else t for name, t in tensors.items()}  # backwards refuse those

    def _check_sequences(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse fields without sequences that can be cut into slices."""
        slices, shapes = self._form.slices, {name: list(t.shape) for name, t in tensors.items()}
        if flat := [name for name, shape in shapes.items() if len(shape) < 2]:
            raise UserError(f"the field '{flat[0]}' of a batch has the shape {shapes[flat[0]]}, without sequences to "
                            f"cut into {slices} slices",
                            hint="dimension 1 of every field counts tokens: repeat for each what belongs to a whole "
                                 "sequence, or leave the slices out")
        tokens = {name: shape[1] for name, shape in shapes.items()}
        if len(set(tokens.values())) > 1:
            raise UserError(f"the fields of a batch disagree on the number of tokens: {tokens}",
                            hint="with slices dimension 1 of every field counts the tokens")
        if (length := next(iter(tokens.values()))) < slices:
            raise UserError(f"sequences of {counted(length, 'token')} cannot be cut into {slices} slices",
                            hint=f"use at most {counted(length, 'slice')}, or longer sequences")


class BatchComparison:
    """Compare the batches of one rank with those of all others, which read as many.

    With a flush, and in evaluations, ranks tell of their batches in the exchange that begins a step
    (:meth:`take`, :meth:`expect`). Without a flush a rank tells of a batch when it reads the batch (:meth:`tell`), in
    an exchange beside that of calls: ranks read ahead of one another there.

    Args:
        exchange: for streams.
        fields: of a batch.
        group: of ranks that read the same batches; others read as many, of as many samples.

    Attributes:
        untold: batches that were read, of which the others are not told yet.
    """

    def __init__(self, exchange: Exchange, fields: Sequence[str], group: int) -> None:
        self._exchange, self._fields, self._group = exchange, fields, group
        self.untold: list[ReadBatch] = []
        self._expected: deque[tuple[int, Callable[[], object]]] = deque()  # by first microbatch, the waits

    def read(self, first: int, number: int, batch: Batch | None, error: BaseException | None) -> None:
        """Describe a batch that was read, from this microbatch of its loader on."""
        samples, fields = 0, {}
        if batch is not None:
            samples = next(iter(batch.values())).shape[0]
            fields = {name: [zlib.crc32(str(tuple(batch[name].shape)).encode()),
                             None if batch[name].is_meta else checksum(batch[name])] for name in self._fields}
        why = "" if error is None else first_line(error)
        self.untold.append(ReadBatch(number, first, samples, why, self._group, fields))

    def take(self) -> list[ReadBatch]:
        """Return the batches that were read, and that the others are told of now."""
        batches, self.untold = self.untold, []
        return batches

    def expect(self, first: int, all_told: Callable[[], object]) -> None:
        """Let :meth:`confirm` wait until all have told of the batch with this first microbatch."""
        self._expected.append((first, all_told))

    def tell(self, batches: Sequence[ReadBatch]) -> None:
        """Tell the others of batches of a stream. All ranks have read the same ones when a stream is drained."""
        for batch in batches:
            self.expect(batch.first, self._exchange.begin(None, "reading training batches", None, [batch],
                                                          hears="later"))

    def confirm(self, until: float = inf) -> None:
        """Wait until all ranks have told the same of the batches up to a microbatch.

        Raises:
            RunError: they have not, or a rank failed.
        """
        while self._expected and self._expected[0][0] < until:
            self._expected.popleft()[1]()


def checksum(field: Tensor) -> int:
    """Return a checksum of 32 bits of a field's values, whatever their layout in memory. The host waits for a GPU."""
    total = zlib.crc32(str(field.dtype).encode())
    for part in (field,) if field.nbytes <= WHOLE_BYTES else (_first_values(field), _spread_values(field)):
        on_host = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
        total = zlib.crc32(on_host.view(-1).view(torch.uint8).numpy().data, total)
    return total


def _first_values(field: Tensor) -> Tensor:
    """Return the first values of every sample along the last dimension."""
    while field.dim() > 2:
        field = field[:, 0]
    return field[:, :FIRST_VALUES] if field.dim() == 2 else field


def _spread_values(field: Tensor) -> Tensor:
    """Return every n-th value along each dimension except the samples', n a power of 2 that leaves few enough."""
    steps = [1] * field.dim()
    sizes = list(field.shape)
    while torch.Size(sizes).numel() > max(SPREAD_VALUES, sizes[0]):
        widest = max(range(1, len(sizes)), key=sizes.__getitem__)
        steps[widest] *= 2
        sizes[widest] = -(-field.shape[widest] // steps[widest])
    return field[tuple(slice(None, None, step) for step in steps)]


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    if isinstance(error, RunError):
        return error.what
    if isinstance(error, UserError):
        return error.problems[0].what
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


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
