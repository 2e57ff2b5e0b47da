"""Rules on optimizer steps and on the weight versions that they make."""

from __future__ import annotations

from vpipe.errors import counted
from vpipe.schedules.action import COMPLETES, Action, Op
from vpipe.schedules.grid import fault
from vpipe.schedules.reading import Reading


def updates(reading: Reading) -> None:
    """Every update is stepped once per stage, in order, with the gradients of exactly its microbatches.

    On every replica, with those of them that it takes. With a flush nothing is in flight at a step.
    """
    schedule, rounds = reading.schedule, reading.schedule.rounds
    for stage, rank in reading.replicas():
        name = _name(reading, stage, rank)
        steps = flying = 0
        since: set[int] = set()  # microbatches whose weight gradients were made since the last step
        for action, spot in reading.of_stage(stage, rank):
            if action.op is Op.FORWARD:
                flying += 1
            elif action.op in COMPLETES:
                flying -= 1
                since.add(action.microbatch)
            elif action.op is Op.STEP:
                if action.microbatch != steps:
                    raise fault(schedule, f"{action} comes where update {steps} of {name} is due",
                                "step every update once, in order", spot)
                due = set(rounds.share(stage, steps, stage, rank))
                if since != due:
                    wrong = [f"{word} {sorted(which)}" for word, which in
                             (("those missing are", due - since), ("those of other updates are", since - due)) if which]
                    raise fault(schedule, f"{action} must use the gradients of {_numbers(due)}; {', '.join(wrong)}",
                                "place the step right behind the last backward, or weight half, of its update", spot)
                if schedule.flush and flying:
                    raise fault(schedule, f"{action} with {counted(flying, 'microbatch')} in flight, in a schedule "
                                "with a flush",
                                "let every backward run before the step", spot)
                steps, since = steps + 1, set()
        if steps != schedule.updates(stage):
            raise fault(schedule, f"{name} makes {steps} of {schedule.updates(stage)} updates",
                        "step every update once, in order", reading.end(rank))


def _numbers(microbatches: set[int]) -> str:
    if not microbatches:
        return "no microbatch"
    if len(microbatches) == 1:
        return f"microbatch {min(microbatches)}"
    if len(microbatches) == max(microbatches) - min(microbatches) + 1:
        return f"microbatches {min(microbatches)} to {max(microbatches)}"
    return f"microbatches {', '.join(map(str, sorted(microbatches)))}"


def _name(reading: Reading, stage: int, rank: int) -> str:
    return f"stage {stage}" + (f" on rank {rank}" if reading.schedule.rounds.width(stage) > 1 else "")


def used_versions(reading: Reading) -> None:
    """A stage uses versions that it has made, and never goes back behind the one in use: older ones may be gone."""
    for stage, rank in reading.replicas():
        made = 0
        chosen: int | None = None
        for action, spot in reading.of_stage(stage, rank):
            if action.op is Op.STEP:
                made += 1
            elif action.op is Op.USE:
                oldest = made if chosen is None else chosen
                if action.microbatch > made:
                    raise fault(reading.schedule, f"{action}: stage {stage} has made version {made} at most by then",
                                "use a version behind the step that makes it: update 0 makes version 1", spot)
                if action.microbatch < oldest:
                    raise fault(reading.schedule, f"{action} goes back behind version {oldest}, which is in use",
                                "use versions in the order in which they are made; without any USE the latest is in "
                                "use, so say USE before the step that makes a newer one", spot)
                chosen = action.microbatch


def reductions(reading: Reading) -> None:
    """The replicas of a stage sum their gradients once per update, each behind its own and before its norm and step."""
    if not reading.lowered:
        return
    schedule = reading.schedule
    for stage, rank in reading.replicas():
        if schedule.rounds.width(stage) > 1:
            for update in range(schedule.updates(stage)):
                _once_between(reading, Action(Op.REDUCE, stage, update), rank, (Op.NORM, Op.STEP),
                              "sum the gradients of a replicated stage once per update, on each of its ranks, right "
                              "before the step")


def norms(reading: Reading) -> None:
    """If norms are exchanged, every stage publishes that of every update once, on each of its ranks.

    It stands behind the weight gradients of the update and before the rank's first step of it, which waits for
    the norms of all stages.
    """
    if not reading.normed:
        return
    schedule = reading.schedule
    for stage, rank in reading.replicas():
        for update in range(schedule.updates(stage)):
            _once_between(reading, Action(Op.NORM, stage, update), rank, (Op.STEP,),
                          "publish the norm of every update once per stage, right before the rank's first step, or "
                          "exchange no norms at all")


def _once_between(reading: Reading, action: Action, rank: int, before: tuple[Op, ...], hint: str) -> None:
    """That an action on an update stands once on a rank, between the last gradient of the update and what needs it.

    That is its own stage's, and of steps behind norms any stage's.
    """
    schedule, stage, update = reading.schedule, action.stage, action.microbatch
    program = schedule.programs[rank]
    positions = [position for there, position in reading.where.get(action, ()) if there == rank]
    position, needing = next((at, one) for at, one in enumerate(program) if one.microbatch == update and
                             one.op in before and (one.stage == stage or action.op is Op.NORM))
    if len(positions) != 1:
        state = f"stands {len(positions)} times in the program of rank {rank}" if positions else \
            f"is missing on rank {rank}"
        raise fault(schedule, f"{action} {state}", hint, (rank, positions[-1] if positions else position))
    made = reading.last.get((stage, update, rank))
    last = -1 if made is None else reading.position(made, rank)
    assert last is not None, "it was read there"
    if not last < positions[0] < position:
        raise fault(schedule, f"{action} on rank {rank} must stand between the last weight gradient of its update and "
                    f"{needing}", hint, (rank, positions[0]))
