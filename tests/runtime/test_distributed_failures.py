"""When a rank dies, stops or is at fault, the others say which, where and waiting for what, and soon."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import jobs
import pytest
from world import World


def run_error(outcome: tuple[str, Any]) -> dict[str, Any]:
    kind, error = outcome
    assert kind == "error"
    assert error["type"] == "RunError", error["traceback"]
    return error


@pytest.mark.parametrize(("schedule", "killed", "lost"), [("1f1b", 1, r"lost rank 1 \(stage 1\)"),
                                                          ("pipedream", 0, r"lost rank 0 \(stage 0\)")])
def test_a_killed_rank_is_named_at_once(pair: World, schedule: str, killed: int, lost: str) -> None:
    pair.begin(jobs.endless, schedule=schedule, timeout_s=30)
    for rank in (0, 1):
        pair.progress(rank, lambda index: index >= 5, within_s=60)
    pair.signal(killed, signal.SIGKILL)
    survivor = 1 - killed
    started = time.monotonic()
    error = run_error(pair.outcome(survivor, 10))
    assert time.monotonic() - started < 10
    assert re.search(rf"^error: rank {survivor} \(stage {survivor}\) {lost} while (waiting for|sending|receiving) "
                     r"(the (loss|gradients|activations|tied gradient) of (microbatch|update)|tied weights, version) "
                     r"\d+ ((for|from) stage [01]|of tie 0): ", error["text"]), error["text"]
    assert error["text"].endswith("\nhint: that rank ended first: its log says why")
    assert (error["rank"], error["peer"]) == (survivor, killed)


def test_a_stopped_rank_is_named_after_the_timeout(pair: World) -> None:
    pair.begin(jobs.endless, schedule="1f1b", timeout_s=3)
    for rank in (0, 1):
        pair.progress(rank, lambda index: index >= 5, within_s=60)
    pair.signal(1, signal.SIGSTOP)
    started = time.monotonic()
    error = run_error(pair.outcome(0, 20))
    waited = time.monotonic() - started
    assert 2 < waited < 10
    assert re.search(r"^error: rank 0 \(stage 0\) gave up waiting for "
                     r"(the (loss|gradients|tied gradient) of (microbatch|update)) \d+ (for|from) stage [01] "
                     r"with rank 1 \(stage 1\) after 3 s", error["text"]), error["text"]
    assert "look at its log; a slow start needs a larger parallel.timeout_s" in error["text"]
    assert (error["rank"], error["peer"]) == (0, 1)
    pair.signal(1, signal.SIGCONT)


def test_a_rank_lost_while_the_model_is_gathered_is_named(pair: World) -> None:
    pair.begin(jobs.waiting_for_state, timeout_s=3)
    for rank in (0, 1):
        pair.progress(rank, lambda _: True, within_s=60)
    pair.signal(1, signal.SIGKILL)
    error = run_error(pair.outcome(0, 10))
    assert error["text"].startswith("error: rank 0 lost rank 1 while sharing what each has with all: ")
    assert error["text"].endswith("(rank 0, peer rank 1)\nhint: that rank ended first: its log says why")
    assert (error["rank"], error["peer"]) == (0, 1)


def test_shapes_that_follow_from_values_are_the_users_mistake(pair: World) -> None:
    pair.begin(jobs.shapes_from_values, timeout_s=2)
    kind, error = pair.outcome(0, 30)
    assert (kind, error["type"]) == ("error", "UserError")
    assert error["text"] == (
        "error: stage 0 sends float32[1, 4, 12] for microbatch 1, but sent float32[1, 2, 12] for another with fields "
        "of the same shapes\nhint: shapes between stages must follow from the shapes of the batch: pad where they "
        "depend on the values")
    waiting = run_error(pair.outcome(1, 30))
    assert waiting["text"].startswith("error: rank 1 (stage 1) gave up waiting for the activations of microbatch 1 "
                                      "for stage 1 with rank 0 (stage 0) after 2 s")


def test_an_error_in_a_layer_is_raised_with_its_place(pair: World) -> None:
    pair.begin(jobs.layer_raises, timeout_s=2)
    error = run_error(pair.outcome(1, 30))
    assert error["text"] == ("error: IndexError: Target 10000 is out of bounds. (rank 1, stage 1, action 1F1)\n"
                             "hint: the log of the rank has the traceback")
    waiting = run_error(pair.outcome(0, 30))
    assert "rank 0 (stage 0) gave up waiting for" in waiting["text"]
