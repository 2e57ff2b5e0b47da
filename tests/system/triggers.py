"""What goes wrong in a rank, at a moment of its training: armed in processes that the fork server forks.

``VPIPE_TEST_TRIGGER`` says it in JSON: which ``rank``, the ``moment``, its ``count`` among those of the rank, and what
to ``do``. It comes once in a run: an attempt that goes on finds the note of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRIGGER = "VPIPE_TEST_TRIGGER"
NOTES = "VPIPE_TEST_NOTES"
"""Environment variable with the folder for notes: ``fired``, with the time, and ``samples<attempt>``, with a line per
microbatch that the first stage was trained on."""


def arm(program: str, arguments: list[str]) -> None:
    """Called in every forked process; see :data:`fork_server.HOOK`."""
    if program != "vpipe.app.launch.rank_main":
        return
    rank, notes = int(os.environ["RANK"]), Path(os.environ[NOTES])
    counts = Counter[str]()
    text = os.environ.get(TRIGGER)
    trigger = json.loads(text) if text else {"rank": None}

    def reached(moment: str) -> bool:
        """Whether it is now that it goes wrong, before what the moment names is done."""
        number = counts[moment]
        counts[moment] += 1
        if rank != trigger["rank"] or (moment, number) != (trigger["moment"], trigger["count"]):
            return False
        if (notes / "fired").exists():
            return False
        (notes / "part").write_text(str(time.time()))
        (notes / "part").rename(notes / "fired")
        return True

    _in_training(reached, trigger, notes)
    _in_saving(reached, trigger, rank == trigger["rank"])


def _in_training(reached: Callable[[str], bool], trigger: dict[str, Any], notes: Path) -> None:
    from vpipe.runtime.worker import Worker
    from vpipe.schedules.kinds import Action, Op

    make = Worker.__init__
    attempt = len(list(notes.glob("samples*")))

    def made(self: Worker, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        forward, backward, step = (self.operations[op] for op in (Op.FORWARD, Op.BACKWARD, Op.STEP))
        if 0 in self.stages:
            samples = (notes / f"samples{attempt}").open("a", buffering=1)

        def forwards(stage: int, microbatch: int) -> None:
            segment = self.segment
            if segment.training and stage == 0:
                fields = segment.loader._open[segment.first + microbatch].fields
                digest = hashlib.sha256(fields["input_ids"].numpy().tobytes()).hexdigest()
                print(segment.number_of(Action(Op.FORWARD, stage, microbatch)), digest, file=samples)
            if reached("forward" if segment.training else "evaluation"):
                go_wrong(trigger)
            forward(stage, microbatch)

        def backwards(stage: int, microbatch: int) -> None:
            if reached("backward"):
                go_wrong(trigger)
            backward(stage, microbatch)

        def steps(stage: int, update: int) -> None:
            if reached("step"):
                go_wrong(trigger)
            step(stage, update)

        self.operations |= {Op.FORWARD: forwards, Op.BACKWARD: backwards, Op.STEP: steps}

    Worker.__init__ = made  # type: ignore[method-assign]


def _in_saving(reached: Callable[[str], bool], trigger: dict[str, Any], its_rank: bool) -> None:
    """``write``: half of a rank's file is written."""
    from vpipe.checkpoint import shards

    write = shards.save_file

    def writes(tensors: Any, path: Path) -> None:
        filler = path.parents[1] / "filler"
        if reached("write"):
            if trigger["do"] == "fill":
                fill(filler)
            else:
                write(tensors, path)
                os.truncate(path, path.stat().st_size // 2)
                go_wrong(trigger)
        write(tensors, path)

    shards.save_file = writes


def go_wrong(trigger: dict[str, Any]) -> None:
    """Do what the trigger says to this process, or to the files that it needs."""
    what = trigger["do"]
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)  # a thread hears of it
    elif what == "memory":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    elif what == "hide":
        Path(trigger["folder"]).rename(trigger["folder"] + ".away")
    else:
        raise AssertionError(what)


def fill(filler: Path) -> None:
    """Leave no room on a disk: a file takes it."""
    with filler.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
