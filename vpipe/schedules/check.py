"""The specification of a schedule, executable: one function per rule.

Every rule takes a :class:`Reading` and raises :class:`CheckError` when it is broken; a rule may rely on
those before it in :data:`RULES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from vpipe.schedules.action import PER_MICROBATCH, RECEIVES, SENDS, Action, Op
from vpipe.schedules.execute import execute
from vpipe.schedules.facts import loads
from vpipe.schedules.grid import Spot, fault
from vpipe.schedules.lower import lower
from vpipe.schedules.order import Placement, Schedule, build
from vpipe.schedules.reading import Reading


def prove(name: str, placement: Placement, microbatches: int, update_every: int | None = None,
          ties: Mapping[int, tuple[int, ...]] | None = None, norm: bool = False) -> Schedule:
    """The schedule ``name``, built, lowered and checked; what to call before a process is started.

    A stream (a schedule without a flush) is proved by a finite part of it. After the warm-up its programs
    repeat: the actions of the next ``update_every`` microbatches are those of the ones before with
    microbatches, updates and versions shifted, and the rules see only differences between these. No
    action depends on one further away than the microbatches in flight, at most one per stage. So
    what holds in one repetition holds in all; ``4 * stages * update_every`` microbatches hold the warm-up,
    several repetitions and the cooldown (``tests/schedules/test_lower.py`` shows the repetition).

    Raises:
        UserError: the numbers do not fit the schedule.
        CheckError: the schedule breaks a rule.
    """
    schedule = lower(build(name, placement, microbatches, update_every, ties), norm)
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Hold a schedule to every rule in :data:`RULES`.

    A schedule without any transfer counts as not lowered: its rules on transfers are empty, and its
    actions wait for each other directly.

    Raises:
        CheckError: a rule is broken; the text shows the grid of actions with the one at fault marked.
    """
    reading = Reading.of(schedule)
    for rule in RULES:
        rule(reading)


def placement(reading: Reading) -> None:
    """Every stage has one rank and every rank a program; every action stands on the rank of its stage.

    Tied exchanges carry the stage that owns the weight: they stand on its rank or on a borrower's.
    """
    schedule = reading.schedule
    ranks = len(schedule.programs)
    holders = {rank for held_by in schedule.placement for rank in held_by}
    for stage, held_by in enumerate(schedule.placement):
        if len(held_by) != 1:
            raise fault(schedule, f"stage {stage} lives on {len(held_by)} ranks {held_by}", "give every stage one rank")
        if not 0 <= held_by[0] < ranks:
            raise fault(schedule, f"stage {stage} lives on rank {held_by[0]}, but there are programs for {ranks} ranks",
                        "add the program of that rank, or place the stage on another", (max(held_by[0], 0), 0))
    for rank in set(range(ranks)) - holders:
        raise fault(schedule, f"rank {rank} has a program but no stage", "start fewer ranks, or place a stage on it",
                    (rank, 0))
    for owner, borrowers in schedule.ties.items():
        if not 0 <= owner < schedule.stages or not set(borrowers) <= holders - set(schedule.placement[owner]):
            raise fault(schedule, f"the tied weights of stage {owner} are borrowed by ranks {borrowers}",
                        f"an owner is a stage below {schedule.stages}, its borrowers are other ranks than its own")
    for action, (rank, position) in reading.actions():
        if not 0 <= action.stage < schedule.stages:
            raise fault(schedule, f"{action} on rank {rank}: there are {schedule.stages} stages",
                        f"use stages 0 to {schedule.stages - 1}", (rank, position))
        borrowed = action.op in (Op.RECV_W, Op.SEND_G)
        homes = reading.borrowers(action.stage) if borrowed else schedule.placement[action.stage]
        if rank not in homes:
            raise fault(schedule, f"{action} stands on rank {rank}, but stage {action.stage} "
                        f"{'is borrowed by' if borrowed else 'lives on'} {sorted(homes)}",
                        "move the action to that rank, or change the placement", (rank, position))


def indices(reading: Reading) -> None:
    """Microbatches, updates and versions are in range; version 0 is everywhere from the start and never sent."""
    schedule = reading.schedule
    for action, spot in reading.actions():
        first, beyond, word = 0, reading.updates, "update"
        if action.op in PER_MICROBATCH:
            beyond, word = schedule.microbatches, "microbatch"
        elif action.op in (Op.SEND_W, Op.RECV_W):
            first, beyond, word = 1, reading.updates + 1, "version"
        if not first <= action.microbatch < beyond:
            raise fault(schedule, f"{action}: there is no {word} {action.microbatch} with {schedule.microbatches} "
                        f"microbatches and an update every {schedule.update_every}",
                        f"use {word}s {first} to {beyond - 1}, or leave the action out", spot)


def completeness(reading: Reading) -> None:
    """Every microbatch goes forward and backward once per stage."""
    schedule = reading.schedule
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            for op in (Op.FORWARD, Op.BACKWARD):
                action = Action(op, stage, microbatch)
                spots = reading.where.get(action, ())
                if len(spots) == 1:
                    continue
                other = reading.where.get(Action(Op.BACKWARD, stage, microbatch), ())
                mark = spots[-1] if spots else other[0] if other else reading.end(reading.rank_of(stage))
                raise fault(schedule, f"{action} stands {len(spots)} times in the programs",
                            "every microbatch goes forward and backward exactly once on every stage", mark)


def updates(reading: Reading) -> None:
    """Every update is stepped once per stage, in order, with the gradients of exactly its microbatches.

    With a flush nothing is in flight at a step.
    """
    schedule = reading.schedule
    for stage in range(schedule.stages):
        steps = flying = 0
        since: set[int] = set()  # microbatches that went backward since the last step
        for action, spot in reading.of_stage(stage):
            if action.op is Op.FORWARD:
                flying += 1
            elif action.op is Op.BACKWARD:
                flying -= 1
                since.add(action.microbatch)
            elif action.op is Op.STEP:
                if action.microbatch != steps:
                    raise fault(schedule, f"{action} comes where update {steps} of stage {stage} is due",
                                "step every update once, in order", spot)
                due = set(range(steps * schedule.update_every, (steps + 1) * schedule.update_every))
                if since != due:
                    wrong = [f"{word} {sorted(which)}" for word, which in
                             (("those missing are", due - since), ("those of other updates are", since - due)) if which]
                    raise fault(schedule, f"{action} must use the gradients of microbatches {min(due)} to {max(due)}; "
                                f"{', '.join(wrong)}", "place the step right behind the last backward of its update",
                                spot)
                if schedule.flush and flying:
                    raise fault(schedule, f"{action} with {flying} microbatches in flight, in a schedule with a flush",
                                "let every backward run before the step", spot)
                steps, since = steps + 1, set()
        if steps != reading.updates:
            raise fault(schedule, f"stage {stage} makes {steps} of {reading.updates} updates",
                        "step every update once, in order", reading.end(reading.rank_of(stage)))


def norms(reading: Reading) -> None:
    """If norms are exchanged, every stage publishes that of every update once, between its backwards and its step."""
    if not reading.normed:
        return
    schedule, every = reading.schedule, reading.schedule.update_every
    for stage in range(schedule.stages):
        for update in range(reading.updates):
            norm, rank = Action(Op.NORM, stage, update), reading.rank_of(stage)
            spots = reading.where.get(norm, ())
            step = reading.where[Action(Op.STEP, stage, update)][0]
            if len(spots) != 1:
                raise fault(schedule, f"{norm} stands {len(spots)} times in the programs",
                            "publish the norm of every update once per stage, or exchange no norms at all",
                            spots[-1] if spots else step)
            last = max(reading.where[Action(Op.BACKWARD, stage, microbatch)][0]
                       for microbatch in range(update * every, (update + 1) * every))
            if not last < spots[0] < step:
                raise fault(schedule, f"{norm} on rank {rank} must stand between the last backward of its update and "
                            f"{stage}STEP{update}", "place the norm right before the step", spots[0])


def matching(reading: Reading) -> None:
    """No send without its receive on the peer, no receive without its send, none twice."""
    for action, (rank, position) in reading.actions():
        if action.op not in SENDS and action.op not in RECEIVES:
            continue
        partners = reading.partners(action, rank)
        if not partners:
            raise fault(reading.schedule, f"{action} on rank {rank} has no other rank at its other end",
                        "transfer only between stages on different ranks", (rank, position))
        if reading.position(action, rank) != position:
            raise fault(reading.schedule, f"{action} stands more than once on rank {rank}",
                        "transfer every tensor once", (rank, position))
        for partner, peer in partners:
            if reading.position(partner, peer) is None:
                raise fault(reading.schedule, f"{action} on rank {rank} has no {partner} on rank {peer}",
                            f"add {partner} there, or leave {action} out", (rank, position), reading.end(peer))


def precedence(reading: Reading) -> None:
    """On its rank, every action follows what makes or receives the tensors that it uses or sends.

    That is: backward follows forward; a send follows what it sends; forward follows the activations and
    the tied version (the one that the owner's forward of that microbatch used), backward the
    gradients, an owner's norm and step the tied gradients of that update.
    """
    for action, (rank, position) in reading.actions():
        needed = list(reading.makers(action, rank))
        if reading.lowered:
            needed += reading.receives(action, rank)
        for before in needed:
            there = reading.position(before, rank)
            if there is None or there > position:
                state = "is not there" if there is None else f"stands {there - position} actions behind it"
                raise fault(reading.schedule, f"{action} on rank {rank} needs {before} before it, which {state}",
                            f"place {before} before {action}", (rank, position))


def last_versions(reading: Reading) -> None:
    """Every borrower of tied weights ends with the version that their owner ends with."""
    if not reading.lowered or not reading.updates:
        return
    for owner, borrowers in reading.schedule.ties.items():
        last = Action(Op.RECV_W, owner, reading.updates)
        for rank in borrowers:
            if reading.position(last, rank) is None:
                raise fault(reading.schedule, f"rank {rank} borrows the tied weights of stage {owner} and never "
                            f"receives their last version {reading.updates}", f"add {last}", reading.end(rank))


def channel_order(reading: Reading) -> None:
    """Between two ranks, transfers of one kind are sent and received in the same order."""
    sent: dict[tuple[int, int, Op], list[tuple[Action, Spot]]] = defaultdict(list)
    received: dict[tuple[int, int, Op], list[tuple[Action, Spot]]] = defaultdict(list)
    for action, spot in reading.actions():
        if action.op in SENDS:
            for _, peer in reading.partners(action, spot[0]):
                sent[spot[0], peer, action.op].append((action, spot))
        elif action.op in RECEIVES:
            for send, peer in reading.partners(action, spot[0]):
                received[peer, spot[0], send.op].append((send, spot))
    for (source, target, op), sends in sent.items():
        for (send, here), (expected, there) in zip(sends, received[source, target, op], strict=True):
            if send != expected:
                raise fault(reading.schedule, f"rank {source} sends {send} to rank {target}, which receives what "
                            f"{expected} sends first", "send and receive in the same order", here, there)


def no_deadlock_buffered(reading: Reading) -> None:
    """Every rank reaches its end when sends never wait."""
    _reaches_end(reading, rendezvous=False)


def no_deadlock_rendezvous(reading: Reading) -> None:
    """Every rank reaches its end when a send waits until its receive is posted."""
    _reaches_end(reading, rendezvous=True)


def _reaches_end(reading: Reading, rendezvous: bool) -> None:
    cursors, stuck = execute(reading, rendezvous=rendezvous)
    if stuck:
        kind = "wait for their receive (rendezvous)" if rendezvous else "never wait (buffered)"
        raise fault(reading.schedule, f"deadlock when sends {kind}: {'; '.join(map(str, stuck))}",
                    "move the awaited actions forward in their programs, or the waiting ones back",
                    *((one.rank, cursors[one.rank]) for one in stuck), cursors=cursors)


def weight_versions(reading: Reading) -> None:
    """A stage holds at most its stated number of versions, and no backward is staler than these allow."""
    schedule = reading.schedule
    for stage, bound in enumerate(schedule.versions):
        rank = reading.rank_of(stage)
        for load in loads(schedule.programs[rank], stage):
            if load.versions > bound or load.staleness > bound - 1:
                raise fault(schedule, f"stage {stage} holds {load.versions} weight versions with staleness "
                            f"{load.staleness}; the schedule states at most {bound} and {bound - 1}",
                            "let fewer microbatches be in flight at a step, or state more versions",
                            (rank, load.position))


def peak_activations(reading: Reading) -> None:
    """A stage holds the activations of at most its stated number of microbatches."""
    schedule = reading.schedule
    for stage, bound in enumerate(schedule.peak_activations):
        rank = reading.rank_of(stage)
        for load in loads(schedule.programs[rank], stage):
            if load.activations > bound:
                raise fault(schedule, f"stage {stage} holds the activations of {load.activations} microbatches; "
                            f"the schedule states at most {bound}",
                            "run a backward before this forward, or state a higher peak", (rank, load.position))


RULES: tuple[Callable[[Reading], None], ...] = (
    placement, indices, completeness, updates, norms, matching, precedence, last_versions, channel_order,
    no_deadlock_buffered, no_deadlock_rendezvous, weight_versions, peak_activations)
"""Every rule, in the order in which :func:`check` holds a schedule to them."""
