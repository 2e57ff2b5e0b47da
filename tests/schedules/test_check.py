"""The checker: every rule with schedules that break it, and every schedule that must pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vpipe.errors import CheckError, UserError
from vpipe.schedules.action import Action
from vpipe.schedules.check import RULES, check, prove
from vpipe.schedules.execute import execute
from vpipe.schedules.lower import lower
from vpipe.schedules.order import Schedule, build, default_placement
from vpipe.schedules.reading import Reading


def good(name: str = "1f1b", stages: int = 3, microbatches: int = 4, every: int | None = None, *, tied: bool = True,
         norm: bool = True) -> Schedule:
    return prove(name, default_placement(stages), microbatches, every, {0: (stages - 1,)} if tied else {}, norm)


def stream() -> Schedule:
    return good("pipedream", every=1)


def edited(schedule: Schedule, rank: int, edit: Callable[[list[str]], object]) -> Schedule:
    """The schedule with one rank's program, as a list of texts, changed in place by ``edit``."""
    texts = [str(action) for action in schedule.programs[rank]]
    edit(texts)
    programs = list(schedule.programs)
    programs[rank] = tuple(map(Action.parse, texts))
    return schedule.with_programs(programs)


def without(schedule: Schedule, rank: int, text: str) -> Schedule:
    return edited(schedule, rank, lambda texts: texts.remove(text))


def added(schedule: Schedule, rank: int, text: str, before: str | None = None) -> Schedule:
    """With an action added before another, or at the end."""
    return edited(schedule, rank, lambda texts: texts.insert(texts.index(before) if before else len(texts), text))


def moved(schedule: Schedule, rank: int, text: str, before: str | None = None) -> Schedule:
    return added(without(schedule, rank, text), rank, text, before)


def swapped(schedule: Schedule, rank: int, one: str, other: str) -> Schedule:
    exchange = {one: other, other: one}
    return edited(schedule, rank, lambda texts: texts.__setitem__(
        slice(None), [exchange.get(text, text) for text in texts]))


def by_hand(*programs: str) -> Schedule:
    """A flush schedule of one microbatch order per rank, lowered."""
    schedule = build("gpipe", default_placement(len(programs)), 1 + max(int(p[-1]) for p in programs))
    return lower(schedule.with_programs([[Action.parse(text) for text in [*program.split(), f"{rank}STEP0"]]
                                         for rank, program in enumerate(programs)]))


BROKEN: dict[str, list[tuple[Callable[[], Schedule], str, str]]] = {  # rule: (broken schedule, its text, marked)
    "placement": [
        (lambda: added(good(), 0, "1F0", before="0F1"), "1F0 stands on rank 0, but stage 1 lives on [1]", "1F0"),
        (lambda: added(good(), 1, "7F0", before="1F0"), "7F0 on rank 1: there are 3 stages", "7F0"),
        (lambda: added(good(), 1, "0RECV_TIED_W1"), "stands on rank 1, but stage 0 is borrowed by [2]",
         "0RECV_TIED_W1"),
        (lambda: good().with_programs(good().programs[:2]),
         "stage 2 lives on rank 2, but there are programs for 2 ranks", "rank 2 end"),
        (lambda: good().with_programs([*good().programs, ()]), "rank 3 has a program but no stage", "rank 3 end"),
        (lambda: replace(good(), placement=((0,), (1,), (2, 3))), "stage 2 lives on 2 ranks (2, 3)", ""),
        (lambda: replace(good(), ties={0: (0,)}), "tied weights of stage 0 are borrowed by ranks (0,)", ""),
    ],
    "indices": [
        (lambda: added(good(), 1, "1F9"), "1F9: there is no microbatch 9 with 4 microbatches", "1F9"),
        (lambda: added(good(), 1, "1STEP1"), "1STEP1: there is no update 1", "1STEP1"),
        (lambda: added(good(), 0, "0SEND_TIED_W0", before="0F0"), "there is no version 0", "0SEND_TIED_W0"),
    ],
    "completeness": [
        (lambda: without(good(), 1, "1F2"), "1F2 stands 0 times", "1B2"),
        (lambda: without(good(), 2, "2B3"), "2B3 stands 0 times", "end"),
        (lambda: added(good(), 0, "0B0", before="0B1"), "0B0 stands 2 times", "0B0"),
    ],
    "updates": [
        (lambda: without(good(), 1, "1STEP0"), "stage 1 makes 0 of 1 updates", "end"),
        (lambda: moved(good(), 2, "2STEP0", before="2B3"), "of microbatches 0 to 3; those missing are [3]", "2STEP0"),
        (lambda: moved(stream(), 2, "2STEP0", before="2STEP1"),
         "of microbatches 0 to 0; those of other updates are [1]", "2STEP0"),
        (lambda: swapped(stream(), 0, "0STEP1", "0STEP2"), "0STEP2 comes where update 1 of stage 0 is due", "0STEP2"),
        (lambda: added(good(), 1, "1STEP0"), "1STEP0 comes where update 1 of stage 1 is due", "1STEP0"),
        (lambda: replace(stream(), flush=True), "0STEP0 with 2 microbatches in flight", "0STEP0"),
    ],
    "norms": [
        (lambda: without(good(), 1, "1NORM0"), "1NORM0 stands 0 times", "1STEP0"),
        (lambda: moved(good(), 1, "1NORM0"), "1NORM0 on rank 1 must stand between", "1NORM0"),
        (lambda: moved(good(), 1, "1NORM0", before="1B3"), "1NORM0 on rank 1 must stand between", "1NORM0"),
    ],
    "matching": [
        (lambda: without(good(), 0, "0SEND_F1"), "1RECV_F1 on rank 1 has no 0SEND_F1 on rank 0", "1RECV_F1"),
        (lambda: without(good(), 1, "1RECV_B2"), "2SEND_B2 on rank 2 has no 1RECV_B2 on rank 1", "2SEND_B2"),
        (lambda: without(good(), 2, "0SEND_TIED_G0"), "0RECV_TIED_G0 on rank 0 has no 0SEND_TIED_G0 on rank 2",
         "0RECV_TIED_G0"),
        (lambda: without(good(), 2, "0RECV_TIED_W1"), "0SEND_TIED_W1 on rank 0 has no 0RECV_TIED_W1 on rank 2",
         "0SEND_TIED_W1"),
        (lambda: added(good(), 1, "1SEND_F0", before="1SEND_B0"), "1SEND_F0 stands more than once on rank 1",
         "1SEND_F0"),
        (lambda: added(good(), 0, "0SEND_B0"), "0SEND_B0 on rank 0 has no other rank at its other end", "0SEND_B0"),
    ],
    "precedence": [
        (lambda: moved(good(), 1, "1RECV_F1", before="1SEND_F1"),
         "1F1 on rank 1 needs 1RECV_F1 before it, which stands 1 actions behind it", "1F1"),
        (lambda: swapped(good(), 2, "2B1", "2SEND_B1"), "2SEND_B1 on rank 2 needs 2B1 before it", "2SEND_B1"),
        (lambda: swapped(good(), 2, "2F1", "2B1"), "2B1 on rank 2 needs 2F1 before it", "2B1"),
        (lambda: moved(good(), 0, "0RECV_TIED_G0", before="0STEP0"), "0NORM0 on rank 0 needs 0RECV_TIED_G0", "0NORM0"),
        (lambda: moved(good(norm=False), 0, "0RECV_TIED_G0", before="0SEND_TIED_W1"),
         "0STEP0 on rank 0 needs 0RECV_TIED_G0", "0STEP0"),
        (lambda: swapped(good(), 0, "0SEND_TIED_W1", "0STEP0"), "0SEND_TIED_W1 on rank 0 needs 0STEP0",
         "0SEND_TIED_W1"),
        (lambda: moved(good(), 2, "0SEND_TIED_G0", before="2B3"), "0SEND_TIED_G0 on rank 2 needs 2B3",
         "0SEND_TIED_G0"),
        (lambda: moved(stream(), 2, "0RECV_TIED_W1"), "2F3 on rank 2 needs 0RECV_TIED_W1", "2F3"),
    ],
    "last_versions": [
        (lambda: without(without(good(), 0, "0SEND_TIED_W1"), 2, "0RECV_TIED_W1"),
         "rank 2 borrows the tied weights of stage 0 and never receives their last version 1", "end"),
    ],
    "channel_order": [
        (lambda: moved(good("gpipe"), 0, "0SEND_F0", before="0F2"),
         "rank 0 sends 0SEND_F1 to rank 1, which receives what 0SEND_F0 sends first", "0SEND_F1"),
        (lambda: swapped(stream(), 2, "0RECV_TIED_W1", "0RECV_TIED_W2"),
         "rank 0 sends 0SEND_TIED_W1 to rank 2, which receives what 0SEND_TIED_W2 sends first", "0SEND_TIED_W1"),
    ],
    "no_deadlock_buffered": [
        (lambda: by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
         "rank 0 stands before 0B0 and waits for 1SEND_B0 of rank 1; "
         "rank 1 stands before 1F1 and waits for 0SEND_F1 of rank 0", "0B0"),
    ],
    "no_deadlock_rendezvous": [
        (lambda: moved(moved(good(stages=2, tied=False), 0, "0RECV_B0", before="0B0"), 1, "1RECV_F1",
                       before="1F1"),
         "rank 0 stands before 0SEND_F1 and waits for 1RECV_F1 of rank 1; "
         "rank 1 stands before 1SEND_B0 and waits for 0RECV_B0 of rank 0", "0SEND_F1"),
        (lambda: moved(stream(), 2, "0RECV_TIED_W1", before="0RECV_TIED_W2"),
         "rank 0 stands before 0SEND_TIED_W1 and waits for 0RECV_TIED_W1 of rank 2", "0SEND_TIED_W1"),
    ],
    "weight_versions": [
        (lambda: replace(stream(), versions=(2, 2, 1)),
         "stage 0 holds 3 weight versions with staleness 0; the schedule states at most 2 and 1", "0STEP1"),
        (lambda: replace(stream(), versions=(3, 1, 1)), "stage 1 holds 2 weight versions", "1STEP0"),
    ],
    "peak_activations": [
        (lambda: replace(good("gpipe"), peak_activations=(4, 2, 4)),
         "stage 1 holds the activations of 3 microbatches; the schedule states at most 2", "1F2"),
    ],
}


@pytest.mark.parametrize(("rule", "broken", "text", "marked"),
                         [(rule, *case) for rule, cases in BROKEN.items() for case in cases])
def test_a_broken_rule(rule: str, broken: Callable[[], Schedule], text: str, marked: str) -> None:
    schedule = broken()
    reading = Reading.of(schedule)
    for kept in RULES[:[one.__name__ for one in RULES].index(rule)]:
        kept(reading)
    with pytest.raises(CheckError) as raised:
        check(schedule)
    what, *grid, hint = str(raised.value).splitlines()
    assert what.startswith(f"error: schedule '{schedule.name}': ")
    assert text in what
    assert [row.split()[:2] for row in grid] == [["rank", str(rank)] for rank in range(len(grid))]
    assert len(grid) >= len(schedule.programs)
    assert hint.startswith("hint: ")
    rows = " ".join(" ".join(row.split()) for row in grid)
    assert f"{marked} <-- here" in rows if marked else "<-- here" not in rows


def test_every_rule_has_an_example() -> None:
    assert [rule.__name__ for rule in RULES] == list(BROKEN)


def test_a_deadlock_text() -> None:
    with pytest.raises(CheckError) as raised:
        check(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert str(raised.value).splitlines() == [
        "error: schedule 'gpipe': deadlock when sends never wait (buffered): rank 0 stands before 0B0 and waits for "
        "1SEND_B0 of rank 1; rank 1 stands before 1F1 and waits for 0SEND_F1 of rank 0",
        "rank 0 0F0      0SEND_F0 0RECV_B0 0B0 <-- here 0F1 0SEND_F1 0RECV_B1 0B1      0STEP0",
        "rank 1 1RECV_F0 1RECV_F1 1F0      1F1 <-- here 1B0 1SEND_B0 1B1      1SEND_B1 1STEP0",
        "hint: move the awaited actions forward in their programs, or the waiting ones back"]


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize(("name", "every"), [("gpipe", None), ("1f1b", None), ("pipedream", 1), ("pipedream", 2),
                                             ("pipedream", 4)])
def test_every_schedule_passes(name: str, every: int | None, stages: int) -> None:
    for microbatches in range(every or 1, 25, every or 1):
        for ties, norm in (({}, False), ({0: (stages - 1,)} if stages > 1 else {}, True)):
            prove(name, default_placement(stages), microbatches, every, ties, norm)


@st.composite
def proved(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "pipedream"]))
    every = draw(st.sampled_from([1, 2, 3, 4])) if name == "pipedream" else None
    microbatches = (every or 1) * draw(st.integers(1, 24 // (every or 1)))
    stages = draw(st.integers(1, 8))
    placement = tuple((rank,) for rank in draw(st.permutations(range(stages))))
    owners = draw(st.sets(st.integers(0, stages - 1), max_size=2))
    ties = {owner: tuple(placement[borrower][0] for borrower in sorted(draw(st.sets(
        st.integers(owner + 1, stages - 1), max_size=2)))) for owner in owners if owner + 1 < stages}
    return prove(name, placement, microbatches, every, ties, draw(st.booleans()))


@settings(deadline=None, max_examples=100)
@given(proved())
def test_every_placement_and_tie_passes(schedule: Schedule) -> None:
    assert execute(Reading.of(schedule), rendezvous=True) == ([len(program) for program in schedule.programs], [])


@settings(deadline=None, max_examples=60)
@given(proved(), st.data())
def test_no_action_can_be_left_out(schedule: Schedule, data: st.DataObject) -> None:
    assume(schedule.stages > 1)  # a lone stage without its only norm is a good schedule without norms
    rank = data.draw(st.integers(0, schedule.stages - 1))
    at = data.draw(st.integers(0, len(schedule.programs[rank]) - 1))
    programs = list(schedule.programs)
    programs[rank] = programs[rank][:at] + programs[rank][at + 1:]
    with pytest.raises(CheckError):
        check(schedule.with_programs(programs))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b", "pipedream"]), st.integers(1, 8), st.integers(1, 24), st.booleans())
def test_compute_only_schedules_pass(name: str, stages: int, microbatches: int, tied: bool) -> None:
    check(build(name, default_placement(stages), microbatches, ties={0: (stages - 1,)} if tied and stages > 1 else {}))


def test_a_compute_only_deadlock() -> None:
    schedule = edited(build("1f1b", default_placement(2), 2), 0, lambda texts: texts.insert(1, texts.pop(2)))
    check(schedule)
    crossed = edited(schedule, 1, lambda texts: texts.insert(1, texts.pop(2)))
    with pytest.raises(CheckError, match="rank 0 stands before 0B0 and waits for 1B0 of rank 1; "
                                         "rank 1 stands before 1F1 and waits for 0F1 of rank 0"):
        check(replace(crossed, peak_activations=(2, 2)))


def test_two_stages_of_one_rank_follow_each_other() -> None:
    def on_one_rank(program: Sequence[str]) -> Schedule:
        return replace(build("gpipe", default_placement(2), 1), placement=((0,), (0,)),
                       programs=(tuple(map(Action.parse, program)),))

    check(on_one_rank(["0F0", "1F0", "1B0", "0B0", "1STEP0", "0STEP0"]))
    with pytest.raises(CheckError, match="1F0 on rank 0 needs 0F0 before it, which stands 1 actions behind it"):
        check(on_one_rank(["1F0", "0F0", "1B0", "0B0", "1STEP0", "0STEP0"]))


def test_prove_refuses_numbers_before_it_checks() -> None:
    with pytest.raises(UserError, match="does not divide 5"):
        prove("pipedream", default_placement(2), 5, 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream"])
def test_checking_is_fast(name: str) -> None:
    schedule = lower(build(name, default_placement(8), 64, ties={0: (7,)}), norm=True)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        check(schedule)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.2
