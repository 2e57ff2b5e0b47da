"""Ranks agree through a store, and on a folder that all of them see."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from vpipe.checkpoint.agreement import LocalAgreement, StoreAgreement, check_shared_folder
from vpipe.errors import UserError

WAIT_S = 30.0


def test_rank_0_that_comes_to_no_verdict_tells_the_others() -> None:
    store, said = HashStore(), []

    def vote() -> None:
        with pytest.raises(RuntimeError, match="rank 0 could not decide: KeyError: 'size'"):
            StoreAgreement(store, 1, 2).agree("", str)
        said.append(True)

    def decide(_: list[str]) -> str:
        raise KeyError("size")

    other = Thread(target=vote, daemon=True)
    other.start()
    with pytest.raises(KeyError, match="size"):
        StoreAgreement(store, 0, 2).agree("", decide)
    other.join(WAIT_S)
    assert said == [True]


def test_a_rank_may_have_more_tensors_than_a_store_takes_in_plain_words() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=WAIT_S))
    vote = '"model.weight": {"shape": [1], "dtype": "float32"}, ' * 200_000
    assert len(vote) > 8 << 20
    told = Thread(target=StoreAgreement(client, 1, 2).agree, args=(vote, "".join), daemon=True)
    told.start()
    assert StoreAgreement(server, 0, 2).agree("", "".join) == vote
    told.join(WAIT_S)


def look(roots: list[Path]) -> list[str]:
    """What each rank says of its folder."""
    store, said = HashStore(), [""] * len(roots)

    def check(rank: int) -> None:
        try:
            check_shared_folder(roots[rank], StoreAgreement(store, rank, len(roots)), rank, f"host{rank}")
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
    monkeypatch.setattr("vpipe.checkpoint.agreement.VISIBLE_S", 0.1)
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
        check_shared_folder(tmp_path / "file" / "x", LocalAgreement(), 0, "here")
