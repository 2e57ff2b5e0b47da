"""The GPUs that ranks of one host need, and ranks that must be on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from small_run import write_config

from vpipe.app.config.config import load_config
from vpipe.app.launch.rank_env import check_gpus, hosts_of
from vpipe.errors import UserError


@pytest.mark.parametrize(("gpus", "numbers", "refused"), [
    (1, [3], None), (2, [0, 1], None),  # the only GPU that a rank is shown is its own
    (2, [3], "GPU 3 is wanted, but this host has 2 GPUs, counted from 0\n"), (1, [0, 1], ": 2 ranks, 1 GPU\n"),
    (2, [1, 1], ", but two ranks of a host are given the same: [1, 1]\n"), (0, [0], "this machine has no GPU")])
def test_gpus_that_nccl_needs(gpus: int, numbers: list[int], refused: str | None, tmp_path: Path,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for backend in (None, "gloo", "nccl"):
        config = load_config(write_config(tmp_path, parallel__backend=backend))
        if backend != "nccl" or refused is None:
            check_gpus(config, numbers)
        else:
            with pytest.raises(UserError, match=re.escape(refused)):
                check_gpus(config, numbers)


@pytest.mark.parametrize(("gpus", "refused"), [(0, False), (1, True), (4, True), (6, False)])
def test_machines_names_gpus_that_are_there_or_none_are(gpus: int, refused: bool, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = load_config(write_config(tmp_path)).model_copy(update={"machines": ("localhost:0", "localhost:5")})
    check_gpus(config, [0, 5], started_by_others=True)
    check_gpus(config.with_parallel(device="cpu"), [0, 5])
    if not refused:
        check_gpus(config, [0, 5])
        return
    with pytest.raises(UserError, match=f"machines names GPU 5, but this host has {gpus} GPUs?, counted from 0"):
        check_gpus(config, [0, 5])


def test_ranks_that_split_layers_are_neighbours_on_one_host(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), ["parallel.tensor=2"])
    assert hosts_of(config.model_copy(update={"machines": ("localhost:0", "localhost:1", "hostB:0", "hostB:1")}))
    with pytest.raises(UserError, match=r"ranks 0 to 1 split every layer \(parallel.tensor is 2\), but are on 2 hosts"):
        hosts_of(config.model_copy(update={"machines": ("localhost:0", "hostB:0", "localhost:1", "hostB:1")}))
