"""A run without a checkpoint: what is said of it, and what then."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from small_run import write_config

from vpipe.app.cli import _parser
from vpipe.app.config.config import Config, load_config
from vpipe.app.errors import LastingError
from vpipe.app.launch.launcher import _Run
from vpipe.app.run_log import METRICS
from vpipe.app.train.resume import find_resume_point
from vpipe.app.train.run_folder import CONFIG, make_run_folder, why_unsaved
from vpipe.errors import RunError, UserError


def a_run(folder: Path, steps: int, **changes: Any) -> tuple[Config, Path]:
    """One that recorded so many steps, and saved nothing."""
    config = load_config(write_config(folder, **changes))
    run = make_run_folder(folder / "runs", config.resolved_yaml())
    (run / METRICS).write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(steps)))
    return config, run


@pytest.mark.parametrize(("every", "steps", "why"), [
    (None, 0, "it made no step"),
    (None, 3, "checkpoint.every_minutes is null"),
    (20, 1, "its first is due after step 20, and it made 1 step"),
    (2, 3, "no save came to its end, see RUN/rank0.log")])
def test_why_there_is_none(tmp_path: Path, every: int | None, steps: int, why: str) -> None:
    config, run = a_run(tmp_path, steps, checkpoint__every_steps=every)
    assert why_unsaved(config, run).replace(str(run), "RUN") == why


@pytest.mark.parametrize(("every", "more"), [(None, ["--set", "checkpoint.every_steps=N"]), (20, [])])
def test_a_run_that_cannot_be_gone_on_with_is_refused_with_a_command_that_works(tmp_path: Path, every: int | None,
                                                                                more: list[str]) -> None:
    config, run = a_run(tmp_path, 3, checkpoint__every_steps=every, checkpoint__at_end=True,
                        checkpoint__directory=str(tmp_path / "far"))
    with pytest.raises(UserError, match=f"there is no checkpoint of the run in '{run}': ") as caught:
        find_resume_point(run)
    [problem] = caught.value.problems
    assert problem.where == f"looked in {tmp_path / 'far' / run.name}"
    before, _, command = problem.hint.partition(": vpipe ")
    assert before == "start a new run"
    options = _parser().parse_args([word.replace("=N", "=5") for word in shlex.split(command)])
    assert shlex.split(command)[2:] == more
    again = load_config(options.config, options.settings)
    assert again.saving.every_steps == (every or 5)
    assert again.model_copy(update={"checkpoint": None}) == config.model_copy(update={"checkpoint": None})


def ended(config: Config, run: Path, error: RunError) -> str:
    launched = _Run(config, None)
    launched.folder = run
    return launched.ended(error, None).hint


def test_a_failure_says_that_nothing_was_saved_and_what_would_be(tmp_path: Path) -> None:
    config, run = a_run(tmp_path, 3)
    assert ended(config, run, RunError("lost", hint="its log: x")) == (
        "its log: x; no checkpoint was made: checkpoint.every_minutes is null")
    assert ended(config, run, LastingError("nan", hint="there is no checkpoint")) == "there is no checkpoint"
    (run / "checkpoints" / "step-2").mkdir(parents=True)
    assert ended(config, run, RunError("lost", hint="its log: x")) == (
        f"its log: x; go on from step-2 with: vpipe train --resume {run}")


def test_an_end_before_the_first_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = a_run(tmp_path, 0)
    launched = _Run(config, None)
    launched.print_resume_command()  # it has no folder yet
    launched.folder = run
    launched.print_resume_command()
    assert capsys.readouterr().err == "no checkpoint was made: it made no step\n"
    assert (run / CONFIG).is_file()
