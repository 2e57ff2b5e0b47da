"""The checker: every rule with schedules that break it, and every schedule that must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from golden import assert_golden, refusal
from hypothesis import assume, given
from hypothesis import strategies as st
from proved import prove

from vpipe.errors import CheckError
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.checker import RULES, check, execute
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.lowering import lower
from vpipe.schedules.schedule import Schedule
from vpipe.testing import schedules


def good(name: str = "1f1b", stages: int = 3, microbatches: int = 4, every: int | None = None, *, tied: bool = True,
         norm: bool = True) -> Schedule:
    return prove(name, Layout.LOOP(stages), microbatches, every, {0: (stages - 1,)} if tied else {}, norm)


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


def parsed(program: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, program.split()))


def by_hand(*programs: str) -> Schedule:
    """A flush schedule of one microbatch order per rank, lowered."""
    schedule = build("gpipe", Layout.LOOP(len(programs)), 1 + max(int(p[-1]) for p in programs))
    return lower(schedule.with_programs([parsed(f"{program} {rank}STEP0") for rank, program in enumerate(programs)]))


def halves() -> Schedule:
    return good("zb_h1")


def vee(ties: Mapping[int, tuple[int, ...]] | None = None, *, norm: bool = True,
        compute_only: bool = False) -> Schedule:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1; unless told, stage 3 borrows weights of stage 0, beside it."""
    programs = (parsed("0F0 0F1 3F0 3I0 3F1 3I1 3W0 3W1 0R0 0B0 0B1 3STEP0 0STEP0"),
                parsed("1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 1STEP0 2STEP0"))
    schedule = Schedule("vee", Layout.ZIGZAG(2, 2), programs, 2, 2, flush=True,
                        peak_activations=(3, 4), versions=(1, 1, 1, 1), ties={0: (3,)} if ties is None else ties)
    return schedule if compute_only else lower(schedule, norm)


def synchronised() -> Schedule:
    """A stream of two stages, each microbatch on one version through both."""
    schedule = build("pipedream", Layout.LOOP(2), 4, 1, {0: (1,)})
    last = parsed("1USE0 1F0 1B0 1STEP0 1F1 1B1 1USE1 1STEP1 1F2 1B2 1USE2 1STEP2 1F3 1B3 1USE3 1STEP3")
    return lower(replace(schedule, versions=(2, 2)).with_programs([schedule.programs[0], last]))


def shared() -> Schedule:
    """A stream through two stages of one rank, which share a weight."""
    program = parsed("0F0 1F0 1B0 0B0 1STEP0 0STEP0 0F1 1F1 1B1 0B1 1STEP1 0STEP1")
    return lower(Schedule("shared", ((0,), (0,)), (program,), 2, 1, flush=False,
                          peak_activations=(2,), versions=(1, 1), ties={0: (1,)}))


def replicated() -> Schedule:
    """Stage 0 on ranks 0 and 1, stage 1, which borrows a weight of it, on rank 2."""
    return prove("1f1b", ((0, 1), (2,)), 4, None, {0: (1,)}, True)


def replicated_stream(microbatches: int = 4) -> Schedule:
    return prove("pipedream", ((0, 1), (2,)), microbatches, 1)


def owned() -> Schedule:
    """The same, and each of the two replicas steps a part of stage 0."""
    return prove("pipedream", ((0, 1), (2,)), 4, 1, {0: (1,)}, norm=True, zero1=True)


def gathered() -> Schedule:
    """The same without the tied weight, and with updates of two microbatches of each."""
    return prove("pipedream", ((0, 1), (2,)), 8, 2, zero1=True)


BROKEN: dict[str, list[Callable[[], Schedule]]] = {  # by rule
    "placement": [
        lambda: added(good(), 0, "1F0", before="0F1"),
        lambda: added(good(), 1, "7F0", before="1F0"),
        lambda: added(good(), 1, "0RECV_TIED_W1"),
        lambda: good().with_programs(good().programs[:2]),
        lambda: good().with_programs([*good().programs, ()]),
        lambda: replace(good(), placement=((0,), (1,), (2, 3))),
        lambda: replace(good(), placement=((0,), (1,), ())),
        lambda: replace(good(), placement=((0,), (1,), (2, 2))),
        lambda: added(without(replicated(), 1, "0F3"), 0, "0F3", before="0B2"),
        lambda: added(without(replicated(), 0, "0B2"), 1, "0B2", before="0B3"),
        lambda: added(replicated(), 2, "0REDUCE_GRAD0"),
        lambda: replace(good(), ties={0: (0,)}),
        lambda: replace(good(), ties={2: (1,)}),
        lambda: replace(good(), ties={0: (3,)}),
        lambda: added(good(tied=False), 2, "0SEND_TIED_G0"),
        lambda: added(without(vee(), 1, "2F1"), 0, "2F1"),
    ],
    "indices": [
        lambda: added(good(), 1, "1F9"),
        lambda: added(good(), 1, "1STEP1"),
        lambda: added(good(), 0, "0SEND_TIED_W0", before="0F0"),
        lambda: added(halves(), 1, "1I7"),
        lambda: added(halves(), 1, "1W4"),
        lambda: added(good(), 1, "1R4", before="1B3"),
        lambda: added(synchronised(), 1, "1USE5"),
        lambda: added(replicated_stream(), 1, "0REDUCE_GRAD2"),
    ],
    "completeness": [
        lambda: without(good(), 1, "1F2"),
        lambda: without(good(), 2, "2B3"),
        lambda: added(good(), 0, "0B0", before="0B1"),
        lambda: without(vee(), 1, "2B1"),
        lambda: without(halves(), 1, "1I2"),
        lambda: without(halves(), 1, "1W2"),
        lambda: added(halves(), 1, "1W2"),
        lambda: added(halves(), 1, "1B2"),
        lambda: added(good(), 1, "1I2"),
        lambda: added(vee(), 0, "0R0", before="0B0"),
    ],
    "updates": [
        lambda: without(good(), 1, "1STEP0"),
        lambda: moved(good(), 2, "2STEP0", before="2B3"),
        lambda: moved(stream(), 2, "2STEP0", before="2STEP1"),
        lambda: swapped(stream(), 0, "0STEP1", "0STEP2"),
        lambda: added(good(), 1, "1STEP0"),
        lambda: moved(halves(), 1, "1STEP0", before="1W3"),
        lambda: without(vee(), 1, "2STEP0"),
        lambda: replace(moved(build("gpipe", Layout.LOOP(1), 3), 0, "0STEP0", before="0B2"), update_every=2,
                        flush=False),
        lambda: replace(stream(), flush=True),
        lambda: without(replicated_stream(), 1, "0STEP1"),
        lambda: moved(replicated_stream(), 1, "0STEP0", before="0STEP1"),
        lambda: swapped(replicated_stream(), 0, "0STEP0", "0STEP1"),
    ],
    "used_versions": [
        lambda: swapped(synchronised(), 1, "1USE1", "1USE2"),
        lambda: added(synchronised(), 1, "1USE0", before="1F3"),
        lambda: moved(synchronised(), 1, "1USE0", before="1F1"),
    ],
    "reductions": [
        lambda: without(replicated(), 1, "0REDUCE_GRAD0"),
        lambda: added(replicated(), 1, "0REDUCE_GRAD0"),
        lambda: moved(replicated(), 1, "0REDUCE_GRAD0", before="0B3"),
        lambda: moved(replicated(), 0, "0REDUCE_GRAD0", before="0STEP0"),
        lambda: swapped(replicated_stream(), 0, "0REDUCE_GRAD0", "0STEP0"),
        lambda: without(prove("1f1b", ((0, 1),), 4), 0, "0REDUCE_GRAD0"),
    ],
    "norms": [
        lambda: without(replicated(), 1, "0NORM0"),
        lambda: without(good(), 1, "1NORM0"),
        lambda: moved(halves(), 1, "1NORM0", before="1W3"),
        lambda: moved(vee(), 1, "2NORM0", before="2STEP0"),
        lambda: moved(good(), 1, "1NORM0"),
        lambda: moved(good(), 1, "1NORM0", before="1B3"),
    ],
    "matching": [
        lambda: without(good(), 0, "0SEND_F1"),
        lambda: without(good(), 1, "1RECV_B2"),
        lambda: without(good(), 2, "0SEND_TIED_G0"),
        lambda: without(good(), 2, "0RECV_TIED_W1"),
        lambda: added(good(), 1, "1SEND_F0", before="1SEND_B0"),
        lambda: without(vee(), 0, "0RECV_TIED_G0"),
        lambda: without(vee({0: (2, 3)}), 1, "0RECV_TIED_W1"),
        lambda: added(vee(), 1, "1SEND_F0", before="2F0"),
        lambda: without(replicated(), 1, "0RECV_TIED_G0"),
        lambda: added(good(), 0, "0SEND_B0"),
    ],
    "precedence": [
        lambda: moved(good(), 1, "1RECV_F1", before="1SEND_F1"),
        lambda: swapped(good(), 2, "2B1", "2SEND_B1"),
        lambda: swapped(good(), 2, "2F1", "2B1"),
        lambda: swapped(halves(), 2, "2I1", "2W1"),
        lambda: swapped(halves(), 2, "2I1", "2SEND_B1"),
        lambda: moved(halves(), 2, "0SEND_TIED_G0", before="2W3"),
        lambda: moved(vee(), 0, "0R0", before="0F0"),
        lambda: moved(vee(), 0, "0R0", before="0B1"),
        lambda: moved(good(), 0, "0RECV_B0", before="0F0"),
        lambda: swapped(vee(), 1, "1F1", "2F1"),
        lambda: swapped(vee(), 1, "1B1", "2B1"),
        lambda: moved(vee(norm=False), 0, "0SEND_TIED_G0"),
        lambda: moved(shared(), 0, "0RECV_TIED_W1"),
        lambda: moved(shared(), 0, "0SEND_TIED_W1"),
        lambda: moved(synchronised(), 1, "0RECV_TIED_W1"),
        lambda: moved(good(), 0, "0RECV_TIED_G0", before="0STEP0"),
        lambda: moved(good(norm=False), 0, "0RECV_TIED_G0", before="0SEND_TIED_W1"),
        lambda: swapped(good(), 0, "0SEND_TIED_W1", "0STEP0"),
        lambda: moved(good(), 2, "0SEND_TIED_G0", before="2B3"),
        lambda: moved(stream(), 2, "0RECV_TIED_W1"),
    ],
    "last_versions": [
        lambda: without(without(good(), 0, "0SEND_TIED_W1"), 2, "0RECV_TIED_W1"),
        lambda: without(without(vee(), 0, "0SEND_TIED_W1"), 0, "0RECV_TIED_W1"),
    ],
    "borrowed_versions": [
        lambda: moved(build("pipedream", Layout.LOOP(2), 4, ties={0: (1,)}), 1, "1F3", before="1F2"),
    ],
    "channel_order": [
        lambda: moved(good("gpipe"), 0, "0SEND_F0", before="0F2"),
        lambda: swapped(stream(), 2, "0RECV_TIED_W1", "0RECV_TIED_W2"),
    ],
    "no_deadlock": [
        lambda: by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        lambda: edited(replicated_stream(6), 2, lambda texts: [  # the fifth before the second
            texts.insert(texts.index("1F1"), texts.pop(texts.index(text)))
            for text in ("1RECV_F2", "1RECV_F4", "1F4")]),
        lambda: moved(moved(good(stages=2, tied=False), 0, "0RECV_B0", before="0B0"), 1, "1RECV_F1", before="1F1"),
        lambda: moved(moved(stream(), 2, "0RECV_TIED_W1", before="0RECV_TIED_W3"), 2, "0RECV_TIED_W2",
                      before="0RECV_TIED_W3"),
    ],
    "no_deadlock_in_one_order": [
        lambda: swapped(prove("interleaved", ((0, 1), (0, 1)), 4, norm=True), 1, "0REDUCE_GRAD0", "1REDUCE_GRAD0"),
    ],
    "weight_versions": [
        lambda: replace(stream(), versions=(2, 2, 1)),
        lambda: replace(stream(), versions=(3, 1, 1)),
        lambda: moved(synchronised(), 1, "1USE1", before="1F2"),
    ],
    "peak_activations": [
        lambda: replace(good("gpipe"), peak_activations=(4, 2, 4)),
        lambda: replace(vee(), peak_activations=(3, 3)),
    ],
    "nothing_freed_is_used": [
        lambda: added(good(), 1, "1OFFLOAD2", before="1F3"),
        lambda: added(halves(), 1, "1OFFLOAD2", before="1I2"),
        lambda: added(good(), 1, "1OFFLOAD2", before="1B3"),
        lambda: added(added(vee(), 0, "0OFFLOAD0", before="0B0"), 0, "0FETCH0", before="0B0"),
    ],
    "gathered_weights": [
        lambda: without(without(owned(), 0, "0GATHER_W0"), 1, "0GATHER_W0"),
        lambda: without(without(owned(), 0, "0GATHER_W1"), 1, "0GATHER_W1"),
        lambda: moved(moved(owned(), 0, "0GATHER_W0", before="0GATHER_W1"), 1, "0GATHER_W0", before="0GATHER_W1"),
        lambda: swapped(owned(), 0, "0GATHER_W0", "0SEND_TIED_W1"),
        lambda: without(without(gathered(), 0, "0GATHER_W0"), 1, "0GATHER_W0"),
        lambda: without(without(gathered(), 0, "0GATHER_W1"), 1, "0GATHER_W1"),
        lambda: added(added(gathered(), 0, "0GATHER_W1"), 1, "0GATHER_W1"),
    ],
    "slices": [
        lambda: Schedule("mine", ((0,),), (parsed("0F0 0F1 0B1 0B0 0STEP0 0F2 0F3 0B3 0B2 0STEP1"),), 4, 2,
                         flush=False, peak_activations=(2,), versions=(1,), ties={}, slices=2),
    ],
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule(rule: str) -> None:
    texts = []
    for broken in BROKEN[rule]:
        schedule = broken()
        for kept in RULES[:[one.__name__ for one in RULES].index(rule)]:
            kept(schedule)
        texts.append(refusal(check, schedule, kind=CheckError))
    assert_golden(__file__, rule, texts)


def test_every_rule_has_an_example() -> None:
    assert [rule.__name__ for rule in RULES] == list(BROKEN)


PROVED = schedules(["gpipe", "1f1b", "zb_h1", "interleaved_zb", "looped_bfs", "zb_v", "pipedream", "2bw"])
"""Any of the kinds: whole and in halves, several stages per rank with and without a turn, streams."""


@given(PROVED)
def test_every_placement_and_tie_passes(schedule: Schedule) -> None:
    assert execute(schedule.graph, rendezvous=True) == (
        [len(program) for program in schedule.programs], {})


@given(PROVED, st.data())
def test_no_action_can_be_left_out(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    at = data.draw(st.integers(0, len(schedule.programs[rank]) - 1))
    # Early recomputes and changes of version may be there or not; a lone stage may also do without its only norm.
    assume(schedule.programs[rank][at].op not in (Op.RECOMPUTE, Op.USE, *[Op.NORM] * (schedule.stages == 1)))
    programs = list(schedule.programs)
    programs[rank] = programs[rank][:at] + programs[rank][at + 1:]
    with pytest.raises(CheckError):
        check(schedule.with_programs(programs))


def test_a_compute_only_deadlock() -> None:
    schedule = edited(build("1f1b", Layout.LOOP(2), 2), 0, lambda texts: texts.insert(1, texts.pop(2)))
    check(schedule)
    crossed = edited(schedule, 1, lambda texts: texts.insert(1, texts.pop(2)))
    with pytest.raises(CheckError, match="rank 0 stands before 0B0 and waits for 1B0 of rank 1; "
                                         "rank 1 stands before 1F1 and waits for 0F1 of rank 0"):
        check(replace(crossed, peak_activations=(2, 2)))


def test_stages_of_one_rank_follow_each_other_without_transfers() -> None:
    schedule = vee(compute_only=True)
    check(schedule)
    for one, other in (("1F1", "2F1"), ("2B1", "1B1")):
        with pytest.raises(CheckError, match=f"{other} on rank 1 needs {one} before it, which comes only later"):
            check(swapped(schedule, 1, one, other))


def test_a_borrower_on_the_owners_rank_takes_over_without_a_transfer() -> None:
    assert " ".join(map(str, shared().programs[0])) == (
        "0RECV_TIED_G0 0F0 1F0 1B0 0SEND_TIED_G0 0RECV_TIED_W1 0B0 1STEP0 0STEP0 0RECV_TIED_G1 0SEND_TIED_W1 "
        "0F1 1F1 1B1 0SEND_TIED_G1 0RECV_TIED_W2 0B1 1STEP1 0STEP1 0SEND_TIED_W2")
    both = vee({0: (2, 3)})  # an exchange with the other rank, and one on this
    check(both)
    assert [sum(action.op is Op.RECV_W for action in program) for program in both.programs] == [1, 1]


@pytest.mark.parametrize(("schedule", "version"), [(stream, [0, 1, 2, 3]), (synchronised, [0, 0, 1, 2])])
def test_the_version_in_use(schedule: Callable[[], Schedule], version: list[int]) -> None:
    made = schedule()
    assert [made.versions_used[made.stages - 1, microbatch] for microbatch in range(4)] == version
    check(made)
