"""vpipe under its schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from batches import batches
from model import SEED, adamw, gpt
from precision import BF16
from system import System, Updates

from vpipe import Asynchronous, Execution, Pipeline


def _updates(schedule: str, microbatches: int, update_every: int | None, cut: Sequence[int],
             precision: str) -> Updates:
    pipe = Pipeline(gpt(), adamw, stages=cut, schedule=Asynchronous(schedule, update_every=update_every),
                    microbatches=microbatches, precision=precision, execution=Execution(device="cpu"), seed=SEED)
    for step in pipe.train(batches()):
        yield step.loss


def _kinds(precision: str) -> Iterator[tuple[str, str]]:
    """What a precision is called here, and how its name goes on in that of a system."""
    yield precision, ""
    if precision == BF16:
        yield "bf16_pure", " pure"


def vpipe_systems(microbatches: Sequence[int], cut: Sequence[int], precision: str) -> Iterator[System]:
    """1F1B and GPipe for every number of microbatches."""
    for m in microbatches:
        for schedule in ("1f1b", "gpipe"):
            for kind, more in _kinds(precision):
                yield System(f"vpipe {schedule} m{m}{more}", "vpipe", partial(_updates, schedule, m, None, cut, kind))


def stream_systems(microbatches: Sequence[int], cut: Sequence[int], precision: str) -> Iterator[System]:
    """PipeDream: an update of 16 samples like the others, but without waiting for the pipeline to empty.

    It goes on as one long stream from turn to turn, so it needs no more than one microbatch per update.
    """
    for m in microbatches:
        for kind, more in _kinds(precision):
            yield System(f"vpipe pipedream m{m}{more}", "vpipe", partial(_updates, "pipedream", m, m, cut, kind),
                          exact=False)
