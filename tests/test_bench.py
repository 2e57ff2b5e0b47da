"""``vpipe bench``: what is refused, what runs, what its table and its CSV say."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from small_run import losses, write_config

from vpipe.cli import main
from vpipe.config.config import Config
from vpipe.errors import RunError
from vpipe.launch.folder import make_run_folder
from vpipe.train.job import Job
from vpipe.train.loop import train


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the config ``small``; runs are in this process, and gpipe always fails."""

    def run(config: Config, start: None, restarts: None) -> None:
        job = Job.of(config)
        folder = make_run_folder(job.config.log_directory, job.config.resolved_yaml())
        if config.parallel.schedule == "gpipe":
            raise RunError("out of memory", hint="buy more", rank=1)
        train(job, folder)

    monkeypatch.setattr("vpipe.launch.run.run", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write_config(tmp_path).rename(tmp_path / "configs" / "small.yaml")
    return tmp_path


@pytest.mark.parametrize(("words", "said"), [
    (["--models", "smal"], "error: --models names 'smal', but there is no file 'configs/smal.yaml'\n"
                           "hint: did you mean 'small'?"),
    (["--models", "small,small"], "error: --models names 'small' 2 times\nhint: name it once"),
    (["--models", "x/y.yaml"], "error: --models names 'x/y.yaml', but there is no such file\nhint: "),
    (["--models", ""], "error: --models '' names nothing in one place\nhint: give names or files of configs, with "),
    (["--models", "small", "--schedules", "1f1b,gpip"], "hint: did you mean 'gpipe'?"),
    (["--models", "small", "--steps", "0"], "error: --steps is 0\nhint: give a whole number, 1 or more"),
    (["--models", "small", "-o", "nowhere/a.csv"], "error: cannot write 'nowhere/a.csv': it is in no folder"),
    (["--models", "small", "--schedules", "1f1b,gpipe", "--set", "model.hiden_size=3"], "did you mean 'hidden_size'?"),
])
def test_mistakes_are_refused(configs: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("error:") == 1
    assert not (configs / "runs").exists()


def test_one_table_and_one_csv(configs: Path, capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["bench", "--models", "small,configs/small.yaml", "--schedules", "1f1b,gpipe", "--steps", "3",
             "--set", "training.learning_rate=0.5", "--set", "metrics.peak_tflops=1e-9"]
    assert main([*words, "-o", "all.csv"]) == 1
    out, err = capsys.readouterr()
    assert "error: 2 of 4 runs failed\nhint: the table says why; the logs are in " in err
    assert ("== 4 of 4: configs/small.yaml, schedule gpipe\nthe same program as small, schedule gpipe, which has run\n"
            in out)
    table = out[out.rindex("\nmodel "):].splitlines()[1:]
    assert table[0].split() == ["model", "schedule", "ranks", "samples/s", "tokens/s", "median", "p95", "MFU", "HFU",
                                "bubble", "memory", "sent", "loss"]
    assert table[1].split()[:3] == ["small", "1f1b", "2"]
    assert " % (!) " in table[1]
    assert table[2].split() == ["small", "gpipe", *"-" * 11]
    assert table[3].split()[:3] == ["configs/small.yaml", "1f1b", "(=)"]
    assert table[3].split()[3:] == table[1].split()[2:]
    assert table[5].startswith("warning: small, schedule 1f1b: the MFU of ")
    assert table[6:9] == ["small, schedule gpipe: failed: out of memory (rank 1)", *(
        f"(=) configs/small.yaml, schedule {name}: the same program as small, schedule {name}, which ran for both"
        for name in ("1f1b", "gpipe"))]
    rows = list(csv.DictReader((configs / "all.csv").read_text().splitlines()))
    assert [(row["model"], row["schedule"], row["failed"]) for row in rows] == [
        (model, schedule, "out of memory (rank 1)" if schedule == "gpipe" else "")
        for model in ("small", "configs/small.yaml") for schedule in ("1f1b", "gpipe")]
    assert (rows[0]["training.learning_rate"], rows[0]["steps"], rows[0]["parallel.schedule"]) == ("0.5", "3", "1f1b")
    assert [row["same_as"] for row in rows] == ["", "", "small, schedule 1f1b", "small, schedule gpipe"]
    assert {key for key in rows[0] if rows[0][key] != rows[2][key]} == {"model", "same_as"}
    assert (rows[1]["steps"], rows[1]["training.learning_rate"], rows[1]["parallel.schedule"]) == ("", "0.5", "gpipe")
    [runs] = (configs / "runs").iterdir()
    assert sorted(path.name for path in runs.iterdir()) == ["1", "2", "bench.csv", "bench.json"]
    assert (runs / "bench.csv").read_bytes() == (configs / "all.csv").read_bytes()
    [run] = (runs / "1").iterdir()
    assert len(losses(run)) == 3
    assert float(rows[0]["last_loss"]) == pytest.approx(losses(run)[-1], rel=1e-5)


def test_another_schedule_may_be_the_same_program(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--models", "small", "--schedules", "1f1b,gpipe", "--steps", "1"]
    assert main([*words, "--set", "training.num_microbatches=1", "-o", "all.csv"]) == 0  # gpipe, which fails, never ran
    assert "(=) small, schedule gpipe: the same program as small, schedule 1f1b, which ran for both" in (
        capsys.readouterr().out)
    first, second = csv.DictReader((configs / "all.csv").read_text().splitlines())
    assert first["tokens_per_s"] == second["tokens_per_s"]
    assert (first["parallel.schedule"], second["parallel.schedule"]) == ("1f1b", "gpipe")


def test_a_schedule_that_the_config_cannot_have_is_a_row(configs: Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config, *_: Any) -> None:
        raise KeyboardInterrupt  # the first that runs

    monkeypatch.setattr("vpipe.launch.run.run", run)
    words = ["bench", "--models", "small", "--schedules", "gpipe,pipedream", "--set", "parallel.update_every=2"]
    assert main(words) == 130
    out = capsys.readouterr().out
    assert "small, schedule gpipe: failed: parallel.update_every is " in out
    [runs] = (configs / "runs").iterdir()
    assert (runs / "bench.csv").read_text().count("\n") == 2  # what had come so far


def test_a_copy_that_cannot_be_made_costs_no_figures(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--models", "small", "--steps", "1", "-o", "runs"]) == 2  # which becomes the runs' folder
    [runs] = (configs / "runs").iterdir()
    said = f"error: cannot write 'runs': Is a directory\nhint: copy it yourself: {runs}/bench.csv"
    assert said in capsys.readouterr().err
    assert (runs / "bench.csv").read_text().count("\n") == 2
