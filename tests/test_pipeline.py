"""The public face: what it offers, what it refuses and with which words."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from golden import assert_golden, refusal
from pipelines import parts
from torch import Tensor, nn

import vpipe
from vpipe import Cut, Model, Order, Pipeline, Plan, Update
from vpipe.checkpoint.manifest import Position
from vpipe.errors import PerformanceWarning, RunError, UserError
from vpipe.schedules.registry import RegisteredSchedule


def model() -> Model:
    torch.manual_seed(1)
    return Model.sequential(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(),
                                          nn.Linear(8, 2)), nn.CrossEntropyLoss())


def batches(count: int, samples: int = 8) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(2)
    return [{"input": torch.randn(samples, 3, generator=random),
             "target": torch.randint(2, (samples,), generator=random)} for _ in range(count)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def pipeline(**arguments: Any) -> Pipeline:
    return Pipeline(model(), **parts(**{"optimizer": sgd, **arguments}))


def run(pipe: Pipeline, data: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    return [step.loss for step in pipe.train(data)], pipe.state_dict()


# -- what there is -------------------------------------------------------------------------------------


def test_the_public_names_are_a_pipeline_and_its_parts() -> None:
    assert vpipe.__all__ == ["Asynchronous", "Cut", "Execution", "Layer", "Model", "Order", "Pipeline", "Plan",
                             "Precision", "Transfers", "Update"]
    assert [getattr(vpipe, name).__name__ for name in vpipe.__all__] == vpipe.__all__
    with pytest.raises(AttributeError, match="module 'vpipe' has no attribute 'Pipelin'"):
        vpipe.Pipelin  # noqa: B018


def test_modules_without_tensors_do_not_load_torch() -> None:
    uses = ("import vpipe", "from vpipe import Cut, Plan; Plan(Cut((1,)))",
            "from vpipe.schedules.builder import build; build('1f1b', ((0,), (1,)), 2)")
    script = "".join(f"{use}\nassert 'torch' not in sys.modules, {use!r}\n" for use in ("import sys", *uses))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# -- arguments that do not fit -------------------------------------------------------------------------
ARGUMENTS = [
    {}, {"stages": 7}, {"stages": 0}, {"partition": [1] * 7}, {"partition": []}, {"partition": [3, 2]},
    {"stages": 2, "recompute": [0.5]}, {"stages": 2, "recompute": 1.5}, {"stages": 2, "recompute": [0, -0.5]},
    {"stages": 2, "recompute": [0.5, float("nan")]}, {"partition": [2, 4], "recompute": [[1, 2], [9, 4]]},
    {"stages": 2, "recompute": [0, [True]]}, {"stages": 2, "schedule": "1f2b"}, {"stages": 2, "schedule": "zigzag"},
    {"stages": 2, "microbatches": 0}, {"stages": 2, "schedule": "pipedream", "microbatches": 6, "update_every": 4},
    {"stages": 2, "schedule": "pipedream", "update_every": 0},
    *({"stages": 2, "schedule": "gpipe", "microbatches": 4, "update_every": every} for every in (1, 2)),
    {"stages": 2, "placement": [[0], [0]]}, {"stages": 2, "placement": [[0, 1], [2]]},
    {"stages": 2, "placement": [[0, 1], [3]], "microbatches": 4},
    {"stages": 2, "placement": [[0, 1], [1]], "microbatches": 4}, {"stages": 2, "ranks": 0},
    {"stages": 2, "placement": [[0, 0], [1]], "microbatches": 4},
    {"stages": 2, "placement": [[0, 1], []], "microbatches": 4},
    {"stages": 4, "placement": [[0, 1], [2], [0, 1], [2]], "microbatches": 4, "schedule": "interleaved"},
    {"stages": 2, "placement": [[0]]}, {"stages": 3, "schedule": "zb_v", "microbatches": 4},
    {"stages": 4, "schedule": "interleaved", "microbatches": 4, "placement": [[0], [1], [1], [0]]},
    {"plan": Plan(Cut((3, 3)), Order("gpip"))}]


def test_an_argument_that_does_not_fit_is_named_with_its_remedy() -> None:
    assert_golden(__file__, "arguments", [refusal(pipeline, **one).replace(
        ", ".join(RegisteredSchedule.names()), "SCHEDULES") for one in ARGUMENTS])


def test_a_plan_for_a_model_of_other_sizes_is_refused() -> None:
    made_for = {"structure": model().digest({}), "model_name": "mine"}
    pipeline(plan=Plan(Cut((3, 3)), profiled=made_for))
    pipeline(plan=Plan(Cut((3, 3)), profiled={"model": "0123", "model_name": "of an older version"}))
    other = Plan(Cut((3, 3)), profiled=made_for | {"structure": "another"})
    assert refusal(lambda: pipeline(plan=other)) == (
        "error: the plan is for another model: mine (layers of digest another) there, layers of digest "
        f"{made_for['structure']} here\nhint: make a plan for this model, or keep what it was made for")


def test_too_few_microbatches_are_warned_of_in_a_category_of_their_own() -> None:
    with pytest.warns(PerformanceWarning, match="1 microbatch for 3 stages leaves ranks without work; raise "
                                                "microbatches, at best to 12") as warned:
        Pipeline(model(), sgd, stages=3, schedule="gpipe")
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(stages=3, schedule="gpipe", microbatches=3)
        pipeline(stages=3, schedule="pipedream")


def test_late_gradients_are_warned_of() -> None:
    with pytest.warns(PerformanceWarning) as warned:
        Pipeline(model(), sgd, stages=Cut(ranks=[[0], [1], [2, 3]]), schedule="pipedream")
    assert [(str(warning.message), warning.filename) for warning in warned] == [(
        "the gradients of stage 0 are 3 updates late on average, so each update lowers the loss less; better are: "
        "a larger update_every; an optimizer such as torch.optim.Muon; delay_correction=1.0; fewer stages; "
        "a schedule with a flush, which has no delay", __file__)]


BATCHES: list[dict[str, Tensor]] = [
    {"input": torch.zeros(6, 3), "target": torch.zeros(6, dtype=torch.int64)},
    {"input": torch.zeros(8, 3), "labels": torch.zeros(8)}, {"input": torch.zeros(8, 3), "target": torch.zeros(4)}]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_batch_that_does_not_fit_is_refused_wherever_it_goes(schedule: str) -> None:
    def pipe() -> Pipeline:
        return pipeline(stages=2, schedule=schedule, microbatches=4)

    assert_golden(__file__, "batches", [refusal(lambda one=one: list(pipe().train([one]))) for one in BATCHES])
    assert_golden(__file__, "batches evaluated", [refusal(pipe().evaluate, [one]) for one in BATCHES[1:]])


@pytest.mark.parametrize("nothing", [[], iter([])])
def test_there_must_be_something_to_evaluate(nothing: Any) -> None:
    assert refusal(lambda: pipeline(stages=2).evaluate(nothing)) == (
        "error: there is nothing to evaluate on\nhint: give evaluate at least one batch")


def test_training_on_nothing_makes_no_step() -> None:
    pipe = pipeline(stages=2)
    before = pipe.state_dict()
    assert list(pipe.train([])) == []
    assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())


def test_a_loss_must_be_one_number() -> None:
    vector = Model.sequential(nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss(reduction="none"))
    assert refusal(lambda: list(Pipeline(vector, sgd, stages=1).train(batches(1)))) == (
        "error: the loss of layer 0 '0' has shape [8] for microbatch 0\n"
        "hint: the last layer must return one number: the mean over its samples")


# -- what it does --------------------------------------------------------------------------------------


def test_a_plan_says_what_the_arguments_would() -> None:
    plan = Plan(Cut((1, 4, 1), recompute=(0.0, 0.5, 1.0), ranks=((2,), (0,), (1,))), Order("gpipe"))
    by_plan = pipeline(plan=plan, microbatches=2)
    by_hand = pipeline(partition=[1, 4, 1], recompute=[0.0, 0.5, 1.0], placement=[[2], [0], [1]], schedule="gpipe",
                       microbatches=2)
    for pipe in (by_plan, by_hand):
        assert (pipe.partition, pipe.recomputed, pipe.placement, pipe.schedule) == (
            (1, 4, 1), (frozenset(), {3, 4}, {5}), ((2,), (0,), (1,)), "gpipe")
    assert run(by_plan, batches(2))[0] == run(by_hand, batches(2))[0]
    shared = pipeline(plan=Plan(Cut((6,), ranks=((0, 1),)), zero1=True, tensor=1), microbatches=2)
    assert any(action.op == "GATHER_W" for program in shared.lowered.programs for action in program)
    assert refusal(lambda: pipeline(plan=Plan(Cut((6,)), tensor=2))) == (
        "error: the plan splits layers over 2 ranks, but there is 1 lane\n"
        "hint: build the layers on a mesh, Execution(mesh=mesh), or make another plan")


def test_layers_to_recompute_may_be_named() -> None:
    pipe = pipeline(partition=[2, 4], recompute=[0.5, [2, 4]])
    assert pipe.recomputed == ({1}, {2, 4})


def test_arguments_fill_what_a_plan_leaves_open() -> None:
    pipe = pipeline(plan=Plan(Cut((3, 3), recompute=(0.5, 0.5))), schedule="pipedream")
    assert (pipe.partition, pipe.recomputed, pipe.placement, pipe.schedule) == (
        (3, 3), ({2}, {5}), ((0,), (1,)), "pipedream")


def test_defaults_are_1f1b_balanced_by_parameters() -> None:
    pipe = pipeline(stages=2)
    assert (pipe.schedule, pipe.microbatches, pipe.recomputed, pipe.rank) == ("1f1b", 1, (frozenset(),) * 2, 0)
    assert pipe.partition == (1, 5)  # 32 | 0 0 72 0 18 parameters: the heavier part has 90


def test_steps_carry_number_loss_rate_and_norm() -> None:
    pipe = pipeline(stages=2, microbatches=2, grad_clip=1e-3, learning_rate_factor=lambda update: 0.5**update)
    steps = list(pipe.train(batches(3)))
    assert [step.index for step in steps] == [0, 1, 2]
    assert [step.learning_rate for step in steps] == [0.1, 0.05, 0.025]
    assert all(step.gradient_norm > 1e-3 for step in steps), "before clipping"
    assert not any(step.stop for step in steps)
    assert [step.index for step in pipe.train(batches(1))] == [3], "numbers go on"


def test_the_rate_of_an_asynchronous_step_is_its_own_though_later_stages_are_ahead() -> None:
    """Stage 0 has nothing to train, so the rate is that of stage 1, which is an update ahead when stage 0 steps."""
    net = Model.sequential(nn.Sequential(nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)), nn.CrossEntropyLoss())
    pipe = Pipeline(net, Update(sgd, learning_rate_factor=lambda update: 0.5**update), stages=3, schedule="pipedream",
                    microbatches=2)
    assert [step.learning_rate for step in pipe.train(batches(3))] == [0.1 * 0.5**update for update in range(6)]


def test_a_model_with_nothing_to_train_has_no_rate() -> None:
    frozen = Model.sequential(nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Tanh()), nn.MSELoss())
    pipe = Pipeline(frozen, Update(sgd, grad_clip=1.0), stages=2)
    (step,) = pipe.train([{"input": torch.randn(4, 3), "target": torch.randn(4, 3)}])
    assert step.learning_rate is None
    assert (step.gradient_norm, pipe.lowered.frozen) == (0, 1), "the last stage keeps its backward"


def test_an_optimizer_may_want_names() -> None:
    seen: list[list[str]] = []

    class ByName:
        def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
            seen.append(list(named))
            return torch.optim.SGD(named.values(), lr=0.1) if named else None

    list(pipeline(partition=[1, 2, 3], optimizer=ByName()).train(batches(1)))
    assert seen == [["0.weight", "0.bias"], [], ["3.weight", "3.bias", "5.weight", "5.bias"]]


def test_the_state_is_a_copy() -> None:
    pipe = pipeline(stages=2)
    first = pipe.state_dict()
    list(pipe.train(batches(1)))
    assert not torch.equal(first["0.weight"], pipe.state_dict()["0.weight"])


def test_errors_of_the_batches_reach_the_caller() -> None:
    def torn() -> Iterator[dict[str, Tensor]]:
        yield from batches(1)
        raise OSError("the disk is gone")

    for schedule in ("1f1b", "pipedream"):
        with pytest.raises(OSError, match="the disk is gone"):
            list(pipeline(stages=2, schedule=schedule).train(torn()))


def test_left_out_a_pipeline_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA ends where layers would be moved there."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr("vpipe.accelerator.uuid_of", str)

    def moved(module: nn.Module, device: torch.device) -> nn.Module:
        raise RunError(f"moved to {device}", hint="")

    monkeypatch.setattr(nn.Module, "to", moved)
    for arguments in ({}, {"device": "cuda"}):
        with pytest.raises(RunError, match="moved to cuda:1"):
            pipeline(stages=2, **arguments)
    assert current == [torch.device("cuda:1")] * 2


def test_the_position_is_that_of_the_steps_that_were_yielded() -> None:
    """With a flush after every batch; without one while microbatches are in flight, too."""
    pipe = pipeline(stages=3, microbatches=4)
    assert (pipe.position.updates, pipe.position.microbatches, pipe.position.samples) == (0, 0, 0)
    for step in pipe.train(batches(3)):
        position = pipe.position
        assert (position.updates, position.microbatches, position.samples) == (step.index + 1, 4 * (step.index + 1),
                                                                               8 * (step.index + 1))
    pipe = pipeline(stages=3, microbatches=4, schedule="pipedream")
    for count in (0, 12):
        for step in pipe.train(batches(3)):
            position = pipe.position
            assert position.updates == position.microbatches == step.index + 1 > count
            assert position.samples == 2 * position.updates
    assert pipe.position == Position(24, 24, 0, 48)


def test_the_position_says_which_weights_were_evaluated_and_saved(tmp_path: Path) -> None:
    pipe = pipeline(stages=3, microbatches=4, schedule="pipedream")
    found = []
    for step in pipe.train(batches(4)):
        if step.index == 4:
            pipe.evaluate(batches(1))
            found.append(pipe.position.updates)
            pipe.save(tmp_path / "saved")
            found.append(pipe.position.updates)
    assert found[0] == found[1] > 5, "what was in flight made updates"
    assert pipeline(stages=2, microbatches=4, schedule="pipedream").load(tmp_path / "saved").updates == found[0]


@pytest.mark.parametrize("pauses", [5, [5, 10, 15], {5, 10, 15, 90}])
def test_pauses_make_an_evaluation_be_of_an_exact_update(pauses: Any) -> None:
    """The run is that of a pipeline that drains there, whether or not anything is evaluated."""
    def run(evaluated: bool) -> tuple[list[float], list[int]]:
        pipe, losses, positions = pipeline(stages=3, microbatches=4, schedule="pipedream"), [], []
        for step in pipe.train(batches(4), pauses=pauses):
            losses.append(step.loss)
            if evaluated and (step.index + 1) % 5 == 0:
                pipe.evaluate(batches(1))
                positions.append(pipe.position.updates)
        return losses, positions

    losses, positions = run(evaluated=True)
    assert positions == [5, 10, 15]
    assert losses == run(evaluated=False)[0]
    assert losses != [step.loss for step in pipeline(stages=3, microbatches=4, schedule="pipedream").train(batches(4))]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_stop_from_another_thread_ends_training_and_the_next_training_goes_on(schedule: str) -> None:
    pipe, indices = pipeline(stages=3, microbatches=4, schedule=schedule), []
    for step in pipe.train(batches(9)):
        indices.append(step.index)
        if len(indices) == 2:
            asking = Thread(target=pipe.stop)
            asking.start()
            asking.join(10)
    assert (indices, step.stop, pipe.position.updates) == ([0, 1, 2], True, 3)
    left = pipeline(stages=3, microbatches=4, schedule=schedule)
    for step in left.train(batches(9)):
        if step.index == 2:
            break
    assert run(pipe, batches(2))[0] == run(left, batches(2))[0], "as if its caller had left the loop"


def test_a_stop_while_nothing_is_trained_or_of_another_pipeline() -> None:
    pipe, other = pipeline(stages=2, microbatches=2), pipeline(stages=2, microbatches=2)
    pipe.stop()
    assert [len(run(one, batches(3))[0]) for one in (other, pipe, pipe)] == [3, 1, 3]


def test_updates_that_an_evaluation_makes_come_with_the_stop() -> None:
    pipe, steps = pipeline(stages=3, microbatches=4, schedule="pipedream"), []
    for step in pipe.train(batches(9), stop=lambda: True):
        pipe.evaluate(batches(1))
        steps.append(step)
    assert len(steps) == pipe.position.updates > 1


@pytest.mark.parametrize("given", [0, -3, 2.5, True, "15", [0], [1.5], [None], {3: 1}])
def test_pauses_that_are_no_numbers_of_updates(given: Any) -> None:
    with pytest.raises(UserError, match=re.escape(f"pauses is {given!r}")):
        list(pipeline(stages=2).train(batches(1), pauses=given))


def test_the_position_after_a_failure_is_that_of_the_steps_that_were_yielded() -> None:
    class Failing(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Failing.calls += 1
            if Failing.calls == 20:
                raise ValueError("enough")
            return super().forward(x)

    failing = Model.sequential(nn.Sequential(nn.Linear(3, 3), Failing(3, 2)), nn.CrossEntropyLoss())
    pipe, done = Pipeline(failing, sgd, stages=2, schedule="pipedream", microbatches=4), []
    with pytest.raises(RunError):
        deque(map(done.append, pipe.train(batches(8))))
    assert pipe.position.updates == len(done) > 10


@pytest.mark.usefixtures("forked")
def test_a_pipeline_of_this_process_uses_no_group_that_the_program_makes_later(tmp_path: Path) -> None:
    """Its other ranks know nothing of the pipeline, so to ask them would hang."""
    program = tmp_path / "later.py"
    program.write_text(textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        from torch import nn
        from vpipe import Cut, Model, Pipeline, Transfers
        torch.manual_seed(0)
        model = Model.sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.MSELoss())
        pipe = Pipeline(model, lambda params: torch.optim.SGD(params, lr=0.1), Cut(2, ranks=2), microbatches=2,
                        transfers=Transfers(timeout_s=20))
        dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
        if sys.argv[1] == "0":
            batch = {"input": torch.zeros(4, 3), "target": torch.ones(4, 3)}
            print(len([step.loss for step in pipe.train([batch])]), len(pipe.state_dict()))
        dist.barrier()
        """))
    processes = [subprocess.Popen([sys.executable, program, str(rank), f"file://{tmp_path}/store"], text=True,
                                  stdout=subprocess.PIPE) for rank in range(2)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["1 4\n", ""]
