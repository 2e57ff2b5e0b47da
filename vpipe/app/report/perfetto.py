"""Write ``RUN/trace.json``: the run in the trace-event format, which Perfetto opens.

Each rank is a process with three rows: compute, transfers, idle. A flow leads from every send to the action that uses
it. A counter shows the kept tensors.

Source: Google, *Trace Event Format* (phases X, M, C, s, f; times in microseconds).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any

from vpipe.app.report.idle_causes import Producers, time_slices
from vpipe.app.report.recording import Recording, Track, describe
from vpipe.app.visualize.table import row_name

MOST_ACTIONS = 250_000
"""Limit for all ranks together: about 110 MB of JSON. Perfetto in a browser holds no much larger file."""
SHORTEST_IDLE_US = 5.0

_COMPUTE, _TRANSFERS, _IDLE = 1, 2, 3
_ROWS = {_COMPUTE: "compute", _TRANSFERS: "transfers", _IDLE: "idle"}
Event = tuple[float, dict[str, Any]]


def write_trace(recording: Recording, producers: Producers, path: Path, most: int = MOST_ACTIONS,
                say: Callable[[str], None] = lambda text: None) -> str | None:
    """Write the file, whole or not at all; returns a sentence on what was left out, if anything.

    Args:
        most: actions; later ones are left out.
        say: called now and then with the progress.
    """
    ends = sorted(done.end_s for track in recording.tracks for done in track.actions)
    until_s, note = ends[most - 1] if len(ends) > most else recording.end_s, None
    if until_s < recording.end_s:
        note = (f"trace.json shows the first {until_s:.1f} s of {recording.end_s:.1f} s, {most:,} actions: Perfetto "
                "opens no much larger file.")
    flows = _flows(recording, until_s)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(_dumped(event) for event in _names(recording)))
        events = [own for track in recording.tracks for own in (
            _of_rank(recording, track, producers, flows, until_s), _kept_tensors(track, until_s))]
        for count, (at_us, event) in enumerate(merge(*events, key=itemgetter(0))):
            file.write(",\n" + _dumped(event))
            if count % 20_000 == 0:
                say(f"writing {path.name}, {at_us / 1e6:.1f} of {min(until_s, recording.end_s):.1f} s")
        about = {"schedule": recording.schedule, "idle": f"shorter than {SHORTEST_IDLE_US:g} us is left out",
                 "notes": [*recording.notes, *([note] if note else [])]}
        file.write(f'\n],"otherData":{_dumped(about)}}}\n')
    partial.replace(path)
    return note


_dumped = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


def _names(recording: Recording) -> Iterator[dict[str, Any]]:
    for track in recording.tracks:
        rank = track.rank
        name = row_name(recording.placement, rank) + (f" on {track.host}" if track.host else "") + recording.in_lane
        threads = [("thread", row, what, row) for row, what in _ROWS.items()]
        for kind, thread, called, place in [("process", 0, name, rank), *threads]:
            yield {"ph": "M", "name": f"{kind}_name", "pid": rank, "tid": thread, "args": {"name": called}}
            yield {"ph": "M", "name": f"{kind}_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": place}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _of_rank(recording: Recording, track: Track, producers: Producers, flows: Mapping[Hashable, int],
             until_s: float) -> Iterator[Event]:
    """Yield a rank's slices and flows, in order."""
    rank = track.rank
    for start_s, end_s, cause, done in time_slices(recording, track, producers):
        if end_s > until_s:
            return
        start, end = _us(start_s), _us(end_s)
        row = _IDLE if cause is not None or done is None else _COMPUTE if done.op.works else _TRANSFERS
        event = {"ph": "X", "pid": rank, "tid": row, "ts": start, "dur": round(end - start, 3)}
        if cause is not None or done is None:
            if end - start >= SHORTEST_IDLE_US:
                yield start, {**event, "name": "evaluation" if cause is None else cause.value,
                              "args": {} if done is None else {"before": str(done.action)}}
            continue
        yield start, {**event, "name": str(done.action), "cat": str(done.op), "args": {
            "what": describe(done, recording.slices), "waited_ms": round(done.waited_s * 1e3, 4),
            "held_bytes": done.held_bytes, "versions": done.versions}}
        end_of = recording.dependencies.transferred(done.action)
        if end_of is not None and (number := flows.get(end_of[0])) is not None:
            flow = {"ph": "s" if end_of[1] else "f", "id": number, "pid": rank, "tid": row, "ts": start,
                    "name": "transfer", "cat": "transfer"}
            yield start, flow if end_of[1] else {**flow, "bp": "e"}


def _kept_tensors(track: Track, until_s: float) -> Iterator[Event]:
    """Yield the counter of a rank's kept tensors."""
    static = sum(track.static_bytes.values())
    for second, activations, versions in track.kept_bytes():
        if second <= until_s:
            yield _us(second), {"ph": "C", "pid": track.rank, "ts": _us(second), "name": "kept tensors", "args": {
                "activations": activations, "weight versions": versions, "gradients and optimizer": static}}


def _flows(recording: Recording, until_s: float) -> dict[Hashable, int]:
    """Number the flows whose ends are both shown and in order: two hosts' clocks may differ."""
    begun: dict[tuple[Hashable, bool], float] = {}  # by what flows, and whether it is sent
    for track in recording.tracks:
        for done in track.actions:
            if done.end_s <= until_s and (end := recording.dependencies.transferred(done.action)) is not None:
                begun[end] = done.begun_s
    both = (use for (use, sent), begun_s in begun.items()
            if sent and (use, False) in begun and _us(begun_s) <= _us(begun[use, False]))
    return {use: number for number, use in enumerate(both, 1)}
