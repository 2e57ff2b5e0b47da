"""A transport of another package, and what happens where ranks do not agree on one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from world import World

from vpipe import Transfers
from vpipe.runtime.transport import process_group
from vpipe.runtime.transport.process_group import DistributedTransport, transport_class

PAGE = Path(__file__).parents[3] / "docs" / "add-a-transport.md"


def train(*, package: str, **arguments: Any) -> Any:
    sys.path.insert(0, package)
    try:
        return jobs.train(**arguments)
    finally:
        sys.path.remove(package)


@pytest.mark.jobs
def test_a_transport_of_a_package_carries_a_run_to_the_bit(world: World, tmp_path: Path) -> None:
    (tmp_path / "folders.py").write_text(PAGE.read_text().split("```")[1].removeprefix("python"))
    (tmp_path / "folders-1.0.dist-info").mkdir()
    (tmp_path / "folders-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: folders\nVersion: 1.0\n")
    (tmp_path / "folders-1.0.dist-info" / "entry_points.txt").write_text(
        "[vpipe.transports]\nfolder = folders:Folder\n")
    run = {"model": "rich", "schedule": "pipedream", "partition": [4, 4], "replicas": 2, "microbatches": 4}
    expected = jobs.train_here(**run)
    assert world.run(train, package=str(tmp_path), backend="folder", **run) == [expected] * 4
    assert len(list(tmp_path.glob("*activations*"))) == 3 * 4 + 4, "of training, and of held-out samples"
    assert len(list(tmp_path.glob("*gradients*"))) == 3 * 4


@pytest.mark.parametrize(("mine", "other", "said"), [
    ("shared_memory", "shared_memory", ""), ("", "", ""), (None, "", ""), (None, None, ""),
    ("shared_memory", "", "shared memory: rank 1 is set to shared_memory false"),
    ("", "shared_memory", "shared memory: rank 0 is set to shared_memory false"),
    ("shared_memory", None, "shared memory: rank 1 has not installed it"),
    ("folder", "shared_memory", "folder: rank 1 is set to shared_memory")])
def test_all_ranks_use_a_transport_or_none(mine: str | None, other: str | None, said: str,
                                           monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found, both = type("Found", (DistributedTransport,), {}), SimpleNamespace(all_gather=lambda own: [own, other])
    process_group.say_once.cache_clear()
    monkeypatch.setattr(process_group, "is_ordered", lambda device: False)
    monkeypatch.setattr(process_group, "exchange", lambda timeout_s: both)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(type(process_group.TRANSPORTS), "added", lambda self, *names: [found])
    monkeypatch.setattr(Transfers, "transport", mine)
    same = mine == other == "shared_memory"
    assert transport_class(Transfers(), torch.device("cpu")) is (found if same else DistributedTransport)
    assert capsys.readouterr().err == (f"gloo carries tensors between ranks of a host, not {said}\n" if said else "")
