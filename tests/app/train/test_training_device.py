"""Where a rank of a run computes: what its config and its environment say together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_run import job_of, write_config

from vpipe import accelerator
from vpipe.app.config.config import load_config
from vpipe.app.train.job import device_of, on_processors
from vpipe.errors import UserError


@pytest.mark.parametrize(("backend", "device", "rank", "where"), [
    (None, None, 1, "cuda:1"), (None, None, 3, "cuda:1"), ("gloo", None, 1, "cuda:1"), (None, "cpu", 1, "cpu"),
    ("gloo", "cpu", 1, "cpu"), ("gloo", "cuda", 1, "cuda:1"), ("gloo", "cuda", 3, "cuda:1"),
    (None, "cuda:0", 1, "cuda:0"), ("nccl", None, 1, "cuda:1"), ("nccl", "cuda", 0, "cuda:0")])
def test_the_local_rank_gives_the_gpu_whatever_the_backend(backend: str | None, device: str | None, rank: int,
                                                           where: str, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    config = job_of(tmp_path).config.with_parallel(backend=backend, device=device)
    assert device_of(config) == torch.device(where)
    assert current == [torch.device(where)] * (where != "cpu")
    assert on_processors(config) == (where == "cpu")


def test_without_a_gpu_a_rank_computes_on_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = load_config(write_config(tmp_path))
    assert device_of(config) == torch.device("cpu")
    assert on_processors(config)
    asking = config.with_parallel(device="cuda")
    assert not on_processors(asking)
    with pytest.raises(UserError, match="device is cuda, but this process sees no GPU"):
        device_of(asking)


@pytest.mark.parametrize(("keys", "words", "asks"), [
    ({}, "GPUs where there are any, else cpu; nccl where each has a GPU, else gloo between them", False),
    ({"backend": "gloo"}, "GPUs where there are any, else cpu; gloo between them", False),
    ({"device": "cpu"}, "cpu; gloo between them", False), ({"backend": "nccl"}, "cuda; nccl between them", True),
    ({"device": "cuda:1"}, "cuda:1; nccl where each has a GPU, else gloo between them", True)])
def test_devices_known_before_a_run(keys: dict[str, str], words: str, asks: bool, tmp_path: Path) -> None:
    parallel = job_of(tmp_path).config.with_parallel(**keys).parallel
    assert parallel.devices == f"ranks compute on {words}"
    assert parallel.asks_for_gpus == asks


def test_a_config_may_name_a_kind_that_only_torch_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, settings = write_config(tmp_path), ["parallel.device=late:1"]
    with pytest.raises(UserError, match="must be cpu, cuda or a GPU such as cuda:1, got 'late:1'"):
        load_config(file, settings)
    monkeypatch.setattr(accelerator, "kind", lambda: "late")
    assert load_config(file, settings).parallel.device == "late:1"
