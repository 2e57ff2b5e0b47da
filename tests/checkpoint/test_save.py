"""A checkpoint is saved at once or not at all, in place of another and of nothing else."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch
from lines import exchanges
from saved_state import about, full, names, read_all, same, tensors

from vpipe.checkpoint import Checkpoints, shards
from vpipe.checkpoint.manifest import Manifest
from vpipe.checkpoint.save import save_checkpoint
from vpipe.errors import RunError, UserError


def test_a_checkpoint_makes_way_for_another_of_its_name(tmp_path: Path) -> None:
    for fill in (1.0, 2.0):
        save_checkpoint(tmp_path / "mine", about(1), tensors(fill))
    assert same(read_all(tmp_path / "mine"), tensors(2.0))
    assert names(tmp_path) == {"mine"}


def test_one_whose_writing_was_cut_short_is_no_hindrance(tmp_path: Path) -> None:
    for name in ("mine.tmp", "mine.old"):
        save_checkpoint(tmp_path / name, about(1), tensors())
    assert Manifest.load(Checkpoints.find(tmp_path / "mine")).step == 1
    save_checkpoint(tmp_path / "mine", about(2), tensors(2.0))
    assert same(read_all(tmp_path / "mine"), tensors(2.0))
    assert names(tmp_path) == {"mine"}


def test_nothing_but_a_checkpoint_makes_way(tmp_path: Path) -> None:
    def refused(folder: Path, what: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=f"nothing was saved: {what}"):
            save_checkpoint(folder, about(2), tensors())
        assert sorted(tmp_path.rglob("*")) == before

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "home" / "link").symlink_to(tmp_path / "home")
    for folder in (tmp_path / "home", tmp_path / "home" / "link"):
        refused(folder, "'.*home' holds 'link', which is no part of a checkpoint")
    refused(tmp_path / "home" / "thesis.txt", "'.*thesis.txt' is a file")
    refused(Path("/"), "'/' holds ")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "rank0.safetensors").write_bytes(b"of something else")
    refused(tmp_path / "weights", "'.*weights' holds 'rank0.safetensors', but no checkpoint.json")
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "mine.tmp" / "letter").write_text("dear")
    refused(tmp_path / "mine", "'.*mine.tmp' holds 'letter'")

    save_checkpoint(tmp_path / "ck", about(1), tensors())
    (tmp_path / "ck").rename(tmp_path / "ck.old")  # a copy that a user keeps
    save_checkpoint(tmp_path / "ck", about(2), tensors())
    assert Manifest.load(tmp_path / "ck.old").step == 1
    refused(tmp_path / "ck", "'.*ck.old' exists, which is what '.*ck' would be called while another")


def test_a_mistake_of_ours_does_not_keep_the_other_ranks_waiting(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("vpipe.checkpoint.save.write_manifest", out_of_memory)
    with pytest.raises(RunError, match=r"could not save a checkpoint to '.*mine': out of memory"):
        save_checkpoint(tmp_path / "mine", about(1), tensors())
    assert not list(tmp_path.iterdir())


def test_a_host_that_does_not_see_the_folder_keeps_no_part_of_it(tmp_path: Path) -> None:
    of_rank = exchanges(2)

    def save(rank: int) -> None:
        with pytest.raises(RunError, match=r"could not save a checkpoint to '.*mine': No such file or directory"):
            save_checkpoint(tmp_path / str(rank) / "mine", about(1), {f"model.{rank}": torch.ones(2)}, of_rank[rank])
        assert not list((tmp_path / str(rank)).iterdir())
        done.append(rank)

    done: list[int] = []
    other = Thread(target=save, args=(1,), daemon=True)
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    other.start()
    save(0)
    other.join(30.0)
    assert sorted(done) == [0, 1]


def test_one_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "mine", about(1), tensors())
    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(RunError, match=r"could not save a checkpoint to '.*mine': No space left on device \(rank 0\)"):
        save_checkpoint(tmp_path / "mine", about(2), tensors())
    assert Manifest.load(tmp_path / "mine").step == 1
    assert names(tmp_path) == {"mine"}
