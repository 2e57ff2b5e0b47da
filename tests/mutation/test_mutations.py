"""Files of every kind with a mistake or damage in them: read within a second and 300 MB, or refused in our words.

Thousands of such files found what the other tests here hold literally; these keep a sample of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from limits import refusal
from made_profile import made_profile
from mutations import mutated, mutated_bytes

from vpipe.app.config.config import load_config
from vpipe.app.data.bert_samples import SHAPES, STORAGE, shape_of
from vpipe.app.data.code_search_net import jsonl_files, read_functions
from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import MANIFEST, Manifest, _checksum
from vpipe.checkpoint.shards import write_shards
from vpipe.description.cut import Cut
from vpipe.description.order import Order
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import predict
from vpipe.plan.profile import Profile
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build, described, proved
from vpipe.schedules.csv_format import CsvFile
from vpipe.schedules.lowering import lower

NATIVE = {
    "model": {"name": "bert", "preset": "tiny", "hidden_size": 16, "num_heads": 4, "dropout": 0.1, "vocab_size": 64},
    "dataset": {"name": "synthetic", "batch_size": 16, "num_workers": 0, "samples": 64, "seed": 1},
    "training": {"learning_rate": 1e-4, "num_microbatches": 4, "max_steps": 3, "warmup_steps": 0.1, "grad_clip": 1.0,
                 "lr_policy": "cosine", "precision": "fp16", "loss_scale": 1024, "seed": 0, "threads": 1},
    "parallel": {"model_parallel_size": 4, "schedule": "1f1b", "partition": [3, 2, 2, 2], "recompute": [0.5, 0, 0, [7]],
                 "stage_to_rank_map": {"0": [0], "1": [1], "2": [2], "3": [3]}, "compress": ["none", "int8", "none"],
                 "warmup_depth": [3, 2, 1, 0], "timeout_s": 60.0},
    "checkpoint": {"every_steps": 5}, "machines": [f"localhost:{rank}" for rank in range(4)], "log_directory": "out"}
FLAT = {
    "directory": "bert", "partition": "p.json", "config_file": "m.json", "sync_mode": "asp", "model_type": "bert",
    "batch_size": 16, "learning_rate": 0.03, "epochs": 2, "learning_rate_policy": "polynomial", "weight_decay": 0.0,
    "machines": [f"localhost:{rank}" for rank in range(4)], "distributed_backend": "gloo", "synthetic_data": True,
    "log_directory": "out", "print_frequency": 100, "checkpoint": {"every_steps": 3}}
PARTITION = {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}
RANKS = {"module_to_stage_map": [0, 1, 2, 3, 3], "stage_to_rank_map": {"0": [0], "1": [1], "2": [2], "3": [3]},
         "stage_to_depth_map": {"0": 3, "1": 2, "2": 1, "3": 0}}
PROFILE = made_profile(6, 4, 2)
PLAN = Plan(Cut((3, 3), recompute=((1,), ()), ranks=((0,), (1,))), Order("1f1b"), 4,
            predict(PROFILE, Plan(Cut((3, 3)), Order("1f1b"), 4)).prediction, "abc")


def plain_copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def written(dice: Random, value: Any, write: Callable[[Any], str]) -> bytes:
    """A value as a file, changed before it was written, or behind."""
    if dice.random() < 0.7:
        return write(mutated(dice, plain_copy(value))).encode()
    return mutated_bytes(dice, write(value).encode())


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value)


def test_native_configs(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(as_yaml(NATIVE))
    assert refusal(partial(load_config, path)) is None
    dice, refused = Random(0), 0
    for _ in range(40):
        path.write_bytes(written(dice, NATIVE, as_yaml))
        refused += refusal(lambda: load_config(path).resolved_yaml()) is not None
    assert 20 < refused < 40


def test_flat_configs(tmp_path: Path) -> None:
    pytest.importorskip("vpipe.extras.legacy.vpipe_flat")
    (tmp_path / "bert").mkdir()
    contents = {"f.yml": FLAT, "bert/p.json": PARTITION, "bert/m.json": RANKS}
    dice, refused = Random(0), 0
    for name in ("", *list(contents) * 12):
        for each, value in contents.items():
            write = as_yaml if each == "f.yml" else json.dumps
            (tmp_path / each).write_bytes(written(dice, value, write) if each == name else write(value).encode())
        found = refusal(partial(load_config, tmp_path / "f.yml"))
        assert name or found is None
        refused += found is not None
    assert 20 < refused < 37


def test_plans(tmp_path: Path) -> None:
    path, dice, refused = tmp_path / "plan.json", Random(0), 0
    PLAN.save(path)
    assert Plan.load(path) == PLAN

    def load() -> None:
        plan = Plan.load(path)
        plan.save(tmp_path / "again.json")
        assert Plan.load(tmp_path / "again.json").as_json() == plan.as_json()
        assert plan.ranks
        assert len(plan.recomputed) == len(plan.partition)

    for _ in range(60):
        path.write_bytes(written(dice, PLAN.as_json(), json.dumps))
        refused += refusal(load) is not None
    assert 30 < refused < 60


def test_profiles(tmp_path: Path) -> None:
    path, dice, refused = tmp_path / "profile.json", Random(0), 0
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE

    def load() -> None:
        profile = Profile.load(path)
        predict(profile, Plan(Cut((1, len(profile.layers) - 1)), Order("pipedream"), microbatches=4))

    for _ in range(50):
        path.write_bytes(written(dice, PROFILE.as_json(), json.dumps))
        refused += refusal(load) is not None
    assert 25 < refused < 50


def test_schedules(tmp_path: Path) -> None:
    made = [build(name, Layout.LOOP(2), 4) for name in ("gpipe", "1f1b", "zb_h1", "pipedream")]
    texts = [each.to_csv() for schedule in made for each in (schedule, lower(schedule))]
    texts += [schedule.to_torch_csv() for schedule in made if schedule.flush]
    path, dice, refused = tmp_path / "s.csv", Random(0), 0

    def arrange() -> None:
        schedule = CsvFile.read(path).schedule
        proved(described(Order(path), Cut(schedule.stages), schedule.microbatches))

    for text in texts:
        path.write_text(text)
        assert refusal(arrange) is None
        for _ in range(6):
            rows = [row.split(",") for row in text.splitlines()]
            mutated(dice, rows)
            content = "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows).encode()
            path.write_bytes(content if dice.random() < 0.6 else mutated_bytes(dice, text.encode()))
            refused += refusal(arrange) is not None
    assert 40 < refused < 72


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors = {"model.a.weight": torch.ones(4, 3), "model.b.bias": torch.zeros(2), "optim.a.step#int": torch.tensor(7)}
    about = Manifest(40, 1280, 7, data="f00d", config=as_yaml(NATIVE), numbers={"microbatches": 8}, arrangement={
        "partition": [2, 3], "schedule": "1f1b", "optimizers": ["AdamW"], "microbatches": 4})
    result = write_shards(folder, 0, tensors)
    replace(about, tensors=result.tensors, files=result.files).save(folder)
    return folder


def load_all(folder: Path) -> None:
    manifest = Manifest.load(folder)
    Checkpoint(folder, manifest).tensors(manifest.tensors)


def sealed(content: Any) -> str:
    """A manifest with the checksum of what it says now: not the checksum, but the rules have to find what is wrong."""
    content = {key: value for key, value in content.items() if key != "checksum"} if isinstance(content, dict) else {}
    return json.dumps({**content, "checksum": _checksum(content)})


def test_manifests(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "step-40"))
    assert refusal(partial(load_all, folder)) is None
    whole, dice, refused = json.loads((checkpoint / MANIFEST).read_text()), Random(0), 0
    for _ in range(60):
        (folder / MANIFEST).write_bytes(written(dice, whole, sealed))
        refused += refusal(partial(load_all, folder)) is not None
    assert 30 < refused < 60


def test_headers_of_safetensors(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "step-40"))
    whole, dice, refused = (folder / "rank0.safetensors").read_bytes(), Random(0), 0
    size = struct.unpack("<Q", whole[:8])[0]
    manifest = json.loads((folder / MANIFEST).read_text())
    for _ in range(40):
        header = written(dice, json.loads(whole[8:8 + size]), json.dumps)
        length = dice.choice([len(header)] * 9 + [0, 2**40, 2**64 - 1])
        content = struct.pack("<Q", length) + header + whole[8 + size:]
        (folder / "rank0.safetensors").write_bytes(content)
        manifest["files"]["rank0.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / MANIFEST).write_text(sealed(manifest))
        refused += refusal(partial(load_all, folder)) is not None
    assert 30 < refused <= 40


def test_shards(tmp_path: Path) -> None:
    shards = pytest.importorskip("vpipe.extras.bert_hdf5.shards")
    rng, dice, refused = np.random.default_rng(0), Random(0), 0
    shards.write_shard(tmp_path / "a_training.hdf5", {name: rng.integers(0, 2, (12, *shape_of(name, 16, 3))).astype(
        STORAGE[name]) for name in SHAPES})
    whole = (tmp_path / "a_training.hdf5").read_bytes()

    def epoch() -> None:
        dataset = shards.BertHdf5(tmp_path)
        for batch in dataset.batches("train", 2, seed=0):
            assert 0 <= int(batch["input_ids"].min()) <= int(batch["input_ids"].max()) < dataset.vocab_size
            assert 0 <= int(batch["masked_lm_positions"].min()) <= int(batch["masked_lm_positions"].max()) < 16
            assert all(set(batch[name].unique().tolist()) <= {0, 1} for name in (
                "input_mask", "segment_ids", "next_sentence_labels"))

    assert refusal(epoch) is None
    for _ in range(60):
        (tmp_path / "a_training.hdf5").write_bytes(mutated_bytes(dice, whole))
        refused += refusal(epoch) is not None
    assert 25 < refused < 60


def test_functions(tmp_path: Path) -> None:
    path, dice, refused = tmp_path / "train_0.jsonl", Random(0), 0
    records = [{"code": f"def f{i}(): pass", "docstring": "Do it.", "language": "python", "partition": "train"}
               for i in range(5)]
    for _ in range(100):
        path.write_bytes(written(dice, records, lambda found: "\n".join(map(json.dumps, found))
                                 if isinstance(found, list) else json.dumps(found)))
        refused += refusal(lambda: list(read_functions(jsonl_files(tmp_path), tmp_path))) is not None
    assert 50 < refused < 100
