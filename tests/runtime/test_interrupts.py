"""Ctrl-C in a script: a first one leaves a pipeline whole, a second one ends at once; a stream says what it lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import BATCHES, Interrupted, Interrupter
from jobs import fingerprint
from models import norm_model, rich_model
from pipelines import parts
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.errors import RunError, counted
from vpipe.runtime.microbatches import Batch
from vpipe.schedules.graph import Flow

pytestmark = pytest.mark.jobs

WHOLE = "made, and the pipeline is as after the last: train, evaluate and save go on from there"


@pytest.fixture(autouse=True)
def _handler_of_python() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def untied() -> Model:
    return rich_model(tied=False)


def small() -> Model:
    """Dropout, a skip and a mask."""
    layers = untied().layers
    return Model([*layers[:3], layers[-1]], untied().batch)


def small_norm() -> Model:
    """Running statistics, which a batch must advance once."""
    layers = norm_model().layers
    return Model([*layers[:2], layers[-1]], norm_model().batch)


@pytest.mark.parametrize(("model", "seeds", "arguments"), [
    (small, 20, {"schedule": "1f1b"}), (small_norm, 20, {"schedule": "gpipe", "recompute": 0.5}),
    *(pytest.param(*case, marks=[pytest.mark.system, pytest.mark.long]) for case in (
        (untied, 500, {"schedule": "1f1b", "stages": 3}), (norm_model, 500, {"schedule": "gpipe", "recompute": 0.5})))])
def test_an_interrupt_at_any_instruction_leaves_the_oracles_losses(model: Any, seeds: int, arguments: dict[str, Any],
                                                                   tmp_path: Path) -> None:
    pipe = Interrupted(model, 3 * seeds, tmp_path / "saved", **arguments)
    for seed in range(seeds):
        pipe.press(seed)
    assert pipe.interrupted >= 0.75 * seeds
    pipe.compare()


def test_a_checkpoint_that_takes_the_place_of_another_leaves_nothing_in_the_way(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    pipe = Pipeline(small(), torch.optim.SGD, stages=2)
    module = "checkpoint/directory.py"

    def save(*at: int) -> int:
        keys = Interrupter(*at, module=module)
        with keys.watching():
            pipe.save(tmp_path / "saved")
        return keys.count

    save()
    for at in range(1, save() + 1):
        with pytest.raises(KeyboardInterrupt):
            save(at)
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]


class Keyboard:
    """Presses Ctrl-C ``times`` times when the ``at``-th call of ``where`` comes."""

    def __init__(self, where: str = "", at: int = 0, times: int = 1) -> None:
        self.where, self.left, self.times, self.covers = where, at, times, False

    def called(self, where: str) -> None:
        self.left -= where == self.where
        if where == self.where and self.left == 0:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
            if self.covers:
                raise ValueError("covered")


class Watched(nn.Module):
    def __init__(self, keyboard: Keyboard) -> None:
        super().__init__()
        self._keyboard = keyboard

    def forward(self, hidden: Tensor) -> Tensor:
        self._keyboard.called("forward")
        return hidden * 1.0


def pipeline(keyboard: Keyboard, **arguments: Any) -> Pipeline:
    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            if self in made:  # and no copy of it, by which vpipe looks for a norm over all parameters
                keyboard.called("step")

    def make(parameters: list[nn.Parameter]) -> Watching:
        made.append(Watching(parameters, lr=0.1))
        return made[-1]

    made: list[Watching] = []

    layers = list(untied().layers)
    layers.insert(4, Layer("watched", lambda: Watched(keyboard)))
    return Pipeline(Model(layers, untied().batch),
                    **parts(stages=3, microbatches=4, seed=2,
                            optimizer=make, **arguments))


def train(pipe: Pipeline, batches: Iterator[Batch] | list[Batch]) -> list[float]:
    return [step.loss for step in pipe.train(batches)]


def interrupted(keyboard: Keyboard, act: Callable[[Pipeline], object], **arguments: Any) -> tuple[Pipeline, str]:
    """The pipeline after an interrupt, and what it says."""
    pipe = pipeline(keyboard, **arguments)
    with pytest.raises(KeyboardInterrupt) as caught:
        act(pipe)
    return pipe, " ".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize(("keyboard", "done"), [
    (Keyboard("forward", 1), 0), (Keyboard("forward", 6), 1), (Keyboard("forward", 6, times=2), 1),
    (Keyboard("step", 1), 1), (Keyboard("step", 2), 1)])
def test_a_batch_is_given_up_before_its_first_step_and_ended_after_it(keyboard: Keyboard, done: int) -> None:
    pipe, note = interrupted(keyboard, lambda pipe: train(pipe, BATCHES), schedule="1f1b")
    assert note == f"{counted(done, 'update')} {WHOLE}"
    assert pipe.position.steps == done
    assert train(pipe, BATCHES[done:]) == train(pipeline(Keyboard(), schedule="1f1b"), BATCHES)[done:]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_interrupt_that_a_failing_layer_covers_is_raised(schedule: str) -> None:
    acts: list[Callable[[Pipeline], Any]] = [lambda pipe: train(pipe, BATCHES), lambda pipe: pipe.evaluate(BATCHES)]
    for act in acts:
        keyboard = Keyboard("forward", 6)
        keyboard.covers = True
        with pytest.raises(KeyboardInterrupt) as caught:
            act(pipeline(keyboard, schedule=schedule))
        assert isinstance(caught.value.__context__, RunError)
        assert "covered" in str(caught.value.__context__)


def test_a_second_interrupt_in_a_step_ends_it_at_once() -> None:
    pipe, note = interrupted(Keyboard("step", 5, times=2), lambda pipe: train(pipe, BATCHES), schedule="1f1b")
    assert note == ("1 update made by all stages; stages here have made 1 and 2: build a new pipeline, and load a "
                    "checkpoint")
    with pytest.raises(RunError, match="failed in the middle of an update"):
        pipe.state_dict()


def test_an_interrupt_of_a_stream_loses_nothing_and_a_second_one_what_it_says() -> None:
    pipe, note = interrupted(Keyboard("forward", 6), lambda pipe: train(pipe, BATCHES), schedule="pipedream",
                             update_every=1)
    assert note == ("4 updates made, and nothing is lost: the next call of the pipeline ends the microbatches in "
                    "flight")
    state, ended = pipe.state_dict(), pipe.position.steps
    whole = pipeline(Keyboard(), schedule="pipedream", update_every=1)
    for step in whole.train(BATCHES):
        if step.index == 3:  # where the other was interrupted
            break
    assert fingerprint(whole.state_dict()) == fingerprint(state)
    assert whole.position.steps == ended > 4
    _, note = interrupted(Keyboard("forward", 6, times=2), lambda pipe: train(pipe, BATCHES), schedule="pipedream",
                          update_every=1)
    assert note == ("3 updates made by all stages; stages here have made 3 to 5, and microbatches 3 to 5 in flight are "
                    "lost: build a new pipeline, and load a checkpoint")


def test_an_interrupt_while_a_stream_is_ordered_leaves_the_pipeline_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, follow = Keyboard("ordered", 5), Flow.follow
    pipe = pipeline(keyboard, schedule="pipedream", update_every=1)
    monkeypatch.setattr(Flow, "follow", lambda *each: keyboard.called("ordered") or follow(*each))
    with pytest.raises(KeyboardInterrupt) as caught:
        train(pipe, BATCHES)
    assert caught.value.__notes__ == [f"0 updates {WHOLE}"]
    assert train(pipe, BATCHES) == train(pipeline(Keyboard(), schedule="pipedream", update_every=1), BATCHES)


@pytest.mark.parametrize("arguments", [{"schedule": "1f1b"}, {"schedule": "pipedream"}])
def test_an_interrupt_while_a_batch_is_read_ends_those_before(arguments: dict[str, Any]) -> None:
    def broken_off() -> Iterator[Batch]:
        yield from BATCHES[:2]
        signal.raise_signal(signal.SIGINT)

    pipe = pipeline(Keyboard(), **arguments)
    for act in (lambda: train(pipe, broken_off()), lambda: pipe.evaluate(broken_off())):
        with pytest.raises(KeyboardInterrupt):
            act()
    assert pipe.position.microbatches == 8
    whole = pipeline(Keyboard(), **arguments)
    train(whole, BATCHES[:2])
    assert train(pipe, BATCHES[2:3]) == train(whole, BATCHES[2:3])


def test_handlers_are_pythons_between_steps_and_those_of_the_user_stay() -> None:
    pipe, seen = pipeline(Keyboard("forward", 1), schedule="1f1b"), list[object]()

    def note(number: int, frame: object) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    signal.signal(signal.SIGINT, note)
    train(pipe, BATCHES[:1])
    assert seen == [note] == [signal.signal(signal.SIGINT, signal.default_int_handler)]
    for _ in pipe.train(BATCHES[1:3]):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
