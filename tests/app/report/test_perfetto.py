"""``trace.json`` as Perfetto reads it: the structure of its events."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_run import make_run

from vpipe.app.report.idle_causes import Producers
from vpipe.app.report.perfetto import write_trace
from vpipe.app.report.recording import Recording, read_recording
from vpipe.schedules.kinds import Op


def written(recording: Recording, folder: Path, most: int = 10**6) -> tuple[dict[str, Any], str | None]:
    note = write_trace(recording, Producers.from_recording(recording), folder / "trace.json", most)
    return json.loads((folder / "trace.json").read_text()), note


@pytest.fixture(params=["1f1b", "zb_v", "pipedream"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Recording:
    return read_recording(make_run(tmp_path / "run", request.param, updates=4, evaluation=request.param == "1f1b"))


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What every trace must keep; its events without the names."""
    assert trace["displayTimeUnit"] == "ms"
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert {event["ph"] for event in events} <= {"X", "s", "f", "C"}
    assert all(early["ts"] <= late["ts"] for early, late in pairwise(events)), "sorted by time"
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        for early, late in pairwise(row):
            assert early["ts"] + early["dur"] <= late["ts"] + 0.002, "slices of a row do not overlap"
    begun = {event["id"]: event for event in events if event["ph"] == "s"}
    ended = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begun.keys() == ended.keys(), "every flow has both ends"
    assert len(begun) == sum(event["ph"] == "s" for event in events), "and a number of its own"
    for number, start in begun.items():
        end = ended[number]
        assert start["ts"] <= end["ts"]
        assert start["pid"] != end["pid"]
        assert end["bp"] == "e"
        for event in (start, end):  # Perfetto binds an end to the slice around it
            assert any(slice_["ts"] <= event["ts"] <= slice_["ts"] + slice_["dur"]
                       for slice_ in rows[event["pid"], event["tid"]])
    return events


def test_the_trace_is_well_formed_and_has_every_action(made: Recording, tmp_path: Path) -> None:
    trace, note = written(made, tmp_path)
    events = check(trace)
    assert note is None
    names = Counter((event["pid"], event["name"]) for event in events if event["ph"] == "X" and event["tid"] != 3)
    assert names == Counter((track.rank, str(done.action)) for track in made.tracks for done in track.actions)
    sends = sum(done.op in (Op.SEND_F, Op.SEND_B) for track in made.tracks for done in track.actions)
    assert sum(event["ph"] == "s" for event in events) == sends > 0
    assert {event["name"] for event in events if event["tid" if "tid" in event else "pid"] == 3
            and event["ph"] == "X"} >= {"schedule", "between actions"}


def test_processes_and_rows_have_names(made: Recording, tmp_path: Path) -> None:
    trace, _ = written(made, tmp_path)
    names = {(event["pid"], event["tid"], event["name"]): event["args"] for event in trace["traceEvents"]
             if event["ph"] == "M"}
    for rank in range(4):
        assert names[rank, 0, "process_name"]["name"].startswith(f"rank {rank}")
        assert [names[rank, row, "thread_name"]["name"] for row in (1, 2, 3)] == ["compute", "transfers", "idle"]


def test_the_memory_counter_counts_what_was_held(made: Recording, tmp_path: Path) -> None:
    trace, _ = written(made, tmp_path)
    for track in made.tracks:
        held = [event["args"]["activations"] for event in trace["traceEvents"]
                if event["ph"] == "C" and event["pid"] == track.rank]
        assert max(held) == max(done.held_bytes for done in track.actions)


def test_a_long_run_is_cut_and_the_cut_is_said(made: Recording, tmp_path: Path) -> None:
    trace, note = written(made, tmp_path, most=60)
    events = check(trace)
    assert note is not None
    assert "60 actions" in note
    assert note in trace["otherData"]["notes"]
    assert sum(event["ph"] == "X" and event["tid"] != 3 for event in events) == 60


def test_a_use_ahead_of_its_send_has_no_arrow(tmp_path: Path) -> None:
    """As clocks of two hosts may have it."""
    made = read_recording(make_run(tmp_path / "run", ranks=2, microbatches=2, updates=2, offsets=(0.0, -5.0)))
    path = tmp_path / "run" / "trace" / "rank1.jsonl"
    path.write_text(path.read_text().replace(", -5.0]", ", -5.2]"))
    apart = read_recording(tmp_path / "run")
    flows = [sum(event["ph"] == "s" for event in check(written(one, tmp_path)[0])) for one in (made, apart)]
    assert flows[0] == 8
    assert flows[1] < 8
