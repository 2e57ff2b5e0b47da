"""Training with random kills, resumes and re-splits, compared with the oracle to the bit. See README.md.

python benchmarks/soak/run.py [--minutes N] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import FrameType

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.append(str(Path(__file__).parent.parent / "throughput"))

import torch
from injuries import INJURIES, Figures, Injuries
from long_run import long_runs
from machine import description
from processes import adopt_orphans, bury, end_all, take_one_core
from undisturbed import UndisturbedRun

MOST_DIFFERENCES = 5


def soak(folder: Path, minutes: float, seed: int) -> bool:
    """Whether nothing was different."""
    draw, figures, began = random.Random(seed), Figures(), time.monotonic()
    core, until = take_one_core(), began + 60 * minutes
    torch.set_num_threads(1)
    adopt_orphans()
    print(f"soak of {minutes:g} minutes, seed {seed}, on core {core}, in {folder}", flush=True)
    undisturbed = UndisturbedRun(folder, seed)

    def say(text: str) -> None:
        minute, second = divmod(int(time.monotonic() - began), 60)
        print(f"{minute:3d}:{second:02d} {figures.counts['launches']:4d}  {text}", flush=True)

    def tell(text: str) -> None:
        bury(undisturbed.pids())
        undisturbed.sample()
        say(f"{text}  [{undisturbed.words()}]")

    deal = dealer(draw)
    while time.monotonic() < until and len(figures.differences) < MOST_DIFFERENCES:
        for long_run in draw.sample(made := long_runs(folder, draw), len(made)):
            if time.monotonic() < until and not undisturbed.ended and len(figures.differences) < MOST_DIFFERENCES:
                Injuries(long_run, draw, deal, figures, undisturbed.pids, tell).run(until)
        if undisturbed.ended:
            break
    trained_s = time.monotonic() - began
    figures.differences += undisturbed.growth() + undisturbed.end(300, say)
    left = end_all()
    if left:
        figures.differences.append(f"{left} processes were left at the end")
    print("\n".join(report(figures, undisturbed, minutes, seed, trained_s, time.monotonic() - began)), flush=True)
    return not figures.differences


def dealer(draw: random.Random) -> Callable[[], str]:
    """Every injury once before any comes again."""

    def deck() -> Iterator[str]:
        while True:
            yield from draw.sample(INJURIES[:-1], len(INJURIES) - 1)

    cards = deck()
    return lambda: next(cards)


def report(figures: Figures, undisturbed: UndisturbedRun, minutes: float, seed: int, trained_s: float, all_s: float
           ) -> list[str]:
    """The figures as Markdown."""
    counts = figures.counts
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
    lines = ["", f"| what | in {trained_s / 60:.0f} minutes |", "|---|---:|"]
    lines += [f"| {what} | {counts[what]} |" for what in ("launches", "resumes", "re-splits", "runs compared",
                                                          "steps compared")]
    lines += [f"| undisturbed run: steps | {undisturbed.long_run.steps} |",
              f"| cores used, on average | {cpu_s / all_s:.2f} |",
              f"| differences | {len(figures.differences)} |", "",
              "| injury | times | seconds until all processes had gone: median | most |", "|---|---:|---:|---:|"]
    for injury in INJURIES:
        times = figures.seconds[injury]
        spent = f"{median(times):.1f} | {max(times):.1f}" if times else "- | -"
        lines.append(f"| {injury} | {max(counts[injury], len(times))} | {spent} |")
    command = f"python {' '.join(sys.argv)}: seed {seed}, {minutes:g} minutes"
    return [*lines, "", *undisturbed.table(), "", description(), command, "",
            *(f"DIFFERENT: {what}" for what in figures.differences)]


def main() -> int:
    """Soak; exit status 1 on any difference, whose folder is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, help="of all that is random; a new one when not given")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vpipe-soak-"))
    kept = True

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(f"ended by {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, ended)
    try:
        kept = not soak(folder, options.minutes, random.randrange(2**31) if options.seed is None else options.seed)
    finally:
        end_all()
        if kept:
            print(f"kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    return int(kept)


if __name__ == "__main__":
    sys.exit(main())
