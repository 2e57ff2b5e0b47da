"""Read the record of a run: ``RUN/trace/rank<N>.jsonl`` (:mod:`vpipe.schedules.trace`), of a later lane
``RUN/trace/lane<K>/rank<N>.jsonl``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vpipe.errors import UserError, counted
from vpipe.schedules import Dependencies, RecordedAction, kinds

_RECORD_AGAIN = "record the run again with 'trace: true' in its config, or copy the file whole"

SHARED = ("schedule", "placement", "flush", "microbatches", "update_every", "partition", "recomputed",
          "samples_per_step", "slices")
"""Keys of the header that are equal on all ranks."""


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # False for NaN and infinity


def _lists_of(value: Any, least: int) -> bool:
    return isinstance(value, list) and all(isinstance(own, list) and len(own) >= least and all(map(_is_count, own))
                                           for own in value)


def _sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and _is_count(size) for key, size in value.items())


_KEYS: Mapping[str, Callable[[Any], bool]] = {
    "rank": _is_count, "host": lambda value: isinstance(value, str), "clock_offset_s": is_number,
    "placement": lambda value: _lists_of(value, 1) and bool(value), "schedule": lambda value: isinstance(value, str),
    "flush": lambda value: isinstance(value, bool), "microbatches": lambda value: _is_count(value, 1),
    "update_every": lambda value: _is_count(value, 1),
    "partition": lambda value: isinstance(value, list) and all(_is_count(count, 1) for count in value),
    "recomputed": lambda value: _lists_of(value, 0), "samples_per_step": lambda value: _is_count(value, 1),
    "weight_bytes": _sizes, "static_bytes": _sizes, "slices": lambda value: _is_count(value, 1)}


def _read_header(file: Path) -> dict[str, Any]:
    """Return the header of a rank's file, checked."""
    with _open_lines(file) as lines:
        text = next(lines, "")
    if not text:
        raise UserError(f"the record {file.name} is empty: rank {file.stem.removeprefix('rank')} did not come to the "
                        "end of its first step", where=str(file), hint="let the run go on, or " + _RECORD_AGAIN)
    where = f"{file}:1"
    try:
        header = json.loads(text)
    except ValueError:
        raise UserError("the header of the record is not JSON", where=where, hint=_RECORD_AGAIN) from None
    if not isinstance(header, dict) or header.get("format") != RecordedAction.file_format():
        found = header.get("format") if isinstance(header, dict) else None
        raise UserError(f"the record has format {found!r}, this version reads "
                        f"{RecordedAction.file_format()}", where=where,
                        hint="use the version of vpipe that made the run")
    header = {"slices": 1, **header}  # left out where microbatches are whole
    for key, is_right in _KEYS.items():
        if key not in header or not is_right(header[key]):
            raise UserError(f"'{key}' in the header of the record is {header.get(key)!r}", where=where,
                            hint=_RECORD_AGAIN)
    stages = len(header["placement"])
    for key in ("partition", "recomputed"):
        if len(header[key]) != stages:
            raise UserError(f"'{key}' in the header has {counted(len(header[key]), 'entry')} for "
                            f"{counted(stages, 'stage')}", where=where, hint=_RECORD_AGAIN)
    if file.name != f"rank{header['rank']}.jsonl":
        raise UserError(f"{file.name} is the record of rank {header['rank']}", where=where, hint=_RECORD_AGAIN)
    return header


@contextmanager
def _open_lines(file: Path, tail_bytes: int | None = None) -> Iterator[Iterator[str]]:
    """Open a file's lines, or those in its last bytes; a file that cannot be read is a UserError."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            if tail_bytes is not None:
                lines.seek(max(0, file.stat().st_size - tail_bytes))
            yield lines
    except OSError as error:
        raise UserError(f"cannot read the record: {error.strerror}", where=str(file), hint=_RECORD_AGAIN) from None


_SLACK_S = 1e-6  # by which rounded times may overlap
_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d+)")


@dataclass(frozen=True)
class Track:
    """The record of one rank.

    Attributes:
        host: name of its host.
        actions: in order; none overlaps the next.
        evaluations: (start_s, end_s) of evaluations, which do not count as training.
        weight_bytes: of one version, by stage.
        static_bytes: of gradients and optimizer state, by stage.
        truncated: whether there was more than is recorded.
        broken_off: whether the record has no end: the rank failed, was ended from outside, or is still running.
    """

    rank: int
    host: str
    actions: Sequence[RecordedAction]
    evaluations: Sequence[tuple[float, float]] = ()
    weight_bytes: Mapping[int, int] = field(default_factory=dict)
    static_bytes: Mapping[int, int] = field(default_factory=dict)
    truncated: bool = False
    broken_off: bool = False

    @property
    def reaches_end(self) -> bool:
        """Return whether the record reaches the rank's real end."""
        return not (self.truncated or self.broken_off)

    def kept_bytes(self) -> Iterator[tuple[float, int, int]]:
        """Yield (second, bytes of activations, bytes of weight versions) where these change, from then on."""
        versions, before = dict.fromkeys(self.weight_bytes, 1), (-1, -1)
        for done in self.actions:
            if not done.op.works:
                continue
            if done.stage in versions:
                versions[done.stage] = done.versions
            kept = done.held_bytes, sum(count * self.weight_bytes[stage] for stage, count in versions.items())
            if kept != before:
                before = kept
                yield done.end_s, *kept


@dataclass(frozen=True)
class Recording:
    """A recorded run, or a simulated one in the same form.

    Attributes:
        schedule: its name.
        placement: ranks per stage.
        flush: whether the pipeline is empty at every update.
        microbatches: of a batch.
        update_every: microbatches of an update; without a flush, on every replica.
        partition: layers per stage.
        recomputed: per stage, numbers of recomputed layers.
        tracks: by rank; second 0 is the start of the first action, on the clock of rank 0.
        notes: sentences for the reader of the report.
        slices: of every microbatch: then its actions are of slices.
        in_lane: which lane's ranks these are, to stand behind what they are called; empty where there is one.
    """

    schedule: str
    placement: tuple[tuple[int, ...], ...]
    flush: bool
    microbatches: int
    update_every: int
    partition: tuple[int, ...]
    recomputed: tuple[tuple[int, ...], ...]
    samples_per_step: int
    tracks: tuple[Track, ...]
    notes: tuple[str, ...] = ()
    in_lane: str = ""
    slices: int = 1

    @cached_property
    def frozen(self) -> int:
        """How many stages from the first on train nothing: those without a backward."""
        return min((done.stage for track in self.tracks for done in track.actions if done.op.returns), default=0)

    @cached_property
    def dependencies(self) -> Dependencies:
        """What its actions needed of each other, and the microbatches of every rank and update."""
        kinds_there = {done.op for track in self.tracks for done in track.actions}
        return Dependencies(self.placement, self.microbatches * self.slices if self.flush else self.update_every,
                            self.flush, kinds_there, self.slices)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that live on a rank, in order."""
        return [stage for stage, ranks in enumerate(self.placement) if rank in ranks]

    @property
    def end_s(self) -> float:
        return max((track.actions[-1].end_s for track in self.tracks if track.actions), default=0.0)

    @property
    def recorded_until_s(self) -> float:
        """Return the second until which every rank with actions is recorded."""
        return min((track.actions[-1].end_s for track in self.tracks if track.actions and not track.reaches_end),
                   default=self.end_s)


def read_recording(folder: Path, say: Callable[[str], None] = lambda text: None, lane: int = 0,
                   tail_bytes: int | None = None) -> Recording:
    """Return the record of a lane of the run in ``folder``.

    Args:
        say: called with a line before each file is read.
        tail_bytes: of each file that are read, at its end; all when None.

    Raises:
        UserError: there is none, a rank's file is missing, or a line is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run folder '{folder}'",
                        hint="give the folder that 'vpipe train' prints as its run folder")
    trace = folder / "trace" / (f"lane{lane}" if lane else "")
    files = sorted(trace.glob("rank*.jsonl"))
    if not files and not 0 <= lane <= (there := len(list((folder / "trace").glob("lane*")))):
        raise UserError(f"the run in '{folder}' has records of {counted(there + 1, 'lane')}, and none of lane {lane}",
                        hint="lanes are counted from 0: those of a run with parallel.tensor, else there is one")
    if not files:
        raise UserError(f"the run in '{folder}' has no record of its actions ({trace}/rank0.jsonl is missing)",
                        hint="train with --set trace=true, or 'trace: true' in the config; a script with "
                             "RecordedRun(..., trace=True)")
    say(f"reading {files[0].name}, 1 of {counted(len(files), 'file')}")
    headers = {file: _read_header(file) for file in files}
    first = headers[files[0]]
    ranks = sorted({rank for own in first["placement"] for rank in own})
    if missing := [rank for rank in ranks if trace / f"rank{rank}.jsonl" not in headers]:
        raise UserError(f"the run has {counted(len(ranks), 'rank')}, but the record of rank "
                        f"{', '.join(map(str, missing))} is missing in '{trace}'",
                        hint="a run over several hosts leaves each rank's file on its own host: copy them together")
    for file, header in headers.items():
        if differing := [key for key in SHARED if header[key] != first[key]]:
            raise UserError(f"{file.name} and {files[0].name} are of different runs: {differing[0]} is "
                            f"{header[differing[0]]} and {first[differing[0]]}", where=f"{file}:1", hint=_RECORD_AGAIN)
    tracks, notes, in_lane = [], [], ""
    if _is_count(lanes := first.get("lanes"), 2):
        notes.append(f"Lane {lane} of {lanes}: rank r here is process {lanes} r" + f" + {lane}" * bool(lane)
                     + " of the job; 'vpipe trace RUN --lane N' shows another.")
        in_lane = f", lane {lane} of {lanes}"
    for number, rank in enumerate(ranks, 1):
        if number > 1:
            say(f"reading rank{rank}.jsonl, {number} of {counted(len(ranks), 'file')}")
        file = trace / f"rank{rank}.jsonl"
        track, track_notes = _read_track(file, headers[file], tail_bytes)
        tracks.append(track)
        notes += track_notes
    if not any(track.actions for track in tracks):
        raise UserError(f"the record in '{trace}' holds no action", hint=_RECORD_AGAIN)
    zero = min(track.actions[0].start_s for track in tracks if track.actions)
    recording = Recording(
        first["schedule"], tuple(map(tuple, first["placement"])), first["flush"], first["microbatches"],
        first["update_every"], tuple(first["partition"]), tuple(map(tuple, first["recomputed"])),
        first["samples_per_step"], tuple(_map_times(track, lambda second: second - zero) for track in tracks),
        tuple(notes), in_lane, first["slices"])
    if not any(track.broken_off for track in tracks):
        return recording
    return replace(recording, notes=(*notes, "The run did not end well, or is still going: the records of "
                                     f"{sum(track.broken_off for track in tracks)} of {counted(len(tracks), 'rank')} "
                                     f"have no end. Figures are of its first {recording.recorded_until_s:.1f} s, "
                                     "as far as they all reach."))


def _read_track(file: Path, header: Mapping[str, Any], tail_bytes: int | None) -> tuple[Track, list[str]]:
    """Return a rank's record, and notes on it."""
    notes, actions, stages = list[str](), list[RecordedAction](), len(header["placement"])
    clocks: list[tuple[float, float]] = []
    evaluations: list[tuple[float, float]] = []
    truncated, last_s = False, float("-inf")
    with _open_lines(file, tail_bytes) as lines:
        next(lines)  # the header, or the rest of a line
        for number, line in enumerate(lines, 2):
            try:
                entry = json.loads(line)
            except ValueError:
                if not line.endswith("\n"):  # the file ends in the middle of it
                    notes.append(f"{file.name} breaks off in line {number}: the run was ended, or is still going.")
                    break
                raise _damaged(file, number, line) from None
            note = entry if isinstance(entry, dict) else {}
            if isinstance(entry, list) and (done := _parse_action(entry, stages, last_s)) is not None:
                last_s = done.end_s
                actions.append(done)
            elif note.get("truncated") is True:
                truncated = True
            elif (evaluation := _pair(note.get("evaluation"))) is not None and evaluation[0] <= evaluation[1]:
                evaluations.append(evaluation)
            elif (clock := _pair(note.get("clock"))) is not None:
                clocks.append(clock)
            else:
                raise _damaged(file, number, line)
    if truncated:
        notes.append(f"{file.name} ends after {len(actions):,} actions: recording has a limit. What came later is not "
                     "in this report.")
    weight_bytes, static_bytes = ({int(stage): size for stage, size in header[key].items()}
                                  for key in ("weight_bytes", "static_bytes"))
    track = Track(header["rank"], header["host"], actions, evaluations, weight_bytes, static_bytes, truncated,
                  broken_off=len(clocks) < 2)
    # Offset to rank 0's clock: linear between the first and the last comparison.
    compared = clocks or [(0.0, header["clock_offset_s"])]
    (at_s, offset_s), (later_s, later_offset_s) = compared[0], compared[-1]
    drift = (later_offset_s - offset_s) / (later_s - at_s) if later_s > at_s else 0.0
    return _map_times(track, lambda second: second + offset_s + (second - at_s) * drift), notes


def _pair(value: Any) -> tuple[float, float] | None:
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 and all(map(is_number, value)) else None


def _map_times(track: Track, to: Callable[[float], float]) -> Track:
    """Return a record with every time mapped by ``to``, to another clock."""
    return replace(track, evaluations=[(to(start), to(end)) for start, end in track.evaluations],
                   actions=[RecordedAction(op, stage, index, start, end, min(waited, end - start), held, versions)
                            for op, stage, index, start_s, end_s, waited, held, versions in track.actions
                            for start, end in ((to(start_s), to(end_s)),)])


def _parse_action(entry: list[Any], stages: int, last_s: float) -> RecordedAction | None:
    """Parse an action; None when it is damaged."""
    if len(entry) != 6 or type(entry[0]) is not str or (match := _TEXT.fullmatch(entry[0])) is None:
        return None
    _, start_s, end_s, waited_s, held, versions = entry
    op, stage = kinds.find(match[2]), int(match[1])
    if op is None and match[2].isupper() and len(match[2]) > 1:
        raise UserError(f"the record has actions '{entry[0]}', and no kind of action is called '{match[2]}' here",
                        hint="install the package that the run had, or name its file with --import")
    if op is None or stage >= stages or not (is_number(start_s) and is_number(end_s) and is_number(waited_s)):
        return None
    if not (_is_count(held) and _is_count(versions) and start_s <= end_s and last_s - _SLACK_S <= start_s
            and -_SLACK_S <= waited_s <= end_s - start_s + _SLACK_S):
        return None
    start_s = max(start_s, last_s)
    end_s = max(start_s, end_s)
    waited_s = min(max(0.0, waited_s), end_s - start_s)
    return RecordedAction(op, stage, int(match[3]), start_s, end_s, waited_s, held, versions)


def _damaged(file: Path, number: int, line: str) -> UserError:
    shown = line.strip()
    return UserError(f"line {number} of the record is damaged: {shown[:60]}{'...' if len(shown) > 60 else ''}",
                     where=f"{file}:{number}", hint=_RECORD_AGAIN)


def describe(done: RecordedAction, slices: int) -> str:
    """Return ``forward, microbatch 17, stage 2``, or ``forward, microbatch 8, slice 1, stage 2``."""
    number, part = divmod(done.number, slices) if done.op.per_microbatch else (done.number, 0)
    which = f", slice {part}" * (done.op.per_microbatch and slices > 1)
    return f"{done.op.name}, {done.op.counts} {number}{which}, stage {done.stage}"
