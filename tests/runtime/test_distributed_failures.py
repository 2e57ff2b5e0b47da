"""When a rank dies, stops or is at fault, all others say which, where and what they were at, and soon."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
from world import World

pytestmark = pytest.mark.jobs

TRANSFER = (r"(waiting for|sending|receiving) (the (loss|gradients|activations|tied gradient) of (microbatch|update)|"
            r"tied weights, version) \d+ ((for|from) stage \d|of tie 0)")
WAIT = rf"({TRANSFER} with rank \d \(stage \d\)|comparing batches)"


@pytest.fixture
def four(tmp_path: Path) -> Iterator[World]:
    """Four ranks that a short silence makes give up."""
    some = World(4, tmp_path, gloo_timeout_s=8)
    yield some
    some.kill()


def run_error(outcome: tuple[str, Any]) -> dict[str, Any]:
    kind, error = outcome
    assert kind == "error"
    assert error["type"] == "RunError", error["traceback"]
    return error


def run_some_steps(world: World, schedule: str, timeout_s: float, **arguments: Any) -> None:
    world.begin(jobs.endless, schedule=schedule, stages=world.ranks, timeout_s=timeout_s, **arguments)
    for rank in range(world.ranks):
        world.progress(rank, lambda index: index >= 5, within_s=60)


def test_a_pause_is_survived_and_a_killed_rank_named_by_all(four: World) -> None:
    run_some_steps(four, "1f1b", 8)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 2):
            four.signal(rank, number)
        time.sleep(1.5 if number is signal.SIGSTOP else 0.2)
    four.signal(2, signal.SIGKILL)
    for rank in (0, 1, 3):  # rank 0 has nothing to do with rank 2
        error = run_error(four.outcome(rank, 10))
        assert re.search(rf"^error: rank 2 \(stage 2\) died without a message; rank {rank} \(stage {rank}\) was "
                         rf"{WAIT} \(rank {rank}, ", error["text"]), error["text"]
        assert error["text"].endswith("\nhint: see the rank's output or log; a process that is killed prints "
                                      "nothing (Linux kills one when memory runs out)")
        assert (error["rank"], error["peer"]) == (rank, 2)


def test_when_rank_0_is_stopped_all_others_say_so(four: World) -> None:
    run_some_steps(four, "pipedream", 8)
    four.signal(0, signal.SIGSTOP)
    for rank in (1, 2, 3):
        error = run_error(four.outcome(rank, 20))
        assert re.search(rf"^error: rank 0 \(stage 0\) gave no sign of life for \d\.?\d* s; rank {rank} "
                         rf"\(stage {rank}\) was {WAIT} \(rank ", error["text"]), error["text"]
        assert error["peer"] == 0


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_killed_rank_0_is_named(pair: World, shared_memory: bool) -> None:
    run_some_steps(pair, "pipedream", 30, shared_memory=shared_memory)
    pair.signal(0, signal.SIGKILL)
    error = run_error(pair.outcome(1, 10))
    assert re.search(rf"^error: rank 0 \(stage 0\) died without a message; rank 1 \(stage 1\) was {WAIT} \(",
                     error["text"]), error["text"]


def test_a_transfer_has_a_timeout_of_its_own(pair: World) -> None:
    run_some_steps(pair, "1f1b", 3)
    pair.signal(1, signal.SIGSTOP)
    error = run_error(pair.outcome(0, 20))
    assert re.search(rf"^error: rank 1 \(stage 1\) gave no sign of life for \d\.?\d* s; rank 0 \(stage 0\) gave up "
                     rf"{TRANSFER} with rank 1 \(stage 1\) after 3 s; rank 0 \(stage 0\) has waited 3\.0 s [^;]+ "
                     r"rank 1 \(stage 1\), while running [^;]+; rank 1 \(stage 1\) has given no sign of life ",
                     error["text"]), error["text"]
    assert (error["rank"], error["peer"]) == (0, 1)


def test_a_rank_lost_while_the_model_is_gathered_is_named(pair: World) -> None:
    pair.begin(jobs.waiting_for_state, timeout_s=3)
    for rank in (0, 1):
        pair.progress(rank, lambda _: True, within_s=60)
    pair.signal(1, signal.SIGKILL)
    error = run_error(pair.outcome(0, 10))
    assert error["text"].startswith("error: rank 1 (stage 1) died without a message; rank 0 (stage 0) was beginning "
                                    "state_dict() (rank 0, peer rank 1)\nhint: ")


def test_shapes_that_follow_from_values_are_the_users_mistake(pair: World) -> None:
    pair.begin(jobs.shapes_from_values, timeout_s=2)
    kind, error = pair.outcome(0, 30)
    assert (kind, error["type"]) == ("error", "UserError")
    assert error["text"] == (
        "error: stage 0 sends float32[1, 4, 12] for microbatch 1, but sent float32[1, 2, 12] for another with fields "
        "of the same shapes\nhint: shapes between stages must follow from the shapes of the batch: pad where they "
        "depend on the values")
    other = run_error(pair.outcome(1, 30))
    assert other["text"].startswith("error: rank 0 (stage 0) failed: stage 0 sends float32[1, 4, 12] for microbatch 1, "
                                    "but sent float32[1, 2, 12] for another with fields of the same shapes; rank 1 ")


def test_a_rank_that_does_nothing_is_named(pair: World) -> None:
    pair.begin(jobs.trains_alone, timeout_s=2)
    assert pair.outcome(0, 30) == ("result", None)
    waiting = run_error(pair.outcome(1, 30))
    assert waiting["text"].startswith(
        "error: rank 0 (stage 0) is running but did not answer in time; rank 1 (stage 1) gave up beginning "
        "train() after 2 s; rank 1 (stage 1) has waited ")
    assert re.search(r"for what each has from rank 0 \(stage 0\); rank 0 "
                     r"\(stage 0\) (has been outside of the pipeline, in the program that runs it, for \d+\.?\d* s: "
                     r"the slow one|is busy, with nothing for long) \(rank 1, ", waiting["text"])
    assert "see the rank's output or log; a slow start needs a larger timeout_s" in waiting["text"]


def test_ranks_that_wait_for_one_another_are_a_deadlock_not_slow(pair: World) -> None:
    pair.begin(jobs.goes_apart, call="another", timeout_s=4)
    for rank in (0, 1):
        error = run_error(pair.outcome(rank, 30))
        assert re.search(r"^error: rank [01] \(stage [01]\), rank [01] \(stage [01]\) wait for one another: a "
                         rf"deadlock; rank {rank} ", error["text"]), error["text"]
        assert re.search(r"rank 1 \(stage 1\) has waited \d\.\d s for [^;]+ from rank 0", error["text"]), error["text"]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("call", ["evaluate", "state_dict"])
@pytest.mark.parametrize("apart", [0, 1])
def test_ranks_in_different_calls_say_which_at_once(pair: World, call: str, schedule: str, apart: int) -> None:
    pair.begin(jobs.goes_apart, call=call, timeout_s=30, schedule=schedule, apart=apart)
    what = [f"{call}()", "step 1 of train()"][::-1 if apart else 1]
    for rank in (0, 1):
        error = run_error(pair.outcome(rank, 10))["text"]
        assert error.startswith(f"error: rank 0 (stage 0) is at {what[0]}, rank 1 at {what[1]}; rank {rank} "), error
        assert error.endswith("hint: every rank must make the same calls in the same order, with the same arguments")


@pytest.mark.parametrize("arguments", [{"schedule": "1f1b"}, pytest.param(
    {"schedule": "gpipe", "executor": "async_threaded"}, marks=pytest.mark.extras("async_threaded"))])
def test_an_error_in_a_layer_is_raised_with_its_place_and_told_to_all(pair: World, arguments: dict[str, Any]) -> None:
    pair.begin(jobs.layer_raises, timeout_s=30, **arguments)
    error = run_error(pair.outcome(1, 30))
    what = ("the forward of layer 7 'head' on h float32[2, 6, 12], labels int64[2, 6] raised IndexError: Target 10000 "
            "is out of bounds.")
    hint = "\nhint: make the layer accept these inputs, or change the outputs of the layers before it or the batch's " \
           "field 'labels'"
    assert error["text"] == f"error: {what} (rank 1, stage 1, microbatch 1, action 1F1){hint}"
    other = run_error(pair.outcome(0, 10))
    assert other["text"].startswith(f"error: rank 1 (stage 1) failed: {what} (microbatch 1, action 1F1); rank 0 (stage "
                                    "0) was ")
    assert other["text"].endswith(hint)
