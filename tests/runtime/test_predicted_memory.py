"""What a pipeline holds while it runs, beside what was predicted from a profile of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import jobs
import pytest
import torch
from models import WIDTH, rich_batches, rich_model, untied_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from world import World

from vpipe import Asynchronous, Cut, Layer, Model, Order, Pipeline, Update
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import predict
from vpipe.plan.profile import Profile
from vpipe.plan.stage_costs import SUM_BYTES, combined_memory
from vpipe.profiling import RankGroup, measure
from vpipe.runtime.action_recorder import labelled
from vpipe.runtime.reducer import BUCKET_BYTES
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.trace import RecordedAction

pytestmark = pytest.mark.jobs


@pytest.fixture(autouse=True)
def no_speed_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long to measure, and no memory depends on it."""
    monkeypatch.setattr("vpipe.profiling.measurement.matrix_flops_per_s", lambda device, dtype: 1e9)


def profile_of(model: Model, optimizer: OptimizerSettings, microbatch: dict[str, Tensor],
               precision: str = "fp32") -> Profile:
    identities = RankGroup("cpu").identify(model, [microbatch], model_name="", optimizer="adamw", precision=precision)
    made, = measure(model, [microbatch], optimizer.from_named, identities=identities, budget_s=0.0)
    return made


def frozen_skips() -> Model:
    """A front that is not trained, and makes what later layers read."""
    layers = untied_model().layers
    front = [replace(layer, build=lambda build=layer.build: build().requires_grad_(False)) for layer in layers[:2]]
    return Model([*front, *layers[2:]], batch=("ids", "labels"))


def plain() -> Model:
    """Without skips; layers that keep their inputs, and layers that keep their outputs."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return Model.sequential(nn.Sequential(*layers), nn.MSELoss())


@cache
def measured(build: Callable[[], Model], precision: str, name: str) -> tuple[Model, OptimizerSettings, Any, Profile]:
    """A model, its optimizer, two batches of 8 microbatches, and the profile of one microbatch."""
    model, batches = build(), rich_batches(2, 32)
    if build is plain:
        batches = [{"input": torch.randn(32, WIDTH), "target": torch.randn(32, WIDTH)}] * 2
    optimizer = OptimizerSettings(name, 1e-3, matrices=hidden_matrices(model))
    microbatch = {name: field[:4] for name, field in batches[0].items()}
    return model, optimizer, batches, profile_of(model, optimizer, microbatch, precision)


SCHEDULES = sorted({*RegisteredSchedule.names()} - {"auto"})
"""The order of ``auto`` follows from measured times."""

PARTS = {"nothing": (), "some": ((0,), (2, 3), (), (6,)), "everything": ((0, 1), (2, 3), (4, 5), (6, 7))}
"""Recomputed layers of four stages."""


@pytest.mark.parametrize(("schedule", "recomputed", "build", "precision", "optimizer"), [
    *((*each, "fp32", "adamw") for each in product(SCHEDULES, PARTS, (rich_model, plain))),
    *((name, "some", frozen_skips, "fp32", "adamw") for name in SCHEDULES),
    *((name, "some", rich_model, *how) for name in ("pipedream", "2bw") for how in (
        ("bf16", "adamw"), ("bf16_pure", "adamw"), ("bf16_pure", "muon")))])
def test_a_pipeline_holds_what_was_predicted(schedule: str, recomputed: str, build: Callable[[], Model], precision: str,
                                             optimizer: str) -> None:
    """Every byte of every rank: activations of all microbatches in flight and versions of weights, as recorded while it
    runs; gradients, master weights and the optimizer's state; and, with what a backward needs for a while, what the
    summary of a run prints as planned."""
    model, settings, batches, made = measured(build, precision, optimizer)
    every = 4 if schedule == "2bw" else None
    corrects = schedule == "2bw" or (schedule, precision) == ("pipedream", "bf16")
    late = Asynchronous(schedule, update_every=every, delay_correction=float(corrects))
    order = Order(schedule) if RegisteredSchedule.named(schedule).flush else late
    plan = Plan(Cut((2, 2, 2, len(model) - 6), PARTS[recomputed]), Order(schedule), microbatches=8)
    prediction = predict(replace(made, extrapolates=corrects, averages=corrects), plan, update_every=every).prediction
    pipe = Pipeline(model, Update(settings, average=0.9 if corrects else None), plan.cut, order, 8, precision=precision)
    recorders = pipe.engine.record(limit=10_000)
    list(pipe.train(batches[:1 + bool(every)]))
    taken = []
    for rank, recorder in recorders.items():
        memory = {stage: prediction.stages[stage].memory for stage, on in enumerate(pipe.placement) if rank in on}
        weights, static = recorder.weight_bytes(), recorder.static_bytes()
        assert {stage: weights[stage] + static[stage] for stage in memory} == {
            stage: each.weights + each.gradients + each.optimizer for stage, each in memory.items()}
        held, versions = 0, dict.fromkeys(weights, 1)
        for note in recorder.pop_records():
            if isinstance(note, RecordedAction):
                versions |= {note.stage: note.versions} if note.stage in versions else {}
                held = max(held, note.held_bytes + sum(weights[stage] * count for stage, count in versions.items()))
        whole = combined_memory(list(memory.values()))
        taken.append(held + sum(static.values()) + whole.working)
        assert taken[-1] == whole.peak, rank
    assert prediction.fullest_rank[1] == max(map(prediction.taken_bytes, taken))


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_replicas_that_step_a_part_hold_at_most_what_was_predicted(precision: str) -> None:
    """The state of the largest parameter and an equal part of the rest; the last stage keeps last changes, too."""
    model, optimizer, batches = rich_model(), OptimizerSettings("adamw", 1e-3), rich_batches(2, 12)
    made = profile_of(model, optimizer, {name: field[:2] for name, field in batches[0].items()}, precision)
    plan = Plan(Cut((4, len(model) - 4), ranks=((0, 1, 2), (3, 4))), Order("pipedream"), microbatches=6)
    made = replace(made, extrapolates=True, averages=True)
    predicted, without = (predict(replace(made, zero1=zero1), plan, update_every=1).prediction.stages
                          for zero1 in (True, False))
    pipe = Pipeline(model, Update(optimizer, zero1=True, average=0.9), plan.cut, Asynchronous(
        "pipedream", update_every=1, delay_correction=1.0), 6, precision=precision)
    list(pipe.train(batches))
    for stage, ranks in enumerate(pipe.placement):
        kept = [pipe.engine.workers[rank].usage(stage).state_bytes for rank in ranks]
        memory, total = predicted[stage].memory, without[stage].memory.optimizer
        assert sum(kept) == total
        assert max(kept) <= memory.optimizer < total
        assert memory.optimizer >= total / len(ranks)
        assert replace(memory, optimizer=0, working=0) == replace(without[stage].memory, optimizer=0, working=0)


class Seen(nn.Module):
    """Tokens see those before them, whose keys and values every slice concatenates with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, h: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        keys, values = self.key(h), self.value(h)
        if carried:
            keys, values = (torch.cat(both, 1) for both in zip(carried, (keys, values), strict=True))
        h = h + F.scaled_dot_product_attention(h[:, None], keys[:, None], values[:, None])[:, 0]
        return h if carried is None else (h, keys, values)


class TokenLoss(nn.Module):
    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(h.flatten(0, 1), labels.flatten())


def seen() -> Model:
    return Model([Layer("words", lambda: nn.Embedding(16, 16), ("input_ids",), carried=()),
                  *(Layer(f"seen{n}", Seen, carried=("keys", "values")) for n in range(6)),
                  Layer("loss", TokenLoss, ("h", "labels"), ("loss",), carried=())],
                 batch=("input_ids", "labels"), labels="labels")


def gpt() -> Model:
    return family_named("gpt").factory(ModelSettings(16, hidden_size=16, num_layers=2, num_heads=2,
                                                     sequence_length=16, dropout=0.0))


@pytest.mark.parametrize("make", [seen, gpt])
def test_slices_hold_what_was_predicted(make: Callable[[], Model]) -> None:
    """Of layers that concatenate, more by what is not there of what all before have carried, which is counted as a mean
    of whole microbatches. Of families, which have one memory for a microbatch, exactly what the last of two slices on
    the last stage holds."""
    model, optimizer = make(), OptimizerSettings("adamw", 1e-3)
    [batch] = [{name: torch.arange(16 * 16).reshape(16, 16) % 16 for name in model.batch}]
    microbatch = {name: field[:2] for name, field in batch.items()}
    made = profile_of(model, optimizer, microbatch)
    cut, parts = ((2, 2, 2, 2), (1, 2, 4)) if make is seen else ((2, len(model) - 2), (2,))
    for dropped, slices in product(((), ((), (2, 3), (5,), ())) if make is seen else ((),), parts):
        plan = Plan(Cut(cut, recompute=dropped or 0.0), Order("seq1f1b", slices=slices), microbatches=8)
        prediction = predict(made, plan).prediction
        pipe = Pipeline(model, optimizer, plan.cut, plan.order, 8)
        recorders = pipe.engine.record(limit=10_000)
        list(pipe.train([batch]))
        share, last = max(slices - 1, 2) / 2 / slices if slices > 1 else 0.0, len(cut) - 1
        for stage, recorder in recorders.items():
            held = max(note.held_bytes for note in recorder.pop_records() if isinstance(note, RecordedAction))
            if stage == last and slices > 1:
                # Labels of a slice are a part of every row, so the loss copies them; and each slice keeps what all of
                # a microbatch keep once: how much its labels weigh and, of GPT's loss, two more numbers.
                held -= microbatch["labels"].nbytes + 4 * (1 if make is seen else 3) * (slices - 1)
            in_flight = slices - 1 + len(cut) - stage
            spare = in_flight * share - sum(index % slices for index in range(in_flight)) / slices
            layers = range(stage * 2, stage * 2 + 2)
            more = sum(made.layers[number].carried_bytes * (spare + (
                2 * share - (slices - 1) / slices) * (bool(dropped) and number in dropped[stage])) for number in layers)
            found = prediction.stages[stage].memory.activations
            assert found == held + more if make is seen else found == held or stage < last, (plan, stage)


SIDE = 64
BIG = 2048
"""Bytes that an activation of the squares does not have, nor do the numbers that say which gradients there are."""


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(h))))


class SquareLoss(Square):
    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(h), y)


def squares(mesh: DeviceMesh | None = None) -> Model:
    """Four layers of square matrices, which any lanes divide evenly."""
    def made(kind: type[nn.Module]) -> nn.Module:
        return kind() if mesh is None else fully_shard(kind(), mesh=mesh["dp"])

    return Model([*(Layer(f"l{i}", lambda: made(Square), inputs=("h" if i else "x",)) for i in range(3)),
                  Layer("loss", lambda: made(SquareLoss), inputs=("h", "y"), outputs=("loss",))], batch=("x", "y"))


class Momentum:
    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9, foreach=False)


def held_in_update(pipe: Pipeline, batch: dict[str, Tensor]) -> tuple[int, int]:
    """The most bytes that an update allocates at once, whatever holds them, and those when it comes to its last step.

    In the order of time: what the profiler shows adds them up per operation.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        list(pipe.train([batch]))
    held = most = at_step = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) >= BIG:
            held += event.nbytes()
            most = max(most, held)
        at_step = held if "STEP" in event.name() else at_step
    return most, at_step


def whole_at_once(*, runs: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The most bytes of weights, gradients and optimizer that this rank holds in an update of each run: by the
    allocator, and as recorded; and those of gradients when it comes to its last step."""
    found = []
    for run in runs:
        mesh = init_device_mesh("cpu", tuple(run["shape"]), mesh_dim_names=("pp", "dp"))
        pipe = jobs.pipeline(squares(mesh), Momentum(), mesh=mesh, data="dp",
                             **{name: value for name, value in run.items() if name != "shape"})
        batch = {"x": torch.randn(4, SIDE), "y": torch.randn(4, SIDE)}
        list(pipe.train([batch]))
        [recorder] = pipe.engine.record().values()
        recorder.worker.around.append(partial(labelled, recorder.worker))
        # The least of some updates: gloo's threads may let go of what was sent a while after the rank was told so.
        most, at_step = map(min, zip(*(held_in_update(pipe, batch) for _ in range(4)), strict=True))
        parts, static = (sum(each.values()) for each in (recorder.weight_bytes(), recorder.static_bytes()))
        notes = [note for note in recorder.pop_records() if isinstance(note, RecordedAction)]
        found.append([most + static, max(note.held_bytes for note in notes) + parts + static, at_step])
    return found


def test_stages_that_lanes_divide_hold_the_closed_form(world: World) -> None:
    """Of n lanes 1/n of weights and optimizer, and the whole weights and gradients of all stages of a rank at once;
    while they are summed, the gradients of a bucket, too."""
    assert SUM_BYTES == BUCKET_BYTES
    runs: list[dict[str, Any]] = [
        {"shape": shape, "schedule": schedule, "partition": partition, "microbatches": 4}
        for shape, whole, parts in (([2, 2], [2, 2], [1, 1, 1, 1]), ([1, 4], [4], [2, 2]))
        for schedule, partition in (("1f1b", whole), ("gpipe", whole), ("zb_h1", whole), ("interleaved", parts))]
    batch = {"x": torch.randn(1, SIDE), "y": torch.randn(1, SIDE)}
    identities = RankGroup("cpu").identify(squares(), [batch], model_name="squares", optimizer="sgd", precision="fp32")
    made, = measure(squares(), [batch], Momentum().from_named, identities=identities, budget_s=0.0)
    of_ranks = world.run(whole_at_once, runs=runs)
    for place, run in enumerate(runs):
        plan = Plan(Cut(tuple(run["partition"])), Order(run["schedule"]), microbatches=4)
        prediction = predict(made, plan, lanes=run["shape"][1]).prediction
        for rank, found in enumerate(of_ranks):
            of_pipeline = rank // run["shape"][1]
            memory = combined_memory([stage.memory for stage in prediction.stages if of_pipeline in stage.ranks])
            held, recorded, summed = found[place]
            numbers = 2 * run["partition"][0]  # one for each of two parameters per layer: whether a lane has a gradient
            assert recorded == memory.peak - memory.working
            flags = 4 * numbers * run["shape"][1]  # that are sent, and arrive
            message = prediction.stages[0].memory.gradients + flags
            assert held == memory.peak - memory.activations + 2 * flags, run
            assert summed == message / run["shape"][1], run
