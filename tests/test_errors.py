"""What an error says and with which status a command ends."""

from __future__ import annotations

import pickle

import pytest

from vpipe.errors import CheckError, Problem, RunError, UserError, VpipeError, nearest


def test_a_problem_says_what_where_and_the_remedy() -> None:
    assert str(Problem("x is 3", "use 4")) == "error: x is 3\nhint: use 4"
    assert str(Problem("x is 3", "use 4", "a.yaml:3:5")) == "error: x is 3 (a.yaml:3:5)\nhint: use 4"


def test_a_user_error_is_a_value_error_with_status_two() -> None:
    error = UserError("x is 3", hint="use 4", where="a.yaml")
    assert str(error) == "error: x is 3 (a.yaml)\nhint: use 4"
    assert error.problems == (Problem("x is 3", "use 4", "a.yaml"),)
    assert isinstance(error, ValueError)
    assert isinstance(error, VpipeError)
    assert error.exit_status == 2


def test_several_problems_are_one_error() -> None:
    problems = [Problem("x is 3", "use 4"), Problem("y is 5", "use 6", "b.json:1:2")]
    error = UserError.all_of(problems)
    assert str(error) == "error: x is 3\nhint: use 4\nerror: y is 5 (b.json:1:2)\nhint: use 6"
    assert error.problems == tuple(problems)
    with pytest.raises(AssertionError, match="at least one problem"):
        UserError.all_of([])


def test_a_broken_schedule_is_the_users_error_too() -> None:
    error = CheckError.all_of([Problem("a deadlock", "turn them round")])
    assert type(error) is CheckError
    assert error.exit_status == 2


def test_a_run_error_says_where_in_the_run() -> None:
    error = RunError("out of luck", hint="try again", rank=2, stage=3, action="3F5", peer=0)
    assert str(error) == "error: out of luck (rank 2, stage 3, action 3F5, peer rank 0)\nhint: try again"
    assert (error.rank, error.stage, error.action, error.peer) == (2, 3, "3F5", 0)
    assert error.exit_status == 1
    assert not isinstance(error, ValueError)


def test_a_run_error_names_only_what_is_known_and_zero_is_known() -> None:
    assert str(RunError("no luck", hint="again")) == "error: no luck\nhint: again"
    assert RunError("no luck", hint="again", rank=0).located == "no luck (rank 0)"


def test_a_problem_survives_a_process_boundary() -> None:
    problem = Problem("x is 3", "use 4", "a.yaml")
    assert pickle.loads(pickle.dumps(problem)) == problem


def every_kind(of: type[VpipeError] = VpipeError) -> list[type[VpipeError]]:
    return [of, *(kind for each in of.__subclasses__() for kind in every_kind(each))]


def test_every_error_survives_a_process_boundary_with_its_fields_and_lines() -> None:
    for kind in every_kind():
        made = kind("no luck") if kind is VpipeError else kind("no luck", hint="again")  # type: ignore[call-arg]
        made.more = [1, 2]  # type: ignore[attr-defined]
        made.add_note("noted")
        with pytest.raises(kind) as caught:
            raise made
        error = caught.value
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            other = pickle.loads(pickle.dumps(error, protocol))
            assert (type(other), other.args, str(other)) == (kind, error.args, str(error))
            assert {**vars(other), "_frames": ""} == {**vars(error), "_frames": ""}
            assert "raise made" in other.frames
            assert other.with_frames() == error.with_frames()


@pytest.mark.parametrize(("word", "remedy"), [
    ("gpip", "did you mean 'gpipe'?"), ("pipe-dream", "did you mean 'pipedream'?"),
    ("zzz", "known names: 1f1b, gpipe, pipedream"), ("", "known names: 1f1b, gpipe, pipedream")])
def test_the_nearest_name_or_all_of_them(word: str, remedy: str) -> None:
    assert nearest(word, ["pipedream", "gpipe", "1f1b"]) == remedy
