"""Numbers out of all proportion are refused before a list of that length is made, wherever they are written."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from limits import refusal, within_limits
from pipelines import parts
from torch import nn

from vpipe import Model, Pipeline
from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.synthetic import synthetic
from vpipe.app.train.job import Job
from vpipe.description.cut import Cut, balanced
from vpipe.description.order import Order
from vpipe.errors import UserError
from vpipe.plan.plan import Plan
from vpipe.schedules.builder import described

CONFIG = """\
model: {name: gpt, hidden_size: 16, num_layers: 4, num_heads: 4, sequence_length: 8, vocab_size: 64}
dataset: {name: synthetic, batch_size: 8}
training: {learning_rate: 1e-3, num_microbatches: 4}
parallel: {model_parallel_size: 4}
"""


@pytest.mark.parametrize(("setting", "what"), [
    ("parallel.model_parallel_size=1000000000", "must be at most 1024, got 1000000000"),
    ("parallel.data_parallel_size=1000000000", "must be at most 16384, got 1000000000"),
    ("parallel.data_parallel_size=16384", "16384 replicas of 4 ranks are 65,536 ranks"),
    ("parallel.data_parallel_size=4096", "4096 replicas of stage 0 for 4 microbatches"),
    ("parallel.chunks=1000000000", "must be at most 1024, got 1000000000"),
    ("parallel.update_every=1000000000", "must be at most 65536, got 1000000000"),
    ("parallel.partition=[1000000000, 1, 1, 1]", "has 1,000,000,003 layers in all, more than 100,000"),
    ('parallel.stage_to_rank_map={"0": [0], "1": [1], "2": [2], "3": [1000000000]}',
     "names ranks up to 1000000000, but never rank 3"),
    ("parallel.timeout_s=1e300", "must be at most 1000000, got 1e+300"),
    ("training.num_microbatches=1000000000", "must be at most 65536, got 1000000000"),
    ("training.epochs=100000000000", "must be at most 1000000000, got 100000000000"),
    ("training.threads=1000000", "must be at most 1024, got 1000000"),
    ("dataset.batch_size=8000000000", "must be at most 1048576, got 8000000000"),
    ("dataset.num_workers=1000000", "must be at most 1024, got 1000000"),
    ("dataset.samples=1000000000", "1,000,000,000 synthetic samples of 8 tokens are too many to be kept in memory"),
    ("model.num_layers=4000000", "must be at most 1024, got 4000000"),
    ("model.hidden_size=16000000000", "must be at most 16777216, got 16000000000"),
    ("model.vocab_size=1000000000", "must be at most 16777216, got 1000000000"),
    ("model.sequence_length=1000000000", "must be at most 16777216, got 1000000000"),
    ("model.sequence_length=16777216", "1,024 synthetic samples of 16,777,216 tokens are too many"),
    ("training.seed=0x" + "f" * 5000, "a whole number has more than 100 digits"),
    (".".join("a" * 5000) + "=1", "does not set a key")])
def test_a_value_of_a_config(setting: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    assert what in str(refusal(lambda: Job.from_config(load_config(path, [setting]))))


@pytest.mark.parametrize(("sizes", "what"), [
    ({"n_embd": 16 * 10**9}, "GPT's n_embd is 16000000000\nhint: it must be an integer from 1 to 16,777,216"),
    ({"n_layer": 10**9}, "GPT's n_layer is 1000000000\nhint: it must be an integer from 1 to 1,024"),
    ({"n_embd": 16_777_213, "n_head": 4}, "16777213 is not divisible by its 4 attention heads"),
    ({"vocab_size": 10**9}, "GPT's vocab_size is 1000000000")])
def test_a_size_of_a_hugging_face_config(sizes: dict[str, int], what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(str({"n_embd": 16, "n_head": 4, **sizes}).replace("'", '"'))
    (tmp_path / "c.yaml").write_text(
        CONFIG.replace("hidden_size: 16, num_layers: 4, num_heads: 4", f"config_file: {tmp_path / 'config.json'}")
        .replace("vocab_size: 64", "vocab_size: -1"))
    assert what in str(refusal(lambda: Job.from_config(load_config(tmp_path / "c.yaml"))))


@pytest.mark.parametrize(("command", "what"), [
    ("plan CONFIG --ranks 1000000000", "--ranks is 1000000000, but the model has only 9 layers"),
    ("verify CONFIG --steps 1000000000", "--steps is 1000000000\nhint: compare 10,000 updates at most"),
    ("slurm CONFIG --nodes 1000000000", "4 ranks cannot be put on 1000000000 nodes with equally many on each"),
    pytest.param("data build-bert --out OUT --sequence-length 1000000000", "BERT samples have at most 8,192 tokens",
                 marks=pytest.mark.extras("bert_hdf5")),
    ("schedule 1f1b --ranks 1000000000 --microbatches 8",
     "1000000000 ranks and 8 microbatches are 16,000,000,000 forwards"),
    ("schedule 1f1b --ranks 4 --microbatches 1000000000",
     "4 ranks and 1000000000 microbatches are 8,000,000,000 forwards"),
    ("schedule interleaved --ranks 4 --microbatches 8 --chunks 1000000000", "are 64,000,000,000 forwards"),
    ("schedule 1f1b --stages 999999999 --widths 99999 --microbatches 99999", "or parts of sums"),
    ("schedule auto --ranks 5000 --microbatches 4", "stay below 25,000"),
    ("schedule --all --ranks 1000000000 --microbatches 1",
     "1000000000 ranks and 1 microbatch are 2,000,000,000 forwards")])
def test_a_number_of_a_command(command: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = {"CONFIG": str(tmp_path / "c.yaml"), "OUT": str(tmp_path / "out")}
    with within_limits():
        assert main([words.get(word, word) for word in command.split()]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(("words", "what"), [
    ({"stages": 10**9}, "1000000000 stages, but the model has only 3 layers"),
    ({"stages": 2, "ranks": 10**9}, "ranks is 1000000000\nhint: give 16,384 at most"),
    ({"stages": 2, "microbatches": 10**9}, "microbatches is 1000000000\nhint: give 65,536 at most"),
    ({"stages": 2, "chunks": 10**9}, "chunks is 1000000000\nhint: give 1,024 at most"),
    ({"stages": 2, "schedule": "pipedream", "update_every": 10**9}, "update_every is 1000000000"),
    ({"ranks": [[0], [10**9]]}, "names ranks up to 1000000000, but never rank 1"),
    ({"ranks": [[0], [-1]]}, "names rank -1")])
def test_an_argument_of_a_pipeline(words: dict[str, object], what: str) -> None:
    model = Model.sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), nn.MSELoss())
    assert what in str(refusal(lambda: Pipeline(model, partial(torch.optim.SGD, lr=0.1), **parts(**words))))


@pytest.mark.parametrize(("wanted", "what"), [
    ((Order("1f1b"), Cut(1024), 60_000),
     "1024 ranks and 60000 microbatches are 122,880,000 forwards and backwards\n"
                                   "hint: stay below 250,000: use fewer microbatches, stages or replicas"),
    ((Order("1f1b"), Cut(4, ranks=256), 256),
     "1024 ranks and 256 microbatches are 524,288 forwards and backwards "
                                           "or parts of sums"),
    ((Order("pipedream"), Cut(400), 4),
     "400 ranks and 1600 microbatches, which prove a stream of 'pipedream', are "
                                  "1,280,000 forwards")])
def test_schedules_too_long_to_check_are_refused(wanted: tuple[Order, Cut, int], what: str) -> None:
    assert what in str(refusal(lambda: described(*wanted)))


def test_a_plan_made_in_python() -> None:
    assert "partition has 1,000,000,000 layers in all" in str(refusal(lambda: Plan(Cut((10**9,),
                                                                                       recompute=(1.0,))).recomputed))


def test_a_model_of_very_many_layers_is_balanced_at_once() -> None:
    with within_limits():
        assert balanced([1] * 512, 128) == [4] * 128


def test_synthetic_samples_are_bounded_by_what_is_kept_in_memory() -> None:
    assert synthetic(DatasetSettings(sequence_length=16, samples=1 << 24)).samples("train") == 1 << 24
    with pytest.raises(UserError, match=r"use 16,777,216 at most: set dataset\.samples, or a smaller"):
        synthetic(DatasetSettings(sequence_length=8, samples=(1 << 24) + 1))
