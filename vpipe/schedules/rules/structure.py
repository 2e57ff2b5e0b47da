"""Rules on what must be there: stages on ranks, every microbatch through every stage."""

from __future__ import annotations

from collections.abc import Collection

from vpipe.errors import counted
from vpipe.schedules.action import PER_MICROBATCH, Action, Op
from vpipe.schedules.grid import fault
from vpipe.schedules.reading import Reading


def placement(reading: Reading) -> None:
    """Every stage has ranks and every rank a program; every action stands on a rank of its stage.

    What is done with a microbatch stands on the replica that takes it. Stages share all of their ranks or none. Tied
    exchanges carry the stage that owns the weight: they stand on its ranks or on those of a stage that borrows it.
    A weight belongs to the first stage that uses it, so only later ones can borrow it.
    """
    schedule = reading.schedule
    ranks = len(schedule.programs)
    for stage, held_by in enumerate(schedule.placement):
        if not held_by or len(set(held_by)) < len(held_by):
            raise fault(schedule, f"stage {stage} lives on {counted(len(held_by), 'rank')} {held_by}",
                        "give every stage at least one rank, and none twice")
        for rank in held_by:
            if not 0 <= rank < ranks:
                raise fault(schedule, f"stage {stage} lives on rank {rank}, but there are programs for "
                            f"{counted(ranks, 'rank')}",
                            "add the program of that rank, or place the stage on another", (max(rank, 0), 0))
        for other, theirs in enumerate(schedule.placement[:stage]):
            if set(theirs) & set(held_by) and theirs != held_by:
                raise fault(schedule, f"stage {stage} lives on ranks {held_by}, stage {other} on {theirs}",
                            "let stages share all of their ranks, in the same order, or none")
    for rank in set(range(ranks)) - {rank for held_by in schedule.placement for rank in held_by}:
        raise fault(schedule, f"rank {rank} has a program but no stage", "start fewer ranks, or place a stage on it",
                    (rank, 0))
    for owner, borrowers in schedule.ties.items():
        if owner < 0 or not set(borrowers) <= set(range(owner + 1, schedule.stages)):
            raise fault(schedule, f"the tied weights of stage {owner} are borrowed by stages {borrowers}",
                        "the first stage that uses a weight owns it; later ones, up to "
                        f"{schedule.stages - 1}, borrow it")
    for action, (rank, position) in reading.actions():
        if action.stage >= schedule.stages:
            raise fault(schedule, f"{action} on rank {rank}: there "
                        f"{'is' if schedule.stages == 1 else 'are'} {counted(schedule.stages, 'stage')}",
                        f"use {_range('stage', 0, schedule.stages)}", (rank, position))
        borrowed = action.op in (Op.RECV_W, Op.SEND_G)
        homes = reading.partners.borrowing.get(action.stage, ()) if borrowed else schedule.placement[action.stage]
        if rank not in homes:
            raise fault(schedule, f"{action} stands on rank {rank}, but stage {action.stage} "
                        f"{'is borrowed by' if borrowed else 'lives on'} {_ranks(homes)}",
                        "move the action to that rank, or change the placement", (rank, position))
        if action.op in PER_MICROBATCH and rank != (home := reading.rank_of(action.stage, action.microbatch)):
            raise fault(schedule, f"{action} stands on rank {rank}, but of the {len(homes)} replicas of stage "
                        f"{action.stage} number {action.microbatch % len(homes)}, rank {home}, takes that microbatch",
                        "microbatch i goes to replica i mod their number, forward and backward", (rank, position))


def _range(word: str, first: int, beyond: int) -> str:
    return f"{word} {first}" if beyond == first + 1 else f"{counted(2, word)[2:]} {first} to {beyond - 1}"


def _ranks(homes: Collection[int]) -> str:
    return f"rank {' and '.join(map(str, sorted(homes)))}" if homes else "no rank"


_NAMES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.INPUT: "input half of the backward",
          Op.WEIGHT: "weight half of the backward"}


def indices(reading: Reading) -> None:
    """Microbatches, updates and versions are in range; version 0 is everywhere from the start and never sent."""
    schedule = reading.schedule
    for action, spot in reading.actions():
        updates = schedule.updates(action.stage)
        first, beyond, word = 0, updates, "update"
        if action.op in PER_MICROBATCH:
            beyond, word = schedule.microbatches, "microbatch"
        elif action.op in (Op.SEND_W, Op.RECV_W, Op.USE):
            first, beyond, word = int(action.op is not Op.USE), updates + 1, "version"
        if not first <= action.microbatch < beyond:
            raise fault(schedule, f"{action}: there is no {word} {action.microbatch} with "
                        f"{counted(schedule.microbatches, 'microbatch')} and an update every "
                        f"{schedule.rounds.span(action.stage)}",
                        f"use {_range(word, first, beyond)}, or leave the action out", spot)


def completeness(reading: Reading) -> None:
    """Every microbatch goes forward once per stage, and backward once: whole, or in two halves.

    What was dropped is recomputed early at most once.
    """
    schedule = reading.schedule
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            backward = reading.returning(stage, microbatch), reading.completing(stage, microbatch)
            whole = Action(Op.BACKWARD, stage, microbatch)
            if whole in backward and backward[0] != backward[1]:  # one half and not the other
                backward = Action(Op.INPUT, stage, microbatch), Action(Op.WEIGHT, stage, microbatch)
            if whole in reading.where and whole not in backward:
                raise fault(schedule, f"{whole} stands in the programs beside its halves",
                            "give every microbatch on every stage either B, or I and W", reading.where[whole][-1])
            for action in (Action(Op.FORWARD, stage, microbatch), *dict.fromkeys(backward)):
                spots = reading.where.get(action, ())
                if len(spots) != 1:
                    there = [reading.where[other][0] for other in backward if other in reading.where]
                    mark = spots[-1] if spots else there[0] if there else reading.end(
                        reading.rank_of(stage, microbatch))
                    what = f"stands {len(spots)} times in the programs" if spots else \
                        f"is missing: stage {stage} has no {_NAMES[action.op]} of microbatch {microbatch}"
                    raise fault(schedule, f"{action} {what}", "every microbatch goes forward and backward exactly "
                                "once on every stage; backward is either B, or I and W", mark)
            recompute = Action(Op.RECOMPUTE, stage, microbatch)
            if len(spots := reading.where.get(recompute, ())) > 1:
                raise fault(schedule, f"{recompute} stands {len(spots)} times in the programs",
                            "recompute every microbatch at most once", spots[-1])
