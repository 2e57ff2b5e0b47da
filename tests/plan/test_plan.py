"""Plan files: what is read and written, and the words for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vpipe import Plan
from vpipe.errors import UserError

FULL = Plan((3, 2, 2), (0.5, 0.0, 1.0), ((2,), (0,), (1,)), "1f1b")


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(UserError) as error:
        Plan.load(path)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize("plan", [FULL, Plan((4,)), Plan((1, 1), schedule="pipedream"), Plan((1, 1), (0.0, 0.3))])
def test_what_is_saved_is_loaded(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"], "nothing else is left"


def test_the_file_is_json_that_people_can_read(tmp_path: Path) -> None:
    FULL.save(str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "partition": [3, 2, 2], "recompute_ratio": [0.5, 0.0, 1.0],
        "stage_to_rank_map": {"0": [2], "1": [0], "2": [1]}, "schedule": "1f1b"}


def test_saving_replaces_the_file_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    FULL.save(path)
    with pytest.raises(TypeError):
        Plan((1,), schedule=object()).save(path)  # type: ignore[arg-type]
    assert Plan.load(path) == FULL


def test_a_file_of_vpipe_is_a_plan(tmp_path: Path) -> None:
    path = written(tmp_path, {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]})
    assert Plan.load(path) == Plan((12, 13, 13, 11), (0.3, 0.0, 0.0, 0.0))
    assert all(type(ratio) is float for ratio in Plan.load(path).recompute_ratio)


def test_ranks_come_in_the_order_of_stages(tmp_path: Path) -> None:
    ranks = {str(s): [s] for s in reversed(range(12))}
    plan = Plan.load(written(tmp_path, {"partition": [1] * 12, "stage_to_rank_map": ranks}))
    assert plan.stage_to_rank_map == tuple((s,) for s in range(12))


@pytest.mark.parametrize(("content", "text"), [
    ([3, 3], 'error: the plan has no partition ({path})\nhint: write {{"partition": [3, 3, 3]}}: layers per stage'),
    ({}, 'error: the plan has no partition ({path})\nhint: write {{"partition": [3, 3, 3]}}: layers per stage'),
    ({"partition": [3], "recompute_ratios": [0]},
     "error: unknown key 'recompute_ratios' in the plan ({path})\nhint: did you mean 'recompute_ratio'?"),
    ({"partition": []}, "error: partition is [] ({path})\nhint: write a list of positive integers: layers per stage"),
    ({"partition": [3, 0]},
     "error: partition is [3, 0] ({path})\nhint: write a list of positive integers: layers per stage"),
    ({"partition": [True]},
     "error: partition is [True] ({path})\nhint: write a list of positive integers: layers per stage"),
    ({"partition": "3"}, "error: partition is '3' ({path})\nhint: write a list of positive integers: layers per stage"),
    ({"partition": [3, 3], "recompute_ratio": [0.5]},
     "error: recompute_ratio has 1 entries for 2 stages ({path})\nhint: give one ratio per stage"),
    ({"partition": [3], "recompute_ratio": [1.5]},
     "error: recompute_ratio is [1.5] ({path})\nhint: write a list of numbers from 0 to 1"),
    ({"partition": [3], "recompute_ratio": 0.5},
     "error: recompute_ratio is 0.5 ({path})\nhint: write a list of numbers from 0 to 1"),
    ({"partition": [3, 3], "stage_to_rank_map": {"0": [0], "2": [1]}},
     "error: stage_to_rank_map names ['0', '2'] for 2 stages ({path})\n"
     'hint: give the ranks of every stage: {{"0": [0], ..., "1": [1]}}'),
    ({"partition": [3, 3], "stage_to_rank_map": {"0": 0, "1": [1]}},
     "error: stage_to_rank_map is {{'0': 0, '1': [1]}} ({path})\n"
     'hint: give the ranks of every stage: {{"0": [0], ..., "1": [1]}}'),
    ({"partition": [3, 3], "stage_to_rank_map": {"0": [0], "1": ["1"]}},
     "error: stage_to_rank_map is {{'0': [0], '1': ['1']}} ({path})\n"
     'hint: give the ranks of every stage: {{"0": [0], ..., "1": [1]}}'),
    ({"partition": [3, 3], "stage_to_rank_map": 5},
     "error: stage_to_rank_map is 5 ({path})\n"
     'hint: give the ranks of every stage: {{"0": [0], ..., "1": [1]}}'),
    ({"partition": [3], "schedule": ["1f1b"]},
     "error: schedule is ['1f1b'] ({path})\nhint: give its name, such as 1f1b")])
def test_a_mistake_is_named_with_its_place_and_remedy(tmp_path: Path, content: object, text: str) -> None:
    path = written(tmp_path, content)
    assert problems(path) == [text.format(path=path)]


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, {"partition": [3], "recompute": 1, "recompute_ratio": [2], "schedule": 1})
    assert [text.split(" (")[0] for text in problems(path)] == [
        "error: unknown key 'recompute' in the plan", "error: recompute_ratio is [2]", "error: schedule is 1"]


def test_what_is_no_json_is_shown_where(tmp_path: Path) -> None:
    path = written(tmp_path, '{"partition": [3,\n 3}')
    assert problems(path) == [
        f"error: the plan is not JSON: Expecting ',' delimiter ({path}:2:3)\n"
        'hint: a plan looks like {"partition": [3, 3, 3], "recompute_ratio": [0, 0, 0]}']


def test_a_file_that_is_no_text_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert problems(path) == [f"error: the plan is not text in UTF-8 ({path})\n"
                              'hint: a plan looks like {"partition": [3, 3, 3], "recompute_ratio": [0, 0, 0]}']


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    assert problems(path) == [f"error: cannot read the plan: No such file or directory ({path})\n"
                              "hint: give the path of a JSON file"]
    assert problems(tmp_path) == [f"error: cannot read the plan: Is a directory ({tmp_path})\n"
                                  "hint: give the path of a JSON file"]
