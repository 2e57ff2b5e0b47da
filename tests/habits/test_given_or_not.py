"""A default that is said beside what says otherwise is refused with both values; of two views none is ignored."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from world import World

from vpipe import Asynchronous, Cut, Execution, Layer, Model, Order, Pipeline, Plan, Precision, Transfers, Update
from vpipe.app.config.apply_plan import TARGETS
from vpipe.app.config.config import Config, load_config
from vpipe.app.train.resume import ResumePoint, resumed_config
from vpipe.checkpoint import Checkpoint
from vpipe.errors import UserError


class Ending(nn.Linear):
    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(h).flatten(0, 1), labels.flatten())


MODEL = Model([Layer("words", lambda: nn.Embedding(16, 8), ("ids",), carried=()),
               Layer("body", lambda: nn.Linear(8, 8), carried=()),
               Layer("ending", lambda: Ending(8, 16), ("h", "labels"), ("loss",), carried=())],
              ("ids", "labels"), "labels")
SLICED = Plan(Cut((2, 1)), Order("seq1f1b", slices=2), 4)
LATE = Plan(Cut((2, 1)), Asynchronous("pipedream", update_every=2, warmup_depth=[2, 0], delay_correction=0.0), 4)
PLANS = {"sliced": SLICED, "whole": replace(SLICED, order=Order("gpipe", slices=1)), "late": LATE,
         "shared": replace(SLICED, zero1=True), "apart": replace(SLICED, zero1=False)}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def followed(plan: str, microbatches: int | None = None, zero1: bool | None = None, **order: Any) -> Pipeline:
    return Pipeline(MODEL, Update(sgd, zero1=zero1), PLANS[plan], Asynchronous(**order), microbatches)


def test_what_a_plan_may_say_too_has_no_default_but_none() -> None:
    planned = {field.name for kind in (Plan, Asynchronous) for field in fields(kind)}
    said = {field.name: field.default for part in (Order, Asynchronous, Update, Precision, Transfers, Execution)
            for field in fields(part) if field.name in planned}
    assert said.keys() >= {"slices", "delay_correction", "zero1"}
    assert not {*said.values()} - {None, ""}


@pytest.mark.parametrize(("plan", "name", "said", "there"), [
    ("sliced", "slices", 1, 2), ("sliced", "microbatches", 1, 4), ("sliced", "schedule", "1f1b", "seq1f1b"),
    ("whole", "slices", 2, 1), ("late", "update_every", 1, 2), ("late", "warmup_depth", (1, 0), (2, 0)),
    ("late", "delay_correction", 1.0, 0.0), ("shared", "zero1", False, True), ("apart", "zero1", True, False)])
def test_a_default_beside_a_plan_that_says_otherwise(plan: str, name: str, said: Any, there: Any) -> None:
    with pytest.raises(UserError) as error:
        followed(plan, **{name: said})
    assert str(error.value).startswith(f"error: {name} is {said!r} beside a plan with {there!r}\nhint: leave it out")
    assert Plan.of_json(PLANS[plan].as_json()).as_json() == PLANS[plan].as_json(), "a file tells them apart, too"
    alone, same = followed(plan), followed(plan, **{name: there})  # what a plan says, too, is no other
    assert (same.lowered, same.description) == (alone.lowered, alone.description)


def meshed() -> str:
    """The refusal of a plan for whole layers beside a mesh of two lanes."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    with pytest.raises(UserError) as error:
        Pipeline(MODEL, sgd, Plan(Cut((3,)), tensor=1), execution=Execution("cpu", mesh=mesh))
    return str(error.value).partition("\n")[0]


def test_a_plan_for_whole_layers_beside_a_mesh(two: World) -> None:
    assert two.run(meshed) == ["error: the plan splits layers over 1 rank, but there are 2 lanes"] * 2


SAID = {"partition": [2, 2], "recompute_ratio": [0.5, 0], "recompute_layers": [[0], []], "schedule": "gpipe",
        "slices": 2, "microbatches": 8, "update_every": 4, "warmup_depth": [2, 0], "tensor": 2, "zero1": True,
        "stage_to_rank_map": {"0": [0, 1], "1": [2, 3]}}
BESIDE = {"plan": "plan.json"}


def load(*settings: str, plan: Any = None, resolved: bool = False, **sections: dict[str, Any]) -> Config:
    given = {"model": {"name": "gpt", "preset": "small"}, "dataset": {"name": "text", "batch_size": 16},
             "training": {"learning_rate": 1e-4}, "parallel": {}}
    Path("c.yaml").write_text(json.dumps({name: own | sections.get(name, {}) for name, own in given.items()}))
    Path("plan.json").write_text(json.dumps(plan))
    return load_config(Path("c.yaml"), settings, resolved=resolved)


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("key", "section", "name"), [
    *((key, *keys) for key, keys in TARGETS.items()), ("stage_to_rank_map", "parallel", "data_parallel_size")])
def test_a_key_at_its_default_beside_a_plan(key: str, section: str, name: str) -> None:
    """Null and auto leave a key to the plan; another default is refused, unless the plan is said over its file."""
    default = Config.model_fields[section].annotation.model_fields[name].default
    plan = {"partition": [2, 2], "schedule": "gpipe" if key == "slices" else "pipedream", "microbatches": 8,
            key: SAID[key]}
    alone = load(plan=plan, parallel=BESIDE)
    sections = {"parallel": BESIDE} | {section: (BESIDE if section == "parallel" else {}) | {name: default}}
    for settings, own in (((f"{section}.{name}={json.dumps(default)}",), {"parallel": BESIDE}), ((), sections)):
        if default in (None, "auto"):
            assert load(*settings, plan=plan, **own) == alone
        else:
            with pytest.raises(UserError, match=rf"{section}.{name} is .*, but {key} in the plan"):
                load(*settings, plan=plan, **own)
    assert load("parallel.plan=plan.json", plan=plan, **sections) == alone


def test_a_default_on_the_command_line_goes_before_the_file() -> None:
    one = load("parallel.data_parallel_size=1", parallel={"stage_to_rank_map": SAID["stage_to_rank_map"]}).parallel
    assert (one.stage_to_rank_map, one.model_parallel_size) == (None, 2)
    for schedule, slices in (("gpipe", 2), ("1f1b", 1)):  # of a run, which is resumed
        run = {"model_parallel_size": 2, "schedule": "gpipe", "slices": 2}
        assert load(f"parallel.schedule={schedule}", resolved=True, parallel=run).parallel.slices == slices


@pytest.mark.parametrize(("said", "holds"), [({}, True), ({"zero1": True}, False), ({"slices": 1}, True)])
def test_a_resumed_run_follows_its_plan_where_the_file_says_nothing_else(said: dict[str, Any], holds: bool) -> None:
    load(plan={"partition": [2, 2], "zero1": False}, parallel={"model_parallel_size": 2, **said})
    found = resumed_config(ResumePoint(Path(), None), Path("c.yaml"), []).parallel
    assert (found.partition, found.zero1) == (((2, 2), False) if holds else ("auto", True))


def test_two_views_are_never_one(tmp_path: Path) -> None:
    late = Asynchronous("pipedream", update_every=1, delay_correction=1.0)
    pipe = Pipeline(MODEL, Update(sgd, average=0.9), Cut((2, 1)), late, 2)
    list(pipe.train([{name: torch.arange(48).view(8, 6) % 16 for name in ("ids", "labels")}] * 3))
    pipe.save(str(tmp_path))
    given = {"corrected": False, "averaged": True, "sharded": True}
    for look in (pipe.state_dict, Checkpoint.open(tmp_path).weights):
        sums = [sum(value.double().sum().item() for value in look(**asked).values())
                for asked in ({}, {"corrected": False}, {"averaged": True})]
        assert len({*sums}) == 3
        with pytest.raises(UserError, match="corrected=False and averaged=True ask for different tensors in one call"):
            look(corrected=False, averaged=True)
    for name in ("corrected", "averaged"):
        with pytest.raises(UserError, match=f"{name}={given[name]} and sharded=True ask for different tensors"):
            pipe.state_dict(sharded=True, **{name: given[name]})
