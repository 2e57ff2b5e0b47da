"""The late device: what late_checks.py checks of it, that the host cannot touch its memory, and that ten published bugs
of programs with streams are seen on it, whatever the seed. Pipelines of one process on it compute the bits of the
processor, or of the device run synchronously, and the host waits for it no more than it must (pipeline_checks.py)."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import late_checks
import pipeline_checks
import pytest
import stream_bugs

Ended = Callable[..., subprocess.CompletedProcess[str]]
Printed = Callable[..., Any]

# Not in make test yet: once on a loaded machine a program with the device did not end, and the reason is not found.
slowly = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(300)]  # the first builds the device
EACH = len(stream_bugs.SEEDS)
FAST = ("fast",)


@pytest.mark.parametrize("check", [pytest.param(check, marks=slowly) for check in late_checks.CHECKS])
def test_late_device(printed: Printed, check: str) -> None:
    failure = printed("late_checks.py")[check]
    assert failure is None, failure


@pytest.mark.parametrize("access", [pytest.param(access, marks=slowly) for access in late_checks.ACCESSES])
def test_the_host_cannot_touch_the_memory_of_the_device(ended: Ended, access: str) -> None:
    process = ended("late_checks.py", access)
    assert process.stdout == "before\n"
    assert process.returncode == -signal.SIGSEGV, process.stderr


@pytest.mark.parametrize("bug", [pytest.param(bug.__name__, marks=slowly) for bug in stream_bugs.BUGS])
def test_a_published_bug_gives_wrong_results_with_every_seed(printed: Printed, bug: str) -> None:
    assert printed("stream_bugs.py")[bug] == {
        "wrong": [False] * EACH, "mended": [True] * EACH, "wrong, synchronous": [True] * EACH}


def checks() -> Iterator[object]:
    for group, names in pipeline_checks.CHECKS.items():
        marks = [pytest.mark.timeout(600)] + ([] if group in FAST else [pytest.mark.system, pytest.mark.long])
        for name in names:
            yield pytest.param(group, name, marks=[pytest.mark.jobs, *marks], id=f"{group}-{name}")


@pytest.mark.parametrize(("group", "name"), list(checks()))
def test_pipeline_on_late(printed: Printed, group: str, name: str) -> None:
    failure = printed("pipeline_checks.py", group)[name]
    assert failure is None, failure
