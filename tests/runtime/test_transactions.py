"""Calls x failures: after a call that fails, every rank is as if it had not been asked."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nccl_jobs
import pytest
import torch
from everywhere import HARDEST
from jobs import fingerprint
from pipelines import parts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from world import World

from vpipe import Model, Pipeline
from vpipe.checkpoint.manifest import Position
from vpipe.errors import RunError, UserError
from vpipe.runtime.microbatches import Batch

BATCHES = [{"input": torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)),
            "target": torch.arange(8) % 3} for seed in range(6)]
BAD = [{"input": BATCHES[0]["input"]}]
ERROR, INTERRUPT, FULL = ZeroDivisionError("mine"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")
SIGNAL: Any = partial(os.kill, os.getpid(), signal.SIGINT)
armed: dict[str, Any] = {}
"""What the layer of this name raises or calls, once."""
made = set[Path]()


def trip(name: str) -> None:
    """Do what is armed under this name."""
    if callable(what := armed.pop(name, None)):
        what()
    elif what is not None:
        raise what


def factor(step: int) -> float:
    return 1 / (1 + step % 4)


class Probe(nn.Module):
    """Counts its forwards in a buffer, draws from Python's generator, and may raise."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        trip(self.name)
        hidden = hidden * (1 + self.forwards / 100)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: trip(f"backward of {self.name}"))
        return hidden


class Loss(nn.CrossEntropyLoss):
    """May raise."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        trip("loss")
        return super().forward(scores, target)


class Adam(torch.optim.AdamW):
    """May raise before its step, or when it has begun to keep state."""

    def step(self, closure: Any = None) -> Any:
        trip("step")
        if "state" in armed:
            self.state[self.param_groups[0]["params"][-1]]["begun"] = torch.ones(())
            trip("state")
        return super().step(closure)


class Observer:
    """May raise before a step."""

    def gradients(self, update: int, named: Any) -> None:
        trip("observer")

    def weights(self, update: int, named: Any) -> None:
        pass


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    (made := Adam(parameters, lr=0.01)).register_step_pre_hook(lambda *_: trip("hook"))
    return made


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One has another rate than at first: their parameters fit into no single group."""
    matrices, others = ([p for p in parameters if (p.dim() == 2) is matrix] for matrix in (True, False))
    return torch.optim.AdamW([{"params": matrices, "initial_lr": 0.5}, {"params": others, "initial_lr": 0.1}], lr=0.01)


def pipeline(optimizer: Any = adam, width: int = 8, lanes: int = 0, **arguments: Any) -> Pipeline:
    torch.manual_seed(0)
    model = Model.sequential(nn.Sequential(
        nn.Linear(6, width), Probe("front"), nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.1),
        Probe("back"), nn.Linear(width, 3)), loss=Loss())
    mesh = {"mesh": init_device_mesh("cpu", (1, lanes), mesh_dim_names=("pp", "tp"))} if lanes else {}
    pipe = Pipeline(model, **parts(**{"stages": [3, 4], "microbatches": 2, "optimizer": optimizer, "seed": 2,
                                      "average": 0.9, "learning_rate_factor": factor, "schedule": "1f1b", **mesh,
                                      **arguments}))
    pipe.observe(dict.fromkeys(range(4), Observer()))
    return pipe


def train(pipe: Pipeline, batches: Any, **arguments: Any) -> list[float]:
    return [step.loss for step in pipe.train(batches, **arguments)]


def torn(error: BaseException) -> Iterator[Batch]:
    raise error
    yield {}


class Unreadable:
    def __iter__(self) -> Iterator[Batch]:
        raise ERROR


def entered(context: Any) -> Iterator[None]:
    with context:
        yield


def raising(error: BaseException) -> Any:
    def function(*arguments: Any, **options: Any) -> Any:
        raise error
    return function


def layer(name: str, error: Any, call: Callable[[], Any], rank: int | None = None) -> Any:
    """A call during which a layer, an optimizer or a function of the user's raises, or a signal comes there; ``rank``:
    where, of several."""
    if rank is None or os.environ.get("RANK", str(rank)) == str(rank):
        armed[name] = error
    try:
        return call()
    finally:
        armed.clear()


def unrated(pipe: Pipeline, call: Callable[[], Any], rank: int | None = None) -> Any:
    """A call while the factor of the learning rate raises; ``rank``: where, of several."""
    steps = next(iter(pipe.engine.workers.values())).optimizer_steps
    here = rank is None or os.environ["RANK"] == str(rank)
    with patch.object(steps, "factor", raising(ERROR) if here else steps.factor):
        return call()


def marked(pipe: Pipeline, call: Callable[[], Any], rank: int) -> Any:
    """A call while a weight of one rank has a gradient that no microbatch has made."""
    weight = pipe.engine.local_stages[0].weights.leaves()[0]
    weight.grad = torch.ones_like(weight) if os.environ.get("RANK") == str(rank) else None
    try:
        return call()
    finally:
        weight.grad = None


def patched(name: str, error: BaseException, call: Callable[[], Any], rank: int = 1) -> Any:
    """A call during which a function of a library raises, on one rank of several."""
    if os.environ.get("RANK", str(rank)) != str(rank):
        return call()
    with patch(name, raising(error)):
        return call()


def spoilt(pipe: Pipeline, change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """A state with other numbers, of which no pipeline takes the last tensor that is trained."""
    state = pipe.state_dict()
    return {name: change(value) if name == "6.weight" else value + 1 for name, value in state.items()}


def saved(folder: Path, *optimizer: Any, **arguments: Any) -> Path:
    """A checkpoint, made once for all rows."""
    if (at := folder.with_name(f"{len(optimizer)}{arguments}")) not in made:
        pipe = pipeline(*optimizer, **arguments)
        train(pipe, BATCHES[:1])
        pipe.save(at)
        made.add(at)
    return at


def damaged(folder: Path) -> Path:
    """A checkpoint of which one file is damaged."""
    (pipe := pipeline()).save(folder / "saved")
    file = max((folder / "saved").glob("*.safetensors"))
    if os.environ.get("RANK", "0") == "0":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    pipe.usage()  # when all ranks are there
    return folder / "saved"


def evaluate(pipe: Pipeline, **arguments: Any) -> Any:
    return pipe.evaluate(BATCHES, **arguments)


def on_one(rank: int, there: Any, elsewhere: Any = BATCHES) -> Any:
    return there if os.environ.get("RANK") == str(rank) else elsewhere


Act = Callable[..., Any]
SAVED, SHARDS = "vpipe.checkpoint.shards.", "vpipe.checkpoint.checkpoint.Checkpoint.tensors"
READ = "position arrangement stages device sharded local_usage clock_offset drain check_replicas local_state usage"
READING: dict[str, Act] = {READ: lambda p, f: [
    each() if callable(each := getattr(p, name)) else each for name in READ.split()]}
TRAINED: dict[str, Act] = {
    "train: updates": lambda p, f: train(p, BATCHES, updates="two"),
    "train: stop": lambda p, f: train(p, BATCHES, stop=True),
    "train: pauses": lambda p, f: train(p, BATCHES, pauses=[0]),
    "train: no iterator": lambda p, f: train(p, Unreadable()),
    "train: torn": lambda p, f: train(p, torn(ERROR)),
    "train: interrupted reading": lambda p, f: train(p, torn(INTERRUPT)),
    "train: bad batch": lambda p, f: train(p, BAD),
    "train: factor": lambda p, f: unrated(p, lambda: train(p, BATCHES)),
    "evaluate: outputs": lambda p, f: evaluate(p, outputs="none"),
    "evaluate: no iterator": lambda p, f: p.evaluate(Unreadable(), averaged=True),
    "evaluate: empty": lambda p, f: p.evaluate([], averaged=True),
    "evaluate: torn": lambda p, f: p.evaluate(torn(ERROR)),
    "evaluate: bad batch": lambda p, f: p.evaluate([*BATCHES, *BAD], averaged=True),
    "evaluate: metric raises": lambda p, f: evaluate(p, outputs=raising(ERROR)),
    "evaluate: metric raises, averaged": lambda p, f: evaluate(p, outputs=raising(ERROR), averaged=True),
    "evaluate: metric calls": lambda p, f: evaluate(p, outputs=lambda named: p.load(f)),
    "evaluate: metric of no name": lambda p, f: evaluate(p, outputs=lambda named: {"x": named["x"]}),
    "evaluate: metric without rows": lambda p, f: evaluate(p, outputs=lambda named: {"x": named["loss"].sum()}),
    "state_dict: views": lambda p, f: p.state_dict(averaged=True, corrected=False),
    "load: trained": lambda p, f: p.load(saved(f)),
    "load_state_dict: trained": lambda p, f: p.load_state_dict(p.state_dict()),
    "sharded: trained": lambda p, f: p.sharded.load_state_dict(p.sharded.state_dict()),
    "restore: trained": lambda p, f: p.restore(p.position, lambda wanted: p.local_state()),
    "save: folder": lambda p, f: p.save(5),
    "save: taken": lambda p, f: ((f / "x").mkdir(exist_ok=True), (f / "x/y").touch(), p.save(f / "x")),
    "save: full disk": lambda p, f: patched(f"{SAVED}save_file", FULL, lambda: p.save(f / "saved")),
    "save: no manifest": lambda p, f: patched("vpipe.checkpoint.save.write_manifest", FULL,
                                              lambda: p.save(f / "saved"), rank=0),
    "save: out of memory": lambda p, f: patched("vpipe.runtime.engine.whole", MemoryError(),
                                                lambda: p.save(f / "saved")),
    "gradient_norms": lambda p, f: p.gradient_norms(),
    "usage: since": lambda p, f: p.usage(since=5),
    "record: limit": lambda p, f: p.record(limit="all"),
    "labelled: its body": lambda p, f: [train(p, torn(ERROR)) for _ in entered(p.labelled())],
    "observe: ranks": lambda p, f: p.observe({}),
    "schedule_kernels": lambda p, f: p.schedule_kernels(None),
    "prepared: no world": lambda p, f: Pipeline.prepared(p.model, p.description, p.lowered, None),
}
LAYERS: dict[str, Act] = {
    "evaluate: front": lambda p, f: layer("front", ERROR, lambda: evaluate(p, averaged=True)),
    "evaluate: back": lambda p, f: layer("back", ERROR, lambda: evaluate(p)),
}
STEPS = ("step", "hook", "observer", "state")
"""Of an optimizer's step, before it changes anything: on all ranks, for one of them may step before another raises."""
IN_BATCHES: dict[str, Act] = {f"train: on rank {rank}, {place}": lambda p, f, rank=rank, place=place: layer(
    place, ERROR, lambda: train(p, BATCHES), rank) for place, rank in (
        ("front", 0), ("back", 1), ("loss", 1), ("backward of front", 0), ("backward of back", 1),
        *((place, None) for place in STEPS))}
"""Of two stages or replicas each; where all norms come before a step, also what raises late."""
UNTRAINED: dict[str, Act] = {
    "load: folder": lambda p, f: p.load(f / "none"),
    "load: damaged": lambda p, f: p.load(damaged(f)),
    "load: cannot be read": lambda p, f: patched(f"{SAVED}safe_open", FULL, lambda: p.load(saved(f))),
    "load: another error": lambda p, f: patched(SHARDS, ERROR, lambda: p.load(saved(f))),
    "load: another model": lambda p, f: p.load(saved(f, width=9)),
    "load: other groups": lambda p, f: p.load(saved(f, two_groups)),
    "restore: position": lambda p, f: p.restore(None, lambda wanted: p.local_state()),
    "restore: tensors": lambda p, f: p.restore(Position(0, 0), raising(ERROR)),
    "load_state_dict: a list": lambda p, f: p.load_state_dict([]),
    "load_state_dict: shape": lambda p, f: p.load_state_dict(spoilt(p, lambda t: t[:2])),
    "load_state_dict: numbers": lambda p, f: p.load_state_dict(spoilt(p, lambda t: t.to(torch.complex64))),
    "load_state_dict: no tensor": lambda p, f: p.load_state_dict(spoilt(p, Tensor.tolist)),
    "load_state_dict: a name": lambda p, f: p.load_state_dict(
        {name: value + 1 for name, value in p.state_dict().items() if name != "6.weight"}),
    "load_state_dict: position": lambda p, f: p.load_state_dict(
        {**p.state_dict(sharded=True), "vpipe": {"position": torch.zeros(2)}}),
    "sharded: optimizer": lambda p, f: p.sharded.load_state_dict(
        {"model": {name: value + 1 for name, value in p.sharded.state_dict()["model"].items()}, "optimizer": 5}),
}
ALONE: dict[str, Act] = {f"train: {error!r} in {place}": lambda p, f, place=place, error=error: layer(
    place, error, lambda: train(p, BATCHES)) for error in (ERROR, INTERRUPT)
    for place in ("front", "back", "backward of front", "backward of back", *STEPS)} | {
    "train: signal in front": lambda p, f: layer("front", SIGNAL, lambda: train(p, BATCHES)),
    "train: signal in a backward": lambda p, f: layer("backward of back", SIGNAL, lambda: train(p, BATCHES)),
    "evaluate: interrupted": lambda p, f: layer("back", INTERRUPT, lambda: evaluate(p, averaged=True)),
    "evaluate: signal": lambda p, f: layer("front", SIGNAL, lambda: evaluate(p, averaged=True)),
    "evaluate: metric interrupted": lambda p, f: evaluate(p, outputs=raising(INTERRUPT)),
    "save: interrupted": lambda p, f: patched(f"{SAVED}save_file", INTERRUPT, lambda: p.save(f / "saved")),
}
INTERRUPTED: dict[str, Act] = {
    "load: interrupted": lambda p, f: patched(f"{SAVED}safe_open", INTERRUPT, lambda: p.load(saved(f)))}
ON_ONE: dict[str, Act] = {f"{name} on rank {rank}": partial(call, rank) for rank in (0, 1) for name, call in {
    "evaluate: torn": lambda rank, p, f: p.evaluate(on_one(rank, chain(BATCHES[:5], torn(ERROR))), averaged=True),
    "evaluate: bad batch": lambda rank, p, f: p.evaluate(on_one(rank, [*BATCHES[:1], *BAD])),
    "evaluate: fewer batches": lambda rank, p, f: p.evaluate(on_one(rank, BATCHES[:4])),
    "evaluate: empty": lambda rank, p, f: p.evaluate(on_one(rank, []), averaged=True),
    "evaluate: no iterator": lambda rank, p, f: p.evaluate(on_one(rank, Unreadable()), averaged=True),
    "train: no iterator": lambda rank, p, f: train(p, on_one(rank, Unreadable())),
    "state_dict: no memory for another's": lambda rank, p, f: patched(
        "vpipe.runtime.collectives.torch.empty", MemoryError(), p.state_dict, rank),
    "train: torn": lambda rank, p, f: train(p, on_one(rank, torn(ERROR))),
    "train: interrupted reading": lambda rank, p, f: train(p, on_one(rank, torn(INTERRUPT))),
    "train: exits": lambda rank, p, f: train(p, on_one(rank, torn(SystemExit(3)))),
    "train: bad batch": lambda rank, p, f: train(p, on_one(rank, BAD)),
    "train: empty": lambda rank, p, f: train(p, on_one(rank, [])),
    "train: both": lambda rank, p, f: train(p, on_one(rank, BAD, torn(ERROR))),
    "train: one has none, one cannot": lambda rank, p, f: train(p, on_one(rank, [], torn(ERROR))),
    "train: factor": lambda rank, p, f: unrated(p, lambda: train(p, BATCHES), rank),
    "train: factor and reading": lambda rank, p, f: unrated(p, lambda: train(p, on_one(rank, BATCHES, BAD)), rank),
    "train: a gradient": lambda rank, p, f: marked(p, lambda: train(p, BATCHES), rank),
    }.items()}
"""Of two processes."""
NO_ROW = {"plan", "stop"}
"""One makes no pipeline; the other ends the next training, which has tests of its own."""


def seen(pipe: Pipeline) -> list[Any]:
    """What tells two pipelines apart, with their next three updates."""
    return [fingerprint(pipe.state_dict()), fingerprint(pipe.state_dict(averaged=True)), pipe.position,
            train(pipe, BATCHES[2:5]), pipe.evaluate(BATCHES[:1])]


def after(*, calls: dict[str, Act], folder: Path, **arguments: Any) -> dict[str, str]:
    """Calls that do not fail as they should, or some after which a pipeline is not as another that was not asked.

    Which are made after one another on one pipeline changes by the day; some are made on pipelines that trained.
    """
    wrong, drawn = {}, random.Random(date.today().toordinal()).sample(list(calls), len(calls))
    fresh = [name for name in drawn if name in UNTRAINED | INTERRUPTED]
    trained = [name for name in drawn if name not in fresh]
    for names in [*batched(fresh), *batched(trained)]:
        both = [pipeline(**arguments) for _ in range(2)]
        for pipe in both if names[0] in trained else ():
            train(pipe, BATCHES[:2])
        ends = {}
        for name in names:
            (own := folder / str(drawn.index(name))).mkdir(exist_ok=True)
            try:
                calls[name](both[0], own)
                ends[name] = "returned"
            except BaseException as error:
                ends[name] = type(error).__name__
        expected = seen(both[1])
        try:
            same = [a == b for a, b in zip(seen(both[0]), expected, strict=True)]
        except Exception as error:
            same, ends["then"] = [False], str(error)
        if not all(same) or any((end == "returned") != (name in READING) for name, end in ends.items()):
            wrong[str(same)] = str(ends)
    return wrong


def batched(names: list[str], most: int = 7) -> Iterator[list[str]]:
    yield from (names[first:first + most] for first in range(0, len(names), most))


@pytest.mark.parametrize("arguments", [{}, *(pytest.param(more, marks=pytest.mark.jobs) for more in (
    {"schedule": "pipedream"}, {"replicas": 2}))], ids=str)
def test_calls_that_fail_in_one_process_leave_everything_as_it_was(arguments: dict[str, Any], tmp_path: Path) -> None:
    calls = READING | TRAINED | LAYERS | UNTRAINED | ALONE | INTERRUPTED
    if "schedule" in arguments:  # the last stage has made an update by then
        calls = {name: call for name, call in calls.items() if "backward of front" not in name}
    assert after(calls=calls, folder=tmp_path, **arguments) == {}


def after_here(folder: str, **arguments: Any) -> dict[str, str]:
    layers = {} if "lanes" in arguments else LAYERS  # lanes wait for one another within a layer
    return after(calls=READING | TRAINED | layers | ON_ONE | UNTRAINED, folder=Path(folder), **arguments)


def after_first(**arguments: Any) -> dict[str, str]:
    """The calls whose second batch fails on one rank, after which a pipeline is not as one that has made the first."""
    wrong = {}
    for name, rank in product(("torn", "bad", "fewer", "factor"), (0, 1)):
        pipe, other = (pipeline(**arguments) for _ in range(2))
        train(other, BATCHES[:1])
        there = chain(BATCHES[:1], {"torn": torn(ERROR), "bad": BAD, "fewer": ()}.get(name, BATCHES[1:]))
        try:
            for _ in (steps := pipe.train(on_one(rank, there))):
                if name == "factor":
                    unrated(pipe, partial(next, steps), rank)
            wrong[name] = "returned"
        except (RunError, UserError, ZeroDivisionError) as error:
            if seen(pipe) != seen(other):
                wrong[name] = str(error)
    return wrong


@pytest.mark.parametrize("arguments", [{}, *(pytest.param(each, marks=pytest.mark.jobs) for each in (
    {"stages": 1, "lanes": 2}, {"stages": 1, "replicas": 2}))], ids=str)
def test_a_second_batch_that_fails_on_one_rank_leaves_the_first(arguments: dict[str, Any], two: World) -> None:
    assert two.run(after_first, **arguments) == [{}, {}]


def after_batches(folder: str, **arguments: Any) -> dict[str, str]:
    return after(calls=IN_BATCHES, folder=Path(folder), **arguments)


@pytest.mark.parametrize("arguments", [{"grad_clip": 1.0}, {"grad_clip": 1.0, "schedule": "zb_h1"},
                                       {"stages": 1, "replicas": 2}], ids=str)
def test_a_layer_that_raises_on_one_rank_leaves_all_as_they_were(arguments: dict[str, Any], tmp_path: Path,
                                                                 two: World) -> None:
    assert two.run(after_batches, folder=str(tmp_path), **arguments) == [{}, {}]


@pytest.mark.jobs
def test_under_nccls_rules_too(tmp_path: Path, two: World) -> None:
    assert two.run(nccl_jobs.under, run="test_transactions.after_batches", **HARDEST, folder=str(tmp_path),
                   grad_clip=1.0) == [{}, {}]
    assert two.run(nccl_jobs.under, run="test_transactions.after_first", **HARDEST) == [{}, {}]


@pytest.mark.parametrize("arguments", [{}, *(pytest.param(each, marks=pytest.mark.jobs) for each in (
    {"stages": 1, "lanes": 2}, {"schedule": "pipedream"}, {"stages": 1, "replicas": 2}))],
    ids=str)
def test_calls_that_fail_in_two_processes_leave_every_rank_as_it_was(arguments: dict[str, Any], tmp_path: Path,
                                                                     two: World) -> None:
    assert two.run(after_here, folder=str(tmp_path), **arguments) == [{}, {}]


def test_every_public_name_has_a_row() -> None:
    rows = {name for row in READING | TRAINED | UNTRAINED for name in row.partition(":")[0].split()}
    assert rows ^ {name for name in vars(Pipeline) if not name.startswith("_")} == NO_ROW


@pytest.mark.parametrize("calls", [
    lambda pipe: pipe.evaluate(BATCHES, lambda named: pipe.state_dict()),
    lambda pipe: layer("front", pipe.drain, lambda: train(pipe, BATCHES)),
    lambda pipe: (train(pipe, BATCHES), layer("step", pipe.usage, lambda: train(pipe, BATCHES)))])
def test_a_call_within_another_is_told_so(calls: Callable[[Pipeline], Any]) -> None:
    with pytest.raises(UserError, match="calls the pipeline in the middle of an update or evaluation"):
        calls(pipeline())


def test_a_change_under_way_is_refused_again() -> None:
    pipe = pipeline(schedule="pipedream")
    next(pipe.train(BATCHES))
    with torch.no_grad():
        pipe.engine.local_stages[0].modules[0].weight.add_(1)
    for call in (pipe.drain, pipe.state_dict, pipe.drain):
        with pytest.raises(UserError, match="was changed after step 0"):
            call()
