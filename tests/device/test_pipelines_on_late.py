"""Pipelines of one process on the late device compute the bits of the same device run synchronously, and of the
processor; and the host waits for the device no more than it must (pipeline_checks.py)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator

import pipeline_checks
import pytest

pytestmark = pytest.mark.jobs

Ended = Callable[..., subprocess.CompletedProcess[str]]
Failures = Callable[[str], dict[str, str | None]]

FAST = ("fast",)


@pytest.fixture(scope="module")
def failures(ended: Ended) -> Failures:
    found: dict[str, dict[str, str | None]] = {}

    def of_group(group: str) -> dict[str, str | None]:
        if group not in found:
            process = ended("pipeline_checks.py", group)
            assert process.returncode == 0, process.stderr
            found[group] = json.loads(process.stdout)
        return found[group]

    return of_group


def checks() -> Iterator[object]:
    for group, names in pipeline_checks.CHECKS.items():
        marks = [pytest.mark.timeout(600)] + ([] if group in FAST else [pytest.mark.system, pytest.mark.long])
        for name in names:
            yield pytest.param(group, name, marks=marks, id=f"{group}-{name}")


@pytest.mark.parametrize(("group", "name"), list(checks()))
def test_pipeline_on_late(failures: Failures, group: str, name: str) -> None:
    assert failures(group)[name] is None, failures(group)[name]
