"""Run ``vpipe watch``: show how far a run is, again and again while it goes on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from math import isfinite
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from vpipe.app.launch.failure_report import find_failure
from vpipe.app.metric_formulas import share_text
from vpipe.app.report.figures import Window, rank_times
from vpipe.app.report.idle_causes import Cause, Producers
from vpipe.app.report.recording import read_recording
from vpipe.app.run_log import RunLog, number
from vpipe.app.train.run_folder import CONFIG, run_in
from vpipe.app.train.run_state import MeanTimes, RunState
from vpipe.app.visualize.table import compact, fitted, ms_text, terminal_columns
from vpipe.errors import RunError, UserError, VpipeError
from vpipe.units import size_text

EVERY_S = 1.0
"""Time between two looks at the files."""

MOST_RANKS = 32
"""Rows of ranks; of more, these and the slowest are shown."""

RECORD_BYTES = 1 << 16
"""The end of a rank's record that is read, with hundreds of actions; and the share of their time left out at its
beginning, when what a rank waited for is not among them."""
BEGINNING = 0.2

CURVE = "▁▂▃▄▅▆▇█"
CURVE_COLUMNS = 40


def _clock(seconds: float) -> str:
    return str(tqdm.format_interval(seconds)) if isfinite(seconds) else "-"


def run_watch(options: argparse.Namespace) -> None:
    """Show a run until it ends, on a terminal; else its state, once.

    Raises:
        VpipeError: this is no run, or the run has failed.
    """
    terminal = sys.stdout.isatty()
    console = Console(force_terminal=terminal, highlight=False, width=None if terminal else terminal_columns())
    watch(run_in(options.folder), console)


def watch(folder: Path, console: Console) -> None:
    """Show a run on a console; Ctrl-C ends that, not the run."""
    state = RunState.read(folder)
    if not console.is_terminal or console.is_dumb_terminal or _ended(state):
        console.print(_view(state, console))
    else:
        with suppress(KeyboardInterrupt), Live(_view(state, console), console=console, auto_refresh=False) as live:
            while not _ended(state):
                time.sleep(EVERY_S)
                state = RunState.read(folder)
                live.update(_view(state, console), refresh=True)
    if (failure := _failure(state)) is not None:
        raise failure


def _ended(state: RunState) -> bool:
    return state.summary is not None or _failure(state) is not None


def _failure(state: RunState) -> VpipeError | None:
    """Return why a run has failed; None where it has not, or is about to start again."""
    if state.is_alive or state.summary is not None:
        return None
    if (told := find_failure(state.folder, state.describe, {})) is not None:
        return told
    return None if state.is_alive is None else RunError(
        f"the run came to no end: its {state.holder} is gone", hint="see its logs; vpipe train --resume goes on from "
        "its newest checkpoint" if (state.folder / CONFIG).exists() else "see what its script printed")


def _view(state: RunState, console: Console) -> RenderableType:
    folder = Text(str(state.folder), "bold", no_wrap=True, overflow="ignore")
    parts: list[RenderableType] = [folder, _headline(state), *_progress(state)]
    if state.lines:
        parts += _figures(state, ascii_only=console.options.ascii_only)
    if state.rank_times is not None:
        parts += [Text(), *_ranks(state, state.rank_times, console.width)]
    elif state.lines:
        parts.append(Text("(no times of each rank yet)", "dim"))
    if state.summary is None:
        parts += _recorded(state.folder, console.width)
    return Group(*parts)


def _headline(state: RunState) -> Text:
    if state.summary is not None:
        whole = state.updates is None or state.steps >= state.updates
        status, style = ("ended" if whole else "ended early"), "green"
    elif _failure(state) is not None:
        status, style = "failed", "red"
    else:
        status, style = ("going" if state.lines else "starting"), "bold"
        if state.holder is not None:
            status += f" ({state.holder})"
        if state.is_silent:
            status, style = f"{status}, but silent", "yellow"
    return Text.assemble((status, style), f", last line {_clock(state.silent_s)} ago" * (state.summary is None))


def _progress(state: RunState) -> Iterator[RenderableType]:
    done, total = float(state.steps), state.updates
    passed_s = number(state.lines[-1], "time_s") if state.lines else 0.0
    if total is None and state.limit_s is not None:
        done, whole = passed_s, state.limit_s
    else:
        whole = float(total or 0)
    left_s = None if _ended(state) else state.left_s
    line = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [f"update {state.steps:,}" + (f" of {total:,}" if total is not None else "")]
    if whole:
        cells.append(ProgressBar(total=whole, completed=min(done, whole), width=24))
    cells.append(_clock(passed_s) + (f", {_clock(left_s)} left" if left_s is not None else ""))
    line.add_row(*cells)
    yield line


def _figures(state: RunState, *, ascii_only: bool) -> Iterator[Text]:
    """Yield the losses, and the speed: of an ended run all of it, of another the present one."""
    last = state.lines[-1]
    parts = [f"loss {number(last, 'loss'):.3f}"]
    for key, name in (("perplexity", "perplexity"), ("gradient_norm", "grad norm"), ("learning_rate", "learning rate")):
        if isfinite(value := number(last, key)):
            parts.append(f"{name} {compact(value)}")
    if state.evaluation is not None:
        parts.append(f"evaluation loss {number(state.evaluation, 'evaluation_loss'):.4f} after update "
                     f"{int(number(state.evaluation, 'step')) + 1:,}")
    yield Text("  ".join(parts))
    if not ascii_only and (curve := _curve([loss for _, loss in RunLog(state.folder).losses(CURVE_COLUMNS)])):
        yield Text(f"     {curve}", "cyan")
    texts: dict[str, Callable[[float], str]] = {
        "tokens_per_s": "{:,.0f} tokens/s".format, "samples_per_s": "{:,.1f} samples/s".format,
        "mfu": lambda share: f"MFU {share_text(share)}", "bubble": lambda share: f"bubble {share_text(share)}",
        "memory_bytes": lambda size: f"memory {size_text(int(size))}"}
    if state.figure("tokens_per_s") == state.figure("samples_per_s"):  # samples without tokens
        del texts["tokens_per_s"]
    yield Text("  ".join(text(value) for key, text in texts.items() if isfinite(value := state.figure(key))))


def _curve(values: list[float]) -> str:
    """Draw losses as blocks from the lowest to the highest; empty for fewer than two."""
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    blocks = "".join(CURVE[int((value - low) / span * (len(CURVE) - 1))] for value in values)
    return f"{values[0]:.3f} {blocks} {values[-1]:.3f}"


def _ranks(state: RunState, times: MeanTimes, width: int) -> Iterator[RenderableType]:
    """Yield a row per rank, and which of them is slow."""
    slowest = times.slowest
    shown = [rank for at, rank in enumerate(times.ranks) if at < MOST_RANKS or rank is slowest]
    rows = [[str(rank.rank), " ".join(map(str, state.stages_of(rank.rank))),
             *map(ms_text, (rank.forward_s, rank.backward_s, rank.step_s + rank.others_s, rank.communication_s)),
             "-" if rank.idle_s is None else ms_text(rank.idle_s)] for rank in shown]
    yield Text(f"updates {times.first:,} to {times.last:,}, in milliseconds per update:")
    yield _table(["forward", "backward", "step", "comm", "idle"], rows, width, slowest.rank)
    if left_out := len(times.ranks) - len(shown):
        yield Text(f"({left_out} more ranks)", "dim")
    yield Text("(idle: waiting for other ranks; vpipe trace shows why, of a run with trace: true)", "dim")
    yield from _slow(state, times)


def _recorded(folder: Path, width: int) -> Iterator[RenderableType]:
    """Yield, of a run with ``trace: true``, the causes of idleness that its latest actions tell."""
    files = sorted((folder / "trace").glob("rank*.jsonl"))
    with suppress(UserError, OSError):  # it has just begun
        if files and (found := _causes(folder, tuple(file.stat().st_mtime_ns for file in files), width)) is not None:
            yield Text()
            yield from found


@lru_cache(1)
def _causes(folder: Path, written: tuple[int, ...], width: int) -> tuple[RenderableType, ...] | None:
    """Return these rows; they change when the ranks have ``written`` more, which they do every few seconds."""
    recording = read_recording(folder, tail_bytes=RECORD_BYTES)
    if not all(track.actions for track in recording.tracks):
        return None
    start_s, end_s = max(track.actions[0].start_s for track in recording.tracks), recording.recorded_until_s
    start_s += BEGINNING * (end_s - start_s)
    times = rank_times(recording, Window(0, 0, start_s, end_s), Producers.from_recording(recording))
    if not all(time.whole > 0 for time in times):
        return None
    rows = []
    for time_ in times:
        work_s, idle_s = time_.compute + time_.update + time_.others, [time_.idle.get(cause, 0.0) for cause in Cause]
        parts = work_s, time_.whole - work_s - sum(idle_s), *idle_s
        rows.append([str(time_.rank), " ".join(map(str, recording.stages_of(time_.rank))),
                     *(f"{100 * abs(part) / time_.whole:.1f} %" for part in parts)])
    return (Text(f"the latest {end_s - start_s:.1f} s that were recorded{recording.in_lane}:"),
            _table(["work", "comm", *(_CAUSES[cause] for cause in Cause)], rows, width))


_CAUSES = {Cause.SCHEDULE: "schedule", Cause.TRANSFER: "transfer", Cause.STRAGGLER: "straggler",
           Cause.DISPATCH: "between", Cause.UNKNOWN: "unknown"}


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, slowest: int | None = None) -> Text:
    """Lay out a table of ranks no wider than the terminal, with the row of the slowest in bold."""
    table = Text("\n".join(fitted(["rank", "stage", *heads], rows, width, left=2, names=2)))
    table.highlight_regex(rf"(?m)^(?:rank|{slowest}) .*$", "bold")
    return table


def _slow(state: RunState, times: MeanTimes) -> Iterator[Text]:
    """Name the rank that works longest, and the one that takes most above its plan."""
    slowest = times.slowest
    if len(times.ranks) > 1 and slowest.work_s > 0:
        mean_s = sum(rank.work_s for rank in times.ranks) / len(times.ranks)
        yield Text(f"slowest: {state.describe(slowest.rank)} works {ms_text(slowest.work_s)} ms per update, "
                   f"{100 * (slowest.work_s / mean_s - 1):.0f} % more than the ranks on average")
    planned = {rank.rank: (rank.work_s / planned_s, rank.work_s, planned_s) for rank in times.ranks
               if (planned_s := state.planned_s.get(rank.rank, 0.0)) > 0}
    if planned:
        worst, (share, work_s, planned_s) = max(planned.items(), key=lambda item: item[1][0])
        yield Text(f"beside the plan: {state.describe(worst)} works {ms_text(work_s)} ms per update, planned were "
                   f"{ms_text(planned_s)} ({100 * (share - 1):+.0f} %)")
