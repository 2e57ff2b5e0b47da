"""The comparison of schedules, and the numbers in words."""

from __future__ import annotations

from fractions import Fraction

from test_terminal import made

from vpipe.app.visualize.summary import compare
from vpipe.app.visualize.table import Column, clipped, columns, fitted, listed, number, percent, plain, table
from vpipe.errors import counted


def test_a_table_is_aligned() -> None:
    assert table(["a", "bb"], [["1", "2"], ["333", "4"]]) == ["  a  bb", "  1   2", "333   4"]
    assert table(["a", "bb"], [["1", "2"], ["333", "4"]], left=1) == ["a    bb", "1     2", "333   4"]


def test_characters_of_two_columns_keep_a_table_aligned() -> None:
    assert table(["a", "bb"], [["中文", "2"], ["3", "文"]]) == ["   a  bb", "中文   2", "   3  文"]
    assert table(["a", "bb"], [["中文", "2"], ["3", "4"]], left=1) == ["a     bb", "中文   2", "3      4"]
    assert columns([Column("a", ["中文", "b"], left=True), Column("c", ["1", "2"])], 20) == [
        "a     c", "中文  1", "b     2"]
    assert fitted(["a", "b", "c"], [["中文", "中文中", "中文"]], 13) == [
        "   a       b", "中文  中文中", "", "   a     c", "中文  中文"]
    assert [clipped("中文ab", width) for width in (0, 1, 2, 5, 9)] == ["", "", "中", "中文a", "中文ab"]


def test_schedules_are_compared_the_least_bubble_first() -> None:
    found = {name: made(name, 4, 8) for name in ("gpipe", "interleaved", "pipedream", "zb_h1")}
    assert compare({**found, "none": "'none' needs 9 ranks"}) == """\
schedule     stages/rank  bubble  share  makespan  peak activations  versions  staleness
zb_h1                  1       3   11 %        27                 4         1          0
interleaved            2     4.5   16 %      28.5          5.5 (11)         1          0
pipedream              1       9   once        33                 4         4          3
gpipe                  1       9   27 %        33                 8         1          0
none         not possible: 'none' needs 9 ranks

peak activations: of the rank that holds most, in microbatches of a whole rank (of one stage);
versions, staleness: of the stage with most
once: without a flush (pipedream) the bubble comes once in a run, not at every update
"""


def test_numbers() -> None:
    assert [number(value) for value in (9, Fraction(9, 2), 4.0, 0.1234567, 10**12)] == [
        "9", "4.5", "4", "0.123457", "1e+12"]
    assert [percent(Fraction(share, 1000)) for share in (0, 5, 99, 273, 1000)] == [
        "0 %", "0.5 %", "9.9 %", "27 %", "100 %"]
    assert [(type(plain(value)), plain(value)) for value in (Fraction(4), 4.0, Fraction(1, 4))] == [
        (int, 4), (int, 4), (float, 0.25)]
    assert [counted(1, "rank"), counted(2, "rank"), counted(2, "microbatch")] == ["1 rank", "2 ranks", "2 microbatches"]
    assert [listed([1, 2]), listed([3] * 20), listed([*range(20)])] == ["1 2", "3", "0 to 19"]
