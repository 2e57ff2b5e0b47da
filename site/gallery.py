"""Make the gallery: train six small runs, copy their reports, and fill their commands and figures into its pages.

The pages are ``site/pages/gallery/``. They name a run as ``{{command NAME}}`` and ``{{figures NAME}}``.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from vpipe.app.report.idle_causes import Cause
from vpipe.app.report.report_data import ReportData, load_report_data
from vpipe.units import size_text

HERE = Path(__file__).resolve().parent
CORES = len(os.sched_getaffinity(0))
RANKS = 4 if CORES >= 4 else 2  # ranks that share a core are no picture of a pipeline
BALANCED = {2: [8, 9], 4: [4, 4, 4, 5]}[RANKS]
TWO_PER_RANK = {2: [4, 4, 4, 5], 4: [2, 2, 2, 2, 2, 2, 2, 3]}[RANKS]
UNBALANCED = {2: [4, 13], 4: [3, 3, 3, 8]}[RANKS]


@dataclass(frozen=True)
class Run:
    """A run: layers per stage, further settings, and words in front of the command."""

    partition: list[int]
    settings: tuple[str, ...]
    before: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Return the command, as one types it."""
        settings = (f"parallel.model_parallel_size={len(self.partition)}", f"parallel.partition={self.partition}",
                    *self.settings)
        return [*self.before, "vpipe", "train", "site/gallery.yaml",
                *(word for setting in settings for word in ("--set", setting))]


RUNS = {
    "1f1b": Run(BALANCED, ("parallel.schedule=1f1b",)),
    "zb_v": Run(TWO_PER_RANK, ("parallel.schedule=zb_v",)),
    "pipedream": Run(BALANCED, ("parallel.schedule=pipedream", "training.max_steps=128")),
    "unbalanced": Run(UNBALANCED, ("parallel.schedule=1f1b",)),
    "straggler": Run(BALANCED, ("parallel.schedule=1f1b",), ("python", "site/pause_rank.py", "1")),
    "recompute": Run(BALANCED, ("parallel.schedule=1f1b", "parallel.recompute=1.0")),
}


def fill(folder: Path) -> None:
    """Train the runs, copy their reports into the folder of the pages, and fill in what the pages ask for."""
    texts = {"machine": f"{CORES} cores, {platform.system()}, Python {platform.python_version()}, "
                        f"torch {version('torch')}"}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "site").symlink_to(HERE)  # so that the commands are those that one types in the repository
        for name, run in RUNS.items():
            run_folder = Path(place) / train(name, run, Path(place))
            shutil.copyfile(run_folder / "report.html", folder / f"{name}.html")
            data = load_report_data(run_folder, yaml.safe_load((run_folder / "config.yaml").read_text()))
            texts |= {f"command {name}": typed(run.command), f"figures {name}": figures(data)}
    for page in folder.glob("*.md"):
        page.write_text(re.sub(r"\{\{(.*?)\}\}", lambda found: texts[found[1]], page.read_text()))


def train(name: str, run: Run, place: Path) -> str:
    """Train a run, and return its folder."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(run.command, cwd=place, env=os.environ | paths, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    folder = re.search(r"^run folder: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or folder is None:
        sys.exit(f"error: the gallery's run {name} failed\n{done.stdout}hint: {shlex.join(run.command)}")
    return folder[1]


def typed(command: list[str]) -> str:
    """Return a command over several lines."""
    quoted = [f'"{word}"' if " " in word else word for word in command]
    return " ".join(quoted).replace(" --set ", " \\\n    --set ")


def figures(data: ReportData) -> str:
    """Return a run's key figures as cells of a table."""
    whole = sum(time.whole for time in data.figures.ranks)
    idle = [f"{sum(time.idle.get(cause, 0.0) for time in data.figures.ranks) / whole:.1%}"
            for cause in (Cause.SCHEDULE, Cause.STRAGGLER, Cause.TRANSFER)]
    versions = max(done.versions for track in data.recording.tracks for done in track.actions)
    return " | ".join([f"{data.totals.samples_per_s:.1f}", f"{data.totals.bubble or 0:.1%}", *idle,
                       size_text(max(data.figures.kept_bytes.values())), str(versions),
                       str(max(stage.staleness for stage in data.figures.stages))])
