"""Exchange weights tied across stages: versions travel to the borrower, gradients to the owner.

The first stage that uses a tied weight owns it: it alone steps it and counts it in a norm. Another stage borrows it:
its forward of a microbatch uses the version that the owner's forward of that microbatch used, and its gradients of an
update are summed and sent to the owner, which adds them to its own before the step. Versions and updates are those of
the owner. Between stages of one rank tensors are passed on without a copy: the owner keeps a version until its own
backward of a microbatch, which comes after the borrower's.

With a flush a version is sent when the next batch begins: until then a script may change it. A tied weight that is not
trained is sent where a call begins.

With replicas each rank that borrows gets its versions from one of the owner's ranks, and sends its gradients to all of
them: every replica of the owner adds the same numbers in the same order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from vpipe.description.cut import Ties
from vpipe.errors import UserError
from vpipe.runtime.sharded_tensors import local
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_optimizer import first_of
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind, Transport
from vpipe.runtime.values import Values
from vpipe.runtime.weight_versions import WeightVersions
from vpipe.schedules.assignment import Assignment, Placement, Setting, borrowing_ranks
from vpipe.schedules.kinds import TIED_GRADIENT, TIED_VERSION

_WEIGHTS, _GRADIENTS = TransferKind.TIED_WEIGHTS, TransferKind.TIED_GRADIENTS
_VALUES = {_WEIGHTS: TIED_VERSION, _GRADIENTS: TIED_GRADIENT}


class TiedWeights:
    """Exchange the tied weights of one rank. Updates and versions count from :meth:`begin`.

    Args:
        ties, frozen: of weights that are trained, and that are not.
        values: of the rank, where it puts what it sends to itself.
    """

    def __init__(self, ties: Ties, frozen: Ties, placement: Placement, stages: Mapping[int, Stage],
                 transport: Transport, values: Values) -> None:
        self._ties, self._placement, self._stages, self._transport = ties, placement, stages, transport
        self._values = values
        self._number = {pair: i for i, pair in enumerate(sorted((owner, b) for owner in ties for b in ties[owner]))}
        self._frozen = {TransferKey(_WEIGHTS, number, 0): (owner, borrower, frozen[owner][borrower])
                        for number, (owner, borrower) in enumerate(
                            sorted((owner, b) for owner in frozen for b in frozen[owner]), len(self._number))}
        self._sent: dict[TransferKey, list[tuple[int, int]]] = {}  # marks of those that are not trained, when sent
        self._arriving: list[tuple[int, TransferKey, list[Tensor]]] = []  # of those that are not trained
        self._source = {owner: next(rank for rank in placement[owner]
                                    if transport.rank in borrowing_ranks(placement, owner, ties[owner], rank))
                        for stage in stages.values() for owner in stage.borrowed}
        self._posted: dict[int, deque[int]] = defaultdict(deque)  # versions whose receives are posted, by owner
        self._assignment: Assignment
        self._senders: dict[tuple[int, int], list[int]] = {}  # ranks whose gradients of an update are not posted yet
        self._begun: dict[int, int] = defaultdict(int)  # the owner's updates before those that are counted
        for owner in set(ties) & set(stages):
            names = {name for borrowed in ties[owner].values() for name in borrowed}
            for name in sorted(names - set(stages[owner].weights.names)):
                raise UserError(f"'{name}' is tied to a parameter of another stage, but is its parameter's second name",
                                hint="tie to the first one")

    def begin(self, assignment: Assignment) -> None:
        """Count updates and versions from here."""
        self._assignment = assignment
        self._partners = Setting(assignment, {owner: tuple(borrowers) for owner, borrowers in self._ties.items()})
        for number, stage in self._stages.items():
            self._begun[number] = stage.weights.latest
            self._begun.update({owner: weights.latest for owner, weights in stage.borrowed.items()})

    def abandon(self) -> None:
        """Drop all transfers that were not received."""
        for store in (self._posted, self._senders, self._arriving):
            store.clear()

    def exchange_latest(self, frozen: bool) -> None:
        """Send the latest weights and post their receives: owner after owner, in one order on all ranks.

        Args:
            frozen: also those that are not trained.
        """
        for owner in sorted(self._ties):
            if owner in self._stages:
                self.send_version(owner, self._stages[owner].weights.latest - self._begun[owner], now=True)
            if owner in self._source:
                (_, weights), *_ = self._borrowed(owner)
                self.post_version(owner, weights.latest - self._begun[owner], now=True)
        for key, (owner, borrower, names) in self._frozen.items():
            if owner in self._stages:
                named = dict(self._stages[owner].named_parameters())
                values = [local(named[name].data) for name in names]
                marks = [(named[name]._version, value.data_ptr()) for name, value in zip(names, values, strict=True)]
                if not frozen and self._sent[key] != marks:
                    raise UserError(f"{first_of(list(map(repr, names)))} changed between two batches; not trained, and "
                                    f"tied to stage {borrower}, which has a copy",
                                    hint="change it between two calls of train")
                self._sent[key] = marks
            if not frozen:
                continue
            if owner in self._stages:
                for rank in borrowing_ranks(self._placement, owner, [borrower], self._transport.rank):
                    self._send(rank, key, values)
            if borrower in self._stages:
                source = next(rank for rank in self._placement[owner] if self._transport.rank in borrowing_ranks(
                    self._placement, owner, [borrower], rank))
                ties = self._stages[borrower].frozen_ties
                own = [local(ties[name].data) for name in names]
                self._post(source, key, own)
                self._arriving.append((source, key, own))

    # -- the owner's side

    def send_version(self, owner: int, version: int, now: bool = False) -> None:
        """Send this version, the latest, to every borrower; with a flush that is left to :meth:`exchange_latest`."""
        if not now and self._assignment.flush:
            return
        for borrower, names in sorted(self._ties[owner].items()):
            key, values = self._key(_WEIGHTS, owner, borrower, version), self._stages[owner].weights.values(names)
            for rank in borrowing_ranks(self._placement, owner, [borrower], self._transport.rank):
                self._send(rank, key, values)

    def post_gradients(self, owner: int, update: int) -> None:
        """Post the receives of borrowers' gradients of an update; if transfers are ordered, of one rank per call."""
        senders = self._senders.pop((owner, update), None) or self._partners.gradient_senders(owner, update)
        if self._transport.ordered and len(senders) > 1:
            self._senders[owner, update] = senders[1:]
            senders = senders[:1]
        for rank in senders:
            for borrower, names in sorted(self._ties[owner].items()):
                if rank in self._assignment.contributors(owner, update, borrower):
                    self._post(rank, self._key(_GRADIENTS, owner, borrower, update),
                               self._stages[owner].weights.values(names))

    def add_gradients(self, owner: int, update: int) -> None:
        """Add the borrowers' gradients, the last stage's first: the order in which autograd would sum them."""
        if owner not in self._ties:
            return
        total: dict[str, Tensor] = {}
        for borrower, names in sorted(self._ties[owner].items(), reverse=True):
            parts = [self._receive(rank, self._key(_GRADIENTS, owner, borrower, update))
                     for rank in self._assignment.contributors(owner, update, borrower)]
            for i, name in enumerate(names if parts else ()):
                gradient = parts[0][i]
                for part in parts[1:]:
                    gradient = gradient + part[i]
                total[name] = total[name] + gradient if name in total else gradient
        for name, gradient in total.items():
            self._stages[owner].weights.add_gradient(name, gradient)

    # -- the borrower's side

    def post_version(self, owner: int, version: int, now: bool = False) -> None:
        """Post the receive of a version of the owner's; with a flush that is left to :meth:`exchange_latest`."""
        if not now and self._assignment.flush:
            return
        for borrower, weights in self._borrowed(owner):
            self._post(self._source[owner], self._key(_WEIGHTS, owner, borrower, version),
                       weights.values(weights.names))
        self._posted[owner].append(version)

    def install(self, owner: int, version: int) -> int:
        """Receive and install the posted versions up to ``version``; return its number among the borrowed weights."""
        posted = self._posted[owner]
        while posted and posted[0] <= version:
            arrived = posted.popleft()
            for borrower, weights in self._borrowed(owner):
                tensors = self._receive(self._source[owner], self._key(_WEIGHTS, owner, borrower, arrived))
                weights.install(self._begun[owner] + arrived, tensors)
        return self._begun[owner] + version

    def end(self, training: bool) -> None:
        """End a segment: receive the last versions; with a flush count what will be sent, as the owner counts it."""
        for stage in self._stages.values() if training and self._assignment.flush else ():
            for weights in stage.borrowed.values():
                weights.step(None)
        self.install_all()

    def install_all(self) -> None:
        """Receive and install all posted versions."""
        for owner, posted in self._posted.items():
            self.install(owner, max(posted, default=0))
        for source, key, own in self._arriving:
            for tensor, arrived in zip(own, self._receive(source, key), strict=True):
                tensor.copy_(arrived)
        self._arriving.clear()

    def send_gradients(self, owner: int, update: int) -> None:
        """Send the gradients accumulated for an update, and reset them."""
        for borrower, weights in self._borrowed(owner):
            weights.complete_gradients()
            gradients = [torch.zeros_like(value) if gradient is None else local(gradient).to_dense()
                         for value, gradient in zip(
                             weights.values(weights.names), weights.pop_gradients(), strict=True)]
            for rank in self._placement[owner]:
                self._send(rank, self._key(_GRADIENTS, owner, borrower, update), gradients)

    def _borrowed(self, owner: int) -> list[tuple[int, WeightVersions]]:
        """Return the stages of this rank that borrow from an owner, with the borrowed weights."""
        return [(s, stage.borrowed[owner]) for s, stage in self._stages.items() if owner in stage.borrowed]

    def _key(self, kind: TransferKind, owner: int, borrower: int, number: int) -> TransferKey:
        return TransferKey(kind, self._number[owner, borrower], self._begun[owner] + number)

    # -- to another rank, or to this one

    def _send(self, peer: int, key: TransferKey, tensors: list[Tensor]) -> None:
        if peer == self._transport.rank:
            self._values[_VALUES[key.kind], key.stage, key.number] = tensors
        else:
            self._transport.send(peer, key, tensors)

    def _post(self, peer: int, key: TransferKey, like: list[Tensor]) -> None:
        if peer != self._transport.rank:
            self._transport.post(peer, key, [TensorSpec(tuple(t.shape), t.dtype, wants_gradient=False) for t in like])

    def _receive(self, peer: int, key: TransferKey) -> list[Tensor]:
        if peer == self._transport.rank:
            here: list[Tensor] = self._values.pop((_VALUES[key.kind], key.stage, key.number))
            return here
        return self._transport.receive(peer, key)
