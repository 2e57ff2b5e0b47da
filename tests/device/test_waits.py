"""Without any one of vpipe's waits for a device something goes wrong on the late device: in one process
(wait_checks.py), or between ranks (rank_checks.py)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import late_device
import pytest
import rank_checks
import wait_checks
import waits
from world import World

Ended = Callable[..., subprocess.CompletedProcess[str]]

HARDEST = {"eager": False, "buffered": False}
TRANSFERS: Mapping[str, Mapping[str, bool] | None] = {
    "runtime/collectives.py Collectives._broadcast_among: work.wait(limit)": None,
    "runtime/transport/process_group.py DistributedTransport._wait: work.wait(self._timeout)": None,
    "runtime/transport/process_group.py DistributedTransport._wait: work.wait()": HARDEST,
    "runtime/transport/process_group.py DistributedTransport.receive: "
    "buffer.record_stream(accelerator.current_stream(device))": HARDEST,
    "accelerator.py on_host: current_stream(device).synchronize()": None}
"""Waits for transfers, and the rules by which they show: those of nccl, or None for gloo."""
ELSEWHERE = "accelerator.py clock_of.synchronised: synchronize(device)"
"""A wait that training does without."""
AT_THE_END = "runtime/loaders.py Loaders.end: accelerator.current_stream(self._device).synchronize()"

slowly = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(300)]


def test_every_wait_of_the_sources_is_checked() -> None:
    """A new one comes with a check of what goes wrong without it."""
    assert sorted(waits.places()) == sorted([*wait_checks.CHECKS, *TRANSFERS, AT_THE_END])


@pytest.mark.parametrize("place", [pytest.param(place, marks=slowly) for place in wait_checks.CHECKS])
def test_without_a_wait_something_goes_wrong(printed: Callable[..., Any], place: str) -> None:
    told = printed("wait_checks.py")[place]
    assert not told["with"]
    assert len(told["without"]) == wait_checks.SEEDS


@pytest.fixture(scope="module")
def two(ended: Ended, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two ranks with the device; ``ended`` skips where no compiler builds it."""
    late_device.built()
    world = World(2, tmp_path_factory.mktemp("two"), program=Path(__file__).with_name("rank_with_late.py"))
    yield world
    world.kill()


@pytest.mark.parametrize("place", [pytest.param(place, marks=slowly) for place in TRANSFERS])
def test_without_a_wait_for_a_transfer_something_goes_wrong(two: World, place: str) -> None:
    words: dict[str, Any] = {"model": "rich", "schedule": "1f1b", "microbatches": 4, "stages": 2, "seed": 1,
                             "run": "jobs.train", "rules": TRANSFERS[place]}
    kept = two.run(rank_checks.under, **words)
    assert two.run(rank_checks.without_a_wait, place=ELSEWHERE, **words) == kept
    found: Any = None
    with suppress(pytest.fail.Exception):  # a rank has read what had not come
        found = two.run(rank_checks.without_a_wait, place=place, **words)
    two.kill()  # gloo has lost what was not waited for, and the next test's transfers would wait for ever
    assert found != kept


@pytest.mark.parametrize("place", [pytest.param(None, marks=slowly), pytest.param(AT_THE_END, marks=slowly)])
def test_when_training_ends_its_sends_have_ended(two: World, place: str | None) -> None:
    ended = two.run(rank_checks.ended, place=place, schedule="pipedream", microbatches=4, stages=2)
    assert ended == [place is None] * 2


@pytest.mark.parametrize("rules", [pytest.param(rules, marks=slowly) for rules in (None, HARDEST)])
def test_records_tell_how_long_an_action_waited_for_another_rank(two: World, rules: Mapping[str, bool] | None) -> None:
    """By nccl's rules the device waits within the action; without its marks all would be the action's own time."""
    for notes in two.run(rank_checks.recorded, rules=rules):
        assert all(-1e-6 <= waited <= took + 1e-6 for _, took, waited in notes)
    first, second = two.run(rank_checks.recorded, rules=rules)
    assert sum(waited for what, _, waited in second if what.startswith("1F")) > 0
    assert sum(waited for what, _, waited in first if what.startswith("0B")) > 0
