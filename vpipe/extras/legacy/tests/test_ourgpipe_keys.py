"""OurGPipe's keys and option, and the key that vpipe had before: what they mean, and how they are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from small_run import write_config

from vpipe.app.cli import main
from vpipe.app.command_line import OptionSetting, setting_words
from vpipe.app.commands.train import _note_form
from vpipe.app.config.config import Config, load_config
from vpipe.errors import UserError

GOOD = """\
model: {name: bert, preset: tiny}
dataset: {name: text, batch_size: 16}
training: {learning_rate: 1e-4, num_microbatches: 4}
parallel: {model_parallel_size: 4}
"""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("c.yaml")


def scheduler(name: str) -> OptionSetting:
    """What ``--scheduler`` gives."""
    return OptionSetting(f"parallel.scheduler={name}", "--scheduler", name)


def load(path: Path, text: str, *overrides: str) -> Config:
    path.write_text(text)
    return load_config(path, overrides)


def errors(path: Path, text: str, *overrides: str) -> list[tuple[str, str | None, str]]:
    with pytest.raises(UserError) as caught:
        load(path, text, *overrides)
    return [(problem.what, problem.where, problem.hint) for problem in caught.value.problems]


@pytest.mark.extras("async_threaded")
def test_scheduler_option(at: Path) -> None:
    for others in ("", ", schedule: pipedream, update_every: 2, executor: overlapped", ", scheduler: async_threaded"):
        parallel = load(at, GOOD.replace("size: 4}\n", f"size: 4{others}}}\n"), scheduler("naive")).parallel
        assert (parallel.schedule, parallel.executor, parallel.update_every) == ("gpipe", "naive", None)
    named = load(at, GOOD, "parallel.scheduler=async_threaded")
    assert named.parallel.order_text == "gpipe, executor async_threaded"
    assert load(at, named.resolved_yaml()) == named
    assert errors(at, GOOD, scheduler("1f1b")) == [
        ("'1f1b' is a schedule; a scheduler is naive or async_threaded", "--scheduler",
         "write --set parallel.schedule=1f1b")]
    assert setting_words(["a=b", scheduler("naive")]) == ["--set", "a=b", "--scheduler", "naive"]


def test_the_command_line_has_the_option(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at.write_text(GOOD)
    assert main(["train", "c.yaml", "--scheduler", "nave"]) == 2
    assert capsys.readouterr().err == ("error: --scheduler must be 'naive' or 'async_threaded', got 'nave' "
                                       "(--scheduler)\nhint: did you mean 'naive'?\n")
    with pytest.raises(SystemExit):
        main(["train", "c.yaml", "--shedule=gpipe"])
    assert capsys.readouterr().err == ("error: vpipe train knows no '--shedule'\nhint: did you mean '--scheduler'?\n")


@pytest.mark.parametrize(("overrides", "what", "hint"), [
    (["parallel.compress=[none, bf16, int8]", "parallel.compress_feedback=true"],
     "parallel.compress_feedback is true, but error feedback was removed: it made gradients less exact",
     "leave it out"),
    (["parallel.scheduler=async_threaded", "parallel.schedule=1f1b"],
     "parallel.schedule is '1f1b', but scheduler: async_threaded means schedule: gpipe",
     "leave one of the two out, the scheduler of a file with --set parallel.scheduler=null"),
    (["parallel.scheduler=naive", "parallel.executor=overlapped"],
     "parallel.executor is 'overlapped', but scheduler: naive means executor: naive",
     "leave one of the two out, the scheduler of a file with --set parallel.scheduler=null"),
])
def test_contradictions_are_refused(at: Path, overrides: list[str], what: str, hint: str) -> None:
    [(found, _, remedy)] = errors(at, GOOD, *overrides)
    assert (found, remedy) == (what, hint)


def test_neutral_values_are_accepted(at: Path) -> None:
    plain = load(at, GOOD)
    assert load(at, GOOD, "parallel.scheduler=null") == plain
    silent = GOOD.replace(", num_microbatches: 4", "").replace("size: 4}\n", "size: 4, scheduler: naive}\n")
    assert load(at, silent).training.num_microbatches == 1, "OurGPipe's own default"
    assert load(at, silent, "parallel.scheduler=null").training.num_microbatches == 16
    for feedback in ("false", "true"):
        assert load(at, GOOD, f"parallel.compress_feedback={feedback}") == plain


def test_old_keys_are_refused_beside_other_mistakes(at: Path) -> None:
    wrong = ("parallel.scheduler=3", "parallel.compress_feedback=maybe", "trace=7")
    assert [what for what, *_ in errors(at, GOOD, *wrong)] == [
        "parallel.scheduler must be 'naive' or 'async_threaded', got 3",
        "parallel.compress_feedback must be true or false, got 'maybe'", "trace must be true or false, got 7"]


@pytest.mark.parametrize(("schedule", "microbatches", "said"), [
    ("pipedream", 1, "note: --scheduler naive takes gpipe instead of pipedream: 1 microbatch per flush, so most of the "
     "2 stages wait; set training.num_microbatches\n"),
    ("pipedream", 4, "note: --scheduler naive takes gpipe instead of pipedream: 4 microbatches per flush\n"),
    ("1f1b", 1, "")])
def test_a_scheduler_that_brings_a_flush_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str,
                                                  microbatches: int, said: str) -> None:
    path = write_config(tmp_path, parallel__schedule=schedule, training__num_microbatches=microbatches)
    settings = [scheduler("naive")]
    _note_form(argparse.Namespace(config=path, settings=settings), load_config(path, settings))
    assert capsys.readouterr().err == said
