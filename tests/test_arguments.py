"""What people pass from Python and should not have: named with its remedy, all mistakes of a call at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden import assert_golden, refusal
from pipelines import parts
from torch import Tensor, nn

from vpipe import Asynchronous, Cut, Layer, Model, Order, Pipeline, Plan, Update
from vpipe.arguments import as_integer, as_number, shown
from vpipe.description import Executor


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


ARGUMENTS = [
    {"model": net()}, {"model": nn.Linear(2, 2)}, {"model": [nn.Linear(2, 2)] * 9}, {"stages": "2"}, {"stages": True},
    {"stages": 2.0}, {"microbatches": "4"}, {"microbatches": 4.0}, {"ranks": -1}, {"chunks": 0}, {"update_every": "1"},
    {"stages": [2.0, 2.0]}, {"stages": {}}, {"stages": "plan.json"},
    {"stages": Plan(Cut((2, 2)), Order("gpipe"), microbatches=4), "schedule": "1f1b", "microbatches": 2},
    {"stages": Plan(Cut((2, 2)), Asynchronous(update_every=2)), "schedule": Asynchronous("pipedream", update_every=1)},
    {"recompute": None}, {"recompute": [True, 0]}, {"schedule": 1}, {"seed": 0.5}, {"seed": -1}, {"seed": 2**63},
    {"ranks": [2]}, {"transfers": "gloo"}, {"execution": "cpu"}, {"optimizer": sgd(list(net().parameters()))},
    {"optimizer": [sgd(list(net().parameters()))]}, {"optimizer": None}, {"optimizer": lambda: None},
    {"learning_rate_factor": 0.5}, {"grad_clip": 0}, {"grad_clip": float("nan")}, {"grad_clip": "1"},
    {"skip_not_finite": "no"}, {"timeout_s": float("inf")}, {"backend": 1}, {"precision": 16}, {"executor": 1},
    {"compress": ["none", 8]}, {"delay_correction": "predict"}, {"loss_scale": net(), "precision": "fp16"}]


def test_an_argument_of_the_wrong_kind() -> None:
    assert_golden(__file__, "arguments", [refusal(pipeline, **one).replace(
        ", ".join(Executor.names()), "EXECUTORS") for one in ARGUMENTS])


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


LAYERS = [
    lambda: Layer("e", nn.Linear(3, 3)), lambda: Layer("e", nn.Linear), lambda: Layer("e", None),
    lambda: Layer("e", linear, inputs=("x")), lambda: Layer("e", linear, outputs="mask"),
    lambda: Layer("e", linear, inputs=(1, 2)), lambda: Layer("e", linear, outputs=("h", "h")),
    lambda: Layer("e", linear, carried=["k", "k"]), lambda: Layer("e", linear, carried="keys"),
    lambda: Layer("e", linear, ties=["weight"]), lambda: Layer(3, None), lambda: Model(net(), ("x",)),
    lambda: Model([linear()], ("x",)), lambda: Model([Layer("e", Mean, ("x",), ("loss",))], ("x",)).materialize("3"),
    lambda: Model([Layer("e", Mean, ("x",), ("loss",))], "x"),
    lambda: Model.sequential([linear(), linear()], nn.MSELoss()), lambda: Model.sequential(nn.LSTM(3, 3), nn.MSELoss()),
    lambda: Model.sequential(Residual(linear(), linear()), nn.MSELoss()),
    lambda: Model.sequential(hooked(), nn.MSELoss()), lambda: Model.sequential(net(), nn.CrossEntropyLoss),
    lambda: Model.sequential(net(), "mse"), lambda: Model.sequential(net(), lambda output: output.mean())]


def test_layers_and_models_of_the_wrong_kind() -> None:
    assert_golden(__file__, "layers", map(refusal, LAYERS))


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
    (batches(1)[0], "error: batches is one batch\nhint: give a list of batches, or another iterable: [batch]"),
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


PLANS = [
    lambda: Plan((2, 2)), lambda: Plan(Cut(4)), lambda: Plan(Cut((2, 0))), lambda: Plan(Cut((2, 2), recompute=((0,),))),
    lambda: Plan(Cut((2, 2)), Order("interleaved", chunks=2)), lambda: Plan(Cut((2, 2)), microbatches="4")]


def test_a_plan_is_checked_where_it_is_made() -> None:
    assert_golden(__file__, "plans", map(refusal, PLANS))


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
