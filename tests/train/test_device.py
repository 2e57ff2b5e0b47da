"""Where a rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_run import job_of

from vpipe.train.device import device_of


@pytest.mark.parametrize(("backend", "device", "rank", "where"), [
    ("gloo", None, 1, "cpu"), ("gloo", "cpu", 1, "cpu"), ("gloo", "cuda", 1, "cuda:1"), ("gloo", "cuda", 3, "cuda:1"),
    ("nccl", None, 1, "cuda:1"), ("nccl", "cuda", 0, "cuda:0")])
def test_ranks_may_share_gpus_with_gloo(backend: str, device: str | None, rank: int, where: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = job_of(tmp_path).config.with_parallel(backend=backend, device=device)
    assert device_of(config) == torch.device(where)
