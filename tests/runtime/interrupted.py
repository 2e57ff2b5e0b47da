"""Press Ctrl-C at random instructions of a pipeline, and go on: the losses must stay those of the oracle."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jobs import AdamW, fingerprint
from models import rich_batches
from pipelines import parts

import vpipe
from vpipe import Model, Pipeline
from vpipe.runtime.microbatches import Batch
from vpipe.testing import TrainingRecipe, flush_oracle

OURS = str(Path(vpipe.__file__).parent)
BATCHES = rich_batches(5, 8)


class Interrupter:
    """Count the instructions of vpipe's own frames, those of one of its modules; press Ctrl-C at some of them."""

    def __init__(self, *at: int, module: str = "") -> None:
        self.count, self._at, self._prefix = 0, at, f"{OURS}/{module}"

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._prefix):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count in self._at:
                signal.raise_signal(signal.SIGINT)
        return self._instruction


class Interrupted:
    """A pipeline with a flush whose user presses Ctrl-C.

    Args:
        model: makes one.
        steps: the most that it will train.
    """

    def __init__(self, model: Callable[[], Model], steps: int, folder: Path, **arguments: Any) -> None:
        self._model, self._arguments = model, {"stages": 2, "microbatches": 2, "optimizer": AdamW(), "seed": 2,
                                               **arguments}
        self.pipe = Pipeline(model(), **parts(**self._arguments))
        self._run = flush_oracle(model(), map(self._batch, range(steps)), TrainingRecipe(
            AdamW().from_named, self.pipe.microbatches, 2), self.pipe.partition)
        self._folder, self._lengths = folder, dict[str, int]()
        for _ in range(3):  # the first forwards take more instructions
            self.train()
        self.interrupted = self.finished = 0

    @staticmethod
    def _batch(step: int) -> Batch:
        return BATCHES[step % len(BATCHES)]

    def train(self) -> None:
        """Train one step from where the pipeline is."""
        position = self.pipe.position.steps
        (step,) = self.pipe.train([self._batch(position)])
        assert (step.index, step.loss) == (position, self._run.losses[position])

    def _act(self, what: str) -> None:
        if what == "train":
            self.train()
        elif what == "evaluate":
            self.pipe.evaluate(BATCHES[:1])
        elif what == "save":
            self.pipe.save(self._folder)
        else:
            self.pipe.state_dict()

    def press(self, seed: int) -> None:
        """Interrupt something at an instruction of it, both drawn by a seed; train on."""
        draw = random.Random(seed)
        what = draw.choices(("train", "evaluate", "save", "state_dict"), (7, 1, 1, 1))[0]
        if what not in self._lengths:
            counter = Interrupter()
            with counter.watching():
                self._act(what)
            self._lengths[what] = counter.count
        before, presses = self.pipe.position.steps, Interrupter(at := draw.randint(1, self._lengths[what]))
        try:
            with presses.watching():
                self._act(what)
            assert presses.count < at, "it came, and nothing was raised"
        except KeyboardInterrupt:
            self.interrupted += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self.finished += self.pipe.position.steps - before
        self.train()

    def compare(self) -> None:
        """Save, and compare what is saved with a run that was left alone."""
        self.pipe.save(self._folder)
        alone, other = Pipeline(self._model(), **parts(**self._arguments)), Pipeline(self._model(),
                                                                                     **parts(**self._arguments))
        for _ in alone.train(map(self._batch, range(self.pipe.position.steps))):
            pass
        assert other.load(self._folder) == alone.position
        assert fingerprint(other.state_dict()) == fingerprint(alone.state_dict())
