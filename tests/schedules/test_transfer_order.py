"""Receives are posted in time and in the order of sending, and over nccl in one order of all transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from itertools import islice

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from proved import prove, texts

from vpipe.errors import CheckError, UserError
from vpipe.runtime.interpreter import RankPrograms
from vpipe.schedules.assignment import Layout, Placement, widened
from vpipe.schedules.builder import build, build_evaluation
from vpipe.schedules.checker import check
from vpipe.schedules.generators.pipedream import pipedream
from vpipe.schedules.graph import Flow, other_ends
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.lowering import in_one_order, lower, post_in_time
from vpipe.schedules.registry import _REGISTERED, RegisteredSchedule
from vpipe.schedules.rewrites import reverse_backwards
from vpipe.schedules.schedule import Schedule
from vpipe.testing import orders

Transfer = tuple[Action, int, int]
"""The send, the rank that sends, the rank that receives; of a sum over replicas the action, -1 and the lane; of what
lanes compute together in an action that, -2 and its rank in each."""


class SerialDevices:
    """Carry out programs whose transfers block each other: nccl's rules 2 and 3, and the worst case of rule 5.

    Args:
        schedule: lowered; its programs in the order of issue.
        rendezvous: whether a send ends only with its receive; else it is buffered.
        blocking: whether a rank goes on only when what it issued has ended.
        lanes: whose ranks with the same place do something together in all that is no transfer.
    """

    def __init__(self, schedule: Schedule, *, rendezvous: bool, blocking: bool = False, lanes: int = 1) -> None:
        self.schedule, self.rendezvous, self.blocking, self.lanes = schedule, rendezvous, blocking, lanes
        self.deps = schedule.graph
        self.programs = list(schedule.programs) * lanes
        ranks = range(len(self.programs))
        self.cursors = [0] * len(ranks)
        self.queues: list[list[Transfer]] = [[] for _ in ranks]
        self.buffered: set[Transfer] = set()
        self.ended: set[tuple[Transfer, int]] = set()  # with the rank on which it has
        self.issued: list[list[Transfer]] = [[] for _ in ranks]
        self.received_tied: dict[tuple[Action, int], int] = {}

    def run(self) -> list[str]:
        """Go as far as all ranks can; what each rank that is not at its end stands before."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.programs)):
                while self._step(rank):
                    moved = True
            moved |= self._transfer()
        return [f"rank {rank} before {self.programs[rank][cursor]}"
                for rank, cursor in enumerate(self.cursors) if cursor < len(self.programs[rank])] + [
                f"rank {rank} has {queue[0][0]} under way" for rank, queue in enumerate(self.queues) if queue]

    def _step(self, rank: int) -> bool:
        program = self.programs[rank]
        if self.cursors[rank] == len(program) or (self.blocking and self.queues[rank]):
            return False
        action = program[self.cursors[rank]]
        if not all(self._is_done(*awaited) for awaited in self._awaited(action, rank)):
            return False
        for transfer in self._transfers(action, rank):
            self.queues[rank].append(transfer)
            self.issued[rank].append(transfer)
        self.cursors[rank] += 1
        return True

    def _transfers(self, action: Action, number: int) -> list[Transfer]:
        lane, rank = divmod(number, self.schedule.ranks)
        first = number - rank
        if action.op.transfer is None:
            together = [(action, -2, rank)] if self.lanes > 1 else []
            return [*together, (action, -1, lane)] if action.op is Op.REDUCE else together
        sends = other_ends(self.deps.setting, action, rank)
        if action.op.sends:
            return [(action, number, first + peer) for _, peer in sends if peer != rank]
        if action.op is Op.RECV_G:  # once for each of its senders
            place = self.received_tied.setdefault((action, number), 0)
            self.received_tied[action, number] += 1
            sends = sends[place:place + 1]
        return [(send, first + peer, number) for send, peer in sends if peer != rank]

    def _receives(self, action: Action, rank: int) -> list[Action]:
        position = self.deps.position(action, rank)
        return [one for one in self.deps.before(action, (rank, position)) if one.op.receives]

    def _awaited(self, action: Action, number: int) -> list[tuple[Transfer, int]]:
        """What an action waits for: the transfers that bring what it uses."""
        lane, rank = divmod(number, self.schedule.ranks)
        first = number - rank
        found = [((send, first + peer, number), number) for receive in self._receives(action, rank)
                 for send, peer in other_ends(self.deps.setting, receive, rank) if peer != rank]
        if action.op in (Op.NORM, Op.STEP) and self.schedule.assignment.width(action.stage) > 1:
            found.append(((Action(Op.REDUCE, action.stage, action.microbatch), -1, lane), number))
        if action.op is Op.STEP and self.deps.setting.normed:
            found += [((Action(Op.NORM, stage, action.microbatch), -1, -1), first + ranks[0])
                      for stage, ranks in enumerate(self.schedule.placement) if rank not in ranks]
        return found

    def _is_done(self, transfer: Transfer, rank: int) -> bool:
        action = transfer[0]
        if action.op is Op.NORM:  # over the host
            return self.deps.position(action, rank % self.schedule.ranks) < self.cursors[rank]
        return (transfer, rank) in self.ended

    def _transfer(self) -> bool:
        """End what can end at the head of the queues."""
        moved = False
        for rank, queue in enumerate(self.queues):
            if not queue:
                continue
            transfer = queue[0]
            action, source, target = transfer
            if source == -2:
                ranks: Sequence[int] = range(target, len(self.programs), self.schedule.ranks)
            elif source == -1:
                ranks = [target * self.schedule.ranks + each for each in self.schedule.placement[action.stage]]
            elif self.rendezvous:
                ranks = (source, target)
            elif rank == source:
                self.buffered.add(transfer)
                ranks = (source,)
            elif transfer in self.buffered:
                ranks = (target,)
            else:
                continue
            if all(self.queues[other] and self.queues[other][0] == transfer for other in ranks):
                for other in ranks:
                    self.queues[other].pop(0)
                    self.ended.add((transfer, other))
                moved = True
        return moved


MODES = [(rendezvous, blocking) for rendezvous in (False, True) for blocking in (False, True)]


def made(placement: Placement, programs: Sequence[str], microbatches: int) -> Schedule:
    actions = tuple(tuple(map(Action.parse, program.split())) for program in programs)
    return Schedule("made", placement, actions, microbatches, microbatches, flush=True,
                    peak_activations=(microbatches * len(placement),) * len(programs),
                    versions=(1,) * len(placement), ties={})


def test_a_receive_stands_earlier_where_sends_would_wait_for_each_other() -> None:
    """Rank 0 sends its second microbatch before it takes the first one back, which rank 1 does the other way round."""
    lowered = lower(made(Layout.ZIGZAG(2, 2), (
        "0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1 0STEP0 3STEP0", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1STEP0 2STEP0"), 2))
    check(lowered)
    assert texts(lowered)[1].startswith(
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 1RECV_F1 2B0 1B0 1SEND_B0 1F1 2F1 2SEND_F1 2RECV_B1")
    late = Action(Op.RECV_F, 1, 1), Action(Op.BACKWARD, 1, 0)
    program = [action for action in lowered.programs[1] if action != late[0]]
    program.insert(program.index(late[1]), late[0])  # right ahead of its use, as it would be
    with pytest.raises(CheckError, match="rank 0 stands before 0SEND_F1 and waits for 1RECV_F1 of rank 1"):
        check(lowered.with_programs([lowered.programs[0], program]))


def test_receives_are_posted_as_the_peer_sends() -> None:
    lowered = lower(made(Layout.LOOP(2), ("0F0 0F1 0B1 0B0 0STEP0", "1F1 1F0 1B1 1B0 1STEP0"), 2))
    check(lowered)
    assert texts(lowered)[1].startswith("1RECV_F0 1RECV_F1 1F1 1F0 1B1 1SEND_B1")


def test_a_gradient_is_not_received_before_its_forward() -> None:
    """Rank 0 would receive the gradient of microbatch 0 before the forward of 1, whose gradient is sent first."""
    lowered = lower(made(Layout.LOOP(2), ("0F0 0F1 0B0 0B1 0STEP0", "1F0 1F1 1B1 1B0 1STEP0"), 2))
    check(lowered)
    assert texts(lowered)[0] == "0F0 0SEND_F0 0F1 0RECV_B1 0RECV_B0 0SEND_F1 0B0 0B1 0STEP0"


def test_an_order_without_deadlock_is_not_changed() -> None:
    for name in ("gpipe", "1f1b"):
        schedule = lower(build(name, Layout.LOOP(4), 8, ties={0: (3,)}), norm=True)
        assert post_in_time(schedule) == schedule


def test_an_order_that_cannot_be_mended_is_not_changed() -> None:
    schedule = made(Layout.LOOP(2), ("0F0 0B0 0F1 0B1 0STEP0", "1F0 1F1 1B0 1B1 1STEP0"), 2)
    lowered = lower(schedule)
    assert post_in_time(lowered) == lowered
    with pytest.raises(CheckError, match="deadlock when sends never wait"):
        check(lowered)


@given(orders(), st.booleans())
def test_any_order_that_can_be_computed_can_be_lowered(schedule: Schedule, norm: bool) -> None:
    check(schedule)
    try:
        check(lower(schedule, norm))
    except CheckError as error:  # nccl asks more of the ranks that borrow a weight: gradients in one order
        if not schedule.ties or "one transfer at a time (nccl)" not in str(error):
            raise


def ordered(schedule: Schedule) -> Schedule:
    placed, stuck = in_one_order(schedule)
    assert not stuck
    return placed


def check_serial(schedule: Schedule, lanes: int = 1) -> None:
    for rendezvous, blocking in MODES:
        assert SerialDevices(schedule, rendezvous=rendezvous, blocking=blocking, lanes=lanes).run() == []


@pytest.mark.parametrize("name", RegisteredSchedule.names())
def test_every_schedule_reaches_its_end(name: str) -> None:
    recipe = RegisteredSchedule.named(name)
    for ranks, replicas, norm, tied in ((2, 1, False, True), (4, 1, True, True), (2, 2, True, False)):
        placement = widened(recipe.layout(ranks, recipe.chunks), replicas)
        ties = {0: tuple(range(1, len(placement)))} if tied else {}
        check_serial(ordered(prove(name, placement, 8, None, ties, norm and recipe.flush)))


@given(name=st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2", "pipedream", "2bw"]),
       widths=st.lists(st.integers(1, 3), min_size=1, max_size=4), microbatches=st.sampled_from([6, 12, 24]),
       tied=st.booleans(), norm=st.booleans())
def test_replicas_of_any_width(name: str, widths: list[int], microbatches: int, tied: bool, norm: bool) -> None:
    first = [sum(widths[:stage]) for stage in range(len(widths))]
    placement = tuple(tuple(range(at, at + width)) for at, width in zip(first, widths, strict=True))
    try:
        schedule = prove(name, placement, microbatches, None, {0: tuple(range(1, len(widths)))} if tied else {},
                         norm and RegisteredSchedule.named(name).flush)
    except UserError:
        assume(False)
    check_serial(ordered(schedule))


@pytest.mark.parametrize("name", RegisteredSchedule.names())
def test_lanes_whose_layers_compute_together_reach_their_end(name: str) -> None:
    """Every action but transfers is a collective of two lanes, which finds every rank of its group in the one order."""
    recipe = RegisteredSchedule.named(name)
    for replicas in (1, 2):
        placement = widened(recipe.layout(2, recipe.chunks), replicas)
        check_serial(ordered(prove(name, placement, 8, norm=recipe.flush)), lanes=2)
        if recipe.flush and len(set(map(len, placement))) == 1 == len(placement[0]):
            check_serial(ordered(lower(build(name, placement, 8), norm=True, sharded=True)), lanes=2)


def test_lanes_with_programs_of_their_own_stand_still() -> None:
    """Each comes to its end alone; together they come to their collectives in two orders."""
    one = build("gpipe", Layout.LOOP(2), 2)
    schedule, other = (ordered(lower(each)) for each in (one, reverse_backwards(one)))
    check_serial(schedule)
    check_serial(other)
    devices = SerialDevices(schedule, rendezvous=False, lanes=2)
    devices.programs[2:] = other.programs
    assert {"rank 1 has 1B0 under way", "rank 3 has 1B1 under way"} <= set(devices.run())


def test_evaluations_reach_their_end() -> None:
    for placement in (((0,), (1,), (0,), (1,)), ((0, 1), (2,), (3, 4, 5))):
        check_serial(ordered(lower(build_evaluation(placement, 12))))


def test_without_the_order_the_model_of_a_device_stands_still() -> None:
    """The model finds what nccl would do: GPU.md's settings, but for those whose transfers go one way at a time."""
    placements = {name: RegisteredSchedule.named(name).placement(2) for name in RegisteredSchedule.names()}
    stands_still = {name for name, placement in placements.items()
                    if SerialDevices(prove(name, placement, 8), rendezvous=True).run()}
    assert {"1f1b", "zb_v", "interleaved", "pipedream"} <= stands_still


def test_actions_keep_their_order_and_only_receives_move() -> None:
    schedule = prove("zb_v", ((0,), (1,), (1,), (0,)), 8, None, {0: (3,)}, True)
    for before, after in zip(schedule.programs, ordered(schedule).programs, strict=True):
        assert [a for a in before if not a.op.receives] == [a for a in after if not a.op.receives]
        assert sorted(map(str, before)) == sorted(map(str, after))


def of_stream(schedule: Schedule, rank: int, has_microbatch: Callable[[int], bool]) -> Iterator[Action]:
    """The actions of a rank of a stream that is ordered while it comes."""
    programs = RankPrograms(schedule, [], [rank], ordered=True)
    return (one for one, _ in programs.for_stream(replace(schedule.assignment, has_microbatch=has_microbatch))[0])


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
@pytest.mark.parametrize(("placement", "warmup"), [
    (((0,), (1,), (2,)), (2, 1, 0)), (((0, 1), (2,)), (1, 0)), (((0,), (1, 2)), (2, 0)),
    (((0,), (1,), (2,)), (5, 3, 0)), (((0, 1), (2,)), (3, 0))])
def test_a_stream_is_ordered_as_the_same_schedule_of_known_length(name: str, placement: Placement,
                                                                  warmup: tuple[int, ...]) -> None:
    """Every rank orders the stream by itself, without those of others once it repeats: all must find the same order."""
    every = 1 if name == "pipedream" else max(warmup) + 1
    proved, whole = (prove(name, placement, steps * every * max(map(len, placement)), every, {0: (len(placement) - 1,)},
                           warmup=warmup) for steps in (32, 75))
    for rank, program in enumerate(ordered(whole).programs):
        assert list(of_stream(proved, rank, lambda number: number < whole.microbatches)) == list(program)
    programs = RankPrograms(proved, [], range(proved.ranks), ordered=False)
    assignment = replace(proved.assignment, has_microbatch=lambda number: number < whole.microbatches)
    assert list(programs.for_stream(assignment)[0]) == list(programs._stream_order(assignment)[0])


def test_a_stream_asks_for_no_microbatch_much_before_it_comes() -> None:
    asked: list[int] = []

    def exists(number: int) -> bool:
        asked.append(number)
        return True

    placement = ((0,), (1,), (2,))
    for action in islice(of_stream(prove("pipedream", placement, 12), 2, exists), 200):
        if action.op is Op.FORWARD:
            assert max(asked) <= action.microbatch + len(placement)


def test_a_stream_that_repeats_follows_the_other_ranks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out: list[Action] = []
    follow = Flow.follow

    monkeypatch.setattr(Flow, "follow", lambda flow, *of_rank: carried_out.append(of_rank[0]) or follow(flow, *of_rank))
    schedule = prove("pipedream", tuple((rank,) for rank in range(8)), 32)
    assert len(list(islice(of_stream(schedule, 0, lambda number: True), 10_000))) == 10_000
    assert len(carried_out) < 2_000, "all ranks carry out 80,000"


def test_a_generator_of_a_package_may_change_its_order_late(monkeypatch: pytest.MonkeyPatch) -> None:
    @wraps(pipedream)
    def late(rank: int, ranks: int, microbatches: int, update_every: int, warmup: Sequence[int]) -> Iterator[Action]:
        for action in pipedream(rank, ranks, microbatches, update_every, warmup):
            yield from [Action(Op.RECOMPUTE, rank, action.index)] * (action.op is Op.BACKWARD and action.index > 49)
            yield action

    monkeypatch.setitem(_REGISTERED, "pipedream", replace(RegisteredSchedule.named("pipedream"), program=late))
    actions = of_stream(prove("pipedream", ((0,), (1,)), 8), 0, lambda number: number < 60)
    assert sum(action.op is Op.RECOMPUTE for action in actions) == 10
