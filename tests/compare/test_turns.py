"""The turns, in a world of a clock and lists."""

from __future__ import annotations

from collections.abc import Iterator

from vpipe.compare.outcome import Turn
from vpipe.compare.turns import Course, take_turns


class World:
    """A clock that updates move, and what happened in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[str] = []

    def contender(self, name: str, update_s: float, updates: int) -> Course:
        def steps() -> Iterator[float]:
            for number in range(updates):
                self.now += update_s
                self.events.append(f"{name}{number}")
                yield float(number)

        return Course(name, steps(), updates)

    def run(self, *courses: Course, updates: int) -> None:
        take_turns(courses, lambda: self.events.append("meet"), lambda: self.now,
                   lambda course: self.events.append(f"show {course.name}"), updates)


def test_contenders_take_turns_and_all_ranks_meet_before_each() -> None:
    world = World()
    world.run(world.contender("a", 1, 3), world.contender("b", 2, 3), updates=1)
    assert world.events == ["meet", "a0", "a1", "show a", "meet", "b0", "b1", "show b",
                            "meet", "a2", "show a", "meet", "b2", "show b"]


def test_the_first_update_of_a_turn_does_not_count() -> None:
    world = World()
    a, b = world.contender("a", 1.0, 12), world.contender("b", 2.5, 12)
    world.run(a, b, updates=2)
    assert a.turns == [Turn(2, 2.0)] * 4
    assert b.turns == [Turn(2, 5.0)] * 4
    assert a.losses == list(range(12))
    assert (a.seconds, b.seconds) == (12.0, 30.0)


def test_neither_the_turn_that_warms_up_counts_nor_the_last() -> None:
    course = Course("a", iter(()), 12, [1.0] * 12, [Turn(2, 9.0), Turn(2, 2.0), Turn(2, 2.2), Turn(2, 0.1)], 20.0)
    assert course.counted == (Turn(2, 2.0), Turn(2, 2.2))


def test_a_run_too_short_for_that_is_one_turn() -> None:
    world = World()
    a = world.contender("a", 1.5, 3)
    world.run(a, updates=4)
    assert a.counted == (Turn(3, 4.5),)


def test_one_that_has_ended_is_not_asked_again() -> None:
    world = World()
    world.run(world.contender("a", 1, 2), world.contender("b", 1, 4), updates=1)
    assert world.events == ["meet", "a0", "a1", "show a", "meet", "b0", "b1", "show b", "meet", "b2", "b3", "show b"]


def test_one_whose_number_of_updates_nobody_knows_ends_when_it_says_so() -> None:
    world = World()
    course = Course("a", iter([1.0, 2.0]))
    world.run(course, updates=1)
    assert course.ended
    assert world.events == ["meet", "show a", "meet", "show a"]
