"""What people pass from Python and should not have: named with its remedy, all mistakes of a call at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipelines import parts
from torch import Tensor, nn

from vpipe import Asynchronous, Cut, Layer, Model, Order, Pipeline, Plan, Update
from vpipe.arguments import as_integer, as_number, shown
from vpipe.description import Executor
from vpipe.errors import UserError


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batches(count: int) -> list[dict[str, Tensor]]:
    return [{"input": torch.randn(8, 3), "target": torch.randint(2, (8,))} for _ in range(count)]


def pipeline(**arguments: Any) -> Pipeline:
    model = arguments.pop("model", None) or Model.sequential(net(), nn.CrossEntropyLoss())
    return Pipeline(model, **parts(**{"stages": 2, "optimizer": sgd, **arguments}))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


FACTORY = "hint: give a function that makes it: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
MADE = "which was made already: of other tensors than those that the stages train"
STAGES = "hint: give a list of whole numbers, such as stages=[3, 2, 2, 2]"
MODEL = "hint: give a Model: Model([Layer('embed', lambda: Embed(), ...), ...], batch=('ids', 'labels'))"


@pytest.mark.parametrize(("arguments", "text"), [
    ({"model": net()}, "error: the model is an object of class Sequential, not a Model\n"
                       "hint: write Pipeline(Model.sequential(modules, loss=nn.CrossEntropyLoss()), ...)"),
    ({"model": nn.Linear(2, 2)}, f"error: the model is an object of class Linear, not a Model\n{MODEL}"),
    ({"model": [nn.Linear(2, 2)] * 9}, f"error: the model is an object of class list, not a Model\n{MODEL}"),
    ({"stages": "2"}, "error: stages is '2'\nhint: give a whole number: stages=2"),
    ({"stages": True}, "error: stages is True\nhint: give a whole number"),
    ({"stages": 2.0}, "error: stages is 2.0\nhint: give a whole number"),
    ({"microbatches": "4"}, "error: microbatches is '4'\nhint: give a whole number: microbatches=4"),
    ({"microbatches": 4.0}, "error: microbatches is 4.0\nhint: give a whole number"),
    ({"ranks": -1}, "error: ranks is -1\nhint: give a whole number, 1 or more"),
    ({"chunks": 0}, "error: chunks is 0\nhint: give a whole number, 1 or more"),
    ({"update_every": "1"}, "error: update_every is '1'\nhint: give a whole number: update_every=1"),
    ({"stages": [2.0, 2.0]}, f"error: stages is [2.0, 2.0]\n{STAGES}"),
    ({"stages": {}}, f"error: stages is {{}}\n{STAGES}"),
    ({"stages": "plan.json"}, "error: stages is 'plan.json'\nhint: give a whole number"),
    ({"stages": Plan(Cut((2, 2)), Order("gpipe"), microbatches=4), "schedule": "1f1b", "microbatches": 2},
     "error: microbatches is 2 beside a plan with 4\n"
     "hint: leave it out, or take the plan without: dataclasses.replace(plan, microbatches=None)\n"
     "error: schedule is '1f1b' beside a plan with 'gpipe'\n"
     "hint: leave it out, or take the plan without: dataclasses.replace(plan, order=Order())"),
    ({"stages": Plan(Cut((2, 2)), Asynchronous(update_every=2)), "schedule": Asynchronous("pipedream", update_every=1)},
     "error: update_every is 1 beside a plan with 2\n"
     "hint: leave it out, or take the plan without: dataclasses.replace(plan, order=Order())"),
    ({"recompute": None}, "error: recompute is None\nhint: give a number from 0 to 1, or a list with one per stage"),
    ({"recompute": [True, 0]}, "error: True of stage 0 is neither a share nor a list of layers\n"
     "hint: give a number from 0 to 1, or a list such as [3, 4]: layers of the model, counted from 0"),
    ({"schedule": 1}, "error: schedule is 1\nhint: give a name, such as '1f1b'"),
    ({"seed": 0.5}, "error: seed is 0.5\nhint: give a whole number, 0 or more"),
    ({"seed": -1}, "error: seed is -1\nhint: give a whole number, 0 or more"),
    ({"seed": 2**63}, "error: seed is 9223372036854775808\n"
     "hint: give a whole number, 0 to 9223372036854775807"),
    ({"ranks": [2]}, "error: ranks is [2], which does not list the ranks of every stage\n"
     "hint: write how many every stage has, or a list of lists of whole numbers, such as [[0, 1], [2]]"),
    ({"transfers": "gloo"}, "error: transfers is 'gloo'\nhint: write transfers=Transfers(...)"),
    ({"execution": "cpu"}, "error: execution is 'cpu'\nhint: write execution=Execution(...)"),
    ({"optimizer": sgd(list(net().parameters()))},
     f"error: optimizer is an object of class SGD, {MADE}\n{FACTORY}"),
    ({"optimizer": [sgd(list(net().parameters()))]},
     f"error: optimizer is an object of class SGD, {MADE}\n{FACTORY}"),
    ({"optimizer": None}, f"error: optimizer is None\n{FACTORY}"),
    ({"optimizer": lambda: None}, "error: optimizer is a function, which cannot be called with 1 argument: too many "
                                  f"positional arguments\n{FACTORY}"),
    ({"learning_rate_factor": 0.5}, "error: learning_rate_factor is 0.5\nhint: give a function of the step's number: "
     "learning_rate_factor=lambda step: 0.99**step; a scheduler of torch's is made with the optimizer, see "
     "docs/optimizers.md"),
    ({"grad_clip": 0}, "error: grad_clip is 0\nhint: give a number above 0, such as grad_clip=1"),
    ({"grad_clip": float("nan")}, "error: grad_clip is nan\nhint: give a number above 0, such as grad_clip=1"),
    ({"grad_clip": "1"}, "error: grad_clip is '1'\nhint: give a number above 0, such as grad_clip=1"),
    ({"skip_not_finite": "no"},
     "error: skip_not_finite is 'no'\nhint: write skip_not_finite=True or skip_not_finite=False"),
    ({"timeout_s": float("inf")},
     "error: timeout_s is inf\nhint: give a number above 0 and at most 1e+09, such as timeout_s=60"),
    ({"backend": 1}, "error: backend is 1\nhint: known names: gloo, hccl, nccl, xccl"),
    ({"precision": 16}, "error: precision is 16\nhint: did you mean 'fp16'?"),
    ({"executor": 1}, f"error: executor is 1\nhint: known names: {', '.join(Executor.names())}"),
    ({"compress": ["none", 8]},
     "error: compress is ['none', 8]\nhint: write one of none, bf16, int8, int8_stochastic, or a list of them"),
    ({"delay_correction": "predict"}, "error: delay_correction is 'predict'\n"
     "hint: give a number above 0 and at most 1e+09, such as delay_correction=1"),
    ({"loss_scale": net(), "precision": "fp16"},
     "error: loss_scale is an object of class Sequential\n"
     "hint: give a number above 0, such as 1024, or leave it out: training finds it")])
def test_an_argument_of_the_wrong_kind(arguments: dict[str, Any], text: str) -> None:
    assert refusal(lambda: pipeline(**arguments)) == text


def test_all_arguments_that_are_wrong_come_at_once() -> None:
    text = refusal(lambda: pipeline(stages="two", microbatches=1.5, optimizer=0, schedule=1, precision=16, seed="a"))
    assert [line for line in text.splitlines() if line.startswith("error")] == [
        "error: optimizer is 0", "error: stages is 'two'", "error: schedule is 1", "error: microbatches is 1.5",
        "error: precision is 16", "error: seed is 'a'"]
    text = refusal(lambda: Update(sgd, learning_rate_factor=2, grad_clip=-1, skip_not_finite="no"))  # type: ignore[arg-type]
    assert text.count("error: ") == 3


def test_numbers_of_numpy_and_paths_are_as_good_as_pythons(tmp_path: Path) -> None:
    assert pipeline(stages=np.int64(2)).partition == (1, 3)
    pipe = pipeline(microbatches=np.int32(2), grad_clip=np.float32(0.5), seed=np.int64(1), stages=np.array([1, 3]),
                    recompute=np.float32(0.5),
                    learning_rate_factor=lambda step: np.float32(0.5))
    assert (pipe.partition, pipe.microbatches, type(pipe.microbatches)) == ((1, 3), 2, int)
    assert [step.learning_rate for step in pipe.train(batches(1))] == [0.05]
    file = tmp_path / "own.csv"
    file.write_text("0F0,0B0,0STEP0\n")
    assert pipeline(stages=1, schedule=file).schedule == str(file)


@pytest.mark.parametrize("value", [None, "fast", float("nan"), [0.1]])
def test_a_learning_rate_factor_must_return_a_number(value: object) -> None:
    pipe = pipeline(learning_rate_factor=lambda step: value)
    assert refusal(lambda: list(pipe.train(batches(1)))) == (
        f"error: learning_rate_factor(0) is {value!r}\n"
        "hint: let it return a finite number for the number of every step, such as 1.0")


# -- layers and models ---------------------------------------------------------------------------------


class Mean(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.mean()


def linear() -> nn.Module:
    return nn.Linear(3, 3)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Layer("e", nn.Linear(3, 3)),
     "error: layer 'e' is given an object of class Linear, a module, not a function that builds it\n"
     "hint: write Layer('e', lambda: Linear(...)): a rank builds only its own layers, each under a seed of its own"),
    (lambda: Layer("e", nn.Linear),
     "error: the build function of layer 'e' is the class Linear, which cannot be called with no arguments: missing a "
     "required argument: 'in_features'\nhint: give a function without arguments: Layer('e', lambda: MyModule(...))"),
    (lambda: Layer("e", None), "error: the build function of layer 'e' is None\n"
                               "hint: give a function without arguments: Layer('e', lambda: MyModule(...))"),
    (lambda: Layer("e", linear, inputs=("x")),
     "error: the inputs of layer 'e' are the text 'x', not a tuple of names\nhint: write ('x',), with a comma"),
    (lambda: Layer("e", linear, outputs="mask"),
     "error: the outputs of layer 'e' are the text 'mask', not a tuple of names\nhint: write ('mask',), with a comma"),
    (lambda: Layer("e", linear, inputs=(1, 2)),
     "error: the inputs of layer 'e' are (1, 2)\nhint: give a tuple of names, such as ('h', 'mask')"),
    (lambda: Layer("e", linear, outputs=("h", "h")), "error: the outputs of layer 'e' are ('h', 'h'), with a name that "
                                                     "stands twice\nhint: give every output a name of its own"),
    (lambda: Layer("e", linear, carried=["k", "k"]), "error: the carried tensors of layer 'e' are ('k', 'k'), with a "
                                                     "name that stands twice\n"
                                                     "hint: give every carried tensor a name of its own"),
    (lambda: Layer("e", linear, carried="keys"), "error: the carried tensors of layer 'e' are the text 'keys', not a "
                                                 "tuple of names\nhint: write ('keys',), with a comma"),
    (lambda: Layer("e", linear, ties=["weight"]), "error: the ties of layer 'e' are ['weight']\n"
                                                  "hint: give a dict, such as {'decoder.weight': 'embed.word.weight'}"),
    (lambda: Layer(3, None), "error: the name of a layer is 3\nhint: give a name, such as 'block0'\n"
     "error: the build function of layer 3 is None\n"
     "hint: give a function without arguments: Layer(3, lambda: MyModule(...))"),
    (lambda: Model(net(), ("x",)),
     "error: the layers of the model are an nn.Sequential\nhint: write Model.sequential(modules, loss)"),
    (lambda: Model([linear()], ("x",)),
     "error: layer 0 of the model is an object of class Linear, not a Layer\n"
     "hint: give a list of layers: Model([Layer('embed', lambda: Embed(), ...), ...], batch=('ids', 'labels'))"),
    (lambda: Model([Layer("e", Mean, ("x",), ("loss",))], ("x",)).materialize("3"),
     "error: seed is '3'\nhint: give a whole number, 0 or more: seed=3"),
    (lambda: Model([Layer("e", Mean, ("x",), ("loss",))], "x"),
     "error: the batch fields of the model are the text 'x', not a tuple of names\nhint: write ('x',), with a comma"),
    (lambda: Model.sequential([linear(), linear()], nn.MSELoss()),
     "error: Model.sequential is given an object of class list, not an nn.Sequential\n"
     "hint: write Model.sequential(nn.Sequential(*modules), loss)"),
    (lambda: Model.sequential(nn.LSTM(3, 3), nn.MSELoss()),
     "error: Model.sequential is given an object of class LSTM, not an nn.Sequential\n"
     "hint: write another module as layers: Model([Layer('embed', lambda: Embed(), ...), ...], batch=...)"),
    (lambda: Model.sequential(Residual(linear(), linear()), nn.MSELoss()),
     "error: Residual has a forward of its own, which layers would not carry out\n"
     "hint: write what it does as layers: Model([Layer(...), ...], batch=...)"),
    (lambda: Model.sequential(hooked(), nn.MSELoss()),
     "error: the nn.Sequential has hooks of its own, which layers would not carry out\n"
     "hint: register them on its children"),
    (lambda: Model.sequential(net(), nn.CrossEntropyLoss),
     "error: the loss is the class CrossEntropyLoss\nhint: give what it makes: CrossEntropyLoss()"),
    (lambda: Model.sequential(net(), "mse"),
     "error: the loss is 'mse'\n"
     "hint: give what computes a loss from output and target, such as nn.CrossEntropyLoss()"),
    (lambda: Model.sequential(net(), lambda output: output.mean()),
     "error: the loss is a function, which cannot be called with 2 arguments: too many positional arguments\n"
     "hint: give what computes a loss from output and target, such as nn.CrossEntropyLoss()")])
def test_layers_and_models_of_the_wrong_kind(make: Callable[[], object], text: str) -> None:
    assert refusal(make) == text


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def hooked() -> nn.Sequential:
    modules = net()
    modules.register_forward_hook(lambda module, inputs, output: 2 * output)
    return modules


def test_names_may_come_in_a_list() -> None:
    layer = Layer("e", linear, ["x"], ["h"])
    assert (layer.inputs, layer.outputs) == (("x",), ("h",))


# -- what is trained on --------------------------------------------------------------------------------

BATCHES = "hint: give what yields batches, each a dict of tensors: a list, a DataLoader, a generator"


@pytest.mark.parametrize(("given", "text"), [
    (None, f"error: batches is None\n{BATCHES}"),
    (batches(1)[0], "error: batches is one batch\nhint: give a list, or what else yields batches: [batch]"),
    (torch.zeros(3), f"error: batches is an object of class Tensor\n{BATCHES}"),
    (lambda: batches(1),
     f"error: batches is a function\n{BATCHES}; of a function that is one, what it returns: call it")])
def test_iterables_without_batches_are_refused(given: Any, text: str) -> None:
    pipe = pipeline()
    for use in (lambda: pipe.train(given), lambda: pipe.evaluate(given)):
        assert refusal(use) == text
    assert len(list(pipe.train(batches(1)))) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_loss_that_depends_on_no_parameter_is_refused_in_training_alone(schedule: str) -> None:
    """Plain PyTorch refuses its backward."""
    pipe = pipeline(model=Model.sequential(net(), lambda output, target: output.detach().mean()), schedule=schedule)
    assert pipe.evaluate(batches(1)) != 0
    assert refusal(lambda: list(pipe.train(batches(1)))) == (
        "error: the loss of microbatch 0 has no gradient: it does not depend on any parameter\n"
        "hint: compute it from what the layers return, without detach(), item() or torch.no_grad()")


def test_a_factory_that_returns_nothing_at_all_is_refused_in_training_alone() -> None:
    """Mostly a forgotten return. A stage of several may go without."""
    pipe = pipeline(optimizer=lambda params: None)
    assert pipe.evaluate(batches(1)) > 0
    assert refusal(lambda: pipe.train(batches(1))) == (
        "error: the optimizer factory returned None for every stage, so nothing would be trained\n"
        "hint: let it return what it makes: return torch.optim.AdamW(params, lr=1e-3)")


def test_paths_of_checkpoints_and_plans(tmp_path: Path) -> None:
    pipe = pipeline()
    for use in (pipe.save, pipe.load):
        assert refusal(lambda use=use: use(None)) == (
            "error: the folder is None\nhint: give a path, such as 'checkpoint'")
        assert refusal(lambda use=use: use("a\0b")) == (
            "error: the folder is 'a\\x00b'\nhint: give a path, such as 'checkpoint'")
    assert refusal(lambda: Plan.load(3)) == "error: the path of a plan is 3\nhint: give a path, such as 'plan.json'"
    assert refusal(lambda: Plan(Cut((1,))).save(tmp_path / "none" / "plan.json")) == (
        f"error: cannot write the plan: No such file or directory ({tmp_path / 'none' / 'plan.json'})\n"
        "hint: give the path of a file in a folder that can be written")


@pytest.mark.parametrize(("plan", "text"), [
    (lambda: Plan((2, 2)), "error: cut is (2, 2)\nhint: write cut=Cut(...)"),  # type: ignore[arg-type]
    (lambda: Plan(Cut(4)), "error: the cut of a plan is Cut(stages=4, recompute=0.0, ranks=1)\n"
     "hint: list the layers of every stage, and the ranks of every stage or none: Cut([2, 2], ranks=[[0, 1], [2, 3]])"),
    (lambda: Plan(Cut((2, 0))),
     "error: partition is [2, 0]\nhint: write a list of positive integers: layers per stage"),
    (lambda: Plan(Cut((2, 2), recompute=((0,),))),
     "error: 1 recompute ratio for 2 stages\nhint: give one number, or one per stage"),
    (lambda: Plan(Cut((2, 2)), Order("interleaved", chunks=2)),
     "error: the order of a plan is Order(schedule='interleaved', chunks=2, slices=None)\n"
     "hint: leave chunks and delay_correction out: the ranks say the one, and the other is no part of a plan"),
    (lambda: Plan(Cut((2, 2)), microbatches="4"),  # type: ignore[arg-type]
     "error: microbatches is '4'\nhint: give a whole number, 1 to 65,536")])
def test_a_plan_is_checked_where_it_is_made(plan: Callable[[], Plan], text: str) -> None:
    assert refusal(plan) == text


def test_a_plan_may_be_written_with_lists() -> None:
    assert Plan(Cut([2, 2], [0.5, 0], [[1], [0]])) == Plan(Cut((2, 2), (0.5, 0), ((1,), (0,))))


# -- the parts -----------------------------------------------------------------------------------------


def test_whole_numbers_and_numbers_as_others_write_them() -> None:
    assert [as_integer(value) for value in (3, np.int64(3), torch.tensor(3), True, 3.0, "3", None, np.array([3, 4]),
                                          torch.tensor([3, 4]))] == [3, 3, 3, *[None] * 6]
    assert [as_number(value) for value in (2, 0.5, np.float32(0.5), torch.tensor(0.5), True, "2", None, 10**400)] == [
        2.0, 0.5, 0.5, 0.5, *[None] * 4]


def test_values_are_shown_as_they_are_written_or_by_their_kind() -> None:
    assert [shown(value) for value in (2, "two", [1, 2], None, np.float32(2), object(), Tensor, len, net(), [net()],
                                       "x" * 70, list(range(40)))] == [
        "2", "'two'", "[1, 2]", "None", *(f"an object of class {kind}" for kind in ("float32", "object")),
        "the class Tensor", "the function len", *(f"an object of class {kind}" for kind in ("Sequential", "list")),
        f"'{'x' * 39}...'", "an object of class list"]
