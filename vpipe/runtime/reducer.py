"""Sum gradients over the replicas of a stage, overlapped with the last backward of an update.

This is a reduce-scatter and an all-gather, bucket by bucket. As soon as the last backward of an update has made the
gradients of a bucket, each of w replicas gets its share of them from the others: one w-th. REDUCE_GRAD sums the shares
in the order of the replicas (the end of the reduce-scatter), and sends the sum to the others (the all-gather); NORM or
STEP puts the sums together. So every replica gets the same numbers in any order of arrival, and sends 2 (w-1)/w of the
gradients' size, the least that is possible (Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms, 2009,
section 3; buckets in the order of backward: Li et al., PyTorch Distributed, VLDB 2020, section 3.2).

With ZeRO-1 (Rajbhandari et al., ZeRO, SC 2020, section 5.1) each replica owns whole parameters: a bucket has one owner,
which alone gets its shares, sums them, and steps. It sends the new weights in place of the sums, and GATHER_W puts them
into the version of the others. Whole parameters, since an optimizer or a norm of a part would give other numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

import torch
from torch import Tensor

from vpipe.errors import RunError, UserError
from vpipe.runtime.sharded_tensors import added, is_sharded, local, wrapped
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind, Transport
from vpipe.runtime.weight_versions import WeightVersions
from vpipe.torch_private import foreach_copy_

BUCKET_BYTES = 4 << 20
"""Size of a bucket: far more than a message's fixed cost is worth (gloo: 70 us, in which 0.2 MB are sent), but small
enough that the first one is sent early in the backward."""


class _Bucket:
    """Some of a stage's gradients as the rows of a matrix, one per rank that sums.

    Behind the gradients stands a number for each: 1 if the replica has one, so that the sum counts them.

    Args:
        members: positions of the parameters.
        ranks: those among which the sum is divided: all replicas, or the owner of these parameters.
    """

    def __init__(self, members: Sequence[int], leaves: Sequence[Tensor], ranks: Sequence[int]) -> None:
        self.members, self.ranks = members, ranks
        self._shapes = [leaves[i].shape for i in members]
        self._sizes = [leaves[i].numel() for i in members]
        total, like = sum(self._sizes) + len(members), leaves[members[0]]
        self.rows = like.new_empty((len(ranks), -(-total // len(ranks))))
        # Sums of this replica's row, double-buffered: the sum of a stream's last round, to which few replicas
        # contribute, may be made while the one before is still being sent.
        self._sums = like.new_empty((2, self.rows.shape[1]))

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(tuple(self.rows[0].shape), self.rows.dtype, wants_gradient=False)

    def sum(self, update: int) -> Tensor:
        """Return the memory of this replica's sum of an update; then, with an owner, of the weights that it makes."""
        return self._sums[update % 2]

    @property
    def weights_spec(self) -> TensorSpec:
        return TensorSpec((sum(self._sizes),), self.rows.dtype, wants_gradient=False)

    def weights(self, update: int, leaves: Sequence[Tensor]) -> Tensor:
        """Return the weights that this replica has made, in the memory of its sum."""
        flat = self.sum(update)[:sum(self._sizes)]
        foreach_copy_(list(torch.split(flat, self._sizes)), [leaves[i].data.reshape(-1) for i in self.members])
        return flat

    def put_weights(self, flat: Tensor, leaves: Sequence[Tensor]) -> None:
        """Copy in the weights that the owner has made."""
        parts = [part.view(shape) for part, shape in zip(torch.split(flat, self._sizes), self._shapes, strict=True)]
        foreach_copy_([leaves[i].data for i in self.members], parts)

    def fill(self, gradients: Sequence[Tensor | None], names: Sequence[str]) -> None:
        """Copy this replica's gradients in."""
        for part, i in zip(self._parts(), self.members, strict=True):
            gradient = gradients[i]
            if gradient is None:
                part.zero_()
            elif gradient.layout == torch.strided:
                part.copy_(local(gradient).reshape(-1))
            else:
                raise UserError(f"'{names[i]}' has a gradient in the layout {gradient.layout}: replicas cannot sum it",
                                hint="make it dense (nn.Embedding(sparse=False)), or give its stage one rank")
        there = [float(gradients[i] is not None) for i in self.members]
        if all(number == 1.0 for number in there):
            self.present.fill_(1.0)  # without a copy from the host, for which a GPU would be synchronized
        else:
            self.present.copy_(torch.tensor(there, device="cpu"))

    def _parts(self) -> Sequence[Tensor]:
        return torch.split(self.rows.view(-1)[:sum(self._sizes)], self._sizes)

    @property
    def present(self) -> Tensor:
        """Return per member, once the rows are sums, how many replicas have a gradient."""
        ends = sum(self._sizes)
        return self.rows.view(-1)[ends:ends + len(self.members)]

    def gradients(self, present: Sequence[float]) -> Iterator[tuple[int, Tensor | None]]:
        """Yield the members with their gradients, once the rows are sums; None where no replica has one."""
        for member, part, shape, count in zip(self.members, self._parts(), self._shapes, present, strict=True):
            yield member, part.view(shape) if count else None


class Reducer:
    """Sum the gradients of one replica with those of the stage's others.

    Args:
        stage: its number.
        weights: its own parameters.
        late: names of those whose gradients are not final before the whole backward is done.
        ranks: of the replicas, in order.
        transport: of this rank.
        owners: of the parameters, by their positions: the numbers of replicas; None where each steps all.
    """

    def __init__(self, stage: int, weights: WeightVersions, late: Sequence[str], ranks: Sequence[int],
                 transport: Transport, owners: Sequence[int] | None = None) -> None:
        self._stage, self._weights, self._transport = stage, weights, transport
        self._late = {weights.names.index(name) for name in late}
        self._me, self._others = transport.rank, [rank for rank in ranks if rank != transport.rank]
        leaves = list(map(local, weights.leaves()))
        self._sharded = any(map(is_sharded, weights.leaves()))
        self._buckets = [_Bucket(members, leaves, ranks if owners is None else [ranks[owners[members[0]]]])
                         for members in _grouped(leaves, owners)]
        self._bucket_of = {i: number for number, bucket in enumerate(self._buckets) for i in bucket.members}
        self._sent = 0  # buckets, of the update at hand
        self._missing: list[int] = []  # gradients that each bucket waits for
        self._seen = False  # whether a backward has shown how often each gradient is added to

    # -- the last backward of an update: shares are sent (reduce-scatter)

    @contextmanager
    def during_backward(self, update: int, contributors: Sequence[int], early: bool) -> Iterator[None]:
        """Send the gradients of the backward inside at its end, or ``early``: each bucket once it is complete."""
        if self._transport.ordered:  # transfers have a fixed order: REDUCE_GRAD sends them
            yield
            return
        if not early or self._sharded:  # parts of a gradient that other ranks have are added first
            yield
            self.send(update, contributors)
            return
        times: Counter[int] = Counter()
        self._missing = [len(bucket.members) for bucket in self._buckets]

        def made(i: int) -> None:
            times[i] += 1
            if i in self._late or not self._seen:
                return
            if times[i] > 1 and self._bucket_of[i] < self._sent:
                raise RunError(f"'{self._weights.names[i]}' got a second gradient in one backward of stage "
                               f"{self._stage}, which it never did before, when the first had been sent",
                               hint="use it in one part of the model that is recomputed, or in none")
            # A leaf with several gradients keeps its bucket incomplete, so that it is sent at the end.
            self._missing[self._bucket_of[i]] += -1 if times[i] == 1 else 1
            while self._sent < len(self._buckets) and not self._missing[self._sent]:
                self._send_next(update, contributors)

        with ExitStack() as hooks:
            for i, leaf in ((i, leaf) for i, leaf in enumerate(self._weights.graded()) if leaf.requires_grad):
                hook = leaf.register_post_accumulate_grad_hook(lambda _, i=i: made(i))  # type: ignore[no-untyped-call]
                hooks.callback(hook.remove)
            yield
        self._late |= {i for i, count in times.items() if count > 1}
        self._seen = True
        self.send(update, contributors)

    def send(self, update: int, contributors: Sequence[int]) -> None:
        """Send the rest; a replica without a microbatch of the update only posts receives."""
        if not self._sent:
            self._weights.complete_gradients()
        while self._sent < len(self._buckets):
            self._send_next(update, contributors)
        self._sent = 0

    def abandon(self) -> None:
        """Reset after an update that failed."""
        self._sent = 0

    def _send_next(self, update: int, contributors: Sequence[int]) -> None:
        number, self._sent = self._sent, self._sent + 1
        bucket, key = self._buckets[number], self._key(TransferKind.SHARES, update, number)
        rows: Mapping[int, Tensor] = {}
        if self._me in contributors:
            bucket.fill(self._weights.gradients, self._weights.names)
            rows = dict(zip(bucket.ranks, bucket.rows, strict=True))
        self._exchange(key, rows, contributors if self._me in bucket.ranks else (), bucket.spec)

    def _exchange(self, key: TransferKey, rows: Mapping[int, Tensor], senders: Sequence[int], spec: TensorSpec) -> None:
        """Send each other replica its row, and post receives from the ``senders``.

        Of two ranks the lower one sends first: a transport that keeps one order per pair would deadlock otherwise.
        """
        for peer in self._others:
            if peer in rows and self._me < peer:
                self._transport.send(peer, key, [rows[peer]])
            if peer in senders:
                self._transport.post(peer, key, [spec])
            if peer in rows and self._me > peer:
                self._transport.send(peer, key, [rows[peer]])

    # -- REDUCE_GRAD: the shares are summed, and the sums sent (all-gather)

    def reduce(self, update: int, contributors: Sequence[int]) -> None:
        """Sum this replica's share of every gradient and send it to the others."""
        if self._transport.ordered or self._me not in contributors:
            self.send(update, contributors)
        for number, bucket in self._summed_here():
            key, own = self._key(TransferKind.SHARES, update, number), bucket.rows[bucket.ranks.index(self._me)]
            first, *others = [own if rank == self._me else self._transport.receive(rank, key)[0]
                              for rank in contributors]
            total = added(bucket.sum(update).copy_(first), others)
            self._exchange(self._key(TransferKind.SUMS, update, number), dict.fromkeys(bucket.ranks, total),
                           bucket.ranks, bucket.spec)

    # -- NORM or STEP: the sums are put together

    def gather(self, update: int) -> None:
        """Receive the sums, and make them the gradients of the stage; with owners, those of what this replica owns."""
        gradients: dict[int, Tensor | None] = {}
        for number, bucket in (summed := self._summed_here()):
            for row, rank in zip(bucket.rows, bucket.ranks, strict=True):
                row.copy_(bucket.sum(update) if rank == self._me else
                          self._transport.receive(rank, self._key(TransferKind.SUMS, update, number))[0])
        # One copy to the host for all buckets: a GPU is synchronized once.
        present = iter(torch.cat([bucket.present.float() for _, bucket in summed]).tolist() if summed else [])
        for _, bucket in summed:
            gradients.update(bucket.gradients(list(islice(present, len(bucket.members)))))
        self._weights.put_gradients([None if (gradient := gradients.get(i)) is None else wrapped(gradient, leaf)
                                     for i, leaf in enumerate(self._weights.leaves())])

    def _summed_here(self) -> list[tuple[int, _Bucket]]:
        """Return the buckets of which this replica sums a row, with their numbers."""
        return [(number, bucket) for number, bucket in enumerate(self._buckets) if self._me in bucket.ranks]

    # -- with owners: STEP sends the weights that it made, GATHER_W receives those of the others

    def send_weights(self, update: int) -> None:
        """Send the weights of what this replica owns, and post the receives of the others'."""
        if not self._transport.ordered:
            self._exchange_weights(update)

    def gather_weights(self, update: int) -> None:
        """Copy the weights that the other replicas have made into the latest version."""
        if self._transport.ordered:
            self._exchange_weights(update)
        leaves = list(map(local, self._weights.leaves()))
        for number, bucket in enumerate(self._buckets):
            [owner] = bucket.ranks
            if owner != self._me:
                flat = self._transport.receive(owner, self._key(TransferKind.WEIGHTS, update, number))[0]
                bucket.put_weights(flat, leaves)

    def _exchange_weights(self, update: int) -> None:
        leaves = list(map(local, self._weights.leaves()))
        for number, bucket in enumerate(self._buckets):
            own = bucket.weights(update, leaves) if bucket.ranks == [self._me] else None
            self._exchange(self._key(TransferKind.WEIGHTS, update, number),
                           {} if own is None else dict.fromkeys(self._others, own), bucket.ranks, bucket.weights_spec)

    def _key(self, kind: TransferKind, update: int, bucket: int) -> TransferKey:
        return TransferKey(kind, self._stage, update * len(self._buckets) + bucket)


def owners_of(sizes: Sequence[int], width: int) -> list[int]:
    """Return for parameters of these sizes the replicas that own them: the largest first, each to the least loaded.

    So none owns more than the largest parameter and an equal part of the others: of these the fullest had at most that
    before its last one.
    """
    loads, owners = [0] * width, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def count_buckets(stages: Mapping[int, Stage], owners: Mapping[int, Sequence[int]]) -> int:
    """Return the number of buckets that the stages of a rank have together, some of them with owners."""
    return sum(1 for s, stage in stages.items() for _ in _grouped([*map(local, stage.weights.leaves())], owners.get(s)))


def _grouped(leaves: Sequence[Tensor], owners: Sequence[int] | None) -> Iterator[list[int]]:
    """Yield groups of parameters of one dtype, and one owner, from the last to the first, the order of a backward."""
    for members in by_size(leaves):
        of_owner: dict[int | None, list[int]] = defaultdict(list)
        for i in members:
            of_owner[None if owners is None else owners[i]].append(i)
        yield from of_owner.values()


def by_size(leaves: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield groups of parameters of one dtype of at most a bucket's size, or one; from the last to the first."""
    members: list[int] = []
    size = 0
    for i in reversed(range(len(leaves))):
        leaf = leaves[i]
        if members and (size + leaf.nbytes > BUCKET_BYTES or leaf.dtype != leaves[members[0]].dtype):
            yield members
            members, size = [], 0
        members.append(i)
        size += leaf.nbytes
    if members:
        yield members
