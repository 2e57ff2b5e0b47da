"""The grid that a failed check shows."""

from __future__ import annotations

from vpipe.errors import CheckError, UserError
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.kinds import Action
from vpipe.schedules.schedule import MARK, SIDE, draw_grid


def programs(*texts: str) -> list[list[Action]]:
    return [[Action.parse(text) for text in row.split()] for row in texts]


def test_a_short_grid_is_shown_whole_with_its_columns_aligned() -> None:
    assert draw_grid(programs("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1STEP0"), [(1, 1)]).splitlines() == [
        "rank 0 0F0      0SEND_F0     0B0",
        "rank 1 1RECV_F0 1F0 <-- here 1B0 1STEP0"]


def test_a_rank_without_a_program_has_a_row() -> None:
    assert draw_grid(programs("0F0"), [(1, 0)]).splitlines() == ["rank 0 0F0", "rank 1 end <-- here"]


def long_programs() -> list[list[Action]]:
    """The second rank has twice as many actions."""
    return programs(" ".join(f"0F{i}" for i in range(100)), " ".join(f"1F{i}" for i in range(200)))


def test_a_long_grid_is_a_window_around_the_mark() -> None:
    first, second = draw_grid(long_programs(), [(0, 50)]).splitlines()
    assert first.split() == ["rank", "0", "...", *[f"0F{i}" for i in range(42, 51)], *MARK.split(),
                             *[f"0F{i}" for i in range(51, 59)], "..."]
    assert second.split() == ["rank", "1", "...", *[f"1F{i}" for i in range(92, 109)], "..."]
    assert first.index("0F51") == second.index("1F101")


def test_a_window_at_the_edges() -> None:
    first, second = draw_grid(long_programs(), [(0, 0)]).splitlines()
    assert first.split() == ["rank", "0", "0F0", *MARK.split(), *[f"0F{i}" for i in range(1, 9)], "..."]
    assert second.split() == ["rank", "1", *[f"1F{i}" for i in range(9)], "..."]
    first, second = draw_grid(long_programs(), [(1, 200)]).splitlines()
    assert first.split() == ["rank", "0", "...", *[f"0F{i}" for i in range(91, 100)]]
    assert second.split() == ["rank", "1", "...", *[f"1F{i}" for i in range(192, 200)], "end", *MARK.split()]


def test_of_many_ranks_those_near_a_mark_are_shown() -> None:
    rows = draw_grid(programs(*[f"{rank}F0 {rank}B0" for rank in range(100)]), [(1, 0), (50, 1)]).splitlines()
    assert [row.split()[1] if row != "..." else row for row in rows] == [
        "0", "1", "2", "3", "4", "...", "47", "48", "49", "50", "51", "52", "53", "..."]
    assert rows[1] == f"rank 1  1F0 {MARK} 1B0"
    assert rows[9].endswith(MARK)


def test_cursors_say_what_each_row_is_about() -> None:
    rows = draw_grid(long_programs(), [(0, 50), (1, 20)], cursors=[50, 20]).splitlines()
    assert rows[0].index(MARK) == rows[1].index(MARK)
    assert all(len(row.replace(f" {MARK}", "").split()) == 2 + 2 + 2 * SIDE + 1 for row in rows)


def test_a_fault() -> None:
    schedule = build("gpipe", Layout.LOOP(1), 1)
    error = schedule.error("it is wrong", "mend it", (0, 1))
    assert isinstance(error, CheckError)
    assert isinstance(error, UserError)
    assert str(error).splitlines() == ["error: schedule 'gpipe': it is wrong", "rank 0 0F0 0B0 <-- here 0STEP0",
                                       "hint: mend it"]
