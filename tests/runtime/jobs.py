"""Jobs for a test world. Each also runs in the test's own process, which gives the expected numbers.

Arguments and results are what JSON can hold, which keeps every float as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, repeat
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from models import data_dependent_model, dtype_model, frozen_front, norm_model, rich_batches, rich_model, sliced_model
from pipelines import parts
from rank_process import tell
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vpipe import Model, Pipeline
from vpipe.distributed.init import exchange
from vpipe.errors import UserError
from vpipe.runtime.microbatches import Batch

MODELS = {"rich": rich_model, "untied": lambda: rich_model(tied=False), "dtypes": dtype_model,
          "norm": norm_model, "frozen": frozen_front, "sliced": sliced_model,
          "labelled": lambda: Model(rich_model().layers, rich_model().batch, labels="labels")}


class AdamW:
    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return torch.optim.AdamW(named.values(), lr=3e-3, weight_decay=0.1, fused=True) if named else None


class MuonAndAdamW:
    """Muon for matrices, AdamW for the rest: none where a stage has none of them."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = [p for p in named.values() if p.dim() == 2]
        others = {name: p for name, p in named.items() if p.dim() != 2}
        return ([torch.optim.Muon(matrices, lr=0.02)] if matrices else []) + (
            [AdamW().from_named(others)] if others else [])


OPTIMIZERS = {"adamw": AdamW, "muon": MuonAndAdamW, "none": lambda: lambda parameters: None}


def fingerprint(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Every tensor by the sha256 of its bytes, with dtype and shape."""
    return {name: f"{t.dtype} {list(t.shape)} " + hashlib.sha256(
        t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for name, t in state.items()}


def decay(update: int) -> float:
    return 1.0 / (1 + update)


def pipeline(model: Model, optimizer: Any = "adamw", **arguments: Any) -> Pipeline:
    """``optimizer``: a name of :data:`OPTIMIZERS`, or a factory."""
    factory = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
    return Pipeline(model, **parts(**{"optimizer": factory, "seed": 2, "learning_rate_factor": decay, **arguments}))


def train(*, model: str, batches: int = 3, samples: int = 8, lengths: Sequence[int] = (6,),
          evaluate_after: Sequence[int] = (), leave_after: int | None = None, more: int = 0, hide: bool = False,
          **arguments: Any) -> dict[str, Any]:
    """Everything a run shows: steps, evaluations, the whole state; ``middle`` is that before a second call of ``train``
    which has something to train on, or goes on after the first was left.

    Args:
        evaluate_after: updates after which to evaluate.
        leave_after: the update after which to break out of the loop.
        more: batches for a second call of ``train``.
        hide: put every field that this rank does not read on the meta device.
    """
    pipe = pipeline(MODELS[model](), **arguments)
    data = rich_batches(batches + more, samples, lengths=tuple(lengths))
    held_out = rich_batches(2, samples, seed=9)
    if hide:
        data, held_out = hidden(data, pipe), hidden(held_out, pipe)
    steps, evaluations = [], []
    for step in pipe.train(data[:batches]):
        steps.append(step)
        if step.index in evaluate_after:
            evaluations.append(pipe.evaluate(held_out))
        if step.index == leave_after:
            break
    middle = fingerprint(pipe.state_dict()) if more or leave_after is not None else None
    steps += pipe.train(data[batches:])
    return {"steps": [[s.index, s.loss, s.learning_rate, s.gradient_norm, s.stop] for s in steps],
            "evaluations": evaluations, "middle": middle, "held_out": pipe.evaluate(held_out[:1]),
            "state": fingerprint(pipe.state_dict())}


def evaluate(*, sizes: Sequence[int], hide: bool = False, **arguments: Any) -> list[Any]:
    """Evaluations on batches of these sizes, before training, with outputs, and after each step."""
    pipe = pipeline(rich_model(), **arguments)
    held_out: list[Batch] = [rich_batches(1, samples, seed=samples)[0] for samples in sizes]
    if hide:
        held_out = hidden(held_out, pipe)
    loss, outputs = pipe.evaluate(held_out, ("h", "labels"))
    found: list[Any] = [loss, fingerprint(outputs)]
    for _ in pipe.train(rich_batches(1, 8)):
        found.append(pipe.evaluate(held_out))
        if "average" in arguments:
            found.append(pipe.evaluate(held_out, averaged=True))
    return found


_made: dict[str, str] = {}


def train_here(**arguments: Any) -> dict[str, Any]:
    """What :func:`train` returns in this process; of tests that expect the same run, one makes it."""
    key = json.dumps(arguments, sort_keys=True)
    if key not in _made:
        _made[key] = json.dumps(train(**arguments))
    return dict(json.loads(_made[key]))


def hidden(batches: Sequence[Batch], pipe: Pipeline) -> list[Batch]:
    """The batches without the values of fields that no layer of this process reads."""
    read = {name for stage in pipe.engine.local_stages for name in stage.spec.fields}
    return [{name: t if name in read else t.to("meta") for name, t in batch.items()} for batch in batches]


def what_ranks_build(*, balance: bool) -> list[list[str]]:
    """The layers that this rank builds, and on which device, until the first step is made."""
    built: list[list[str]] = []
    model = rich_model()

    def counting(name: str, build: Any) -> Any:
        def counted() -> nn.Module:
            built.append([name, str(torch.empty(0).device)])
            return build()

        return counted

    model = Model([replace(layer, build=counting(layer.name, layer.build)) for layer in model.layers], model.batch)
    cut = {"stages": 4} if balance else {"partition": [2, 1, 2, 3]}
    pipe = pipeline(model, schedule="1f1b", microbatches=2, recompute=0.5, **cut)
    list(pipe.train(rich_batches(1, 4)))
    return built


def what_ranks_read() -> list[str]:
    """The fields whose values this rank's layers were given, by the hook that every tensor passes."""
    pipe = pipeline(rich_model(), schedule="1f1b", partition=[2, 2, 2, 2], microbatches=2)
    given: set[str] = set()
    batches = rich_batches(2, 4)
    pointers = {t.untyped_storage().data_ptr(): name for batch in batches for name, t in batch.items()}
    for stage in pipe.engine.local_stages:
        for module in stage.modules.values():
            module.register_forward_pre_hook(lambda _, arguments: given.update(
                pointers[t.untyped_storage().data_ptr()] for t in arguments
                if t.untyped_storage().data_ptr() in pointers))
    list(pipe.train(batches))
    return sorted(given)


def stopped(*, schedule: str, after: int) -> list[list[Any]]:
    """Steps up to the one that says stop, which only the last stage's process is asked for."""
    pipe = pipeline(rich_model(), schedule=schedule, partition=[2, 2, 2, 2], microbatches=2)
    asked = count(1)
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1

    def stop() -> bool:
        assert last, "a rank without the last stage was asked"
        return next(asked) > after

    steps = []
    for step in pipe.engine.training.train(rich_batches(12, 4), stop=stop):
        steps.append([step.index, step.loss, step.stop])
        if step.stop:
            break
    return [*steps, [fingerprint(pipe.state_dict())]]


def stopped_by_rank(*, rank: int) -> list[list[Any]]:
    """Where trainings end that a thread of this rank stops after its third step, and another training after them."""
    ends = []
    for schedule in ("1f1b", "pipedream"):
        pipe = pipeline(rich_model(), schedule=schedule, partition=[2, 2, 2, 2], microbatches=2)
        for updates in (500, 2):
            for step in pipe.train(repeat(rich_batches(1, 4)[0]), updates=updates):
                if step.index == 2 and dist.get_rank() == rank:
                    Thread(target=pipe.stop).start()
            ends.append([step.stop, step.index])
    return ends


def used() -> list[dict[str, Any]]:
    """What the stages used, less times and memory, which no two runs share."""
    pipe = pipeline(rich_model(), schedule="pipedream", partition=[2, 2, 2, 2], microbatches=2)
    list(pipe.train(rich_batches(4, 4)))
    return [{"versions": u.versions, "staleness": u.staleness, "peak_activations": u.peak_activations,
             "sent": u.bytes_sent > 0, "positive": min(u.forward_s, u.backward_s, u.step_s) > 0}
            for u in pipe.engine.collectives.usage()]


# -- jobs that fail, for worlds of two -----------------------------------------------------------------


def endless(*, schedule: str, timeout_s: float, stages: int = 2, shared_memory: bool = True, model: str = "rich",
            **arguments: Any) -> None:
    """Train for ever; tells of every step."""
    pipe = pipeline(MODELS[model](), schedule=schedule, stages=stages, microbatches=2, timeout_s=timeout_s,
                    shared_memory=shared_memory, **arguments)

    def batches() -> Iterator[Batch]:
        while True:
            yield from rich_batches(1, 4)

    for step in pipe.train(batches()):
        tell("progress", step.index)


def waiting_for_state(*, timeout_s: float) -> None:
    """Rank 0 asks for the whole model while rank 1 does something else."""
    pipe = pipeline(rich_model(), schedule="1f1b", stages=2, microbatches=2, timeout_s=timeout_s)
    list(pipe.train(rich_batches(1, 4)))
    tell("progress", 0)
    if dist.get_rank() == 0:
        pipe.state_dict()
    else:
        import time

        time.sleep(60)


def shapes_from_values(*, timeout_s: float) -> None:
    """A cut through which tensors go whose shapes depend on the data."""
    pipe = pipeline(data_dependent_model(), schedule="1f1b", stages=2, microbatches=2, timeout_s=timeout_s)
    list(pipe.train([{"ids": torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]])}]))


def layer_raises(*, timeout_s: float, **arguments: Any) -> None:
    """The second stage raises in its second microbatch."""
    pipe = pipeline(rich_model(), stages=2, microbatches=2, timeout_s=timeout_s, **arguments)
    batch = rich_batches(1, 4)[0]
    batch["labels"][2:] = 10_000  # outside the words
    list(pipe.train([batch]))


def trains_alone(*, timeout_s: float) -> None:
    """Rank 1 trains, and rank 0 does nothing."""
    pipe = pipeline(rich_model(), schedule="1f1b", stages=2, microbatches=2, timeout_s=timeout_s)
    if dist.get_rank() == 1:
        list(pipe.train(rich_batches(1, 4)))


def goes_apart(*, call: str, timeout_s: float, schedule: str = "1f1b", apart: int = 0) -> None:
    """A rank evaluates, asks for the whole model, or waits for another thread's exchange, after a step after which the
    other rank trains on."""
    pipe = pipeline(rich_model(), schedule=schedule, stages=2, microbatches=2, timeout_s=timeout_s)
    calls = {"evaluate": lambda: pipe.evaluate(rich_batches(1, 4)), "state_dict": pipe.state_dict,
             "another": lambda: exchange("another", timeout_s).all_gather(None)}
    for _ in pipe.train(rich_batches(4, 4)):
        if dist.get_rank() == apart:
            calls[call]()


def refused(*, tied_to: str | None = None, evaluate: bool = False, **arguments: Any) -> str:
    """The words with which a pipeline is refused whose last bias is tied, or its training, or an evaluation on nothing.
    """
    model = rich_model(tied=False)
    if tied_to is not None:
        head = replace(model.layers[-1], ties={"decoder.bias": tied_to})
        model = Model([*model.layers[:-1], head], model.batch)
    try:
        pipe = pipeline(model, partition=[2, 2, 2, 2], **arguments)
        pipe.evaluate([]) if evaluate else pipe.train(rich_batches(1, 4))
    except UserError as error:
        return str(error)
    return "nothing was refused"


def scheduled(*, schedule: str, change: int | None = None) -> list[Any]:
    """Training under schedulers of torch's, one per optimizer, which step once per step; without a flush they would be
    refused, so that they step from one call of ``train`` to the next, and after the step ``change`` on top."""
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        return optimizer

    pipe = pipeline(rich_model(), make, schedule=schedule, partition=[2, 2, 2, 2], microbatches=2)
    batches, told = rich_batches(4, 4), []
    try:
        for part in ([batches] if schedule == "1f1b" else [batches[:1], batches[1:]]):
            for step in pipe.train(part):
                told.append([step.loss, step.learning_rate])
                if schedule == "1f1b" or step.index == change:
                    for scheduler in schedulers:
                        scheduler.step()
            for scheduler in schedulers:
                scheduler.step()
    except UserError as error:
        told.append(str(error))
    return [told, fingerprint(pipe.state_dict())]


class WithoutGroup(DistributedDataParallel):
    """One that needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def refusal_of_a_wrapped_layer() -> str:
    """What a rank says of a layer that only one of them builds."""
    layers = list(rich_model(tied=False).layers)
    build = layers[3].build
    layers[3] = replace(layers[3], build=lambda: WithoutGroup(build()))
    try:
        Pipeline(Model(layers, rich_model().batch), AdamW(), stages=[2, 2, 2, 2])
    except UserError as error:
        return str(error)
    return ""


def open_files() -> int:
    return len(os.listdir("/dev/fd"))
