"""Rules on what the ranks exchange, and on who waits for whom."""

from __future__ import annotations

from collections import defaultdict

from vpipe.schedules.action import RECEIVES, SENDS, Action, Op
from vpipe.schedules.execute import execute
from vpipe.schedules.grid import Spot, fault
from vpipe.schedules.reading import Reading
from vpipe.schedules.transfer_order import in_one_order


def matching(reading: Reading) -> None:
    """No send without its receive on the peer, no receive without its send, none twice."""
    for action, (rank, position) in reading.actions():
        if action.op not in SENDS and action.op not in RECEIVES:
            continue
        partners = reading.partners.of(action, rank)
        if not partners:
            raise fault(reading.schedule, f"{action} on rank {rank} has no other rank at its other end",
                        "transfer only between stages on different ranks", (rank, position))
        if reading.position(action, rank) != position:
            raise fault(reading.schedule, f"{action} stands more than once on rank {rank}",
                        "transfer every tensor once", (rank, position))
        for partner, peer in partners:
            if reading.position(partner, peer) is None:
                raise fault(reading.schedule, f"{action} on rank {rank} has no {partner} on rank {peer}",
                            f"add {partner} there, or leave {action} out", (rank, position),
                            *[reading.end(peer)] * (peer != rank))


def precedence(reading: Reading) -> None:
    """On its rank, every action follows what makes or receives the tensors that it uses or sends.

    That is: a backward follows the forward and the early recompute, its weight half the input half; a send
    follows what it sends, the receive of a gradient the forward that tells its shapes; forward follows
    the previous stage or its activations, and the tied version (the one that the owner's forward of that microbatch
    used); backward follows the next stage or its gradients; a sum over replicas follows the rank's own gradients; an
    owner's norm and step follow that sum and the tied gradients of that update.
    """
    for action, (rank, position) in reading.actions():
        needed = list(reading.makers(action, rank))
        if reading.lowered:
            needed += reading.receives(action, rank)
            needed += reading.handed_over(action, rank)
        for before in needed:
            there = reading.position(before, rank)
            if there is None or there > position:
                state = "is not there" if there is None else "comes only later in the row"
                raise fault(reading.schedule, f"{action} on rank {rank} needs {before} before it, which {state}",
                            f"place {before} before {action}", (rank, position))


def last_versions(reading: Reading) -> None:
    """Every borrower of tied weights ends with the version that their owner ends with."""
    if not reading.lowered:
        return
    for owner, borrowing in reading.partners.borrowing.items():
        updates = reading.schedule.updates(owner)
        last = Action(Op.RECV_W, owner, updates)
        for rank in borrowing if updates else ():
            if reading.position(last, rank) is None:
                raise fault(reading.schedule, f"rank {rank} borrows the tied weights of stage {owner} and never "
                            f"receives their last version {updates}", f"add {last}", reading.end(rank))


def borrowed_versions(reading: Reading) -> None:
    """The forwards of a rank use the versions of a borrowed weight in their order: an older one is not kept."""
    latest: dict[tuple[int, int], int] = {}  # by rank and owner
    for action, (rank, position) in reading.actions():
        for owner, borrowers in reading.schedule.ties.items():
            if action.op is not Op.FORWARD or action.stage not in borrowers:
                continue
            version = reading.version[owner, action.microbatch]
            if version < latest.get((rank, owner), 0):
                raise fault(reading.schedule, f"{action} on rank {rank} uses version {version} of the tied weights of "
                            f"stage {owner}, after a forward that uses version {latest[rank, owner]}",
                            "run the microbatches of an update before those of later updates", (rank, position))
            latest[rank, owner] = version


def channel_order(reading: Reading) -> None:
    """Between two ranks, transfers of one kind are sent and received in the same order.

    So a transport needs no tags, only a channel per kind and direction; those of a tied weight are its own.
    """
    sent: dict[tuple[int, int, Op, int], list[tuple[Action, Spot]]] = defaultdict(list)
    received: dict[tuple[int, int, Op, int], list[tuple[Action, Spot]]] = defaultdict(list)
    for action, spot in reading.actions():
        tie = action.stage if action.op in _TIED else -1
        if action.op in SENDS:
            for _, peer in reading.partners.of(action, spot[0]):
                sent[spot[0], peer, action.op, tie].append((action, spot))
        elif action.op in RECEIVES:
            for send, peer in reading.partners.of(action, spot[0]):
                received[peer, spot[0], send.op, tie].append((send, spot))
    for (source, target, op, tie), sends in sent.items():
        if source == target:
            continue  # tied weights change hands in any order
        for (send, here), (expected, there) in zip(sends, received[source, target, op, tie], strict=True):
            if send != expected:
                raise fault(reading.schedule, f"rank {source} sends {send} to rank {target}, which receives what "
                            f"{expected} sends first", "send and receive in the same order", here, there)


_TIED = frozenset({Op.SEND_W, Op.RECV_W, Op.SEND_G, Op.RECV_G})


def no_deadlock_buffered(reading: Reading) -> None:
    """Every rank reaches its end when sends never wait."""
    _reaches_end(reading, rendezvous=False)


def no_deadlock_rendezvous(reading: Reading) -> None:
    """Every rank reaches its end when a send waits until its receive is posted."""
    _reaches_end(reading, rendezvous=True)


def no_deadlock_in_one_order(reading: Reading) -> None:
    """Every rank reaches its end when it carries out one transfer at a time, in an order that all ranks keep to.

    That is what nccl asks for: see :mod:`vpipe.schedules.transfer_order`.
    """
    if not reading.lowered:
        return
    _, stuck = in_one_order(reading)
    if stuck:
        waiting = "; ".join(f"rank {rank} stands before {action}" for rank, action in stuck.items())
        cursors = [reading.position(stuck[rank], rank) or 0 if rank in stuck else len(program)
                   for rank, program in enumerate(reading.schedule.programs)]
        raise fault(reading.schedule, f"deadlock when a rank carries out one transfer at a time (nccl): {waiting}",
                    "let the replicas of a stage come to their sums in one order, and the ranks that borrow a weight "
                    "to their gradients in the order of the microbatches",
                    *((rank, cursors[rank]) for rank in stuck), cursors=cursors)


def _reaches_end(reading: Reading, rendezvous: bool) -> None:
    cursors, stuck = execute(reading, rendezvous=rendezvous)
    if stuck:
        kind = "wait for their receive (rendezvous)" if rendezvous else "never wait (buffered)"
        raise fault(reading.schedule, f"deadlock when sends {kind}: {'; '.join(map(str, stuck))}",
                    "move the awaited actions forward in their programs, or the waiting ones back",
                    *((one.rank, cursors[one.rank]) for one in stuck), cursors=cursors)
