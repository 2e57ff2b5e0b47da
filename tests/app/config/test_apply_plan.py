"""A plan file in a config: native, flat and on the command line; what it decides and what contradicts it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden import refusal
from small_run import job_of, write_config

from vpipe import Cut, Order
from vpipe.app.config.config import Config, load_config
from vpipe.app.train.job import Job
from vpipe.errors import UserError
from vpipe.plan.plan import Plan, Prediction, StagePrediction
from vpipe.plan.stage_costs import StageMemory

PREDICTION = Prediction(0.03, 8, 0.0, tuple(
    StagePrediction(first, layers, (rank,), 0.002, 0.004, 0.001, 0.0, 0.0, 0.0, StageMemory(0, 0, 0, 0, 0, 0))
    for rank, (first, layers) in enumerate([(0, 2), (2, 3)])))
PLAN = Plan(Cut((2, 3), recompute=((0,), (2, 4)), ranks=((1,), (0,))), Order("gpipe"), microbatches=2,
            predictions=PREDICTION, profile="0123456789ab")


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(plan: Plan | dict[str, Any], *settings: str, **changes: Any) -> Config:
    """The small config with a plan."""
    if isinstance(plan, Plan):
        plan.save("plan.json")
    else:
        Path("plan.json").write_text(json.dumps(plan))
    return load_config(write_config(Path(), **{"parallel__partition": "auto", **changes}), settings)


def problems(*arguments: Any, **changes: Any) -> list[str]:
    with pytest.raises(UserError) as error:
        load(*arguments, **changes)
    return [str(problem) for problem in error.value.problems]


def decided(config: Config) -> tuple[object, ...]:
    parallel = config.parallel
    return (parallel.partition, parallel.recompute, parallel.placement, parallel.schedule, parallel.update_every,
            config.training.num_microbatches)


WHOLE = ((2, 3), ((0,), (2, 4)), ((1,), (0,)), "gpipe", None, 2)


def test_a_plan_named_in_the_file_says_what_the_file_leaves_open() -> None:
    config = load(PLAN, parallel__plan="plan.json", parallel__schedule="auto", training__num_microbatches=2)
    assert decided(config) == WHOLE


def test_a_plan_on_the_command_line_goes_before_what_the_file_says() -> None:
    config = load(PLAN, "parallel.plan=plan.json", parallel__partition=[1, 2, 2], parallel__model_parallel_size=3,
                  parallel__recompute=0.5, parallel__data_parallel_size=1)
    assert decided(config) == WHOLE
    plain = load({"partition": [1, 4]}, "parallel.plan=plan.json", parallel__recompute=0.5)
    assert decided(plain) == ((1, 4), 0.5, None, "1f1b", None, 4), "what it does not say stays"


def test_a_plan_that_names_a_schedule_says_its_slices_too() -> None:
    cut = Cut((2, 3))
    for planned, slices in ((Plan(cut, Order("seq1f1b", slices=2)), 2), (Plan(cut, Order("1f1b")), 1), (Plan(cut), 4)):
        config = load(planned, "parallel.plan=plan.json", parallel__schedule="gpipe", parallel__slices=4)
        assert (config.order.slices, config.parallel.following(planned, ((0,), (1,))).slices) == (
            slices, planned.order.slices or 1)
    config = load(PLAN, "parallel.slices=4", parallel__schedule="auto")  # what is planned is tried with them
    assert (config.order, config.parallel.slices) == (Order("1f1b", slices=1), 4)


def test_a_plan_on_the_command_line_for_other_stages_drops_what_was_said_of_each() -> None:
    config = load({"partition": [2, 3]}, "parallel.plan=plan.json", parallel__partition=[1, 2, 2],
                  parallel__model_parallel_size=3, parallel__warmup_depth=[3, 2, 1],
                  parallel__compress=["bf16", "none"])
    assert (config.parallel.warmup_depth, config.parallel.compress) == (None, "none")
    same = load({"partition": [2, 3]}, "parallel.plan=plan.json", parallel__partition=[1, 4],
                parallel__compress=["bf16"])
    assert same.parallel.compress == ("bf16",)


def test_a_plan_of_very_many_stages_is_read() -> None:
    stages = tuple(replace(PREDICTION.stages[0], first_layer=rank, layers=1, ranks=(rank,)) for rank in range(600))
    cut = Cut((1,) * 600, ranks=[stage.ranks for stage in stages])
    plan = Plan(cut, predictions=replace(PREDICTION, stages=stages))
    assert load(plan, parallel__model_parallel_size=600, parallel__plan="plan.json").parallel.partition == (1,) * 600


def test_a_plan_says_how_ranks_share() -> None:
    settings = {"parallel__tensor": 2, "parallel__zero1": True}
    for shared, there in (({}, (2, True)), ({"tensor": 1, "zero1": False}, (1, False))):
        config = load({"partition": [2, 3], **shared}, "parallel.plan=plan.json", **settings)
        assert (config.parallel.tensor, config.parallel.zero1) == there
    assert problems({"partition": [2, 3], "zero1": False}, parallel__plan="plan.json", parallel__zero1=True)[
        0].startswith("error: parallel.zero1 is true, but zero1 in the plan 'plan.json' is false (c.yaml")
    assert job_of(Path()).with_plan(Plan(Cut((2, 3)), zero1=True)).config.parallel.zero1


def test_a_plan_of_vpipe_is_one() -> None:
    config = load({"partition": [2, 3], "recompute_ratio": [0.5, 0]}, "parallel.plan=plan.json")
    assert decided(config) == ((2, 3), (0.5, 0.0), None, "1f1b", None, 4)


def test_contradictions_are_refused_all_at_once_with_both_values() -> None:
    found = problems(PLAN, parallel__plan="plan.json", parallel__partition=[3, 2], parallel__recompute=0.5,
                     parallel__schedule="1f1b")
    hint = "\nhint: keep one of the two: leave the key out, or parallel.plan"
    assert [text.removesuffix(hint).split(" (c.yaml")[0] for text in found] == [
        "error: parallel.partition is [3, 2], but partition in the plan 'plan.json' is [2, 3]",
        "error: parallel.recompute is 0.5, but recompute_layers in the plan 'plan.json' is [[0], [2, 4]]",
        "error: parallel.schedule is '1f1b', but schedule in the plan 'plan.json' is 'gpipe'",
        "error: training.num_microbatches is 4, but microbatches in the plan 'plan.json' is 2"]
    [both] = problems(PLAN, "parallel.plan=plan.json", "parallel.partition=[3, 2]")
    assert "(--set parallel.partition)" in both


def test_the_same_said_twice_is_no_contradiction() -> None:
    config = load({"partition": [2, 3], "recompute_ratio": [0.5, 0.4]}, parallel__plan="plan.json",
                  parallel__partition=[2, 3], parallel__recompute=[[1], [4]])
    assert decided(config)[0] == (2, 3)


def test_another_number_of_stages_is_refused_with_both_numbers() -> None:
    [text] = problems({"partition": [1, 2, 2]}, parallel__plan="plan.json")
    assert text.startswith("error: partition has 3 entries for 2 stages (plan.json:1:")


def test_a_damaged_plan_is_refused() -> None:
    assert problems({"partition": [2, 3], "recompute_layers": [[0], [1]]}, "parallel.plan=plan.json") == [
        "error: layer 1 is to be recomputed in stage 1, which has the layers 2 to 4 (plan.json)\n"
        "hint: a list names layers of the model, counted from 0; a number is a share of the stage's layers"]
    Path("plan.json").unlink()
    with pytest.raises(UserError, match=r"there is no file 'plan\.json'"):
        load_config(write_config(Path(), parallel__plan="plan.json", parallel__partition="auto"))


def test_a_job_keeps_its_plan_and_a_config_that_needs_no_file(tmp_path: Path) -> None:
    job = Job.from_config(load(PLAN, "parallel.plan=plan.json"))
    assert (job.plan, job.cut.partition, job.cut.recomputed) == (PLAN, (2, 3), ({0}, {2, 4}))
    assert job.config.parallel.plan is None
    assert job.config.parallel.to_plan == ()
    run = tmp_path / "run"
    run.mkdir()
    job.keep_plan(run)
    assert Plan.load(run / "plan.json") == PLAN
    assert not (run / "profile.json").exists(), "nobody measured it"
    (run / "config.yaml").write_text(job.config.resolved_yaml())
    Path("plan.json").unlink()
    assert decided(load_config(run / "config.yaml")) == WHOLE


def test_a_plan_for_another_model_is_refused_with_both_numbers() -> None:
    assert refusal(Job.from_config, load({"partition": [2, 2]}, "parallel.plan=plan.json")) == (
        "error: the plan is for a model of 4 layers, but this one has 5 (plan.json)\n"
        "hint: make a plan for this model: vpipe plan CONFIG, or Pipeline.plan")


def test_a_job_follows_a_plan(tmp_path: Path) -> None:
    job = job_of(tmp_path).with_plan(PLAN)
    assert decided(job.config) == WHOLE
    assert (job.schedule.placement, job.schedule.microbatches, job.plan) == (((1,), (0,)), 2, PLAN)
    (tmp_path / "again.yaml").write_text(job.config.resolved_yaml())
    assert load_config(tmp_path / "again.yaml") == job.config
    wide = job_of(tmp_path,
                  parallel__data_parallel_size=2).with_plan(Plan(Cut((2, 3), ranks=((0, 1), (2,))), Order("1f1b")))
    assert (wide.schedule.placement, wide.config.parallel.data_parallel_size) == (((0, 1), (2,)), 1)
    assert wide.config.parallel.recompute == 0.0


def test_a_plan_whose_microbatches_do_not_divide_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cuts a batch into 3 microbatches, which do not divide its 8 samples"):
        job_of(tmp_path).with_plan(Plan(Cut((2, 3)), microbatches=3))


# -- the flat form -------------------------------------------------------------------------------------


def flat(plan: dict[str, Any], **keys: Any) -> Config:
    Path("plan.json").write_text(json.dumps(plan))
    Path("ranks.json").write_text(json.dumps({"module_to_stage_map": [0, 1, 1],
                                              "stage_to_rank_map": {"0": [0], "1": [1]}}))
    Path("flat.yml").write_text(json.dumps({
        "directory": ".", "partition": "plan.json", "config_file": "ranks.json", "sync_mode": "bsp",
        "model_type": "bert", "batch_size": 2, "learning_rate": 0.1, "synthetic_data": True, **keys}))
    return load_config(Path("flat.yml"))


@pytest.mark.extras("legacy")
def test_a_flat_file_may_name_any_plan() -> None:
    plan = PLAN.as_json() | {"stage_to_rank_map": {"0": [0], "1": [1]}}
    config = flat(plan)
    assert decided(config) == ((2, 3), ((0,), (2, 4)), ((0,), (1,)), "gpipe", None, 2)
    assert config.dataset.batch_size == 64, "as before: 32 minibatches per update, in fewer microbatches"
    assert Path(str(config.parallel.plan)).name == "plan.json"


@pytest.mark.extras("legacy")
@pytest.mark.parametrize(("plan", "keys", "text"), [
    ({"schedule": "pipedream"}, {}, "schedule is pipedream, which updates without a flush, but sync_mode is bsp"),
    ({"schedule": "gpipe"}, {"schedule": "zb_h1"}, "schedule is 'zb_h1', but schedule in the plan"),
    ({"stage_to_rank_map": {"0": [1], "1": [0]}}, {},
     "stage_to_rank_map is {'0': [0], '1': [1]}, but stage_to_rank_map in the plan"),
    ({"recompute_layers": [[0], [2]]}, {"recompute": True}, "recompute is 1.0, but recompute_layers in the plan"),
    ({"recompute_layer": [[0], [2]]}, {}, "unknown key 'recompute_layer'")])
def test_a_flat_file_and_its_plan_must_agree(plan: dict[str, Any], keys: dict[str, Any], text: str) -> None:
    assert text in refusal(flat, {"partition": [2, 3], **plan}, **keys)
