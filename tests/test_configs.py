"""The files in configs/: each gives a job, the small ones train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_run import check_updates, losses, metrics, only_run

from vpipe.cli import main
from vpipe.train.config import load_config
from vpipe.train.job import Job
from vpipe.train.loop import train

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.glob("*.y*ml"))
LARGE = [path.name for path in FILES if re.fullmatch(r"bert_4(vpipe|gpipe|pipedream)\.yml", path.name)]
TINY = [path.name for path in FILES if path.name.endswith("_tiny.yml")]
WORDS = ("river", "stone", "cloud", "grass", "lantern", "window", "copper", "garden", "whisper", "mountain", "harbour",
         "silver", "thread", "candle")


def test_the_families_are_complete() -> None:
    assert len(LARGE) == len(TINY) == 3
    assert {name.replace(".yml", "_tiny.yml") for name in LARGE} == set(TINY)
    assert len(FILES) == 8


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_job_can_be_made(path: Path, tmp_path: Path) -> None:
    flat = path.suffix == ".yml"
    job = Job.of(load_config(path, [
        "synthetic_data=true" if flat else "dataset.name=synthetic", "dataset.samples=4096",  # data without files
        "model.vocab_size=8192", f"log_directory={tmp_path}"]))
    partition = job.config.parallel.partition
    assert not isinstance(partition, str)
    assert len(partition) == 4
    assert sum(partition) == len(job.model) == (49 if path.name in LARGE else 9)
    again = tmp_path / "config.yaml"
    again.write_text(job.config.resolved_yaml())
    assert load_config(again) == job.config
    assert job.config.parallel.asynchronous == ("gpipe" not in path.name)


@pytest.mark.parametrize("name", TINY)
def test_a_small_one_trains(name: str, tmp_path: Path) -> None:
    """In one process, on short samples; the one below is the command with a process per stage."""
    updates = 2 if "gpipe" in name else 6
    job = Job.of(load_config(CONFIGS / name, [f"training.max_steps={updates}", f"log_directory={tmp_path}",
                                              "model.sequence_length=32", "training.warmup_steps=0",
                                              "training.evaluation_batches=1"]))
    train(job, tmp_path)
    check_updates(tmp_path, updates)
    assert all(8 < loss < 12 for loss in losses(tmp_path))  # ln 8192 + ln 2 = 9.7


def write_text(folder: Path) -> None:
    """500 documents of made-up sentences."""
    folder.mkdir()
    documents = [
        "\n".join(" ".join(["The", *(WORDS[(i * k + j * j + k) % len(WORDS)] for j in range(9)), "rests."])
                  for k in range(1, 13)) for i in range(500)]
    (folder / "story.txt").write_text("\n\n".join(documents))


@pytest.mark.usefixtures("forked")
def test_text_to_shards_to_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "text")
    assert main(["data", "build-bert", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "data"),
                 "--vocab-size", "400"]) == 0
    assert "500 documents" in capfd.readouterr().out
    assert main(["train", str(CONFIGS / "bert_4vpipe_tiny_hdf5.yml"), "--set", f"data_dir={tmp_path / 'data'}",
                 "--set", f"log_directory={tmp_path / 'runs'}", "--set", "training.max_steps=6",
                 "--set", "training.evaluation_batches=1"]) == 0
    run = only_run(tmp_path / "runs")
    out, _ = capfd.readouterr()
    assert f"run folder: {run}\nbert: 9 layers in 4 stages [2, 3, 2, 2], schedule pipedream" in out
    check_updates(run, 6)
    assert metrics(run)[1][0]["evaluation_loss"] > 0
    assert load_config(run / "config.yaml").parallel.recompute == (0.5, 0.0, 0.0, 0.0)
