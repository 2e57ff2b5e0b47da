"""The results as a table, and the machine they belong to."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from batches import SAMPLES
from entrant import Entrant
from model import TOKENS

import vpipe

CLOSE = 2e-3
"""Greatest relative difference of losses: rounding, and what AdamW makes of it in a few updates."""
COMPARED = 4


@dataclass(frozen=True)
class Row:
    """One entrant's figures, in seconds per update; ``cpu_s`` is the processor time of both ranks (median)."""

    name: str
    group: str
    median_s: float
    least_s: float
    cpu_s: float
    losses: tuple[float, ...]
    exact: bool


def rows(entrants: list[Entrant], per_rank: list[dict[str, dict[str, list[float]]]]) -> list[Row]:
    """From what the ranks wrote: times as rank 0 saw them, losses from whoever knows them."""
    made = []
    for entrant in entrants:
        seconds = per_rank[0][entrant.name]["seconds"]
        cpu_s = sum(median(rank[entrant.name]["cpu_seconds"]) for rank in per_rank if rank[entrant.name]["cpu_seconds"])
        losses = next((r[entrant.name]["losses"] for r in per_rank if r[entrant.name]["losses"]), [])
        made.append(Row(entrant.name, entrant.group, median(seconds), min(seconds), cpu_s, tuple(losses),
                        entrant.exact))
    return made


def check_losses(table: list[Row]) -> str:
    """Whether all entrants that should did the same work; a line that says so.

    Raises:
        SystemExit: the losses of two entrants differ by more than rounding.
    """
    exact = [row for row in table if row.exact and row.losses]
    if not exact:
        return "losses: no entrants to compare"
    first, worst = exact[0], 0.0
    for row in exact:
        for i, (one, other) in enumerate(zip(first.losses[:COMPARED], row.losses[:COMPARED], strict=True)):
            worst = max(worst, abs(one - other) / one)
            if worst > CLOSE:
                raise SystemExit(f"not the same work: at update {i} the loss of {first.name} is {one}, "
                                 f"of {row.name} {other}")
    return (f"losses: the {len(exact)} entrants with a flush agree over the first {COMPARED} updates "
            f"({first.losses[0]:.6f} .. {first.losses[COMPARED - 1]:.6f}; greatest relative difference {worst:.1e})")


def text(table: list[Row]) -> str:
    """A Markdown table: fastest first."""
    best = min((row.median_s for row in table if row.group == "torch"), default=None)
    lines = ["| entrant | ms per update, median | min | CPU ms, both ranks | tokens/s | speed, best of torch = 1 |",
             "|---|---:|---:|---:|---:|---:|"]
    for row in sorted(table, key=lambda row: row.median_s):
        ratio = f"{best / row.median_s:.2f}" if best else "-"
        lines.append(f"| {row.name} | {row.median_s * 1e3:.0f} | {row.least_s * 1e3:.0f} | "
                     f"{row.cpu_s * 1e3:.0f} | {SAMPLES * TOKENS / row.median_s:,.0f} | {ratio} |")
    return "\n".join(lines)


def machine() -> str:
    """Processor, system, torch, and which vpipe."""
    info = Path("/proc/cpuinfo")
    found = info.read_text().split("\n") if info.exists() else []
    wanted = ("model name", "cpu family", "model\t")
    models = [line.partition(":")[2].strip() for line in found if line.startswith(wanted)]
    release = Path("/etc/os-release")
    system = next((line.partition("=")[2].strip('"') for line in release.read_text().split("\n")
                   if line.startswith("PRETTY_NAME=")), "") if release.exists() else platform.platform()
    cores = sum(line.startswith("processor") for line in found)
    family, number, name = models[:3] if len(models) > 2 else ("?", "?", platform.processor())
    return (f"{cores} cores {name} (family {family}, model {number}), {system}, Python {platform.python_version()}, "
            f"torch {torch.__version__} (CPU capability {torch.backends.cpu.get_cpu_capability()}), "
            f"vpipe {commit()}")


def commit() -> str:
    """The commit of the vpipe that was measured; "+" when files of it differ from the commit."""
    root = Path(vpipe.__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "vpipe") else "")
