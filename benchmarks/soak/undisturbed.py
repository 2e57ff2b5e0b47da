"""A run that nobody disturbs: whether memory and handles of its processes grow while it saves and evaluates."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from launch import Launch
from long_run import LongRun
from processes import Held, about

NICER = 10
"""It gives way to the launches: they set the pace of the soak."""

GROWTH = 0.04
"""Share by which the median of a process's memory in the last third of the soak may be above that in the second."""

LEAST_BYTES = 6 << 20
"""Growth below this says nothing: an allocator that rounds up makes as much."""

FEW = 2
"""Handles and threads that a save has beside the others: the last third may have caught more of them in the middle."""


def undisturbed(folder: Path, seed: int) -> LongRun:
    """Two stages, a save and an evaluation after every 4 steps: most of its time it does these."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": "bert", "preset": "tiny", "num_layers": 4, "hidden_size": 32, "sequence_length": 32,
                  "vocab_size": 64, "tie_weights": False},
        "dataset": {"name": "synthetic", "batch_size": 16, "samples": 1024},
        "training": {"learning_rate": 0.001, "max_steps": 1_000_000, "num_microbatches": 4, "seed": seed,
                     "optimizer": "adamw", "evaluate_every": 4, "evaluation_batches": 16, "print_frequency": 1000},
        "checkpoint": {"every_steps": 4, "keep": 3}}
    arrangement = {"schedule": "1f1b", "partition": [5, 4]}
    return LongRun("undisturbed", folder / "undisturbed", sections, [arrangement], 1_000_000,
                  evaluations=False)


class UndisturbedRun:
    """The run, at work.

    Attributes:
        long_run: what it is compared by.
        held: by name of a process what it held, one entry per :meth:`sample`.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.long_run = undisturbed(folder, seed)
        self.held: dict[str, list[Held]] = defaultdict(list)
        self._launch = Launch(self.long_run, [str(self.long_run.write_config(self.long_run.arrangements[0]))], set)
        os.setpriority(os.PRIO_PROCESS, self._launch.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICER)

    def pids(self) -> set[int]:
        """Of all its processes."""
        return {self._launch.pid, *(process.pid for process in about(self.long_run.folder))}

    @property
    def ended(self) -> bool:
        """Which it must not have."""
        return self._launch.ended

    def sample(self) -> None:
        """Note what its processes and this one hold, once it saves and evaluates."""
        if self.long_run.steps_done() < 40:
            return
        named = {"soak": os.getpid(), "launcher": self._launch.pid,
                 **{f"rank {rank}": pid for rank, pid in sorted(self._launch.ranks().items())}}
        for name, pid in named.items():
            if (held := Held.by(pid)) is not None:
                self.held[name].append(held)

    def words(self) -> str:
        """The latest figures of its ranks, in few words."""
        ranks = {name: held[-1] for name, held in self.held.items() if name.startswith("rank")}
        if not ranks:
            return "undisturbed run starting"
        return (f"undisturbed run: step {self.long_run.steps_done()}, "
                f"{' + '.join(f'{held.rss_bytes / 2**20:.0f}' for held in ranks.values())} MiB, "
                f"{' + '.join(str(held.handles) for held in ranks.values())} handles")

    def end(self, limit_s: float, tell: Callable[[str], None]) -> list[str]:
        """Let it end in good order, and compare it, which takes a while; what is wrong with it."""
        if self.ended:
            return [f"the undisturbed run ended by itself, see {self._launch.output}"]
        os.kill(self._launch.pid, signal.SIGTERM)
        status, _ = self._launch.gone(limit_s)
        if status != 128 + signal.SIGTERM:
            return [f"the undisturbed run ended with status {status}, see {self._launch.output}"]
        steps = self.long_run.steps = self.long_run.steps_done()

        def progress(step: int) -> None:
            if step % -(-steps // 10) == 0:
                tell(f"the undisturbed run's oracle is at step {step} of {steps}")

        return self.long_run.differences(progress)

    def growth(self) -> list[str]:
        """Processes whose memory or handles have grown."""
        found = []
        for name, held in self.held.items():
            if name == "soak" or len(held) < 12:
                continue
            middle, last = _third(held, 1), _third(held, 2)
            grown = median(h.rss_bytes for h in last) - median(h.rss_bytes for h in middle)
            if grown > max(LEAST_BYTES, GROWTH * median(h.rss_bytes for h in middle)):
                found.append(f"the memory of the undisturbed run's {name} grew by {grown / 2**20:.1f} MiB")
            for what in ("handles", "threads"):
                before, after = (median(getattr(h, what) for h in part) for part in (middle, last))
                if after > before + FEW:
                    found.append(f"the {what} of the undisturbed run's {name} grew from {before:g} to {after:g}")
        return found

    def table(self) -> list[str]:
        """Rows of a Markdown table: per process the medians of each third of the soak, and the most."""
        rows = ["| process | samples | MiB: first third | second | last | most | handles: first third | last | most | "
                "threads |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
        for name, held in self.held.items():
            parts = [_third(held, i) or held for i in range(3)]
            mebibytes = [f"{median(h.rss_bytes for h in part) / 2**20:.1f}" for part in parts]
            handles = [f"{median(h.handles for h in parts[i]):g}" for i in (0, 2)]
            rows.append(f"| {name} | {len(held)} | {' | '.join(mebibytes)} | "
                        f"{max(h.rss_bytes for h in held) / 2**20:.1f} | {' | '.join(handles)} | "
                        f"{max(h.handles for h in held)} | {held[-1].threads} |")
        return rows


def _third(held: Sequence[Held], which: int) -> Sequence[Held]:
    return held[which * len(held) // 3:(which + 1) * len(held) // 3]
