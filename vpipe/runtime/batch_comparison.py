"""Compare the batches that ranks read: with different ones, inputs would be trained with the labels of others.

A rank computes a checksum of every field whose values it has. It sends those of a batch to the next rank with the first
microbatch of the batch, ahead of the activations, together with those of fields that only ranks before it have. The
next rank compares them with its own before it computes with the activations, for which it waits in any case. The
replicas of the last stage send theirs to the first of them, which compares before it waits for their gradients. So no
rank waits longer than without, and the error comes before an update uses the batch.

At the end of its batches a rank sends a message in the same way, and checks whether the ranks before it have more.

Lanes read the same batches, too: their layers compute with shards of one another's. The ranks with the same place in
all lanes compare each batch when they read it; they wait for one another in every layer anyway.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import lcm
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.distributed.value_exchange import Exchange
from vpipe.distributed.watchdog import watch
from vpipe.errors import RunError, UserError
from vpipe.runtime.microbatches import Batch, Checksums, MicrobatchLoader, Segment
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind, Transport, as_bytes, from_bytes
from vpipe.schedules.assignment import Assignment, stages_of_rank
from vpipe.schedules.size import Placement

WHOLE_BYTES = 1 << 18
"""Size of the largest field of which all values are compared; of a larger one some values of every sample are."""

SPREAD_VALUES = 1 << 15
FIRST_VALUES = 64
"""Values at the beginning of every sample that are compared besides values spread over it: a short sequence fills
only the beginning."""

SAME_BATCHES = ("every rank must read the same batches in the same order: give a DataLoader that shuffles a generator "
                "with the same seed on all ranks, generator=torch.Generator().manual_seed(0), and no "
                "DistributedSampler, since the pipeline divides each batch itself")
SAME_CALLS = "every rank must go through the same batches and calls"
SEE_THERE = "the log of that rank has the traceback"

_ENDED = "end"
"""Kind of the message that the batches have ended, or why no more could be read."""

_TEXT = 512
"""Characters of an error that are sent, of at most 6 bytes each."""


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


def checksums(batch: Batch, fields: Sequence[str], rank: int) -> tuple[int, Checksums]:
    """Return the number of samples of a batch that a rank of the job has read, and its checksums."""
    return next(iter(batch.values())).shape[0], {
        name: [zlib.crc32(str(tuple(batch[name].shape)).encode()),
               *((None, None) if batch[name].is_meta else (checksum(batch[name]), rank))]
        for name in fields}


class BatchComparison:
    """Compare the batches of one rank with those of its neighbours.

    Of a batch that passes between two ranks, in whichever stages, one message does. Batches come in order everywhere.

    Attributes:
        posted_until, compared_until: per stage, the microbatch before which nothing is left to post or compare.

    Args:
        placement: ranks per stage.
        fields: of a batch.
        lane: of every rank of the pipeline the job's, for messages.
    """

    def __init__(self, transport: Transport, placement: Placement, fields: Sequence[str], lane: Sequence[int]) -> None:
        self._transport, self._fields, self._rank, self._lane = transport, fields, transport.rank, lane
        self._last, self._stages = len(placement) - 1, stages_of_rank(placement, self._rank)
        self._period = lcm(*map(len, placement))
        # The way of a microbatch; from the last stage on to the first of its replicas.
        self._way = Assignment((*placement, placement[-1][:1]), 1, True, lambda number: True)
        hops = {hop for number in range(self._period) for hop in self._hops(number) if hop[0] != hop[1]}
        self._before = sorted(before for before, after in hops if after == self._rank)
        self._after = sorted(after for before, after in hops if before == self._rank)
        self._lowest = {rank: stage for stage in reversed(range(len(placement))) for rank in placement[stage]}
        self._messages: Counter[tuple[int, int]] = Counter()  # by source and target
        self._bytes = 6 * _TEXT + sum(100 + len(json.dumps(name)) for name in fields)  # of a message
        self._segment: Segment
        self._loader: MicrobatchLoader | None = None
        self._ended: MicrobatchLoader | None = None  # the latest whose end was checked
        self._posted: dict[int, deque[TransferKey]] = {rank: deque() for rank in self._before}
        self._begin_loader()

    def _begin_loader(self) -> None:
        """Begin with the first batch of a loader, whose microbatches count from 0."""
        self._posted_until, self._compared_until = dict.fromkeys(self._before, 0), dict.fromkeys(self._before, 0)
        self._sent_until = dict.fromkeys(self._after, 0)  # without ranks that know that the batches have ended

    def _hops(self, microbatch: int) -> Iterator[tuple[int, int]]:
        """Yield the ranks between which the checksums of a microbatch's batch are sent."""
        yield from pairwise(self._rank_of(stage, microbatch) for stage in range(self._last + 2))

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return self._way.rank_of(stage, microbatch)

    def checksums(self, batch: Batch) -> tuple[int, Checksums]:
        """Return the number of samples, and the checksums."""
        return checksums(batch, self._fields, self._lane[self._rank])

    def begin(self, segment: Segment) -> None:
        """Begin a segment."""
        self._segment, self._way = segment, replace(self._way, slices=segment.assignment.slices)
        self.posted_until, self.compared_until = dict.fromkeys(self._stages, 0), dict.fromkeys(self._stages, 0)
        if segment.loader is not self._loader:
            self._loader = segment.loader
            self._begin_loader()

    def post(self, stage: int, microbatch: int) -> None:
        """Post the receive of the checksums that come ahead of a stage's activations."""
        peer = self._rank_of(stage - 1, microbatch)
        if self._segment.first + microbatch >= self._posted_until[peer]:
            self._posted_until[peer] = self._end_of_batch(microbatch)
            self._posted[peer].append(self._post(peer))
        if self._period == 1:
            self.posted_until[stage] = self._end_of_batch(microbatch) - self._segment.first

    def compare(self, stage: int, microbatch: int) -> None:
        """Compare a batch with the rank before, if this is its first microbatch from there; send its checksums on.

        Raises:
            RunError: the batches differ; or the rank before has no more, or could not read it.
        """
        if self._period == 1:
            self.compared_until[stage] = self._end_of_batch(microbatch) - self._segment.first
        if stage > 0:
            self._compare_with(self._rank_of(stage - 1, microbatch), microbatch)
        peer = self._rank_of(stage + 1, microbatch)
        until = self._sent_until.get(peer)  # None: it is this rank, or knows that the batches have ended
        if until is not None and self._segment.first + microbatch >= until:
            self._sent_until[peer] = self._end_of_batch(microbatch)
            batch = self._batch_of(microbatch)
            self._send(peer, self._kind, batch, self._segment.loader.checksums[batch])
            self.exhausted(self._segment.loader)

    def compare_replicas(self, microbatches: range) -> None:
        """Compare the batches of these microbatches between replicas of the last stage, on the first of them."""
        for microbatch in microbatches if self._rank == self._rank_of(self._last + 1, 0) else ():
            self._compare_with(self._rank_of(self._last, microbatch), microbatch)

    def forget(self, microbatch: int) -> None:
        """Drop the checksums of batches that end before this microbatch."""
        done, known = self._batch_of(microbatch), self._segment.loader.checksums
        for batch in [batch for batch in known if batch < done]:
            del known[batch]

    def exhausted(self, loader: MicrobatchLoader) -> None:
        """Tell the ranks after this one the end of the batches of a stream, once they have all checksums.

        Otherwise a rank with more batches would wait for this one's, and this one for that rank.
        """
        if loader is not self._loader or not loader.ended:  # there may be no segment yet
            return
        if not self._segment.training or self._segment.assignment.flush:
            return
        first = self._segment.first
        for peer, until in list(self._sent_until.items()):
            if not any((self._rank, peer) in self._hops(number - first) for number in range(until, loader.total)):
                self._send_end(loader, peer)

    def check_end(self, loader: MicrobatchLoader, exchange: Exchange) -> None:
        """Check that the batches end alike on every rank, or with an error on one of them.

        Raises:
            RunError: another rank has more, or could not read the next one.
            Exception: of reading a batch here, if another rank could read it.
        """
        if loader is self._ended:
            return
        self._ended = loader
        for peer in list(self._sent_until):
            self._send_end(loader, peer)
        self._begin_loader()
        try:
            for peer in self._before:
                if self._receive(peer)[0] == _ENDED:
                    continue
                if loader.error is not None:
                    watch.failed(loader.error)
                    raise loader.error
                self._fail(f"batches differ between ranks: there are {loader.batches_read} on {self._name()} and "
                           f"more on {self._name(peer)}", SAME_BATCHES)
            self._transport.wait_sent(TransferKind.CHECKSUMS)
            failures = exchange.all_gather(self._failure_of(loader))
        except RunError as error:
            if loader.error is None or loader.error is error:
                raise
            raise loader.error from error
        if any(failures) and not all(failures):
            raise loader.error or RunError(f"{next(filter(None, failures))}; on other ranks the batches ended before",
                                           hint=SEE_THERE, rank=self._lane[self._rank])

    def _send_end(self, loader: MicrobatchLoader, peer: int) -> None:
        del self._sent_until[peer]
        self._send(peer, _ENDED, loader.batches_read, self._failure_of(loader)[:_TEXT])

    def _failure_of(self, loader: MicrobatchLoader) -> str:
        """Return which batch could not be read and why; nothing where the batches have ended."""
        return "" if loader.error is None else (
            f"{self._name()} could not read batch {loader.batches_read}: {first_line(loader.error)}")

    def _name(self, rank: int | None = None) -> str:
        """Return a rank of the pipeline, this one by default, as the job counts it."""
        return f"rank {self._lane[self._rank if rank is None else rank]}"

    def _batch_of(self, microbatch: int) -> int:
        return self._segment.loader.batch_of(self._segment.first + microbatch)

    def _end_of_batch(self, microbatch: int) -> int:
        """Return the loader's first microbatch after the batch of this one."""
        return self._segment.loader.end_of_batch(self._segment.first + microbatch)

    @property
    def _kind(self) -> str:
        """Return the kind of message about a batch."""
        call, autocast = "training" if self._segment.training else "evaluation", self._segment.autocast
        return f"{call} batch" if autocast is None else f"{call} under torch.autocast({autocast}), batch"

    def _compare_with(self, peer: int, microbatch: int) -> None:
        """Compare a microbatch's batch with that of a rank before this one, unless that was done."""
        if peer == self._rank or self._segment.first + microbatch < self._compared_until[peer]:
            return
        self._compared_until[peer] = self._end_of_batch(microbatch)
        kind, number, content = self._receive(peer)
        batch, here, there = self._batch_of(microbatch), self._name(), self._name(peer)
        if kind == _ENDED and content:
            self._fail(content, SEE_THERE, peer)
        if kind == _ENDED:
            self._fail(f"batches differ between ranks: there are {number} on {there} and more on {here}",
                       SAME_BATCHES)
        if (kind, number) != (self._kind, batch):
            self._fail(f"{there} is at {kind} {number}, {here} at {self._kind} {batch}", SAME_CALLS)
        samples, mine = self._segment.loader.checksums[batch]
        if samples != content[0]:
            self._fail(f"batches differ between ranks: batch {batch} has {content[0]} samples on {there} and "
                       f"{samples} on {here}", SAME_BATCHES)
        for name, theirs in content[1].items():
            if mine[name][0] != theirs[0]:
                self._fail(f"batches differ between ranks: the shape of field '{name}' of batch {batch} on {there} "
                           f"and {here}", SAME_BATCHES)
            if mine[name][1] is None:
                mine[name] = theirs
            elif theirs[1] not in (None, mine[name][1]):
                self._fail(f"batches differ between ranks: field '{name}' of batch {batch} on rank {theirs[2]} "
                           f"and rank {mine[name][2]}", SAME_BATCHES)

    def _fail(self, what: str, hint: str, peer: int | None = None) -> NoReturn:
        error = RunError(what, hint=hint, rank=self._lane[self._rank], peer=None if peer is None else self._lane[peer])
        watch.failed(error)
        raise error

    # -- messages

    def _key(self, source: int, target: int) -> TransferKey:
        self._messages[source, target] += 1
        return TransferKey(TransferKind.CHECKSUMS, self._lowest[target], self._messages[source, target] - 1)

    def _send(self, peer: int, kind: str, number: int, content: object = None) -> None:
        self._transport.send(peer, self._key(self._rank, peer), [as_bytes([kind, number, content], self._bytes)])

    def _post(self, peer: int) -> TransferKey:
        key = self._key(peer, self._rank)
        self._transport.post(peer, key, [TensorSpec((self._bytes,), torch.uint8, wants_gradient=False)])
        return key

    def _receive(self, peer: int) -> Any:
        """Wait for the next message: its kind, the number of a batch, and checksums or text."""
        posted = self._posted[peer]
        (message,) = self._transport.receive(peer, posted.popleft() if posted else self._post(peer))
        return from_bytes(message)


class LaneComparison:
    """Compare batches with those that the ranks with the same place in other lanes read.

    Args:
        exchange: between these ranks.
        fields: of a batch.
        alike: the lanes that read the same batches as this one; others read as many, of as many samples.
    """

    def __init__(self, exchange: Exchange, fields: Sequence[str], alike: Sequence[int]) -> None:
        self._exchange, self._fields, self._alike = exchange, fields, alike

    def compare(self, number: int, batch: Batch | None, error: BaseException | None) -> BaseException | None:
        """Compare a batch, or that there is none; return the error with which to end before it."""
        mine = [dist.get_rank(), None if error is None else first_line(error),
                None if batch is None else checksums(batch, self._fields, dist.get_rank())]
        of_all = self._exchange.all_gather(mine, "comparing batches")
        if error is not None:
            return error
        what, hint = None, SAME_BATCHES
        if failed := next(((rank, text) for rank, text, *_ in of_all if text is not None), None):
            what, hint = f"rank {failed[0]} could not read batch {number}: {failed[1]}", SEE_THERE
        elif (ended := {there is None for _, _, there in of_all}) == {True, False}:
            over, more = (next(rank for rank, _, there in of_all if (there is None) is none)
                          for none in (True, False))
            what = f"batches differ between lanes: there are {number} on rank {over} and more on rank {more}"
        elif ended == {False}:
            first = of_all[self._alike[0]]
            what = next(filter(None, (self._difference(number, first, other, lane in self._alike)
                                      for lane, other in enumerate(of_all))), None)
        return None if what is None else RunError(what, hint=hint)

    def _difference(self, number: int, first: Sequence[Any], other: Sequence[Any], alike: bool) -> str | None:
        """Return how a batch differs between two ranks, which read ``alike`` ones or others."""
        (rank, _, (samples, mine)), (peer, _, (theirs, fields)) = first, other
        if samples != theirs:
            return (f"batches differ between lanes: batch {number} has {samples} samples on rank {rank} and {theirs} "
                    f"on rank {peer}")
        for name in self._fields if alike else ():
            (shape, values, _), (their_shape, their_values, _) = mine[name], fields[name]
            if shape != their_shape or (None not in (values, their_values) and values != their_values):
                return (f"batches differ between lanes: {'the shape of ' * (shape != their_shape)}field '{name}' of "
                        f"batch {number} on rank {rank} and rank {peer}")
        return None


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    if isinstance(error, RunError):
        return error.what
    if isinstance(error, UserError):
        return error.problems[0].what
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
