"""Files of a run that are cut or changed at any byte end no command in a traceback of vpipe's."""

from __future__ import annotations

import io
import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vpipe.app.commands.watch import watch
from vpipe.app.launch.failure_report import failure_path, find_failure, write_report
from vpipe.app.run_log import METRICS
from vpipe.app.train.run_folder import FACTS, LAUNCHED, RANK_TIMES, RUNNING, check_not_running, running
from vpipe.errors import RunError, UserError, VpipeError

TIMES = {"rank": 1, "forward_s": 0.5, "backward_s": 0.5, "step_s": 0.1, "communication_s": 0.1, "idle_s": None}
FILES = {
    METRICS: json.dumps({"step": 3, "loss": 2.5, "time_s": 9.0, "step_s": 2.0, "tokens_per_s": 7.5}),
    FACTS: json.dumps({"updates": 9, "max_minutes": 2, "ranks": [[0], [1]], "planned_s": [1.5, 1]}),
    RANK_TIMES: json.dumps({"first_step": 0, "last_step": 3, "ranks": [TIMES | {"rank": 0}, TIMES]}),
    RUNNING: f"process {os.getpid()} on {socket.gethostname()}\n",
    LAUNCHED: f"process {os.getpid()} on {socket.gethostname()}\n",
    "rank1.failure.json": ""}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write_report(tmp_path, 1, RunError("out of luck", hint="again", rank=1, stage=1, action="1F0"))
    return tmp_path


def damaged(whole: bytes, days: int) -> Iterator[bytes]:
    """At every byte within so many days."""
    for place in range(date.today().toordinal() % days, len(whole), days):
        yield whole[:place]
        yield from (whole[:place] + other + whole[place + 1:] for other in (b"\xff", b"9"))


def seen(folder: Path) -> None:
    with suppress(VpipeError):
        watch(folder, Console(file=io.StringIO(), width=80))
    find_failure(folder, str, {})
    check_not_running(folder)


@pytest.mark.parametrize("days", [28, pytest.param(1, marks=pytest.mark.jobs)])
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_or_changed_at_any_byte_ends_no_command_in_a_traceback(name: str, days: int, run: Path) -> None:
    assert failure_path(run, 1).name in FILES
    if name not in (RUNNING, LAUNCHED):
        (run / RUNNING).unlink()
        (run / LAUNCHED).unlink()
    for content in damaged((run / name).read_bytes(), days):
        (run / name).write_bytes(content)
        seen(run)


@pytest.mark.parametrize("value", [5, None, [0, 1], [["a"]], {"a": 1}, ["x"], "x", [], True, 1e400], ids=str)
@pytest.mark.parametrize("name", ["ranks", "updates", "max_minutes", "planned_s"])
def test_a_record_of_another_shape_ends_no_command_in_a_traceback(name: str, value: Any, run: Path) -> None:
    (run / FACTS).write_text(json.dumps(json.loads(FILES[FACTS]) | {name: value}))
    seen(run)


def test_a_lock_whose_text_is_damaged_still_holds(run: Path) -> None:
    with running(run):
        (run / RUNNING).write_bytes(b"process \xff\xfe")
        with pytest.raises(UserError, match="is still going"):
            check_not_running(run)
