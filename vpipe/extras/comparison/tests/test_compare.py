"""Check the command: mistakes are refused before anything starts; runs alternate, and their summaries are compared."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median

import pytest
from small_run import losses, write_config

from vpipe.app.cli import main
from vpipe.app.config.config import Config, load_config
from vpipe.app.train.job import Job, new_run
from vpipe.app.train.loop import train
from vpipe.extras.comparison.contenders import plan_contenders
from vpipe.extras.comparison.systems import ComparisonRequest
from vpipe.plan.plan import Plan

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize(("words", "said"), [
    (["--systems", "gpipe,pipdream"], "error: --systems names 'pipdream', which is no system\n"
                                      "hint: did you mean 'pipedream'?"),
    (["--schedules", "1f1b", "-o", "nowhere/a.csv"], "error: cannot write 'nowhere/a.csv': it is in no folder"),
    ([], "takes --systems or --schedules, and there is neither"),
    (["--models", "c.yaml"], "takes a CONFIG or --models, not both"),
    (["--schedules", "1f1b", "--rounds", "0"], "--rounds is 0\nhint: give a whole number, 1 or more"),
    (["--schedules", "1f1b", "--steps", "0"], "--steps is 0\nhint: give a whole number, 1 or more"),
    (["--system", "gpipe", "--set", "training.learning_rat=1"], "did you mean 'learning_rate'?"),
])
def test_mistakes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    path = write_config(tmp_path)
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
    (["--models", "gpt_small,lama_small"], "error: --models names 'lama_small', but there is no file "
                                           "'configs/lama_small.yaml'\nhint: did you mean 'llama_small'?"),
    (["--models", "small,small"], "error: --models names 'small' 2 times\nhint: name it once"),
    (["--models", "x/y.yaml"], "error: --models names 'x/y.yaml', but there is no such file\nhint: "),
    (["--models", ""], "error: --models '' names nothing in one place\nhint: give names or files of configs, with "),
    (["--models", "small,large", "--set", "model.hiden_size=3"], "did you mean 'hidden_size'?"),
    ([], "takes a CONFIG or --models, and there is neither"),
])
def test_mistakes_in_models_are_refused(configs: Path, capsys: pytest.CaptureFixture[str], words: list[str],
                                        said: str) -> None:
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("error:") == 1
    assert not (configs / "runs").exists()


def here(config: Config, start: None, restarts: None) -> Path:
    """Run what ``launcher.run`` would, in this process."""
    job = Job.from_config(config)
    folder = new_run(job)
    train(job, folder)
    return folder


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs in this process; the list gets the schedule of each."""
    ran: list[str] = []

    def run(config: Config, start: None, restarts: None) -> Path:
        ran.append(config.parallel.schedule)
        return here(config, start, restarts)

    monkeypatch.setattr("vpipe.app.launch.launcher.run", run)
    return ran


def test_rounds_alternate_and_each_run_is_an_ordinary_one(configs: Path, capsys: pytest.CaptureFixture[str],
                                                          one_process: list[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["configs/small.yaml", "--schedules", "1f1b,pipedream,interleaved", "--steps", "3", "--rounds", "3"]
    assert main(["compare", *words, "-o", "all.csv"]) == 0
    order = ["1f1b", "pipedream", "interleaved"]
    assert one_process == [*order, *reversed(order), *order]
    [folder] = (configs / "runs").iterdir()
    rows = list(csv.DictReader((configs / "all.csv").read_text().splitlines()))
    assert (folder / "comparison.csv").read_bytes() == (configs / "all.csv").read_bytes()
    assert [(row["contender"], row["round"], row["parallel.schedule"], row["steps"]) for row in rows] == [
        (name, str(number), name, "3") for name in order for number in (1, 2, 3)]
    runs = {path.name: path for path in folder.iterdir() if path.is_dir()}
    assert {*runs} == {row["run"] for row in rows}
    assert not list(folder.glob("*/checkpoints")), "nobody asked for any"
    flush = [losses(runs[row["run"]]) for row in rows if row["contender"] != "pipedream"]
    assert flush == [flush[0]] * 6, "all train on the same batches from the same weights"
    assert json.loads(rows[-1]["parallel.partition"]) == [1, 1, 1, 2]
    out = capsys.readouterr().out
    assert "2 stages on each rank, balanced by parameters" in out
    assert "round 2 of 3: interleaved" in out
    [table] = [line.split() for line in out.splitlines() if line.startswith("1f1b ")]
    summaries = [json.loads((runs[row["run"]] / "metrics.jsonl").read_text().splitlines()[-1])["summary"]
                 for row in rows[:3]]
    assert table[1] == f"{median(one['samples_per_s'] for one in summaries):,.1f}"
    speeds = [one["samples_per_s"] for one in summaries]
    assert table[2] == f"{100 * (max(speeds) - min(speeds)) / 2 / median(speeds):.1f}"
    assert f"{summaries[0]['evaluation_loss']:.4f}" == table[-1]
    assert "<title>bert on 2 ranks, 8 samples per batch</title>" in (folder / "comparison.html").read_text()


def test_equal_configs_run_once_and_what_does_not_fit_is_named(configs: Path, capsys: pytest.CaptureFixture[str],
                                                               one_process: list[str]) -> None:
    (configs / "same.yaml").write_text((configs / "configs" / "small.yaml").read_text())
    words = ["--models", "small,same.yaml", "--schedules", "gpipe,interleaved", "--rounds", "1", "--steps", "2"]
    assert main(["compare", *words, "--set", "parallel.data_parallel_size=2", "-o", "all.csv"]) == 0
    assert one_process == ["gpipe"]
    assert "(=) the same config as small gpipe, whose runs these are" in capsys.readouterr().out
    small, same, *refused = csv.DictReader((configs / "all.csv").read_text().splitlines())
    assert (same["contender"], same["model"], same["same_as"], same["round"]) == (
        "same.yaml gpipe", "same.yaml", "small gpipe", "1")
    assert small["samples_per_s"] == same["samples_per_s"]
    [page] = (configs / "runs").glob("*/comparison.html")
    assert "small gpipe = same.yaml gpipe" in page.read_text()
    assert [(row["contender"], row["failed"]) for row in refused] == [
        (f"{model} interleaved", "'interleaved' holds 2 stages on a rank, but the config has replicas of stages")
        for model in ("small", "same.yaml")]


@pytest.mark.extras("async_threaded")
def test_a_model_runs_as_its_config_says_and_auto_is_left_to_its_run(configs: Path) -> None:
    config = load_config(configs / "configs" / "small.yaml")
    [own], refused = plan_contenders({"small": config}, ComparisonRequest())
    assert (own.name, own.config, refused) == ("small", Job.from_config(config).config, {})
    [auto], _ = plan_contenders({"": config}, ComparisonRequest(schedules=("auto",)))
    assert auto.config_in(configs, 1).parallel.to_plan == ("schedule",)
    threaded = config.with_parallel(schedule="gpipe", executor="async_threaded")
    assert {*plan_contenders({"": threaded}, ComparisonRequest(schedules=("auto", "1f1b")))[1]} == {"auto", "1f1b"}


def test_nobody_can_take_part(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["configs/small.yaml", "--schedules", "interleaved", "--set", "parallel.data_parallel_size=2"]
    assert main(["compare", *words]) == 2
    assert "error: no contender can take part: interleaved: " in capsys.readouterr().err
    assert not (configs / "runs").exists()


@pytest.mark.usefixtures("forked")
def test_systems_follow_their_plans_and_a_copy_that_cannot_be_made_costs_no_figures(
        configs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "configs/small.yaml", "--systems", "gpipe,vpipe", "--steps", "1", "--rounds", "1"]
    assert main([*words, "-o", "runs"]) == 2  # which becomes the folder of comparisons
    [folder] = (configs / "runs").iterdir()
    out, err = capfd.readouterr()
    assert f"error: cannot write 'runs': Is a directory\nhint: copy it yourself: {folder}/comparison.csv" in err
    assert "vpipe: " in out
    assert " on the fullest rank, as its plan predicts" in out
    for number, row in enumerate(csv.DictReader((folder / "comparison.csv").read_text().splitlines()), 1):
        run, plan = folder / row["run"], Plan.load(folder / f"plan-{number}.json")
        assert Plan.load(run / "plan.json") == plan
        assert json.loads(row["parallel.partition"]) == list(plan.partition)
        assert row["parallel.schedule"] == plan.schedule


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
