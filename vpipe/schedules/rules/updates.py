"""Rules on optimizer steps and on the weight versions that they make."""

from __future__ import annotations

from vpipe.errors import counted
from vpipe.schedules.action import COMPLETES, Action, Op
from vpipe.schedules.grid import fault
from vpipe.schedules.reading import Reading


def updates(reading: Reading) -> None:
    """Every update is stepped once per stage, in order, with the gradients of exactly its microbatches.

    With a flush nothing is in flight at a step.
    """
    schedule = reading.schedule
    for stage in range(schedule.stages):
        steps = flying = 0
        since: set[int] = set()  # microbatches whose weight gradients were made since the last step
        for action, spot in reading.of_stage(stage):
            if action.op is Op.FORWARD:
                flying += 1
            elif action.op in COMPLETES:
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
                    span = f"microbatch {min(due)}" if len(due) == 1 else f"microbatches {min(due)} to {max(due)}"
                    raise fault(schedule, f"{action} must use the gradients of {span}; {', '.join(wrong)}",
                                "place the step right behind the last backward, or weight half, of its update", spot)
                if schedule.flush and flying:
                    raise fault(schedule, f"{action} with {counted(flying, 'microbatch')} in flight, in a schedule "
                                "with a flush",
                                "let every backward run before the step", spot)
                steps, since = steps + 1, set()
        if steps != reading.updates:
            raise fault(schedule, f"stage {stage} makes {steps} of {reading.updates} updates",
                        "step every update once, in order", reading.end(reading.rank_of(stage)))
        if since:
            raise fault(schedule, f"no update of stage {stage} uses the gradients of microbatches {sorted(since)}",
                        f"take a multiple of {counted(schedule.update_every, 'microbatch')}, one update's",
                        reading.end(reading.rank_of(stage)))


def used_versions(reading: Reading) -> None:
    """A stage uses versions that it has made, and never goes back behind the one in use: older ones may be gone."""
    for stage in range(reading.schedule.stages):
        made = 0
        chosen: int | None = None
        for action, spot in reading.of_stage(stage):
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


def norms(reading: Reading) -> None:
    """If norms are exchanged, every stage publishes that of every update once.

    It stands behind the weight gradients of the update and before the rank's first step of it, which waits for
    the norms of all stages.
    """
    if not reading.normed:
        return
    schedule, every = reading.schedule, reading.schedule.update_every
    first_step: dict[tuple[int, int], tuple[int, Action]] = {}  # by (rank, update)
    for action, (rank, position) in reading.actions():
        if action.op is Op.STEP:
            first_step.setdefault((rank, action.microbatch), (position, action))
    for stage in range(schedule.stages):
        rank = reading.rank_of(stage)
        for update in range(reading.updates):
            norm = Action(Op.NORM, stage, update)
            spots = reading.where.get(norm, ())
            position, step = first_step[rank, update]
            if len(spots) != 1:
                state = f"stands {len(spots)} times in the programs" if spots else "is missing"
                raise fault(schedule, f"{norm} {state}",
                            "publish the norm of every update once per stage, or exchange no norms at all",
                            spots[-1] if spots else (rank, position))
            last = max(reading.where[reading.completing(stage, microbatch)][0]
                       for microbatch in range(update * every, (update + 1) * every))
            if not last < spots[0] < (rank, position):
                raise fault(schedule, f"{norm} on rank {rank} must stand between the last weight gradient of its "
                            f"update and {step}", "place the norms of a rank right before its first step", spots[0])
