"""Check the turns, in a world of a clock and lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vpipe.extras.comparison.round_robin import MIN_UPDATES, TimedTraining, take_turns


class World:
    """A clock that updates move, and what happened in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[str] = []

    def contender(self, name: str, update_s: float, updates: int) -> TimedTraining:
        def steps() -> Iterator[float]:
            for number in range(updates):
                self.now += update_s
                self.events.append(f"{name}{number}")
                yield float(number)

        return TimedTraining(name, steps(), updates)

    def run(self, *trainings: TimedTraining, updates: int) -> None:
        take_turns(trainings, lambda: self.events.append("meet"), lambda: self.now,
                   lambda training: self.events.append(f"show {training.name}"), updates)


def test_all_warm_up_before_anybodys_turn_and_all_ranks_meet_before_each() -> None:
    world = World()
    world.run(world.contender("a", 1, 5), world.contender("b", 2, 5), updates=1)
    assert world.events == ["meet", "a0", "a1", "show a", "meet", "b0", "b1", "show b",
                            "meet", "a2", "a3", "show a", "meet", "b2", "b3", "show b",
                            "meet", "a4", "show a", "meet", "b4", "show b"]


def test_neither_the_warm_up_nor_the_first_update_of_a_turn_counts_nor_the_turn_that_ends() -> None:
    world = World()
    a, b = world.contender("a", 1.0, 12), world.contender("b", 2.5, 12)
    world.run(a, b, updates=2)
    assert a.counted == ((1.0, 1.0),) * 3
    assert b.counted == ((2.5, 2.5),) * 3
    assert a.losses == list(range(12))
    assert (a.seconds, b.seconds) == (12.0, 30.0)
    assert a.warmed_up == b.warmed_up == 2


def test_single_delays_are_charged_to_no_system() -> None:
    world, once = World(), [20.0]

    def steps() -> Iterator[float]:
        for _ in range(5):
            world.now += 1.0 + (once.pop() if once else 0)
            yield 1.0

    a, b = TimedTraining("a", steps(), 5), TimedTraining("b", steps(), 5)
    world.run(a, b, updates=4)
    assert a.counted == b.counted == ((1.0,) * 3,)


def test_of_a_run_too_short_for_a_turn_all_after_the_warm_up_counts() -> None:
    world = World()
    three, two, none = world.contender("a", 1.5, 3), world.contender("b", 1.5, 2), world.contender("c", 1.5, 0)
    world.run(three, two, none, updates=4)
    assert three.counted == ((1.5,),)
    assert two.counted == none.counted == ()
    assert [len(training.losses) for training in (three, two, none)] == [3, 2, 0]


@pytest.mark.parametrize(("updates", "turns"), [(MIN_UPDATES - 1, 1), (MIN_UPDATES, 2)])
def test_as_many_updates_as_are_said_to_be_needed_make_two_turns(updates: int, turns: int) -> None:
    world = World()
    training = world.contender("a", 1, updates)
    take_turns([training], lambda: None, lambda: world.now, lambda training: None)
    assert len(training.turns) == turns


def test_one_that_has_ended_is_not_asked_again() -> None:
    world = World()
    world.run(world.contender("a", 1, 2), world.contender("b", 1, 4), updates=1)
    assert world.events == ["meet", "a0", "a1", "show a", "meet", "b0", "b1", "show b", "meet", "b2", "b3", "show b"]


def test_one_whose_number_of_updates_nobody_knows_ends_when_it_says_so() -> None:
    world = World()
    training = TimedTraining("a", iter([1.0, 2.0, 3.0]))
    world.run(training, updates=1)
    assert training.ended
    assert world.events == ["meet", "show a", "meet", "show a"]
