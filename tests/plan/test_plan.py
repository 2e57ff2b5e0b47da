"""Plan files: what is read and written, and the words for what cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from golden import assert_golden, refusal

from vpipe import Asynchronous, Cut, Order, Plan
from vpipe.errors import UserError
from vpipe.plan.plan import Prediction, StagePrediction, ratio_of
from vpipe.plan.stage_costs import StageMemory

FULL = Plan(Cut((3, 2, 2), recompute=(0.5, 0.0, 1.0), ranks=((2,), (0,), (1,))), Order("1f1b"))
MEMORY = StageMemory(1, 2, 3, 4, 5, 6)
PREDICTION = Prediction(0.5, 32, 0.25, tuple(
    StagePrediction(first, layers, (rank,), 0.1, 0.2, 0.0, 0.01, 0.001, 0.2, MEMORY)
    for first, layers, rank in ((0, 3, 2), (3, 2, 0), (5, 2, 1))))
WHOLE = Plan(Cut((3, 2, 2), recompute=((0, 2), (), (5, 6)), ranks=((2,), (0,), (1,))),
             Asynchronous("pipedream", update_every=2), microbatches=8, predictions=PREDICTION, profile="0123456789ab")


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(UserError) as error:
        Plan.load(path)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize("plan", [FULL, WHOLE, Plan(Cut((4,))), Plan(Cut((1, 1)), Order("pipedream")),
                                  Plan(Cut((1, 1), recompute=(0.0, 0.3))), Plan(Cut((2,)), tensor=4, zero1=False),
                                  Plan(Cut((1, 1)), Order("seq1f1b", slices=4))])
def test_a_saved_file_is_loaded_as_it_was(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"], "nothing else is left"


def test_the_file_is_json_that_people_can_read(tmp_path: Path) -> None:
    FULL.save(str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "partition": [3, 2, 2], "recompute_ratio": [0.5, 0.0, 1.0],
        "stage_to_rank_map": {"0": [2], "1": [0], "2": [1]}, "schedule": "1f1b"}


def test_layers_that_are_recomputed_come_with_their_share_for_readers_that_know_no_other() -> None:
    content = WHOLE.as_json()
    assert content["recompute_layers"] == [[0, 2], [], [5, 6]]
    assert [int(ratio * size) for ratio, size in zip(content["recompute_ratio"], content["partition"], strict=True)] \
        == [2, 0, 2]
    assert WHOLE.recomputed == ({0, 2}, frozenset(), {5, 6})
    assert FULL.recomputed == ({2}, frozenset(), {5, 6})
    assert Plan(Cut((2, 2))).recomputed == (frozenset(), frozenset())


def test_a_share_means_as_many_layers_as_it_was_made_for() -> None:
    for layers in (*range(1, 60), 97, 1000):
        for recomputed in range(layers + 1):
            share = ratio_of(recomputed, layers)
            assert 0 <= share <= 1
            assert int(share * layers) == recomputed
    assert (ratio_of(1, 4), ratio_of(1, 3), ratio_of(29, 100)) == (0.25, 0.34, 0.291)


def test_a_plan_for_another_model_or_other_ranks_is_refused_with_both_numbers() -> None:
    WHOLE.check_fits(7, 3)
    assert refusal(WHOLE.check_fits, 13, 4, "plan.json") == (
        "error: the plan is for a model of 7 layers, but this one has 13 (plan.json)\n"
        "hint: make a plan for this model: vpipe plan CONFIG, or Pipeline.plan\n"
        "error: the plan is for 3 ranks, but there are 4 (plan.json)\n"
        "hint: vpipe plan CONFIG --ranks 4 makes a plan for as many")
    assert (Plan(Cut((1, 1), ranks=((0, 1), (2, 3)))).ranks, Plan(Cut((1, 1))).ranks) == (4, 2)


def test_saving_replaces_the_file_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    FULL.save(path)
    with pytest.raises(TypeError):
        Plan(Cut((1,)), profiled={"model": object()}).save(path)
    assert Plan.load(path) == FULL


def test_a_file_of_vpipe_is_a_plan(tmp_path: Path) -> None:
    path = written(tmp_path, {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]})
    assert Plan.load(path) == Plan(Cut((12, 13, 13, 11), recompute=(0.3, 0.0, 0.0, 0.0)))
    assert all(type(ratio) is float for ratio in Plan.load(path).cut.recompute)


def test_ranks_come_in_the_order_of_stages(tmp_path: Path) -> None:
    ranks = {str(s): [s] for s in reversed(range(12))}
    plan = Plan.load(written(tmp_path, {"partition": [1] * 12, "stage_to_rank_map": ranks}))
    assert plan.groups == tuple((s,) for s in range(12))


def test_a_plan_is_a_line_of_text() -> None:
    plan = Plan(Cut((3, 3)), Order("1f1b"), 4)
    assert str(plan) == "1f1b, 2 stages [3, 3], 4 microbatches"
    predicted = replace(plan, predictions=replace(PREDICTION, step_s=0.25, samples_per_step=16))
    assert str(predicted) == f"{plan}, 250 ms per step, 64 samples/s predicted"


MISTAKES: list[object] = [
    [3, 3], {}, {"partition": [3], "recompute_ratios": [0]}, {"partition": []}, {"partition": [3, 0]},
    {"partition": [True]}, {"partition": [3], "tensor": 0}, {"partition": [3], "zero1": 1}, {"partition": "3"},
    {"partition": [3, 3], "recompute_ratio": [0.5]}, {"partition": [3], "recompute_ratio": [1.5]},
    {"partition": [3], "recompute_ratio": 0.5}, {"partition": [3, 3], "stage_to_rank_map": {"0": [0], "2": [1]}},
    {"partition": [3, 3], "stage_to_rank_map": {"0": 0, "1": [1]}},
    {"partition": [3, 3], "stage_to_rank_map": {"0": [0], "1": ["1"]}}, {"partition": [3, 3], "stage_to_rank_map": 5},
    {"partition": [3, 3], "recompute_layers": [0, 1]}, {"partition": [3, 3], "recompute_layers": [[0, 2]]},
    {"partition": [3, 3], "recompute_layers": [[0, 2], [2]]},
    {"partition": [3, 3], "recompute_layers": [[0, 2], []], "recompute_ratio": [0.5, 0]},
    {"partition": [3], "microbatches": 0}, {"partition": [3], "update_every": True}, {"partition": [3], "profile": 5},
    {"partition": [3], "predictions": {"step_s": 1}}, {"partition": [3], "predictions": PREDICTION.as_json()},
    {"partition": [3], "schedule": ["1f1b"]}, '{"partition": [3,\n 3}']


def test_a_mistake_is_named_with_its_place_and_remedy(tmp_path: Path) -> None:
    assert_golden(__file__, "mistakes", [refusal(Plan.load, written(tmp_path, content)).replace(str(tmp_path), "FOLDER")
                                         for content in MISTAKES])


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, {"partition": [3], "recompute": 1, "recompute_ratio": [2], "schedule": 1})
    assert [text.split(" (")[0] for text in problems(path)] == [
        "error: unknown key 'recompute' in the plan", "error: recompute_ratio is [2]", "error: schedule is 1"]
