"""What is learned per second by synchronous and asynchronous schedules. See README.md.

python benchmarks/learning/run.py [--quick] [--processes 2] [--minutes 60]

Appends a row per run to results.jsonl as soon as it is done; runs that stand there are not done again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from arms import plan, quick
from results import RESULTS, append, read
from task import text_facts, text_id
from times import update_s
from training import Run, train


def main() -> None:
    """Do the runs that are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the length, few arms: ten minutes")
    parser.add_argument("--processes", type=int, default=1, help="runs at once, each on a core")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of rows")
    options = parser.parse_args()
    if texts := {row["text"] for row in read(options.results).values()} - {text_id()}:
        raise SystemExit(f"{options.results} has rows of another text, {', '.join(texts)}; here it is {text_facts()}. "
                         "Name another file with --results.")
    print(text_facts(), file=sys.stderr)
    ends = time.monotonic() + 60 * options.minutes
    doing: dict[Future[dict[str, Any]], Run] = {}
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        while True:
            for run in _left(options) if time.monotonic() < ends else ():
                if len(doing) == options.processes:
                    break
                if run not in doing.values():
                    doing[pool.submit(train, run)] = run
            if not doing:
                break
            done, _ = wait(doing, return_when=FIRST_COMPLETED)
            for future in done:
                run, row = doing.pop(future), future.result()
                append(options.results, row)
                print(f"{time.strftime('%H:%M')} {run}: {row['loss']:.4f}, {row['cpu_s']:.0f} s of a core, "
                      f"{row['wall_s']:.0f} s", flush=True)
    if options.quick:
        print("\n".join(_quick_table(options.results)))


def _quick_table(results: Path) -> Iterator[str]:
    """Yield a Markdown table of the quick runs: losses of both seeds, and against the first line."""
    rows = read(results)
    by_way: dict[Run, list[float]] = {}
    for run in quick():
        if run in rows:
            by_way.setdefault(replace(run, seed=0), []).append(rows[run]["loss"])
    first = next(iter(by_way.values()), [1.0])
    yield "| way, a quarter of N | held-out losses | against the first |"
    yield "|---|---|---:|"
    for run, losses in by_way.items():
        yield (f"| {str(run).partition(' rate')[0]} | {', '.join(f'{loss:.4f}' for loss in losses)} | "
               f"{100 * (fmean(losses) / fmean(first) - 1):+.1f} % |")


def _left(options: argparse.Namespace) -> Iterator[Run]:
    rows = read(options.results)
    if options.quick:
        return (run for run in quick() if run not in rows)
    return plan({run: row["loss"] for run, row in rows.items()}, update_s)


if __name__ == "__main__":
    main()
