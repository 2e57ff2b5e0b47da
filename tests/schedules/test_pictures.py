"""The picture in a generator's docstring is the simulated execution."""

from __future__ import annotations

import inspect

import pytest

from vpipe.schedules.assignment import Size, stages_of_rank
from vpipe.schedules.builder import build
from vpipe.schedules.costs import Costs
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate

SIZES = {"zb_h1": (3, 4), "zb_h2": (3, 5), "gpipe": (3, 4), "1f1b": (3, 4),  # ranks and microbatches; others 2 and 4
         "chimera": (4, 4), "dualpipe": (4, 8), "seq1f1b": (3, 2)}
SLICES = {"seq1f1b": 2}
STREAMS = {"pipedream": (3, 1), "pipedream_vertical_sync": (3, 1), "2bw": (2, 2)}  # ranks, microbatches per update


def pictured(name: str) -> Schedule:
    recipe = RegisteredSchedule.named(name)
    if recipe.flush:
        ranks, microbatches = SIZES.get(name, (2, 4))
        return build(name, recipe.layout(ranks, recipe.chunks), microbatches, slices=SLICES.get(name, 1))
    ranks, every = STREAMS.get(name, (2, recipe.update_every(2)))
    return build(name, recipe.layout(ranks, recipe.chunks), 12 * every, every)


def picture(schedule: Schedule) -> list[str]:
    """One row per rank, one column per unit of time, in which a stage does F, I or W.

    Small letters are the rank's second stage; B takes two columns; a step, which takes no time, ends the last B or
    has a column behind the last W; a bar stands where forwards change to the next weight version.
    """
    chunks = schedule.stages // schedule.ranks
    size = Size(schedule.ranks, schedule.microbatches, chunks, schedule.update_every)
    timeline = simulate(schedule, Costs.uniform(size, chunks, chunks, chunks))
    rows = []
    for rank, program in enumerate(schedule.programs):
        starts = {event.action: int(event.start_s) for event in timeline.events[rank]}
        cells = ["."] * (max(starts.values()) + 1)
        bars: set[int] = set()
        before, changed = Op.FORWARD, False
        for action in program:
            if action.op is Op.USE:
                changed = action.microbatch > 0
            elif action.op is Op.STEP:
                column = starts[action] - (before is Op.BACKWARD)
                cells[column] = "-S" if before is Op.BACKWARD else "S"
            else:
                before, column = action.op, starts[action]
                cells[column] = _cell(action, stages_of_rank(schedule.placement, rank).index(action.stage))
                if action.op is Op.BACKWARD:
                    cells[column + 1] = "--"
                if changed:
                    bars.add(column)
                    changed = False
        line = "".join(("|" if column in bars else " ") + f"{cell:2}" for column, cell in enumerate(cells))
        rows.append(f"rank {rank} {line}".rstrip(" ."))
    return rows


def _cell(action: Action, chunk: int) -> str:
    return f"{action.op.lower() if chunk else action.op}{action.microbatch}"


def picture_in_docstring(name: str) -> list[str]:
    lines = (inspect.getdoc(RegisteredSchedule.named(name).program) or "").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("rank ")]


PUBLISHED = [name for name in RegisteredSchedule.names() if name != "auto"]  # which has no order of its own


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_picture_is_the_execution(name: str) -> None:
    drawn, real = picture_in_docstring(name), picture(pictured(name))
    assert drawn, f"draw {name} in its docstring"
    if RegisteredSchedule.named(name).flush:
        assert drawn == real
        return
    for row, whole in zip(drawn, real, strict=True):
        assert row.endswith(" ...")
        assert whole.startswith(row.removesuffix(" ..."))
