"""Check a schedule: the rules of a correct one, a function each, and the proof of a schedule before it runs.

A rule raises :class:`~vpipe.errors.CheckError` when a schedule breaks it. It may rely on the rules before it in
:data:`RULES`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from vpipe.errors import counted
from vpipe.schedules import kinds
from vpipe.schedules.graph import Spot, execute, other_ends
from vpipe.schedules.kinds import Action, Kind, Needed, Value
from vpipe.schedules.lowering import in_one_order
from vpipe.schedules.schedule import Schedule, VersionRegister, count_of, moments, stage_loads


def check(schedule: Schedule) -> None:
    """Hold a schedule to every rule in :data:`RULES`.

    A stream (a schedule without a flush) is proved by a finite part of it. After the warm-up its programs repeat: the
    actions of the next :attr:`~vpipe.schedules.assignment.Assignment.per_step` microbatches are those of the ones
    before with microbatches, updates and versions shifted, and the rules see only differences between these. An action
    depends on no action further away than the microbatches in flight (at most one per rank more than its warm-up)
    and the versions in use (made at most that many microbatches, or one update, before the latest). So what holds in
    one repetition holds in all. Four times as many microbatches contain the warm-up, several repetitions and the
    cooldown (``tests/schedules/test_lowering.py`` shows the repetition).

    A schedule without any transfer counts as not lowered: the rules on transfers are empty then, and its actions wait
    for each other directly.

    Raises:
        CheckError: a rule is broken; the text shows the grid of actions with the one at fault marked.
    """
    for rule in RULES:
        rule(schedule)


def placement(schedule: Schedule) -> None:
    """Check that every stage has ranks, every rank a program, and that every action stands on a rank of its stage.

    Actions on a microbatch stand on the replica that takes it. Tied exchanges carry the stage that owns the weight:
    they stand on its ranks or on those of a stage that borrows it.
    A weight belongs to the first stage that uses it, so only later ones can borrow it.
    """
    ranks, stages = len(schedule.programs), schedule.stages
    for stage, group in enumerate(schedule.placement):
        if not group or len(set(group)) < len(group):
            raise schedule.error(f"stage {stage} lives on {counted(len(group), 'rank')} {group}",
                                 "give every stage at least one rank, and none twice")
        for rank in group:
            if not 0 <= rank < ranks:
                raise schedule.error(f"stage {stage} lives on rank {rank}, but there are programs for "
                                     f"{counted(ranks, 'rank')}",
                                     "add the program of that rank, or place the stage on another", (max(rank, 0), 0))
    for rank in set(range(ranks)) - {rank for group in schedule.placement for rank in group}:
        raise schedule.error(f"rank {rank} has a program but no stage", "start fewer ranks, or place a stage on it",
                             (rank, 0))
    for owner, borrowers in schedule.ties.items():
        if owner < 0 or not set(borrowers) <= set(range(owner + 1, stages)):
            raise schedule.error(f"the tied weights of stage {owner} are borrowed by stages {borrowers}",
                                 "the first stage that uses a weight owns it; later ones, up to "
                                 f"{stages - 1}, borrow it")
    for action, spot in schedule.actions():
        rank = spot[0]
        if action.stage >= stages:
            raise schedule.error(f"{action} on rank {rank}: there {'is' if stages == 1 else 'are'} "
                                 f"{counted(stages, 'stage')}", f"use {_range('stage', 0, stages)}", spot)
        borrowed = action.op.transfer is not None and action.op.transfer.borrowed
        homes = schedule.setting.borrowing.get(action.stage, ()) if borrowed else schedule.placement[action.stage]
        if rank not in homes:
            raise schedule.error(f"{action} stands on rank {rank}, but stage {action.stage} "
                                 f"{'is borrowed by' if borrowed else 'lives on'} "
                                 + (f"rank {' and '.join(map(str, sorted(homes)))}" if homes else "no rank"),
                                 "move the action to that rank, or change the placement", spot)
        if action.op.per_microbatch and rank != (home := schedule.assignment.rank_of(action.stage, action.index)):
            raise schedule.error(f"{action} stands on rank {rank}, but of the {len(homes)} replicas of stage "
                                 f"{action.stage} number {list(homes).index(home)}, rank {home}, takes that "
                                 f"{schedule.unit}",
                                 "microbatch i goes to replica i mod their number, forward and backward"
                                 + ", with all of its slices" * (schedule.slices > 1), spot)


def _range(word: str, first: int, beyond: int) -> str:
    return f"{word} {first}" if beyond == first + 1 else f"{counted(2, word)[2:]} {first} to {beyond - 1}"


def indices(schedule: Schedule) -> None:
    """Check that microbatches, updates and versions are in range; version 0 is there from the start, never sent."""
    for action, spot in schedule.actions():
        word, updates = action.op.counts, schedule.updates(action.stage)
        first = int(word == kinds.VERSION and action.op.transfer is not None)
        beyond = schedule.microbatches if word == kinds.MICROBATCH else updates + (word == kinds.VERSION)
        if not first <= action.index < beyond:
            raise schedule.error(f"{action}: there is no {word} {action.index} with "
                                 f"{counted(schedule.microbatches, 'microbatch')} and an update every "
                                 f"{schedule.assignment.per_update(action.stage)}",
                                 f"use {_range(word, first, beyond)}, or leave the action out", spot)


def completeness(schedule: Schedule) -> None:
    """Check that every microbatch goes forward once per stage, and backward once: whole, or in two halves.

    Dropped activations are recomputed early at most once, as is everything else that generators yield.
    """
    forward, whole = kinds.having("uses_version"), kinds.having("whole_backward")
    first, second = kinds.having("first_half"), kinds.having("second_half")
    others = [kind for kind in kinds.known() if kind in schedule.kinds and kind.generated and kind.per_microbatch
              and kind not in (forward, whole, first, second)]
    where = schedule.graph.where
    for action, spots in where.items() if not all(kind.is_own for kind in schedule.kinds) else ():
        if action.op.counts == kinds.UPDATE and not action.op.is_own and len({rank for rank, _ in spots}) < len(spots):
            raise schedule.error(f"{action} stands {len(spots)} times in the programs",
                                 f"{action.op.name} of every update at most once on a rank", spots[-1])
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            backward = [Action(whole, stage, microbatch)]
            halves = Action(first, stage, microbatch), Action(second, stage, microbatch)
            if not schedule.assignment.trains(stage):
                backward = []
                if needless := [action for action in (Action(whole, stage, microbatch), *halves)
                                if action in where]:
                    raise schedule.error(f"{needless[0]} stands in the programs, but stage {stage} trains nothing, nor "
                                         "does any before it", "leave out its backwards", where[needless[0]][-1])
            elif any(half in where for half in halves):
                if backward[0] in where:
                    raise schedule.error(f"{backward[0]} stands in the programs beside its halves",
                                         "give every microbatch on every stage either B, or I and W",
                                         where[backward[0]][-1])
                backward = list(halves)
            for action in (Action(forward, stage, microbatch), *backward):
                spots = where.get(action, ())
                if len(spots) != 1:
                    there = [where[other][0] for other in backward if other in where]
                    mark = [*spots[-1:], *there, schedule.end(schedule.assignment.rank_of(stage, microbatch))][0]
                    half = "" if action.op in (forward, whole) else f"{' '.join(action.op.name.split()[:2])} of the "
                    what = f"stands {len(spots)} times in the programs" if spots else \
                        f"is missing: stage {stage} has no {half}{(whole if half else action.op).name} of " \
                        f"{schedule.assignment.name_of(microbatch)}"
                    raise schedule.error(f"{action} {what}", f"every {schedule.unit} goes forward and backward "
                                         "exactly once on every stage; backward is either B, or I and W", mark)
            for kind in others:
                if len(spots := where.get(Action(kind, stage, microbatch), ())) > 1:
                    raise schedule.error(f"{Action(kind, stage, microbatch)} stands {len(spots)} times in the programs",
                                         f"{kind.name} every microbatch at most once", spots[-1])


def matching(schedule: Schedule) -> None:
    """Check that every send has its receive on the peer, every receive its send, and that none stands twice."""
    graph = schedule.graph
    for action, (rank, position) in schedule.actions():
        if action.op.transfer is None:
            continue
        partners = other_ends(schedule.setting, action, rank)
        if not partners:
            raise schedule.error(f"{action} on rank {rank} has no other rank at its other end",
                                 "transfer only between stages on different ranks", (rank, position))
        if graph.position(action, rank) != position:
            raise schedule.error(f"{action} stands more than once on rank {rank}", "transfer every tensor once",
                                 (rank, position))
        for partner, peer in partners:
            if graph.position(partner, peer) is None:
                raise schedule.error(f"{action} on rank {rank} has no {partner} on rank {peer}",
                                     f"add {partner} there, or leave {action} out", (rank, position),
                                     *[schedule.end(peer)] * (peer != rank))


def precedence(schedule: Schedule) -> None:
    """Check that every action follows, on its rank, the actions that make or receive the tensors that it uses or sends.

    That is: a backward follows the forward and the early recompute, its weight half the input half; a send
    follows what it sends, the receive of a gradient the forward that tells its shapes; forward follows
    the previous stage or its activations, and the tied version (the one that the owner's forward of that microbatch
    used); backward follows the next stage or its gradients; a sum over replicas follows the rank's own gradients; an
    owner's norm and step follow that sum and the tied gradients of that update.
    """
    graph = schedule.graph
    for action, (rank, position) in schedule.actions():
        for before in graph.before(action, (rank, position)):
            there = graph.position(before, rank)
            if there is None or there >= position:
                state = "is not there" if there is None else \
                    "comes only later in the row" if there > position else "is itself"
                raise schedule.error(f"{schedule.said(action)} on rank {rank} needs {schedule.said(before)} before it, "
                                     f"which {state}", f"place {before} before {action}{_why(before, action)}",
                                     (rank, position))


def _why(before: Action, action: Action) -> str:
    """Return why a slice comes after another one, as a part of a hint; nothing for what goes on in one."""
    if not (before.op.per_microbatch and action.op.per_microbatch) or before.index == action.index:
        return ""
    return (": a slice uses keys and values of those before it" if action.op.uses_version else
            ": slices behind it add to the gradients of its keys and values")


def last_versions(schedule: Schedule) -> None:
    """Check that every borrower of tied weights ends with the version that their owner ends with."""
    carrier = kinds.TIED_VERSION.carrier
    assert carrier is not None, "tied weights are sent"
    for owner, borrowing in schedule.setting.borrowing.items() if schedule.setting.is_lowered else ():
        updates = schedule.updates(owner)
        last = Action(carrier.other_end, owner, updates)
        for rank in borrowing if updates else ():
            if schedule.graph.position(last, rank) is None:
                raise schedule.error(f"rank {rank} borrows the tied weights of stage {owner} and never receives their "
                                     f"last version {updates}", f"add {last}", schedule.end(rank))


def borrowed_versions(schedule: Schedule) -> None:
    """Check that the forwards of a rank use the versions of a borrowed weight in order: older ones are not kept."""
    latest: dict[tuple[int, int], int] = {}  # by rank and owner
    for action, spot in schedule.actions() if schedule.ties else ():
        rank = spot[0]
        for owner, borrowers in schedule.ties.items():
            if not action.op.uses_version or action.stage not in borrowers:
                continue
            version = schedule.versions_used[owner, action.index]
            if version < latest.get((rank, owner), 0):
                raise schedule.error(f"{action} on rank {rank} uses version {version} of the tied weights of stage "
                                     f"{owner}, after a forward that uses version {latest[rank, owner]}",
                                     "run the microbatches of an update before those of later updates", spot)
            latest[rank, owner] = version


def channel_order(schedule: Schedule) -> None:
    """Check that two ranks send and receive the transfers of one kind in the same order.

    So a transport needs no tags, only a channel per kind and direction; those of a tied weight are its own.
    """
    graph = schedule.graph
    channels: dict[tuple[int, int, Kind, int], list[tuple[int, Action, Spot]]] = defaultdict(list)
    for action, spot in schedule.actions():
        if action.op.transfer is None or not action.op.sends:
            continue
        tie = action.stage if action.op.transfer.value.handed_over else -1
        for receive, peer in other_ends(schedule.setting, action, spot[0]):
            if peer != spot[0]:  # on one rank tied weights change hands in any order
                place = graph.position(receive, peer) or 0
                channels[spot[0], peer, action.op, tie].append((place, action, spot))
    for (source, target, _, _), sends in channels.items():
        for (_, send, here), (position, expected, _) in zip(sends, sorted(sends), strict=True):
            if send != expected:
                raise schedule.error(f"rank {source} sends {send} to rank {target}, which receives what {expected} "
                                     "sends first", "send and receive in the same order", here, (target, position))


def updates(schedule: Schedule) -> None:
    """Check that every stage steps every update once, in order, with the gradients of exactly its microbatches.

    So does every replica, with the microbatches that it takes. With a flush nothing is in flight at a step.
    """
    assignment = schedule.assignment
    for stage, rank in schedule.replicas():
        name = f"stage {stage}" + (f" on rank {rank}" if assignment.width(stage) > 1 else "")
        steps = in_flight = 0
        since: set[int] = set()  # microbatches whose weight gradients were made since the last step
        for action, spot in schedule.of_stage(stage, rank):
            if action.op.uses_version:
                in_flight += assignment.trains(stage)
            elif action.op.completes:
                in_flight -= 1
                since.add(action.index)
            elif action.op.makes_version:
                if action.index != steps:
                    raise schedule.error(f"{action} comes where update {steps} of {name} is due",
                                         "step every update once, in order", spot)
                due = set(assignment.share(stage, steps, stage, rank))
                if since != due:
                    wrong = [f"{word} {sorted(which)}" for word, which in
                             (("those missing are", due - since), ("those of other updates are", since - due)) if which]
                    raise schedule.error(f"{action} must use the gradients of {_numbers(due, schedule.unit)}; "
                                         f"{', '.join(wrong)}",
                                         "place the step right behind the last backward, or weight half, of its update",
                                         spot)
                if schedule.flush and in_flight:
                    raise schedule.error(f"{action} with {counted(in_flight, schedule.unit)} in flight, in a schedule "
                                         "with a flush", "let every backward run before the step", spot)
                steps, since = steps + 1, set()
        if steps != schedule.updates(stage):
            raise schedule.error(f"{name} makes {steps} of {schedule.updates(stage)} updates",
                                 "step every update once, in order", schedule.end(rank))


def _numbers(microbatches: set[int], word: str) -> str:
    if not microbatches:
        return f"no {word}"
    if len(microbatches) == max(microbatches) - min(microbatches) + 1:
        return _range(word, min(microbatches), max(microbatches) + 1)
    return f"{counted(2, word)[2:]} {', '.join(map(str, sorted(microbatches)))}"


def used_versions(schedule: Schedule) -> None:
    """Check that a stage uses versions that it has made, and none older than the one in use: those may be gone."""
    for stage, rank in schedule.replicas():
        register = VersionRegister()
        for action, spot in schedule.of_stage(stage, rank):
            if action.op.chooses:
                if action.index > register.latest:
                    raise schedule.error(f"{action}: stage {stage} has made version {register.latest} at most by then",
                                         "use a version behind the step that makes it: update 0 makes version 1", spot)
                if action.index < register.in_use:
                    raise schedule.error(f"{action} goes back behind version {register.in_use}, which is in use",
                                         "use versions in the order in which they are made; without any USE the latest "
                                         "is in use, so say USE before the step that makes a newer one", spot)
            register.follow(action)


def reductions(schedule: Schedule) -> None:
    """Check that replicas and lanes sum their gradients once per update, after them and before norm and step."""
    for stage, rank in schedule.replicas() if schedule.setting.is_lowered else ():
        if schedule.setting.sums(stage):
            for update in range(schedule.updates(stage)):
                _once_between(schedule, kinds.SUM, stage, update, rank,
                              "sum the gradients of a replicated stage once per update, on each of its ranks, right "
                              "before the step")


def norms(schedule: Schedule) -> None:
    """Check that every stage publishes the norm of every update once on each of its ranks, if norms are exchanged.

    A norm stands after the weight gradients of the update and before the rank's first step of it, which waits for
    the norms of all stages.
    """
    for stage, rank in schedule.replicas() if schedule.setting.normed else ():
        if not schedule.setting.norms_of_all and schedule.assignment.width(stage) == 1:
            continue
        for update in range(schedule.updates(stage)):
            _once_between(schedule, kinds.NORMS, stage, update, rank,
                          "publish the norm of every update once per stage, right before the rank's first step, or "
                          "exchange no norms at all")


def _once_between(schedule: Schedule, value: Value, stage: int, update: int, rank: int, hint: str) -> None:
    """Check that what makes a value of an update stands once on a rank, between the last gradient and what needs it.

    The latter is an action of its own stage; after a norm, of any stage.
    """
    graph = schedule.graph
    action, first = Action(graph.makers[value][0][0], stage, update), schedule.placement[stage][0]
    before = [kind for kind in kinds.known() if kind.counts == kinds.UPDATE and kind.transfer is None
              and any(needed is value for needed, _, _ in kind.needs(schedule.setting, stage, 0, first))]
    positions = [position for there, position in graph.where.get(action, ()) if there == rank]
    position, needing = next((at, one) for at, one in enumerate(schedule.programs[rank]) if
                             one.index == update and one.op in before
                             and (one.stage == stage or value is kinds.NORMS))
    if len(positions) != 1:
        state = f"stands {len(positions)} times in the program of rank {rank}" if positions else \
            f"is missing on rank {rank}"
        raise schedule.error(f"{action} {state}", hint, (rank, positions[-1] if positions else position))
    made = graph.last.get((stage, update, rank))
    last = -1 if made is None else graph.position(made, rank)
    assert last is not None, "it was read there"
    if not last < positions[0] < position:
        raise schedule.error(f"{action} on rank {rank} must stand between the last weight gradient of its update and "
                             f"{needing}", hint, (rank, positions[0]))


def weight_versions(schedule: Schedule) -> None:
    """Check that a stage holds at most its stated number of versions, and no backward is staler than they allow."""
    for stage, rank in schedule.replicas():
        bound = schedule.versions[stage]
        for position, versions, staleness in stage_loads(schedule.programs[rank], stage, schedule.frozen):
            if versions > bound or staleness > bound - 1:
                raise schedule.error(f"stage {stage} holds {counted(versions, 'weight version')} with staleness "
                                     f"{staleness}; the schedule states at most {bound} and {bound - 1}",
                                     "let fewer microbatches be in flight at a step, or state more versions",
                                     (rank, position))


def peak_activations(schedule: Schedule) -> None:
    """Check that a rank holds the activations of at most its stated number of microbatch-stages."""
    for rank, bound in enumerate(schedule.peak_activations):
        for moment in moments(schedule.programs[rank], count_of(kinds.SAVED), schedule.frozen):
            if moment.size > bound:
                raise schedule.error(f"rank {rank} holds the activations of "
                                     f"{counted(int(moment.size), f'{schedule.unit}-stage')}; the schedule states at "
                                     f"most {bound}", "run a backward before this forward, or state a higher peak",
                                     (rank, moment.position))


def no_deadlock(schedule: Schedule) -> None:
    """Check that every rank reaches its end, both when sends never wait and when each waits for its receive."""
    if schedule.setting.is_lowered and not execute(schedule.graph, rendezvous=True)[1]:
        return  # sends that never wait hold up nobody else
    for rendezvous, kind in ((False, "never wait (buffered)"), (True, "wait for their receive (rendezvous)")):
        cursors, blocked = execute(schedule.graph, rendezvous=rendezvous)
        if blocked:
            waiting = "; ".join(f"rank {rank} stands before {action} and waits for {awaited} of rank {peer}"
                                for rank, (action, awaited, peer) in blocked.items())
            raise schedule.error(f"deadlock when sends {kind}: {waiting}",
                                 "move the awaited actions forward in their programs, or the waiting ones back",
                                 *((rank, cursors[rank]) for rank in blocked), cursors=cursors)


def no_deadlock_in_one_order(schedule: Schedule) -> None:
    """Check that every rank reaches its end when it does one transfer at a time, in an order that all ranks keep to.

    nccl asks for that: see :class:`vpipe.schedules.lowering.TransferOrder`.
    """
    stuck = in_one_order(schedule)[1] if schedule.setting.is_lowered else {}
    if stuck:
        waiting = "; ".join(f"rank {rank} stands before {action}" for rank, action in stuck.items())
        cursors = [schedule.graph.position(stuck[rank], rank) or 0 if rank in stuck else len(program)
                   for rank, program in enumerate(schedule.programs)]
        raise schedule.error(f"deadlock when a rank carries out one transfer at a time (nccl): {waiting}",
                             "let the replicas of a stage come to their sums in one order, and the ranks that borrow a "
                             "weight to their gradients in the order of the microbatches",
                             *((rank, cursors[rank]) for rank in stuck), cursors=cursors)


def nothing_freed_is_used(schedule: Schedule) -> None:
    """Check that no action uses what an action before it on its rank has freed and none has brought back.

    Where all actions are of vpipe's usual kinds, completeness and precedence say so already.
    """
    graph = schedule.graph
    if not schedule.setting.sharded and all(kind.is_own and kind.host_bytes is None for kind in schedule.kinds):
        return
    for rank, program in enumerate(schedule.programs):
        freed: dict[Needed, Action] = {}
        for position, action in enumerate(program):
            op, stage, index = action
            for needed in op.needs(schedule.setting, stage, index, rank) if freed else ():
                if needed in freed:
                    counts = graph.makers[needed[0]][0][0].counts
                    raise schedule.error(f"{action} on rank {rank} needs the {needed[0].name} of stage {needed[1]} and "
                                         f"{counts} {needed[2]}, which {freed[needed]} has freed",
                                         f"place {action} before {freed[needed]}, or bring them back between the two",
                                         (rank, position))
            if op.memory is not None:
                for value in (*op.memory.takes, *op.memory.leaves):
                    freed.pop((value, stage, index), None)
                freed |= {(value, stage, index): action for value in op.memory.frees
                          if graph.maker(value, stage, index, rank, position) is not None}
            if op.makes_version:
                freed |= dict.fromkeys(kinds.gradients_of(schedule.setting, stage, index, rank), action)


def gathered_weights(schedule: Schedule) -> None:
    """Check that where replicas step parts, each gets the others' weights once per update, before it uses any.

    Between a step and that no action uses the new version, sends it, or makes the next one.
    """
    gather = schedule.graph.makers[kinds.EXCHANGED][0][0]
    for stage, rank in schedule.replicas() if schedule.setting.zero1 else ():
        waiting: Action | None = None
        for action, spot in (*schedule.of_stage(stage, rank), (None, schedule.end(rank))):
            if schedule.assignment.width(stage) == 1:
                break
            if action is not None and action.op == gather:
                if waiting is None or action.index != waiting.index:
                    raise schedule.error(f"{action} on rank {rank} does not follow the step of its update",
                                         "gather the weights once per update, right behind the step", spot)
                waiting = None
            elif waiting is not None and (action is None or action.op.uses_version or action.op.makes_version or any(
                    needed[0] is kinds.UPDATED
                    for needed in action.op.needs(schedule.setting, stage, action.index, rank))):
                missing = Action(gather, stage, waiting.index)
                raise schedule.error(f"{missing} is missing on rank {rank} between {waiting} and "
                                     f"{'the end' if action is None else action}",
                                     "gather the weights once per update, right behind the step", spot)
            elif action is not None and action.op.makes_version:
                waiting = action


def slices(schedule: Schedule) -> None:
    """Check that the pipeline is empty at every step where microbatches are cut into slices.

    That these are whole, and go forward from the first and back from the last, :func:`precedence` says.
    """
    if schedule.slices > 1 and not schedule.flush:
        raise schedule.error(f"every microbatch has {schedule.slices} slices, but there are steps between them",
                             "step once, at the end: there are no slices without a flush")


RULES: tuple[Callable[[Schedule], None], ...] = (
    placement, indices, completeness, updates, used_versions, reductions, norms, matching, precedence, last_versions,
    borrowed_versions, channel_order, no_deadlock, no_deadlock_in_one_order, weight_versions, peak_activations,
    nothing_freed_is_used, gathered_weights, slices)
"""Every rule, in the order in which :func:`check` holds a schedule to them."""
