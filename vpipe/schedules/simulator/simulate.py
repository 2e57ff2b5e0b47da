"""Simulate a schedule event by event: compute when every action starts and ends.

A rank does its actions in order, one at a time, each as soon as its inputs have arrived. Only compute actions and steps
take a rank's time. A transfer starts when its send and its receive have been reached and its link is free. A
compute-only schedule has the same transfers, with receives that are posted from the beginning. Tensors that stay on a
rank take no time. Where norms are exchanged, a step waits for those of all stages. Replicas of a stage send each other
the gradients of an update as soon as each has them all, and the sums as soon as these are made; a step waits for them.
Ranks of one host may share its cores: see :mod:`vpipe.schedules.simulator.event_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from vpipe.errors import CheckError, UserError
from vpipe.schedules.costs import Costs, Number, ratio
from vpipe.schedules.error_grid import rule_error
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.event_loop import EventLoop, SharedCoresLoop
from vpipe.schedules.simulator.tables import SimulationTables
from vpipe.schedules.simulator.timeline import Event, Timeline, TransferEvent


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate ``schedule``, compute-only or lowered, at ``costs``; exactly, as long as none of them is a ``float``.

    The schedule must have passed :func:`~vpipe.schedules.check.check`.

    Raises:
        UserError: ``costs`` are for another number of stages or ranks.
        CheckError: ranks wait for each other.
    """
    if len(costs.stages) != schedule.stages:
        raise UserError(f"there are costs for {len(costs.stages)} stages, but schedule '{schedule.name}' has "
                        f"{schedule.stages}", hint="give one entry per stage")
    if costs.hosts and len(costs.hosts) != schedule.ranks:
        raise UserError(f"there are hosts for {len(costs.hosts)} ranks, but schedule '{schedule.name}' has "
                        f"{schedule.ranks}", hint="give one entry per rank, or none where all share one host")
    if costs.cores is not None and costs.cores < 1:
        raise UserError(f"a host has {costs.cores} cores", hint="give 1 or more, or None for a device per rank")
    tables = SimulationTables.from_schedule(schedule, costs)
    loop = EventLoop(tables, costs.overlap) if costs.cores is None else SharedCoresLoop(tables, costs)
    loop.run()
    if loop.cursors != tables.ends:
        raise _blocked(tables, loop.cursors)

    @cache
    def seconds(ticks: Number) -> Number:
        return ratio(ticks, tables.unit)

    events = [tuple(Event(action, seconds(loop.starts[number]), seconds(loop.end(number, ticks)))
                    for number, action in enumerate(program, start=first)
                    if (ticks := tables.ticks[number]) is not None)
              for first, program in zip(tables.firsts, tables.schedule.programs, strict=True)]
    transfers = [TransferEvent(message.action, message.source, message.target, seconds(loop.began(number, end)),
                          seconds(end)) for number, end in loop.arrivals
                 if (message := tables.messages[number]).source != message.target]
    return Timeline(tables.schedule, costs, tuple(events), tuple(transfers))


def _blocked(tables: SimulationTables, cursors: Sequence[int]) -> CheckError:
    spots = [(rank, cursor - first) for rank, (cursor, first, end)
             in enumerate(zip(cursors, tables.firsts, tables.ends, strict=True)) if cursor < end]
    standing = "; ".join(f"rank {rank} stands before {tables.schedule.programs[rank][position]}"
                         for rank, position in spots)
    return rule_error(tables.schedule, f"the simulation cannot go on: {standing}",
                      "check the schedule first: it says what each of them waits for", *spots,
                      cursors=[cursor - first for cursor, first in zip(cursors, tables.firsts, strict=True)])
