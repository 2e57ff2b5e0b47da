"""One failure of a run, really made: the run in which it happens, and the one that goes on from there.

Ranks come from the fork server, so that a run of three costs one or two seconds of a processor. Several failures are
made at a time: most of what they do is to wait.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fork_server
import triggers
import yaml
from hosts import VPIPE, until
from safetensors.torch import load_file
from small_run import only_run, write_config
from torch import Tensor

from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import Manifest

RANKS = 3
TIMEOUT_S = 10.0
"""``parallel.timeout_s``: a rank that is stopped is noticed within it."""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"training__max_steps": 8, "checkpoint__every_steps": 2, "training__evaluate_every": 3},
    "pipedream": {"training__max_steps": 16, "checkpoint__every_steps": 5, "training__evaluate_every": 7,
                  "parallel__update_every": 1}}
"""8 batches of 4 microbatches: with a flush a step is a batch, without one it is a microbatch."""


@dataclass(frozen=True)
class Failure:
    """What goes wrong in a run of a schedule; see :mod:`triggers`."""

    schedule: str = "1f1b"
    trigger: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()


@dataclass
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


class Run:
    """A run of a failure, in a folder of its own."""

    def __init__(self, folder: Path, failure: Failure) -> None:
        self.folder, self.failure = folder, failure
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        changes = {"parallel__model_parallel_size": RANKS, "parallel__schedule": failure.schedule,
                   "parallel__timeout_s": TIMEOUT_S, **SCHEDULES[failure.schedule], **failure.config}
        self.config = write_config(folder, **{"checkpoint__at_end": True, "checkpoint__keep": 2, **changes})

    def copy(self, folder: Path) -> Run:
        """The same run elsewhere, to do something to it."""
        shutil.copytree(self.folder, folder)
        run = object.__new__(Run)
        run.folder, run.failure, run.notes, run.config = folder, self.failure, folder / "notes", folder / "c.yaml"
        return run

    @property
    def path(self) -> Path:
        """The run's folder."""
        return only_run(self.folder / "runs")

    def train(self, *words: str | Path, trigger: bool = True, patience_s: float = 100.0,
              meanwhile: Callable[[], None] | None = None) -> Ended:
        """``vpipe train`` with these words; nothing of it runs afterwards.

        Args:
            meanwhile: done as soon as the trigger has fired.
        """
        environment = {**os.environ, fork_server.HOOK: "triggers:arm", triggers.NOTES: str(self.notes),
                       "PYTHONPATH": str(Path(__file__).parent)}
        if trigger and self.failure.trigger is not None:
            environment[triggers.TRIGGER] = json.dumps(self.failure.trigger)
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            process = fork_server.Popen([VPIPE, "train", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                   env=environment, cwd=self.folder, start_new_session=True)
        try:
            if meanwhile is not None:
                until(lambda: self.fired is not None, 60, "the trigger")
                meanwhile()
            status = process.wait(patience_s)
        except BaseException:
            process.kill()  # and its ranks end with it
            raise
        self.ended_at = time.time()
        try:
            until(lambda: not self.left(), 10, "nothing of the run is left")
        finally:
            for pid in self.left():
                os.kill(pid, signal.SIGKILL)
        return Ended(status, (self.folder / "out").read_text(), (self.folder / "err").read_text())

    def begin(self, **options: Any) -> Ended:
        """The run in which it happens."""
        return self.train(self.config, *self.failure.words, **options)

    def go_on(self, *words: str | Path) -> Ended:
        """``--resume``, and nothing goes wrong."""
        return self.train("--resume", *(words or (self.path,)), trigger=False)

    @property
    def fired(self) -> float | None:
        """When it went wrong."""
        note = self.notes / "fired"
        return float(note.read_text()) if note.exists() else None

    def left(self) -> list[int]:
        """Processes of the run."""
        return [pid for pid, environment in fork_server.running().items()
                if environment.get(triggers.NOTES) == str(self.notes)]

    # -- what a run leaves ---------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """Of ``metrics.jsonl``, each of which is whole."""
        text = (self.path / "metrics.jsonl").read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def losses(self) -> list[float]:
        steps = [line for line in self.lines() if "loss" in line]
        assert [line["step"] for line in steps] == list(range(len(steps)))
        return [line["loss"] for line in steps]

    def evaluations(self) -> list[tuple[int, float]]:
        return [(line["step"], line["evaluation_loss"]) for line in self.lines() if "evaluation_loss" in line]

    @property
    def checkpoints(self) -> Checkpoints:
        section = yaml.safe_load(self.config.read_text())["checkpoint"]
        root = section.get("directory")
        return Checkpoints(self.path / "checkpoints" if root is None else Path(root) / self.path.name)

    def tensors(self) -> dict[str, Tensor]:
        """Of the last checkpoint, by name."""
        newest = self.checkpoints.newest()
        assert newest is not None
        return {name: tensor for file in Manifest.load(newest).files
                for name, tensor in load_file(newest / file).items()}

    def weights(self) -> dict[str, bytes]:
        """Their bytes."""
        return {name: tensor.numpy().tobytes() for name, tensor in self.tensors().items()}

    def samples(self) -> list[str]:
        """Digests of the microbatches that count: of each attempt those before the first one of the next."""
        attempts = []
        for number in range(len(list(self.notes.glob("samples*")))):
            words = [line.split() for line in (self.notes / f"samples{number}").read_text().splitlines()]
            attempts.append({int(index): digest for index, digest in words})
            assert len(attempts[-1]) == len(words), "a microbatch was used twice"
        used: dict[int, str] = {}
        for attempt in filter(None, attempts):
            first = min(attempt)
            used = {index: digest for index, digest in used.items() if index < first} | attempt
            assert sorted(used) == list(range(len(used))), "a microbatch was left out"
        return list(used.values())

    def check_tidy(self) -> None:
        """No file is half written, no checkpoint is damaged."""
        found = [*self.path.rglob("*"), *self.checkpoints.root.rglob("*")]
        assert not [path for path in found if re.search(r"\.(tmp|old|part)", path.name)]
        for checkpoint in self.checkpoints.all():
            assert not Checkpoint.open(checkpoint).damage()
        assert (self.checkpoints.root / "latest").read_text().strip() == self.checkpoints.newest().name

    def check_equals(self, other: Run) -> None:
        """Bit for bit the same losses, evaluations and weights, and each sample used exactly once."""
        assert self.losses() == other.losses()
        assert self.evaluations() == other.evaluations()
        assert self.samples() == other.samples()
        assert self.weights() == other.weights()
        self.check_tidy()
