"""Check the command: mistakes are refused before anything starts, several models take turns over gloo."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from small_run import write_config

from vpipe.app.cli import main

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize(("words", "machines", "said"), [
    (["--systems", "gpipe,pipdream"], None, "error: --systems names 'pipdream', which is no system\n"
                                            "hint: did you mean 'pipedream'?"),
    (["--schedules", "1f1b", "-o", "nowhere/a.csv"], None, "error: cannot write 'nowhere/a.csv': it is in no folder"),
    ([], None, "takes --systems or --schedules, and there is neither"),
    (["--models", "c.yaml"], None, "takes a CONFIG or --models, not both"),
    (["--schedules", "1f1b", "--steps", "0"], None, "--steps is 0\nhint: give a whole number, 1 or more"),
    (["--system", "gpipe", "--set", "training.learning_rat=1"], None, "did you mean 'learning_rate'?"),
    (["--systems", "gpipe"], ["localhost:0", "elsewhere:0"], "on this host alone, but machines names 1 more"),
])
def test_mistakes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str],
                              machines: list[str] | None, said: str) -> None:
    path = write_config(tmp_path)
    if machines:
        path.write_text(path.read_text() + f"machines: {machines}\n")
    assert main(["compare", str(path), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the configs ``small`` and ``large`` (three stages)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write_config(tmp_path).rename(tmp_path / "configs" / "small.yaml")
    write_config(tmp_path, parallel__model_parallel_size=3, model__num_layers=3).rename(
        tmp_path / "configs" / "large.yml")
    return tmp_path


@pytest.mark.parametrize(("words", "said"), [
    (["--models", "smal"], "error: --models names 'smal', but there is no file 'configs/smal.yaml'\n"
                           "hint: did you mean 'small'?"),
    (["--models", "small,small"], "error: --models names 'small' 2 times\nhint: name it once"),
    (["--models", "x/y.yaml"], "error: --models names 'x/y.yaml', but there is no such file\nhint: "),
    (["--models", ""], "error: --models '' names nothing in one place\nhint: give names or files of configs, with "),
    (["--models", "small,large", "--set", "model.hiden_size=3"], "did you mean 'hidden_size'?"),
    (["--models", "small,large"], "error: the number of ranks is 2 in small, but 3 in large: all models run in the "
                                  "same processes\nhint: make them alike with --set, or compare the models apart"),
    ([], "takes a CONFIG or --models, and there is neither"),
])
def test_mistakes_in_models_are_refused(configs: Path, capsys: pytest.CaptureFixture[str], words: list[str],
                                        said: str) -> None:
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("error:") == 1
    assert not (configs / "runs").exists()


def test_models_that_need_other_processes_are_refused(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(configs, training__threads=2).rename(configs / "b.yaml")
    assert main(["compare", "--models", "small,b.yaml"]) == 2
    assert "error: training.threads is 1 in small, but 2 in b.yaml: all models run in the same processes\n" \
           "hint: make them alike with --set, or compare the models apart" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_one_table_and_one_csv(configs: Path, capfd: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["--models", "small,configs/small.yaml", "--schedules", "1f1b,gpipe", "--steps", "3",
             "--set", "training.learning_rate=0.5", "--set", "metrics.peak_tflops=1e-9"]
    assert main(["compare", *words, "-o", "all.csv"]) == 0
    out = capfd.readouterr().out
    assert "warning: small 1f1b: the MFU of " in out
    assert out.count("(=) the same program as small 1f1b, which ran for both") == 1
    rows = list(csv.DictReader((configs / "all.csv").read_text().splitlines()))
    assert [(row["contender"], row["model"], row["schedule"], row["same_as"]) for row in rows] == [
        (f"{model} {schedule}", model, schedule, same and f"small {schedule}")
        for model, same in (("small", ""), ("configs/small.yaml", "same")) for schedule in ("1f1b", "gpipe")]
    assert (rows[0]["training.learning_rate"], rows[0]["steps"], rows[0]["parallel.schedule"]) == ("0.5", "3", "1f1b")
    assert {key for key in rows[0] if rows[0][key] != rows[2][key]} == {"contender", "model", "same_as"}
    assert float(rows[0]["sent_bytes"]) > 0
    [run] = (configs / "runs").iterdir()
    assert {"comparison.csv", "comparison.json", "comparison.svg", "config.yaml", "config-2.yaml"} <= {
        path.name for path in run.iterdir()}
    assert (run / "comparison.csv").read_bytes() == (configs / "all.csv").read_bytes()


@pytest.mark.usefixtures("forked")
def test_a_copy_that_cannot_be_made_costs_no_figures(configs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "configs/small.yaml", "--systems", "gpipe,vpipe", "--steps", "1"]
    assert main([*words, "-o", "runs"]) == 2  # which becomes the runs' folder
    [run] = (configs / "runs").iterdir()
    err = capfd.readouterr().err
    assert f"error: cannot write 'runs': Is a directory\nhint: copy it yourself: {run}/comparison.csv" in err
    assert "vpipe: microbatches of " in err
    assert (run / "comparison.csv").read_text().count("\n") == 3


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
SRUN = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize("command", [["compare", "--systems", "gpipe"], ["verify"]])
@pytest.mark.parametrize("environment", [TORCHRUN, SRUN])
def test_it_starts_its_ranks_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str],
                                    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*command, str(write_config(tmp_path))]) == 2
    said = capsys.readouterr().err
    assert f"vpipe {command[0]} is one of 2 processes of {'srun' if 'SLURM_JOB_ID' in environment else 'its'}" in said
    assert "hint: run it alone, without torchrun or srun" in said
