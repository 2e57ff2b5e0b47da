"""GPipe turned round: the program of the executor async_threaded."""

from __future__ import annotations

import pytest

from vpipe.errors import UserError
from vpipe.schedules.action import COMPUTE, Op
from vpipe.schedules.build import build
from vpipe.schedules.check import prove
from vpipe.schedules.passes import reverse_backwards
from vpipe.schedules.prepare import ScheduleSpec
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.size import default_placement


def compute(schedule: Schedule, rank: int) -> str:
    return " ".join(str(action)[1:] for action in schedule.programs[rank] if action.op in COMPUTE | {Op.STEP})


def test_the_picture() -> None:
    schedule = prove("gpipe", default_placement(3), 4, last_first=True)
    assert [compute(schedule, rank) for rank in range(3)] == ["F0 F1 F2 F3 B3 B2 B1 B0 STEP0"] * 3
    assert schedule.name == "gpipe"
    assert compute(prove("gpipe", default_placement(3), 4), 1) == "F0 F1 F2 F3 B0 B1 B2 B3 STEP0"


def test_a_recomputation_stays_before_its_backward() -> None:
    turned = reverse_backwards(build("gpipe", default_placement(2), 3, recompute=[0]))
    assert [compute(turned, rank) for rank in range(2)] == [
        "F0 F1 F2 R2 B2 R1 B1 R0 B0 STEP0", "F0 F1 F2 B2 B1 B0 STEP0"]


@pytest.mark.parametrize("placement", [((0,),), ((0,), (1,), (2,)), ((0, 1), (2,)), ((0,), (1, 2), (3,))])
def test_it_is_proved_as_any(placement: tuple[tuple[int, ...], ...]) -> None:
    last = len(placement) - 1
    wanted = ScheduleSpec("gpipe", len(placement), 5, placement=placement, ties={0: (last,)} if last else {},
                          recompute=[last], norm=True, last_first=True)
    own = [action.microbatch for action in wanted.prepare().programs[placement[0][0]] if action.op is Op.BACKWARD]
    assert own == sorted(own, reverse=True)
    assert len(own) == -(-5 // len(placement[0]))


def test_no_other_schedule_can_be_turned() -> None:
    with pytest.raises(UserError, match="'1f1b' cannot run its backwards from the last microbatch to the first"):
        ScheduleSpec("1f1b", 2, 4, last_first=True).prepare()
