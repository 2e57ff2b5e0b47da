"""Run folders, checkpoints, a plan and a profile that the code at 5332972d made are read, and go on."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from made_profile import identities_of
from small_run import losses

from vpipe import Pipeline, Update
from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.families import registry as models
from vpipe.app.imports import IMPORTS, import_files
from vpipe.app.train.job import Job
from vpipe.app.train.profile_cache import store
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile

pytestmark = pytest.mark.jobs

MADE = Path(__file__).parent / "fixtures" / "made_at_5332972d"
WITH_MODEL = ["--import", "tiny_model.py"]
RUNS = ["flush", "stream", "text", pytest.param("pairs", marks=pytest.mark.extras("translation"))]
ROUNDING = 1e-6
"""Relative: another processor or torch may add up in another order. Updates of these runs differ by 1e-2 and more."""

IDLE_LANE = 3
"""Of a rank in trace.json: a slice per idle time, named after its cause."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the files, in which the test works."""
    copy = tmp_path / "made"
    shutil.copytree(MADE, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv(IMPORTS, "[]")  # so that it is taken back
    models.model_names()
    models.PLUGINS.added()
    monkeypatch.setattr(models, "_families", dict(models._families))
    yield copy
    sys.modules.pop("tiny_model", None)


def recorded(run: str) -> list[float]:
    return losses(MADE / run)


def job_of(*settings: str) -> Job:
    import_files(["tiny_model.py"])
    return Job.from_config(load_config(Path("config.yaml"), settings))


def trained(pipe: Pipeline, job: Job, first: int = 0) -> list[float]:
    """The losses of the updates of one batch, the first if no other."""
    fields = tuple(job.dataset.fields)
    return [step.loss for step in pipe.train(islice(job.training_batches(fields), first, first + 1))]


@pytest.mark.parametrize(("run", "idle_us"), [
    ("flush", {(0, "between actions"): 9808.9, (0, "schedule"): 15850.1, (0, "straggler"): 815.1,
               (0, "waiting for a transfer"): 4588.9, (1, "between actions"): 3224.1, (1, "schedule"): 13137.7,
               (1, "straggler"): 3850.7, (1, "waiting for a transfer"): 9475.8}),
    ("stream", {(0, "between actions"): 22266.4, (0, "schedule"): 24572.6, (0, "straggler"): 8170.2,
                (0, "waiting for a transfer"): 16585.7, (1, "between actions"): 5054.6, (1, "schedule"): 29709.3,
                (1, "straggler"): 3808.6, (1, "waiting for a transfer"): 3634.6})])
def test_a_run_folder_is_reported(run: str, idle_us: dict[tuple[int, str], float],
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """The idle time of each rank has the causes that it had."""
    assert main(["trace", run]) == 0
    assert "note:" not in capsys.readouterr().out
    assert "<h2>Idle by cause</h2>" in Path(run, "report.html").read_text()
    found: dict[tuple[int, str], float] = defaultdict(float)
    for event in json.loads(Path(run, "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == IDLE_LANE:
            found[event["pid"], event["name"]] += event["dur"]
    assert found == pytest.approx(idle_us, abs=0.1)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.usefixtures("forked")
def test_a_run_is_resumed(run: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", run, *WITH_MODEL]) == 0, capfd.readouterr().err
    before, now = ((folder / run / "metrics.jsonl").read_text().splitlines() for folder in (MADE, Path()))
    assert now[:2] == before[:2], "these updates are not made again"
    assert losses(Path(run)) == pytest.approx(recorded(run), rel=ROUNDING)


@pytest.mark.parametrize("partition", [[2, 2], [1, 2, 1], [4]])
def test_a_checkpoint_is_loaded(partition: list[int]) -> None:
    job = job_of()
    pipe = Pipeline(job.model, Update(job.optimizer, grad_clip=1.0), stages=partition, schedule="1f1b", microbatches=4)
    position = pipe.load(Path("flush", "checkpoints", "step-2"))
    assert position.updates == 2
    assert trained(pipe, job, first=2) == pytest.approx(recorded("flush")[2:], rel=ROUNDING)


def test_checkpoints_are_listed_and_verified(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["list", "flush"], ["show", "flush"], ["verify", "flush"]):
        assert main(["checkpoint", *command]) == 0
        assert "step-2" in capsys.readouterr().out


def test_a_plan_is_drawn_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "plan.json"]) == 0
    out = capsys.readouterr().out
    assert main(["schedule", "pipedream", "--ranks", "2", "--microbatches", "4", "--warmup-depth", "1,0"]) == 0
    assert out == capsys.readouterr().out
    job, plan = job_of(), Plan.load("plan.json")
    plan.save("again.json")
    assert Path("again.json").read_text() == Path("plan.json").read_text()
    pipe = Pipeline(job.model, job.optimizer, stages=plan)
    assert (pipe.schedule, pipe.partition, pipe.update_every) == ("pipedream", (2, 2), 1)
    assert trained(pipe, job)[:2] == pytest.approx(recorded("stream")[:2], rel=ROUNDING)


def test_a_config_takes_the_plan() -> None:
    job = job_of("parallel.plan=plan.json")
    assert (job.config.parallel.schedule, job.cut.partition) == ("pipedream", (2, 2))


def test_a_profile_is_planned_with(capsys: pytest.CaptureFixture[str]) -> None:
    """As if it had been measured here, with this torch."""
    settings = ["parallel.schedule=pipedream"]
    job, profile = job_of(*settings), Profile.load("profile.json")
    [identity] = identities_of(job, [1], 2)
    store(replace(profile, identity=identity, process_bytes=1), Path("cache"))
    assert main(["plan", "config.yaml", *WITH_MODEL, "--stages", "2", "--set", *settings, "-o", "again.json"]) == 0
    assert capsys.readouterr().err == "", "nothing is measured"
    before, again = Plan.load("plan.json"), Plan.load("again.json")
    predictions = replace(before.predicted, process_bytes=1)
    assert again == replace(before, profile=again.profile, profiled=again.profiled, predictions=predictions)


@pytest.mark.extras("generation")
def test_a_run_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "text", "--prompt", "a pipeline", "--tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"a pipeline to{' again' * 10} all\n"


def test_a_run_is_exported(capsys: pytest.CaptureFixture[str]) -> None:
    """To the bytes that 5332972d wrote."""
    assert main(["checkpoint", "export", "text", "--format", "huggingface", "-o", "hf"]) == 0, capsys.readouterr().err
    found = {name: hashlib.sha256(Path("hf", name).read_bytes()).hexdigest()[:8]
             for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")}
    assert list(found.values()) == ["79628c77", "4521183d", "9cbf3d41", "429bd710"]
