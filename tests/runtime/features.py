"""Every feature of a pipeline, with a small setting of it; two of them together are as their oracle, or refused."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from inspect import isfunction, signature
from itertools import combinations
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock, patch

import models
import pytest
import torch
import torch.distributed as dist
from jobs import MuonAndAdamW, fingerprint
from models import cut, rich_batches
from oracles import assert_same, assert_same_state, averages_of, built, decay, oracle_of, pipeline_of
from pipelines import PARTS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vpipe import Cut, Layer, Model, Order, Pipeline, Plan
from vpipe.accelerator import seeded
from vpipe.app.train.optimizers import OptimizerSettings
from vpipe.description import Description, Executor
from vpipe.description.precision import Precision
from vpipe.description.transfers import CODECS
from vpipe.distributed.init import join_world
from vpipe.errors import UserError
from vpipe.runtime.action_recorder import Recorder
from vpipe.runtime.microbatches import Batch
from vpipe.runtime.step_results import Step
from vpipe.schedules import kinds
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.trace import RecordedAction
from vpipe.testing import ReferencePrecision, evaluate_oracle

Words = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        words: of the pipeline, as for :func:`pipelines.parts`, of the call of ``train``, and of :func:`arranged`.
        act: what is done with the pipeline at every one of the ``moments``: ``begin``, ``loop`` (after the first step
            of a call of ``train``), ``between`` the two calls, ``end``; a pipeline that it returns goes on instead.
        needs: more words, unless its partner says otherwise.
        covers: of :func:`wanted`, beside its own name, and kinds of actions in its schedule.
        two: it is for two processes only.
    """

    words: Words = field(default_factory=dict)
    act: Callable[[Case], Pipeline | None] | None = None
    moments: str = "loop between"
    needs: Words = field(default_factory=dict)
    covers: tuple[str, ...] = ()
    two: bool = False


@dataclass
class Case:
    """A pipeline under way.

    Attributes:
        words: the merged words of both rows.
        drained: the microbatches before which the pipeline was empty.
    """

    words: Words
    folder: Path
    stack: ExitStack
    moment: str = "begin"
    recorders: Mapping[int, Recorder] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    drained: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pipe = self.build()
        self.begin = self.pipe.state_dict() if "average" in self.words else {}

    def build(self) -> Pipeline:
        model, words = arranged(self.words, self.folder)
        return pipeline_of(model, **words)

    def note(self) -> None:
        if self.pipe.engine.training._stream is None:
            self.drained.add(self.pipe.engine.training.position.microbatches)

    def act(self, moment: str, features: Sequence[Feature]) -> None:
        self.moment = moment
        for feature in features:
            if feature.act is not None and moment in feature.moments.split():
                self.pipe = feature.act(self) or self.pipe
                self.note()

    def train(self, features: Sequence[Feature]) -> None:
        """Train on two batches in two calls, or more of one iterator where one may end early."""
        microbatches, how = self.pipe.microbatches, {name: self.words[name] for name in CALL & set(self.words)}
        self.batches, begun = batches_for(self.pipe.model, 2, microbatches, self.words), self.pipe
        whole, call = iter(self.batches), 0
        self.act("begin", features)
        while self.pipe.position.microbatches < 2 * microbatches:
            part: Iterable[Batch] = whole if {*how, "stops"} & set(self.words) else self.batches[call:call + 1]
            if self.pipe is not begun:
                whole = iter(self.batches[self.pipe.position.microbatches // microbatches:])
                part, begun = whole, self.pipe
            loop, first = self.pipe.train(part, **({} if call else how)), True
            self.note()
            for step in loop:
                self.steps.append(step)
                self.note()
                if first:
                    self.act("loop", features)
                first = False
            self.steps += self.pipe.drain()
            self.note()
            call += 1
            self.act("between" if self.pipe.position.microbatches < 2 * microbatches else "end", features)


CALL, APPLIED = {"pauses", "updates", "stop"}, {"stops", "kernels", "recorded", "lengths", "buckets"}
"""Words of the first call of ``train``, and those that are no words of a pipeline."""


class Matrices:
    """Train matrices alone: other parameters, all of some stages, have no optimizer."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        kept = [p for name, p in named.items() if p.dim() == 2 and not name.startswith("mix2")]
        return torch.optim.AdamW(kept, lr=3e-3, fused=True) if kept else None


# -- models beside those of models.py --------------------------------------------------------------------


def shared_model() -> Model:
    """A module with buffers in two places, which every cut leaves in one stage; a loss that weighs labels."""
    with seeded(1):
        norm = nn.BatchNorm1d(5)
        return Model.sequential(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 5), norm,
                                              norm), nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0, 1.0, 3.0])))


def weighed_model() -> Model:
    """Labels that count twice or not at all, as the model says."""
    weights = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0])
    with seeded(1):
        plain = Model.sequential(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 5)),
                                 nn.CrossEntropyLoss(weights))
    return Model(plain.layers, plain.batch, labels="target", label_weights=lambda labels: weights[labels])


def short_model() -> Model:
    """Four of the rich model's layers: a skip, a mask, raw matmuls, a tie."""
    made = models.rich_model()
    return Model([*made.layers[:3], made.layers[-1]], made.batch)


def frozen_model() -> Model:
    """A first stage that trains nothing, whose weight the last one uses, too."""
    made = models.frozen_front()
    return Model([made.layers[0], Layer("still", nn.Tanh), *made.layers[1:]], made.batch)


MODELS: dict[str, Callable[[], Model]] = {made.__name__: made for made in (
    short_model, models.norm_model, frozen_model, models.recurrent_model,
    models.sliced_model, models.thrice_tied_model, models.checkpointed_model, shared_model, weighed_model)}


@cache
def labelled(model: Model, labels: str) -> Model:
    return Model(model.layers, model.batch, labels)


def divided(model: Model, mesh: Any) -> Model:
    from torch.distributed.fsdp import fully_shard  # here, for it takes a second

    def build(make: Callable[[], nn.Module]) -> nn.Module:
        layer = make()
        return fully_shard(layer, mesh=mesh) if any(True for _ in layer.parameters()) else layer

    return Model([replace(layer, build=partial(build, layer.build)) for layer in model.layers], model.batch,
                 model.labels, model.label_weights)


def batches_for(model: Model, batches: int, samples: int, words: Words, seed: int = 3) -> list[dict[str, Tensor]]:
    """Batches with the fields of a model; where labels count, samples have unequal numbers of them, the first none."""
    drawn = torch.Generator().manual_seed(seed)
    if "input" in model.batch:
        return [{"input": torch.randn(2 * samples, 12, generator=drawn),
                 "target": torch.randint(5, (2 * samples,), generator=drawn)} for _ in range(batches)]
    made = rich_batches(batches, samples, seed, words.get("lengths", (6,)))
    for number, batch in enumerate(made):
        for sample in range(samples if model.labels else 0):
            batch["labels"][sample, (sample + number) % 6:] = Model.NO_LABEL
    return [{name: batch[name] for name in model.batch} for batch in made]


# -- acts ------------------------------------------------------------------------------------------------


def reads(case: Case) -> None:
    pipe = case.pipe
    before = pipe.local_usage()
    assert pipe.arrangement["partition"] == list(pipe.partition)
    assert pipe.position.steps >= len(pipe.stages) * (pipe.device.type != "cpu")
    assert len(pipe.usage()) == len(pipe.usage(before))
    assert math.isfinite(pipe.clock_offset())
    pipe.check_replicas()


def drains(case: Case) -> None:
    case.pipe.drain()
    reached = case.pipe.position
    case.pipe.drain()
    assert case.pipe.position == reached


def evaluates(case: Case, averaged: bool = False) -> None:
    pipe, held = case.pipe, batches_for(case.pipe.model, 2, 3, {}, seed=9)
    names = pipe.model.layers[-1].inputs
    found, tensors = pipe.evaluate(held, names, averaged=averaged)
    samples = sum(len(batch[pipe.model.batch[0]]) for batch in held)
    assert {name: len(tensor) for name, tensor in tensors.items()} == dict.fromkeys(names, samples)
    assert found == pipe.evaluate(held, averaged=averaged)
    if not {"compress", "compile", "data"} & set(case.words):
        assert found == evaluate_oracle(pipe.model, pipe.state_dict(averaged=averaged), held, pipe.microbatches,
                                        ReferencePrecision(case.words.get("precision", "fp32")))


def state(case: Case, **view: Any) -> None:
    assert_same_state(case.pipe.state_dict(**view), case.pipe.state_dict(**view))


def loads_state(case: Case) -> None:
    kept = {name: value.clone() for name, value in case.pipe.state_dict().items()}
    case.pipe.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
    case.pipe.load_state_dict(kept)


def averages(case: Case) -> None:
    state(case, averaged=True)
    evaluates(case, averaged=True)


def norms(case: Case) -> None:
    assert not any(norm < 0 for norm in case.pipe.gradient_norms().values())  # NaN in an update that is left out


def loads(case: Case) -> Pipeline | None:
    """Save; between two calls go on with what loads it, and what is given the same in memory."""
    case.pipe.save(case.folder / "saved")
    if case.moment == "loop":
        return None
    made = case.build()
    assert made.load(case.folder / "saved") == case.pipe.position
    if not dist.is_initialized():  # else every process has but its part
        tensors, other = {name: value.clone() for name, value in made.local_state().items()}, case.build()
        other.restore(made.position, lambda wants: {name: value for name, value in tensors.items() if wants(name)})
        return other
    return made


def shards(case: Case) -> Pipeline | None:
    if any(name.startswith("buffers.") for name in case.pipe.engine.checkpoint_state()):
        return None  # of other replicas, which are in no state
    made = case.build()
    made.load_state_dict(case.pipe.state_dict(sharded=True))
    return made


def records(case: Case) -> None:
    """Look at what was recorded since the moment before, and record anew; few actions of the second call's begin."""
    for recorder in case.recorders.values():
        made = [each for each in recorder.pop_records() if isinstance(each, RecordedAction)]
        times = [time for each in made for time in (each.start_s, each.end_s)]
        assert times == sorted(times)
        assert all(each.held_bytes >= 0 for each in made)
        assert made if case.moment == "loop" else not made or recorder.full or made[-1].held_bytes == 0
    case.recorders = case.pipe.record(**({"limit": 3} if case.moment == "between" else {}))


def observes(case: Case) -> None:
    case.pipe.observe(dict.fromkeys(case.pipe.engine.workers, Mock()))
    case.stack.enter_context(case.pipe.labelled())


def prepared(case: Case) -> Pipeline:
    pipe, execution = case.pipe, case.pipe.description.execution
    world = join_world(None, 60.0, execution.device, execution.mesh, execution.data)
    return Pipeline.prepared(pipe.model, pipe.description, pipe.lowered, world)


# -- the table -------------------------------------------------------------------------------------------

STREAM, SLICED = {"schedule": "pipedream"}, {"schedule": "seq1f1b", "model": "sliced_model"}
FILE = "0F0,0OFFLOAD0,0F1,0F2,0FETCH0,0B0,0F3,0B1,0R2,0B2,0B3\n1F0,1I0,1F1,1W0,1B1,1F2,1B2,1F3,1B3\n"
"""A schedule that nobody has registered, with activations on the host, recomputation and split backwards."""

COVERS: dict[str, tuple[str, ...]] = {
    "1f1b": ("Pipeline(model)", "Pipeline.train", "Precision.name", "Transfers.compress", "Execution.executor",
             "Model.layers", "Model.batch", *(f"Layer.{name}" for name in ("name", "build", "inputs", "outputs")),
             *(f"kind {kind}" for kind in ("F", "B", "STEP", "SEND_F", "RECV_F", "SEND_B", "RECV_B"))),
    "zb_h1": ("kind I", "kind W"), "2bw": ("kind USE",), "shared_model": ("Layer.shared",),
    "thrice_tied_model": ("Layer.ties", "kind SEND_TIED_W", "kind RECV_TIED_W", "kind SEND_TIED_G", "kind RECV_TIED_G"),
    "weighed_model": ("Model.labels", "Model.label_weights")}
"""What a schedule or a model stands for; what every pipeline has stands beside the usual schedule."""

ROWS: dict[str, Feature] = {
    **{f"Order.schedule={name}": Feature({"schedule": name}, covers=COVERS.get(name, ()))
       for name in RegisteredSchedule.names()},
    "Order.schedule": Feature({"schedule": FILE}, covers=("kind OFFLOAD", "kind FETCH", "kind R")),
    "Order.chunks": Feature({"chunks": 1}, needs={"schedule": "interleaved"}),
    "Order.slices": Feature({"slices": 2}, needs=SLICED, covers=("Layer.carried",)),
    "Asynchronous.update_every": Feature({"update_every": 2}, needs=STREAM),
    "Asynchronous.warmup_depth": Feature({"warmup_depth": (2, 0)}, needs=STREAM),
    "Asynchronous.delay_correction": Feature({"delay_correction": 1.0}, partial(state, corrected=False), needs=STREAM,
                                             covers=("Pipeline.state_dict(corrected)",)),
    "Cut.stages": Feature({"uneven": True}),
    "Cut.recompute": Feature({"recompute": 1.0}),
    "Cut.recompute=some": Feature({"recompute": 0.5}),
    "Cut.ranks": Feature({"ranks": 2}),
    "Cut.ranks=unequal": Feature({"ranks": "unequal"}),
    "Description.microbatches": Feature({"microbatches": 6}, covers=("Pipeline(microbatches)",)),
    "Description.seed": Feature({"seed": 7, "device": "cpu"}, covers=("Execution.device", "Pipeline(seed)")),
    "Update.optimizer": Feature({"optimizer": Matrices()}),
    "Update.optimizer=several": Feature({"optimizer": MuonAndAdamW()}),
    "Update.learning_rate_factor": Feature({"optimizer": OptimizerSettings("nadam", 0.01, weight_decay=0.1),
                                            "learning_rate_factor": decay}),
    "Update.grad_clip": Feature({"grad_clip": 0.5}, norms, "loop", covers=("kind NORM", "Pipeline.gradient_norms")),
    "Update.skip_not_finite": Feature({"skip_not_finite": True}),
    "Update.zero1": Feature({"zero1": True}, needs={"ranks": 2}, covers=("kind GATHER_W", "kind REDUCE_GRAD")),
    "Update.per_token_loss": Feature({"per_token_loss": True, "labels": "labels"}),
    "Update.average": Feature({"average": 0.9}, averages, covers=(
        "Pipeline.evaluate(averaged)", "Pipeline.state_dict(averaged)")),
    **{f"Precision.name={name}": Feature({"precision": name}) for name in get_args(Precision.Name)},
    "Precision.loss_scale": Feature({"loss_scale": 1024}, needs={"precision": "fp16"}),
    "Transfers.backend": Feature({"backend": "gloo", "timeout_s": 30.0, "shared_memory": False}, covers=(
        "Transfers.timeout_s", "Transfers.shared_memory")),
    **{f"Transfers.compress={name}": Feature({"compress": name}) for name in CODECS},
    **{f"Execution.executor={name}": Feature({"executor": name}, needs={"schedule": "gpipe"})
       for name in Executor.names()},
    "Execution.compile": Feature({"compile": "eager"}),
    "Execution.mesh": Feature({"mesh": "tp"}, two=True),
    "Execution.data": Feature({"mesh": "dp", "data": "dp"}, needs={"model": "weighed_model"}, two=True,
                              covers=("kind UNSHARD", "kind RESHARD")),
    **{f"Model={name}": Feature({"model": name}, covers=COVERS.get(name, ())) for name in MODELS},
    "Plan": Feature({"plan": True}, covers=("Pipeline.plan",)),
    "Pipeline.train(pauses)": Feature({"pauses": 2}),
    "Pipeline.train(updates)": Feature({"updates": 1}),
    "Pipeline.train(stop)": Feature({"stop": lambda: True}),
    "Pipeline.stop": Feature({"stops": True}, lambda case: case.pipe.stop(), "loop"),
    "Pipeline.drain": Feature({}, drains),
    "Pipeline.evaluate": Feature({}, evaluates, covers=("Pipeline.evaluate(outputs)",)),
    "Pipeline.state_dict": Feature({}, state, "begin loop between"),
    "Pipeline.load_state_dict": Feature({}, loads_state, "begin"),
    "Pipeline.sharded": Feature({}, shards, "between", covers=("Pipeline.state_dict(sharded)",)),
    "Pipeline.load": Feature({}, loads, covers=("Pipeline.save", "Pipeline.restore", "Pipeline.local_state")),
    "Pipeline.prepared": Feature({}, prepared, "begin"),
    "Pipeline.record": Feature({"recorded": True}, records, "begin loop between end", covers=(
        "Pipeline.record(limit)",)),
    "Pipeline.observe": Feature({}, observes, "begin loop", covers=("Pipeline.labelled",)),
    "Pipeline.schedule_kernels": Feature({"kernels": True}, lambda case: case.pipe.schedule_kernels(None), "begin"),
    "buckets": Feature({"buckets": 1}, needs={"ranks": 2}),
    "lengths": Feature({"lengths": (6, 9)}),
    "reads": Feature({}, reads, "begin loop between", covers=tuple(f"Pipeline.{name}" for name in (
        "position", "arrangement", "stages", "device", "local_usage", "usage", "usage(since)", "clock_offset",
        "check_replicas"))),
}
DEFAULT = {"Precision.name=fp32", "Transfers.compress=none", "Execution.executor=overlapped", "Model=short_model"}
ROWS = {name: row for name, row in ROWS.items() if name not in DEFAULT}

KEYS = {
    "Update.optimizer": "learning_rate momentum weight_decay", "Update.learning_rate_factor": "lr_policy warmup_steps",
    "Update.skip_not_finite": "on_nan", "Asynchronous.delay_correction": "delay_correction_strength",
    "Description.microbatches": "num_microbatches", "Pipeline.train(updates)": "epochs max_steps",
    "Pipeline.train(stop)": "max_minutes", "Pipeline.evaluate": "evaluate_every evaluation_batches patience",
    "Pipeline.record": "profile_iteration exit_after_profile", "Cut.stages": "model_parallel_size",
    "Cut.ranks": "data_parallel_size stage_to_rank_map", "Execution.mesh": "tensor",
    "Pipeline.schedule_kernels": "use_orion_scheduler orion_strict", "Transfers.compress": "compress_rounding",
    "": "sample_prompts print_frequency threads memory master_port master_address interface"}
"""Keys of the sections training and parallel that are no words, by what they set; the last are beside the pipeline."""

VERTICAL = "pipedream_vertical_sync"
ONE_STAGE = {"1f1b", "2bw", "gpipe", "pipedream", "seq1f1b", "zb_h1", "zb_h2"}
"""Schedules with a stage on each rank, which may have other numbers of replicas."""

WHOLE = ("1f1b", "2bw", "chimera", "gpipe", "hanayo", "interleaved", "looped_bfs", "pipedream", VERTICAL,
         "seq1f1b")
"""Schedules that split no backward."""


def flush(words: Words) -> bool:
    return words["schedule"] == FILE or RegisteredSchedule.named(words["schedule"]).flush


def threaded(words: Words) -> bool:
    return words.get("executor") == "async_threaded"


REFUSED: list[tuple[str, Callable[[Words], Any]]] = [
    ("is a schedule of 4 microbatches, not", lambda w: w["schedule"] == FILE and w["microbatches"] != 4),
    ("says which ranks there are", lambda w: w["schedule"] == FILE and w.get("ranks") == 2),
    ("is a schedule of 4", lambda w: w["schedule"] == FILE and ("slices" in w or "update_every" in w)),
    ("has a flush", lambda w: flush(w) and "delay_correction" in w),
    ("updates once per batch", lambda w: flush(w) and "update_every" in w),
    ("warmup_depth", lambda w: flush(w) and "warmup_depth" in w),
    ("2 stages", lambda w: "chunks" in w and w["schedule"] in ("dualpipe_v", "hanayo", "v_half", "v_min", "zb_v")),
    ("[[0, 1], [2]]", lambda w: w.get("ranks") == "unequal" and w["schedule"] not in ONE_STAGE | {"auto", VERTICAL}
     and ("chunks" not in w or w["schedule"] in ("chimera", "dualpipe"))),
    ("equally many", lambda w: w.get("ranks") == "unequal" and w["schedule"] == "auto"),
    ("with more replicas", lambda w: w.get("ranks") == "unequal" and w["schedule"] == VERTICAL),
    ("for each of the 2 replicas", lambda w: w["schedule"] == "interleaved" and w.get("ranks") == 2
     and w["microbatches"] == 6),
    ("takes whole microbatches", lambda w: "slices" in w and w["schedule"] not in ("gpipe", "seq1f1b")),
    ("do not say what goes from a slice to the next", lambda w: "slices" in w and w["model"] != "sliced_model"),
    ("no oracle with slices", lambda w: "slices" in w and "compress" in w),
    ("which runs the schedule gpipe alone", lambda w: threaded(w) and w["schedule"] != "gpipe"),
    ("in the order of the forwards", lambda w: threaded(w) and "slices" in w),
    ("no timeline", lambda w: threaded(w) and "recorded" in w),
    ("one stream for all", lambda w: not threaded(w) and "kernels" in w),
    ("for every length of what comes before a slice", lambda w: "slices" in w and "compile" in w),
    ("splits every backward", lambda w: "compile" in w and (
        w["schedule"] == FILE or w["schedule"] not in WHOLE)),
    ("shows no cross entropy", lambda w: "compile" in w and "per_token_loss" in w),
    ("loss_scale is dynamic", lambda w: w.get("precision") == "fp16" and not flush(w) and "loss_scale" not in w),
    ("only fp16 scales its loss", lambda w: w.get("precision") != "fp16" and "loss_scale" in w),
    ("have 16 bits already", lambda w: "precision" in w and w.get("compress") == "bf16"),
    ("stages have 2 replicas, and data is", lambda w: "data" in w and (
        "ranks" in w or w["schedule"] in ("chimera", "dualpipe"))),
    ("beside a mesh whose layers compute over several lanes", lambda w: "mesh" in w and (
        "compress" in w or "compile" in w or threaded(w))),
    ("has no flush, but weights that fully_shard divides have one version", lambda w: "data" in w and not flush(w)),
    ("fully_shard has the weights in their own precision", lambda w: "data" in w and w.get("precision") == "bf16_pure"),
    ("both are divided by fully_shard", lambda w: "data" in w and w["model"] in (
        "short_model", "frozen_model", "sliced_model", "thrice_tied_model")),
    ("keeps running statistics", lambda w: "data" in w and w["model"] in ("norm_model", "shared_model")),
    ("and the ranks of every stage or none", lambda w: "plan" in w and w.get("ranks") == 2),
]
"""What does not go together: a part of the reason, and the words of which it is said."""


DEFAULTS: dict[str, Any] = {"schedule": "1f1b", "model": "short_model", "microbatches": 4}

APART = ({"Cut.recompute=some", "Model=thrice_tied_model"}, {"Execution.compile", "Model=checkpointed_model"},
         {"Execution.data", "Model=recurrent_model"})
"""Of the first the uses of a weight are summed in another order (test_every_schedule.py has the bound); in the second
torch's backend ``eager`` draws the dropout of a layer that checkpoints itself anew, without a pipeline, too; in the
third torch warns of a view that a divided layer returns."""


def merged(*names: str) -> dict[str, Any] | None:
    """Return the words of some rows; None where two of them say another value of one word, or do not go together."""
    rows, said = [ROWS[name] for name in names], dict[str, Any]()
    if any(apart <= {*names} for apart in APART) or any(
            said.setdefault(word, value) != value for row in rows for word, value in row.words.items()):
        return None
    words = {**DEFAULTS, **{word: value for row in rows for word, value in row.needs.items()}, **said}
    if words["schedule"].startswith("dualpipe") and "ranks" in words:
        words["microbatches"] = 8
    return words


def arranged(given: Mapping[str, Any], folder: Path) -> tuple[Model | Callable[[], Model], dict[str, Any]]:
    """Return the model and the words of its pipeline on two ranks, or copies of them: layers are cut evenly."""
    words = {name: value for name, value in given.items() if name not in CALL | APPLIED}
    build = MODELS[words.pop("model")]
    model, width, uneven = built(build), words.pop("ranks", 1), words.pop("uneven", False)
    if (labels := words.pop("labels", None)) and model.labels is None:
        build = model = labelled(model, labels)
    if words["schedule"] == FILE:
        words["schedule"], recipe = str(file := folder / "file.csv"), None
        if not file.exists():  # another process may read it now
            file.write_text(FILE)
    else:
        recipe = RegisteredSchedule.named(words["schedule"])
    stages = words.get("chunks", recipe.chunks if recipe else 1)
    here = dist.get_world_size() if dist.is_initialized() and words.get("mesh") != "tp" else 2
    if here // (width if isinstance(width, int) and dist.is_initialized() else 1) > 1 and len(model) >= 2 * stages:
        stages *= 2
    words["partition"] = [1] * (stages - 1) + [len(model) - stages + 1] if uneven else cut(len(model), stages)
    words["replicas"] = width
    if width == "unequal":
        words["placement"] = [[0, 1], [2]]
        del words["replicas"]
    if recipe and not recipe.flush:
        least = max(recipe.update_every(stages * (width if isinstance(width, int) else 2)), 1 + words.get("zero1", 0),
                    recipe.update_every(1 + words.get("warmup_depth", (0,))[0]))
        words.setdefault("update_every", next(n for n in (1, 2, 4, 6) if n >= least))
    if words.pop("plan", False):
        ranks = words.pop("replicas", None) or words.pop("placement")
        words["plan"] = Plan(Cut(words.pop("partition"), words.pop("recompute", 0.0), ranks), Order(words["schedule"]),
                             words["microbatches"])
    if "mesh" in words:
        lanes = words["mesh"] == "tp"
        words["mesh"] = init_device_mesh("cpu", (1, 2) if lanes else (2, 1), mesh_dim_names=("pp", words["mesh"]))
        if not lanes:
            return divided(model, words["mesh"]["dp"]), words
    return build, words


def check(names: Sequence[str], folder: Path) -> Any:
    """Train with two features, and compare with the oracle; return what all ranks must have in common."""
    words, features = merged(*names), [ROWS[name] for name in names]
    with ExitStack() as stack:
        if "buckets" in words:
            stack.enter_context(patch("vpipe.runtime.reducer.BUCKET_BYTES", words["buckets"]))
        if "compile" in words:  # dynamo reads the gradient of every input that it sees
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        if (why := next((why for why, said in REFUSED if said(words)), None)) is not None:
            stack.enter_context(pytest.raises(UserError, match=re.escape(why)))
        case = Case(words, folder, stack)
        case.train(features)
        expected = oracle_of(case.pipe, case.batches, drained_at=case.drained,
                             model=built(MODELS[words["model"]]) if "data" in words else None)
        assert_same(case.pipe, case.steps, expected)
        if "average" in words:
            ours = case.pipe.state_dict(averaged=True)
            followed = averages_of(expected, case.begin, words["average"])
            assert not [name for name in expected.values[0] if not torch.equal(ours[name], followed[name])]
        for name, feature in zip(names, features, strict=True):
            if not dist.is_initialized() and {**words, **(merged(name) or {})} == words:
                assert {each[5:] for each in feature.covers if each.startswith("kind ")} <= {*case.pipe.lowered.kinds}
        return [[repr(step.loss) for step in case.steps], fingerprint(case.pipe.state_dict())]
    return why


# -- what there is, and what is drawn ----------------------------------------------------------------------


def wanted() -> set[str]:
    """Return the names of all that a pipeline can be told: fields, their values where these are listed, and methods."""
    names = {f"{next(c for c in reversed(part.__mro__) if each.name in getattr(c, '__annotations__', ())).__name__}"
             f".{each.name}" for part in (*PARTS.values(), Layer) for each in fields(part)}
    names |= {f"Description.{each.name}" for each in fields(Description) if each.type == "int"}
    for field_name, values in {"Order.schedule": RegisteredSchedule.names(), "Precision.name": get_args(Precision.Name),
                               "Transfers.compress": CODECS, "Execution.executor": Executor.names()}.items():
        names |= {f"{field_name}={value}" for value in values} - DEFAULT
    names |= {f"Model.{name}" for name in signature(Model).parameters}
    names |= {f"Pipeline({name})" for name in signature(Pipeline).parameters if name not in PARTS}
    for name, member in vars(Pipeline).items():
        if not name.startswith("_"):
            told = signature(member).parameters.values() if isfunction(member) else ()
            names |= {f"Pipeline.{name}", *(f"Pipeline.{name}({each.name})" for each in told
                                           if each.default is not each.empty)}
    return names | {f"kind {kind}" for kind in kinds.known() if kind.is_own}


DAYS = 14
PAIRS = [pair for pair in combinations(ROWS, 2) if merged(*pair) is not None]


def drawn(day: int) -> list[tuple[str, ...]]:
    """Return the pairs of a day for one process, all of them in two weeks, as many of a feature on each; and some of
    more features, of the same two weeks."""
    number, dice = {name: place for place, name in enumerate(ROWS)}, random.Random(day % DAYS)
    found: list[tuple[str, ...]] = [pair for pair in PAIRS if sum(map(number.__getitem__, pair)) % DAYS == day % DAYS
                                    and not any(ROWS[name].two for name in pair)]
    for _ in range(7):
        names: list[str] = []
        for name in dice.sample([name for name in ROWS if not ROWS[name].two and name != "Execution.compile"], 10):
            words = merged(*names, name)
            if words is not None and not any(said(words) for _, said in REFUSED):
                names.append(name)
        found.append(tuple(sorted(names, key=number.__getitem__)))
    return found


def drawn_for_two(day: int) -> list[tuple[str, str]]:
    """Return twenty pairs for two processes, three of each feature that is for two alone."""
    dice = random.Random(day)
    pairs = [pair for pair in PAIRS if "Cut.ranks=unequal" not in pair]  # which is for three
    alone = [dice.sample([pair for pair in pairs if name in pair], 3) for name in ROWS if ROWS[name].two]
    found = [pair for three in alone for pair in three]
    return found + dice.sample([pair for pair in pairs if pair not in found], 20 - len(found))


def together(*, names: Sequence[str], folder: str) -> Any:
    """A job: the same in every process of a job."""
    return check(names, Path(folder))
