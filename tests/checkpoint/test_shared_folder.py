"""Ranks agree on a folder that all of them see."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread

import pytest
from lines import exchanges

from vpipe.checkpoint import Checkpoints
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import UserError

WAIT_S = 30.0


def look(roots: list[Path]) -> list[str]:
    """What each rank says of its folder."""
    of_rank, said = exchanges(len(roots)), [""] * len(roots)

    def check(rank: int) -> None:
        try:
            Checkpoints(roots[rank]).check_shared(of_rank[rank], f"host{rank}")
        except UserError as error:
            said[rank] = str(error)

    threads = [Thread(target=check, args=(rank,), daemon=True) for rank in range(len(roots))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return said


def test_a_folder_that_all_see_is_fine(tmp_path: Path) -> None:
    assert look([tmp_path / "new" / "checkpoints"] * 3) == [""] * 3
    assert not list((tmp_path / "new" / "checkpoints").iterdir())


def test_a_folder_that_a_host_does_not_see_is_refused_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.checkpoint.directory.VISIBLE_S", 0.1)
    said = look([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert len(set(said)) == 1
    assert re.match(r"error: the folder for checkpoints '.*' of rank 0 \(host0\) is not the one seen by rank 1 "
                    r"\(host1\)\nhint: checkpoints need a folder that all hosts see, .*: set checkpoint", said[0])
    assert not list((tmp_path / "a").iterdir())


def test_a_folder_that_rank_0_cannot_write_is_refused_by_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = look([tmp_path / "file" / "checkpoints"] * 2)
    assert len(set(said)) == 1
    assert "rank 0 (host0) cannot write checkpoints to" in said[0]
    with pytest.raises(UserError, match=r"cannot write checkpoints to '.*': Not a directory"):
        Checkpoints(tmp_path / "file" / "x").check_shared(Exchange(), "here")
