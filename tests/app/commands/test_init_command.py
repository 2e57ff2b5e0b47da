"""``vpipe init``: what it asks, and a config that loads, is planned and trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

import pytest
from golden import assert_golden
from made_profile import made_profile
from small_run import losses

from vpipe.app.cli import main
from vpipe.app.config.config import Config, load_config
from vpipe.app.config.validation import section_of
from vpipe.app.families.registry import family_named
from vpipe.app.train.job import Job, model_digest
from vpipe.app.train.loop import train
from vpipe.app.train.model_section import model_settings
from vpipe.plan.profile import Profile


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("\n\n".join(f"The cat sat on mat {n}. The dog saw it." * 4
                                                           for n in range(300)))
    return tmp_path


def test_its_model_is_planned_and_trains(here: Path, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, with a profile that nobody measured."""
    words = ["books/a.txt", "--size", "tiny", "--stages", "2", "--batch-size", "4", "--minutes", "5"]
    assert main(["init", *words]) == 0
    assert capsys.readouterr().out == ("train.yaml: gpt tiny, 5 layers in 2 stages, 1f1b\n"
                                       "plan it:  vpipe plan train.yaml\ntrain it: vpipe train train.yaml\n")

    def made(job: Job, sizes: Sequence[int], *, again: bool = False) -> dict[int, Profile]:
        profiles = {size: made_profile(len(job.model), size, job.schedule.ranks) for size in sizes}
        return {size: replace(one, identity=replace(one.identity, model=model_digest(job)))
                for size, one in profiles.items()}

    monkeypatch.setattr("vpipe.app.commands.profile.profiles_of", made)
    settings = ["dataset.cache_directory=cache", "training.max_steps=2", "checkpoint={at_end: false}",
                "metrics.peak_tflops=1", "model.sequence_length=16"]
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", "train.yaml", *sets, "-o", "plan.json"]) == 0
    (here / "run").mkdir()
    train(Job.from_config(load_config(Path("train.yaml"), [*settings, "parallel.plan=plan.json"])), here / "run")
    assert len(losses(here / "run")) == 2


@pytest.mark.parametrize(("words", "expected"), [
    ([], {"model.name": "gpt", "model.hidden_size": 256, "dataset.name": "code_search_net", "dataset.path": None,
          "training.max_minutes": 10, "training.num_microbatches": 32, "parallel.schedule": "1f1b"}),
    (["--family", "bert", "--size", "base", "--data", "books", "--schedule", "asynchronous", "--steps", "70"],
     {"model.preset": "base", "dataset.name": "text", "training.max_steps": 70, "training.lr_policy": "cosine",
      "parallel.schedule": "pipedream", "training.optimizer": "muon", "training.delay_correction": "extrapolate",
      "training.learning_rate": 0.001}),
    (["--schedule", "asynchronous"], {"model.num_layers": 4, "training.learning_rate": 0.006}),
    (["--family", "llama", "--size", "110m", "--batch-size", "7"],
     {"model.preset": "110m", "training.num_microbatches": 7, "dataset.batch_size": 7}),
    (["--family", "qwen3_moe"], {"model.num_layers": 4, "model.experts": 8, "model.experts_per_token": 2}),
    (["--family", "qwen3_moe", "--size", "30b-a3b"], {"model.preset": "30b-a3b", "model.experts": None}),
])
def test_without_a_terminal_options_or_defaults_are_taken_and_comments_are_the_descriptions(
        words: list[str], expected: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words, "-o", "c.yaml"]) == 0
    config, text = load_config(Path("c.yaml")), Path("c.yaml").read_text()
    for key, value in expected.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == value, key
    for section, keys in config.model_dump(exclude_unset=True).items():
        described = section_of(Config.model_fields[section])
        for key in keys if described is not None and f"\n{section}:" in text else ():
            about = described.model_fields[key].description  # type: ignore[union-attr]
            if f"\n  {key}: " in text.split(f"\n{section}:")[1]:
                assert "".join(f"  # {line}\n" for line in wrap(about or "", 100)) + f"  {key}: " in text
    assert text.count("  # ") >= 10
    assert "terminal" not in capsys.readouterr().out


def test_every_size_of_every_family_is_one() -> None:
    for family, sizes in (("gpt", "tiny mini xl"), ("llama", "tiny 13b 3.2-1b"), ("qwen3", "tiny 8b"),
                          ("bert", "tiny large")):
        for size in sizes.split():
            assert main(["init", "--family", family, "--size", size, "--force", "--schedule", "asynchronous"]) == 0
            config = load_config(Path("train.yaml"))
            assert len(family_named(family).factory(model_settings(config.model, 8192))) >= 5


def test_at_a_terminal_it_asks_what_no_option_says_and_asks_again(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers: Iterator[str] = iter(["my.yaml", "nowhere", "books", "gptt", "bert", "", "two", "2", "", "500 steps"])
    asked = []

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["init", "--batch-size", "8"]) == 0
    config = load_config(Path("my.yaml"))
    assert (config.model.name, config.model.preset, config.dataset.path) == ("bert", "mini", Path("books"))
    assert (config.parallel.model_parallel_size, config.training.max_steps) == (2, 500)
    assert len(asked) == 10
    assert not any("batch" in question for question in asked)
    err = capsys.readouterr().err
    assert "there is no file or folder 'nowhere'" in err
    assert "vpipe init has no family 'gptt'\nhint: did you mean 'gpt'?" in err
    assert "--stages is two" in err
    with monkeypatch.context() as ended:
        ended.setattr("builtins.input", lambda question: (_ for _ in ()).throw(EOFError))
        assert main(["init"]) == 2
    assert "hint: give the answers as options" in capsys.readouterr().err


MISTAKES = [
    ["-o", "there.yaml"], ["-o", "books"], ["-o", "nowhere/c.yaml"], ["--stages", "10"], ["--stages", "0"],
    ["--minutes", "-1"], ["--size", "smal"], ["my.yaml"], ["books", "--data", "books"], ["--data", "there.yaml"],
    ["--data", "f.jsonl", "--family", "bert"], ["--schedule", "asynchronous", "--batch-size", "9"]]


def test_mistakes_are_refused_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.yaml").write_text("mine")
    Path("f.jsonl").write_text("{}")

    def said(words: list[str]) -> str:
        assert main(["init", *words]) == 2
        return capsys.readouterr().err.partition(", *.hdf5")[0]  # extras read more

    assert_golden(__file__, "mistakes", {" ".join(words): said(words) for words in MISTAKES})
    assert Path("there.yaml").read_text() == "mine"
    assert not Path("train.yaml").exists()
