"""The configs that come with vpipe: each gives a job, is planned and runs, the big ones scaled down as by --set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from small_run import check_updates, losses, metrics

from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.config.shipped import shipped_configs
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.planning import plan_job
from vpipe.plan.profile import Profile

FILES = list(shipped_configs().values())
LAYERS = {"bert_4gpipe.yml": 49, "bert_4pipedream.yml": 49, "bert_4vpipe.yml": 49, "bert_base.yaml": 25,
          "gpt2_124m.yaml": 25, "gpt_small.yaml": 33, "gpt_small_orion.yaml": 33, "gpt_8stage.yaml": 33,
          "gpt_16stage.yaml": 33, "llama_small.yaml": 17, "cpm.yaml": 65, "translation_4vpipe_tiny.yml": 11,
          "translation_mini_4stage.yaml": 11}
"""The others have 9."""

TINY = ["metrics.peak_tflops=1", "model.hidden_size=16", "model.num_heads=4", "model.sequence_length=8",
        "model.vocab_size=64"]
WORDS = ("river", "stone", "cloud", "grass", "lantern", "window", "copper", "garden", "whisper", "mountain", "harbour",
         "silver", "thread", "candle")
AS_ITS_USERS_WRITE_IT = """\
model:    {name: gpt, hidden_size: 512, num_layers: 16, num_heads: 16, sequence_length: 128, vocab_size: -1}
dataset:  {name: code_search_net, batch_size: 4, num_workers: 0}
training: {learning_rate: 0.0001, epochs: 2, num_microbatches: 4, profile_iteration: 100, exit_after_profile: true}
parallel: {model_parallel_size: 4, data_parallel_size: 1, scheduler: async_threaded, use_orion_scheduler: false}
"""


def made_up(path: Path) -> list[str]:
    """Random batches instead of the data that a file names."""
    native = ["dataset.name=synthetic", "training.sample_prompts=[]"]
    return ["synthetic_data=true"] if path.suffix == ".yml" else native


def test_the_families_are_complete() -> None:
    names = {path.name for path in FILES}
    for kind in ("4gpipe", "4pipedream", "4vpipe"):
        assert f"bert_{kind}_tiny.yml" in names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_job_can_be_made(path: Path, tmp_path: Path) -> None:
    job = Job.from_config(load_config(path, [*made_up(path), "model.vocab_size=8192", f"log_directory={tmp_path}"]))
    partition = job.config.parallel.partition
    assert len(job.model) == LAYERS.get(path.name, 9)
    assert partition == "auto" or sum(partition) == len(job.model)
    assert len(job.partition) == {"gpt_8stage.yaml": 8, "gpt_16stage.yaml": 16, "cpm.yaml": 8}.get(path.name, 4)
    again = tmp_path / "config.yaml"
    again.write_text(job.config.resolved_yaml())
    assert load_config(again) == job.config


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_planned_and_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, as wide as a hair, with as many layers and stages as the file has, and microbatches to fill them.
    What is to be measured is made up: tests/profiling measures."""
    def made(job: Job, sizes: Sequence[int], **_: Any) -> dict[int, Profile]:
        return {size: made_profile(len(job.model), size, len(job.partition)) for size in sizes}

    monkeypatch.setattr("vpipe.app.train.planning.profile_job", made)
    written = load_config(path)
    microbatches = min(written.training.num_microbatches, written.parallel.model_parallel_size)
    settings = [*made_up(path), *TINY, "training.max_steps=2", "training.warmup_steps=0", "parallel.backend=gloo",
                f"training.num_microbatches={microbatches}", f"dataset.batch_size={microbatches}",
                "training.evaluation_batches=1", f"dataset.cache_directory={tmp_path}", f"log_directory={tmp_path}"]
    job = Job.from_config(load_config(path, settings))
    train(job, tmp_path)
    check_updates(tmp_path, 2)
    assert all(3 < loss < 7 for loss in losses(tmp_path))  # ln 64 = 4.2, of BERT + ln 2
    plan = plan_job(Job.from_config(load_config(path, [*settings, "parallel.partition=auto"])), tmp_path).partition
    assert (len(plan), sum(plan)) == (len(job.partition), len(job.model))


def test_the_nested_form_runs_as_its_users_write_it(tmp_path: Path) -> None:
    """On a folder of CodeSearchNet's, with a scheduler by its old name, profiled at its end."""
    (tmp_path / "c.yaml").write_text(AS_ITS_USERS_WRITE_IT)
    assert load_config(tmp_path / "c.yaml").parallel.schedule == "gpipe"
    with (tmp_path / "python_train_0.jsonl").open("w") as file:
        for number in range(200):
            word, other = WORDS[number % 14], WORDS[number * number % 13]
            code = f"def {word}_{number}({other}):\n    {other} += {number}\n    return {other} * {word}\n"
            file.write(json.dumps({"code": code, "docstring": f"The {word} of a {other}.", "language": "python",
                                   "partition": "train" if number % 8 else "test"}) + "\n")
    job = Job.from_config(load_config(tmp_path / "c.yaml", [
        *TINY[:4], f"dataset.path={tmp_path}", f"dataset.cache_directory={tmp_path / 'cache'}", "model.vocab_size=300",
        "training.profile_iteration=2", f"log_directory={tmp_path}"]))
    assert len(job.model) == 33
    train(job, tmp_path)
    assert len(losses(tmp_path)) == 2
    assert list(tmp_path.glob("profiler_async_threaded/rank0/*.json"))


def write_text(folder: Path) -> None:
    """200 documents of made-up sentences."""
    folder.mkdir()
    documents = [
        "\n".join(" ".join(["The", *(WORDS[(i * k + j * j + k) % len(WORDS)] for j in range(9)), "rests."])
                  for k in range(1, 13)) for i in range(200)]
    (folder / "story.txt").write_text("\n\n".join(documents))


def test_text_to_shards_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "text")
    assert main(["data", "build-bert", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "data"),
                 "--vocab-size", "400"]) == 0
    assert "200 documents" in capsys.readouterr().out
    job = Job.from_config(load_config(Path("bert_4vpipe_tiny_hdf5"), [
        f"data_dir={tmp_path / 'data'}", f"log_directory={tmp_path}", "training.max_steps=4",
        "training.evaluation_batches=1"]))
    assert job.config.parallel.recompute == (0.5, 0.0, 0.0, 0.0)
    train(job, tmp_path)
    check_updates(tmp_path, 4)
    assert metrics(tmp_path)[1][0]["evaluation_loss"] > 0
