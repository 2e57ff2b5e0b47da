"""The configs that come with vpipe: each gives a job, is planned and runs, the big ones scaled down as by --set."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from small_run import check_updates, losses

from vpipe.app.config.config import load_config
from vpipe.app.config.shipped import shipped_configs
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.planning import plan_job
from vpipe.plan.profile import Profile

pytestmark = pytest.mark.jobs

NEEDED = {"gpt_small_orion.yaml": ("async_threaded", "orion")}
FILES = [pytest.param(path, marks=pytest.mark.extras(*NEEDED.get(path.name, ["legacy"] * (path.suffix == ".yml"))))
         for path in shipped_configs().values()]
LAYERS = {"bert_4gpipe.yml": 49, "bert_4pipedream.yml": 49, "bert_4vpipe.yml": 49, "bert_base.yaml": 25,
          "gpt2_124m.yaml": 25, "gpt_small.yaml": 33, "gpt_small_orion.yaml": 33, "gpt_8stage.yaml": 33,
          "gpt_16stage.yaml": 33, "llama_small.yaml": 17, "cpm.yaml": 65, "translation_4vpipe_tiny.yml": 11,
          "translation_mini_4stage.yaml": 11}
"""The others have 9."""

TINY = ["metrics.peak_tflops=1", "model.hidden_size=16", "model.num_heads=4", "model.sequence_length=8",
        "model.vocab_size=64"]

def made_up(path: Path) -> list[str]:
    """Random batches instead of the data that a file names."""
    native = ["dataset.name=synthetic", "dataset.language=null", "training.sample_prompts=[]"]
    return ["synthetic_data=true"] if path.suffix == ".yml" else native


PLANNED: dict[Hashable, tuple[int, ...]] = {}
"""Partitions by what a planner sees: half of the files differ in other things alone."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_job_can_be_made(path: Path, tmp_path: Path) -> None:
    job = Job.from_config(load_config(path, [*made_up(path), "model.vocab_size=8192", f"log_directory={tmp_path}"]))
    partition = job.config.parallel.partition
    assert len(job.model) == LAYERS.get(path.name, 9)
    assert partition == "auto" or sum(partition) == len(job.model)
    assert len(job.cut.partition) == {"gpt_8stage.yaml": 8, "gpt_16stage.yaml": 16, "cpm.yaml": 8}.get(path.name, 4)
    again = tmp_path / "config.yaml"
    again.write_text(job.config.resolved_yaml())
    assert load_config(again) == job.config


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_planned_and_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, as wide as a hair, with as many layers and stages as the file has, and microbatches to fill them.
    What is to be measured is made up: tests/profiling measures."""
    def made(job: Job, sizes: Sequence[int], **_: Any) -> dict[int, Profile]:
        return {size: made_profile(len(job.model), size, len(job.cut.partition)) for size in sizes}

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
    if written.parallel.partition == "auto":
        return  # it was planned to be trained
    parallel = written.parallel
    seen = (len(job.model), parallel.schedule, parallel.model_parallel_size, parallel.update_every, microbatches)
    if seen not in PLANNED:
        again = Job.from_config(load_config(path, [*settings, "parallel.partition=auto"]))
        PLANNED[seen] = plan_job(again, tmp_path).cut.partition
    assert (len(PLANNED[seen]), sum(PLANNED[seen])) == (len(job.cut.partition), len(job.model))
