"""A run is whole: its folder has what it needs, and it is resumed and exported from any folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import begin, go_on
from made_text import write_text
from small_run import losses

from vpipe.app.cli import main
from vpipe.app.config.origin import KEPT, read_origin
from vpipe.app.data.tokenizers import load_wordpiece
from vpipe.app.train.checkpoint_model import CheckpointModel
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.resume import data_settings, find_resume_point, prepare_run, run_config
from vpipe.app.train.run_folder import unlock_runs
from vpipe.checkpoint import Manifest

pytestmark = pytest.mark.jobs

GPT = {"model__name": "gpt", "model__preset": None, "model__num_layers": 1, "model__num_heads": 2,
       "model__vocab_size": -1, "dataset__name": "text", "dataset__path": "texts", "dataset__samples": None,
       "dataset__cache_directory": "cache", "checkpoint__every_steps": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the texts of its run, which were named from there."""
    project = tmp_path_factory.mktemp("made") / "project"
    with chdir(write_text(project / "texts").parent):
        begin(project, **GPT)
    return project


@pytest.fixture
def project(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the project, whose original is away; tests stand beside it."""
    hidden = made.rename(made.with_name("hidden"))
    monkeypatch.chdir(tmp_path)
    yield Path(shutil.copytree(hidden, tmp_path / "copy"))
    unlock_runs()
    shutil.rmtree(made, ignore_errors=True)
    hidden.rename(made)


def run_in(project: Path) -> Path:
    [run] = (project / "runs").iterdir()
    return run


def back(project: Path, made: Path) -> Path:
    """The project where it was made, and a tester elsewhere."""
    return run_in(project.rename(made))


def alone(project: Path, made: Path) -> Path:
    """The run elsewhere, where other texts are, and the data where they were."""
    write_text(Path("texts"), seed=1)
    return back(project, made).rename(Path.cwd() / "run")


def without_cache(project: Path, made: Path) -> Path:
    """The project at another place, as on another machine."""
    shutil.rmtree(project / "cache")
    return run_in(project)


@pytest.mark.parametrize("place", [back, alone, without_cache])
def test_it_goes_on_from_any_folder_as_if_nothing_had_moved(
        place: Callable[[Path, Path], Path], project: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place(project, made)
    before = losses(run)
    go_on(run, at=2)
    assert losses(run) == before
    assert "changed since" not in capsys.readouterr().err
    if place is back:
        go_on(run_in(run.parents[1].rename(Path.cwd() / "later")), at=2)


def test_data_elsewhere_are_given_by_an_option(project: Path) -> None:
    run, data = run_in(project), (project / "texts").rename("data")
    before = losses(run)
    assert main(["train", "--resume", str(run)]) == 2
    go_on(run, *data_settings(run, data), at=2)
    assert losses(run) == before


def test_what_is_missing_is_named_with_its_path(project: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(project / "texts")
    assert main(["train", "--resume", str(run_in(project)), "--set", "training.max_steps=6"]) == 2
    said = capsys.readouterr().err
    assert f"{made}/texts does not exist" in said
    assert "as --data PATH" in said
    assert main(["train", str(project / "c.yaml"), "--data", "texts"]) == 2
    assert "--data is given without --resume\nhint: write --set dataset.path=texts" in capsys.readouterr().err


def test_data_that_have_grown_are_refused_until_they_are_given(
        project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Then they are read in the run's own tokens."""
    monkeypatch.setattr("vpipe.app.launch.local.run_ranks", lambda *_: None)
    run, resume = run_in(project), ["train", "--set", "training.max_steps=6", "--resume"]
    tokens, data = (run / "tokenizer.json").read_bytes(), read_origin(run)["data"]
    was = data["training samples"]
    write_text(project / "texts" / "more", 60, seed=1)
    assert main([*resume, str(run)]) == 2
    said = capsys.readouterr().err
    assert f"the checkpoint: path {data['path']} -> {project}/texts, training samples {was} -> " in said
    assert f"go on with other ones: vpipe train --resume {run} --data {project / 'texts'}\n" in said
    assert main([*resume, str(run), "--data", "copy/texts"]) == 0
    assert "changed since step 4: training.max_steps 4 -> 6; path " in capsys.readouterr().err
    assert (run / "tokenizer.json").read_bytes() == tokens
    assert read_origin(run)["data"]["training samples"] > was
    assert read_origin(run / "earlier" / "1")["data"]["training samples"] == was
    start, job = replace(find_resume_point(run), other_data=True), Job.from_config(run_config(run))
    train(job, prepare_run(start, job), start)
    unlock_runs()
    go_on(run, "training.max_steps=7")
    assert len(losses(run)) == 7


def test_the_tokenizer_is_exported_and_a_changed_one_is_not(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(project).rename("run")
    shutil.rmtree(project)
    step = Path(shutil.copytree(run / "checkpoints" / "step-4", "step"))
    shutil.copy(run / "tokenizer.json", step)
    for number, source in enumerate((run, step)):
        assert main(["checkpoint", "export", str(source), "--format", "huggingface", "-o", f"hf{number}"]) == 0
        assert Path(f"hf{number}", "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    (run / "tokenizer.json").write_text((run / "tokenizer.json").read_text() + " ")
    capsys.readouterr()
    assert main(["checkpoint", "export", str(run), "--format", "huggingface", "-o", "hf"]) == 0
    assert "no tokenizer goes with it: its run's tokenizer.json is gone, or has changed" in capsys.readouterr().out


def test_files_that_a_config_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16, "max_position_embeddings": 16, "vocab_size": 32, "type_vocab_size": 2}
    Path("sizes.json").write_text(json.dumps(sizes))
    Path("order.csv").write_text("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n")
    run = begin(tmp_path, model__config_file="sizes.json", model__preset=None, model__hidden_size=None,
                parallel__schedule="order.csv", parallel__model_parallel_size=1, parallel__partition=[3],
                checkpoint__at_end=True, training__max_steps=1)
    assert {path.name for path in run.iterdir()} & set(KEPT) == {"config.json", "schedule.csv"}
    Path("sizes.json").write_text(json.dumps(sizes | {"num_attention_heads": 4}))
    step = run / "checkpoints" / "step-1"
    found = CheckpointModel.from_manifest(Manifest.load(step), step)
    assert found.settings.overrides["num_attention_heads"] == 2, "the run's, not what is there now"
    Path("sizes.json").unlink()
    Path("order.csv").unlink()
    config = run_config(run)
    assert (config.model.config_file, config.parallel.schedule) == (run / "config.json", str(run / "schedule.csv"))
    go_on(run, "training.max_steps=2")


@pytest.mark.parametrize(("words", "found"), [("[UNK] [CLS] [SEP] [MASK] a b", [5, 5]),
                                              ("[UNK] [CLS] [SEP] [MASK] a B", [5, 1])])
def test_the_words_of_bert_are_a_tokenizer(words: str, found: list[int], tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", *words.split()]) + "\n")
    assert load_wordpiece(tmp_path / "vocab.txt").encode("a A", add_special_tokens=False).ids == found
