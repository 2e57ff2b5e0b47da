"""Which rank tells of a failure where no launcher does, and which GPU a rank has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from small_run import write_config

from vpipe.errors import RunError, UserError
from vpipe.launch.failure import write_report
from vpipe.launch.machine import check_gpus, own_device
from vpipe.launch.worker import speaks
from vpipe.train.config import load_config


def test_one_rank_speaks(tmp_path: Path) -> None:
    """The first of those that lost another; or else the one that did not lose anyone."""
    for rank in (2, 0):
        write_report(tmp_path, rank, RunError("lost rank 1", hint="", rank=rank, peer=1))
    assert [rank for rank in (0, 2) if speaks(tmp_path, rank, 3)] == [2]
    write_report(tmp_path, 1, RunError("broke", hint="", rank=1))
    assert [rank for rank in range(3) if speaks(tmp_path, rank, 3)] == [1]


def test_the_only_gpu_that_a_rank_is_shown_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(write_config(tmp_path, parallel__backend="nccl"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_device(config, 3) == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device(config, 1) == 1
    with pytest.raises(UserError, match=re.escape("1 rank, 2 GPUs, counted from 0, but GPU 3 is wanted\n")):
        check_gpus(config, [own_device(config, 3)])
