"""Let something accompany a training: record it, check it, or show at its end what the model has learnt.

:mod:`vpipe.app.train.loop` lists what can accompany every run. An extra or a package adds an observer by an entry point
of its name in the group ``vpipe.observers``, which leads to a subclass of :class:`Observer`::

    [project.entry-points."vpipe.observers"]
    temperature = "my_package.temperature:GpuTemperature"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vpipe import Pipeline

if TYPE_CHECKING:
    from vpipe.app.train.job import Job
    from vpipe.app.train.metrics import Metrics


@dataclass(frozen=True)
class Run:
    """A training on this rank, as its observers see it.

    Attributes:
        job: what is trained, and how.
        pipe: the pipeline, ready to train.
        folder: of the run.
        metrics: losses and times so far; the numbers of steps are those of all attempts.
        note: writes a line to the log and, on rank 0, to the screen.
    """

    job: Job
    pipe: Pipeline
    folder: Path
    metrics: Metrics
    note: Callable[[str], None]


@dataclass(frozen=True)
class SummaryPart:
    """What an observer adds to the summary of a run.

    Attributes:
        lines: of the text, after an empty one.
        figures: entries of the summary in ``metrics.jsonl``.
    """

    lines: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)


class Observer:
    """What accompanies a training on every rank. Whatever is not overridden does nothing.

    All ranks make the same observers, in the same order, and call them at the same moments: a method may communicate
    with the other ranks. The observers leave their contexts (``__exit__``) at the end of every run, also a failed one.
    """

    @classmethod
    def check(cls, job: Job) -> None:
        """Refuse a job with which this observer could only fail; called before a process starts.

        Raises:
            UserError: what is wrong with the config.
        """

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        """Return the observer of a run that is about to begin; None for a run without."""
        raise NotImplementedError

    def before_step(self, done: int) -> None:
        """Prepare for the next step, directly before it; ``done`` steps have ended."""

    def step(self, done: int) -> None:
        """Follow the step, or the steps of a draining pipeline, that have just ended; ``done`` in all."""

    @property
    def ends_run(self) -> bool:
        """Return whether the run must end after the step that has just ended."""
        return False

    def end(self) -> None:
        """Follow the last step, before the last evaluation. A run that fails does not come here."""

    def summary(self) -> SummaryPart | None:
        """Return what the summary of the run should say; rank 0's is used."""
        return None

    def finish(self) -> None:
        """Show or write something after the summary of a run that no signal has stopped."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Close what is open; ``error``: that the run failed with."""
