"""Registering schedules, and generators that are wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from proved import prove

from vpipe.description.cut import Cut
from vpipe.description.order import Asynchronous, Order
from vpipe.errors import UserError
from vpipe.schedules import registry
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import described
from vpipe.schedules.delays import mean_delay
from vpipe.schedules.kinds import Action, backward, forward, step
from vpipe.schedules.registry import RegisteredSchedule, register_schedule
from vpipe.testing import version_rule


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a test adds go with it."""
    RegisteredSchedule.named("1f1b")
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


def good(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    yield from (act(rank, microbatch) for microbatch in range(microbatches) for act in (forward, backward))
    yield step(rank, 0)


def test_a_name_is_given_once() -> None:
    def other(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
        yield from good(rank, ranks, microbatches)

    for _ in range(2):  # a cell of a notebook, run twice
        register_schedule("mine", flush=True)(good)
    with pytest.raises(UserError, match=r"there is already a schedule called 'mine': .*good\nhint: choose another"):
        register_schedule("mine", flush=True)(other)
    with pytest.raises(UserError, match="already a schedule called '1f1b': vpipe"):
        register_schedule("1f1b", flush=True)(good)
    assert RegisteredSchedule.named("mine").program is good


def test_a_stream_that_takes_no_warm_up_is_called_as_before() -> None:
    @register_schedule("eager", flush=False, versions=lambda rank, size: 2, update_every=lambda ranks: 2 * ranks,
                       peak_activations=lambda rank, size: 2 * (size.ranks - rank) - 1,
                       version_of=lambda i, stage, widths, k: max(0, (i - 2 * (len(widths) - 1 - stage)) // k))
    def eager(rank: int, ranks: int, microbatches: int, update_every: int) -> Iterator[Action]:
        """A stream with twice as many forwards ahead, whatever anybody says."""
        warmup = tuple(2 * (ranks - 1 - position) for position in range(ranks))
        yield from RegisteredSchedule.named("pipedream").program(rank, ranks, microbatches, update_every, warmup)

    schedule = prove("eager", Layout.LOOP(3), 48, 6)
    assert [mean_delay(schedule, stage) for stage in range(3)] == [4 / 6, 2 / 6, 0]
    assert version_rule("eager")(20, 0, (1, 1, 1), 6) == 2
    with pytest.raises(UserError, match=r"warmup_depth is \[4, 2, 0\], but 'eager' has an order of its own"):
        described(Asynchronous("eager", update_every=6, warmup_depth=(4, 2, 0)), Cut(3), 48)


def test_a_name_of_the_library_is_taken_before_the_library_is_loaded() -> None:
    code = ("from vpipe.schedules.registry import register_schedule\n"
            "try:\n    register_schedule('zb_v', flush=True)(lambda rank, ranks, microbatches: ())\n"
            "except ValueError as error:\n    print(error)")
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "already a schedule called 'zb_v'" in done.stdout


def text(rank: int, ranks: int, microbatches: int) -> Iterator[Any]:
    yield "0F0"


def nothing(rank: int, ranks: int, microbatches: int) -> None:
    return None


def fails(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    yield forward(rank, 1 // (rank - 1))


def narrow(rank: int) -> Iterator[Action]:
    yield forward(rank, 0)


@pytest.mark.parametrize(("program", "what", "hint"), [
    (text, "schedule 'mine' yields '0F0' on rank 0, which is no Action", "yield actions: forward(stage, microbatch)"),
    (nothing, "schedule 'mine' gives None for rank 0, not actions", "yield actions: "),
    (fails, "schedule 'mine' fails on rank 1 of 2 with 1 microbatch: ZeroDivisionError: ", "mend its generator"),
    (narrow, "schedule 'mine' does not take rank, ranks, microbatches: too many positional arguments",
     "define its generator with the parameters (rank, ranks, microbatches)"),
])
def test_a_wrong_generator(program: Callable[..., Any], what: str, hint: str) -> None:
    register_schedule("mine", flush=True)(program)
    with pytest.raises(UserError) as caught:
        prove("mine", Layout.LOOP(2), 1)
    [problem] = caught.value.problems
    assert problem.what.startswith(what)
    assert problem.hint.startswith(hint)
    assert (problem.where or "").startswith(__file__ if program is fails else "")


@pytest.mark.parametrize(("order", "cut", "what"), [
    (Order("zb_v", chunks=3), Cut(6), "chunks is 3, but 'zb_v' holds 2 stages on each rank"),
    (Order("pipedream", chunks=2), Cut(8), "chunks is 2, but 'pipedream' holds 1 stage on each rank"),
    (Order("interleaved", chunks=4), Cut(ranks=((0,), (1,), (2,), (3,)) * 2),
     "chunks is 4, but the placement puts 2 stages on rank 0"),
    (Order("zb_v"), Cut(8), "1 process for 8 stages, of which 'zb_v' holds 2 on each rank"),
])
def test_numbers_that_do_not_fit(order: Order, cut: Cut, what: str) -> None:
    with pytest.raises(UserError) as caught:
        described(order, cut, 8, processes=1 if order.chunks is None else None)
    assert caught.value.problems[0].what == what


@pytest.mark.parametrize(("processes", "more"), [
    (4, "; where other ranks share its layers, give Execution(mesh=mesh), of which 'pp' has 2 ranks"), (3, "")])
def test_processes_that_may_be_those_of_a_mesh(processes: int, more: str) -> None:
    with pytest.raises(UserError) as caught:
        described(Order("1f1b"), Cut(2), 8, processes)
    assert caught.value.problems[0].hint == f"start 2 processes, or cut the model into {processes} stages{more}"
    with pytest.raises(UserError) as caught:
        described(Order("1f1b"), Cut(2), 8, processes, meshed=True)
    assert caught.value.problems[0].what.startswith(f"{processes} ranks along 'pp' of the mesh for 2 stages, ")
    assert caught.value.problems[0].hint == f"give 'pp' 2 ranks, or cut the model into {processes} stages"
