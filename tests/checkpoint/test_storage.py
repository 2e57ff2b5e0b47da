"""What is written is read again bit for bit, by whichever rank wants it."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch
from saved_state import about, of_every_kind, same, tensors
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from vpipe.checkpoint import storage
from vpipe.checkpoint.folder import find
from vpipe.checkpoint.manifest import FileFacts, Manifest, Stored
from vpipe.checkpoint.once import save_at
from vpipe.checkpoint.restore import read
from vpipe.checkpoint.votes import StoreVotes
from vpipe.errors import RunError, UserError


def read_all(folder: Path) -> dict[str, Tensor]:
    manifest = Manifest.load(folder)
    return read(folder, manifest, manifest.tensors)


@pytest.mark.parametrize("state", [tensors, of_every_kind, dict], ids=["of every sort", "of every kind", "none at all"])
def test_tensors_come_back_as_they_were(tmp_path: Path, state: object) -> None:
    saved = state()  # type: ignore[operator]
    save_at(tmp_path / "mine", about(40), saved)
    assert same(read_all(tmp_path / "mine"), saved)
    assert Manifest.load(tmp_path / "mine").step == 40
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_the_copies_are_no_parts_of_anything(tmp_path: Path) -> None:
    save_at(tmp_path / "mine", about(1), tensors())
    found = read_all(tmp_path / "mine")
    assert all(not tensor.requires_grad and tensor.is_contiguous() for tensor in found.values())
    found["model.a.weight"].zero_()
    assert same(read_all(tmp_path / "mine"), tensors())


def test_who_may_read_the_folder_may_read_what_is_in_it(tmp_path: Path) -> None:
    save_at(tmp_path / "mine", about(1), tensors())
    mode = tmp_path.joinpath("mine").stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o666 for path in (tmp_path / "mine").iterdir()} == {mode}


def test_many_tensors_go_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FILE_BYTES", 40)
    saved = {"model.a": torch.ones(5), "model.b": torch.ones(5), "model.c": torch.ones(30), "model.d": torch.ones(1)}
    save_at(tmp_path / "mine", about(1), saved)
    manifest = Manifest.load(tmp_path / "mine")
    assert {name: stored.file for name, stored in manifest.tensors.items()} == {
        "model.a": "rank0.0.safetensors", "model.b": "rank0.0.safetensors", "model.c": "rank0.1.safetensors",
        "model.d": "rank0.2.safetensors"}
    assert same(read_all(tmp_path / "mine"), saved)


def test_only_the_files_that_are_wanted_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FILE_BYTES", 1)
    save_at(tmp_path / "mine", about(1), tensors())
    manifest = Manifest.load(tmp_path / "mine")
    (tmp_path / "mine" / manifest.tensors["model.b.mask"].file).unlink()
    heard: list[tuple[int, int]] = []
    found = read(tmp_path / "mine", manifest, ["model.a.row"], progress=lambda done, total: heard.append((done, total)))
    assert same(found, {"model.a.row": tensors()["model.a.row"]})
    size = manifest.files[manifest.tensors["model.a.row"].file].bytes
    assert heard == [(size, size)]
    with pytest.raises(UserError, match=r"safetensors is missing"):
        read(tmp_path / "mine", manifest, ["model.b.mask"])


def test_a_name_that_is_not_there_is_told(tmp_path: Path) -> None:
    save_at(tmp_path / "mine", about(1), tensors())
    with pytest.raises(UserError, match=r"has no 'model.x', nor 1 more that .*\nhint: it has 11 tensors"):
        read(tmp_path / "mine", Manifest.load(tmp_path / "mine"), ["model.a.row", "model.x", "model.y"])


def test_a_file_that_is_no_safetensors_is_refused_though_its_sum_is_right(tmp_path: Path) -> None:
    save_at(tmp_path / "mine", about(1), tensors())
    path, manifest = tmp_path / "mine" / "rank0.safetensors", Manifest.load(tmp_path / "mine")
    path.write_bytes(b"nonsense")
    facts = {path.name: FileFacts(8, storage.sha256_of(path))}
    with pytest.raises(UserError, match=r"cannot read the checkpoint '.*mine': "):
        read(tmp_path / "mine", Manifest.of(about(1), manifest.tensors, facts), ["model.a.row"])


@pytest.mark.parametrize("odd", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()],
                         ids=["complex128", "sparse"])
def test_what_files_cannot_hold_is_refused_by_name(tmp_path: Path, odd: Tensor) -> None:
    with pytest.raises(UserError, match=r"'model.odd' is .*, which a checkpoint cannot hold"):
        save_at(tmp_path / "mine", about(1), {"model.odd": odd})
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_makes_way_for_another_of_its_name(tmp_path: Path) -> None:
    for fill in (1.0, 2.0):
        save_at(tmp_path / "mine", about(1), tensors(fill))
    assert same(read_all(tmp_path / "mine"), tensors(2.0))
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_one_whose_writing_was_cut_short_is_no_hindrance(tmp_path: Path) -> None:
    for name in ("mine.tmp", "mine.old"):
        save_at(tmp_path / name, about(1), tensors())
    assert Manifest.load(find(tmp_path / "mine")).step == 1
    save_at(tmp_path / "mine", about(2), tensors(2.0))
    assert same(read_all(tmp_path / "mine"), tensors(2.0))
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_nothing_but_a_checkpoint_makes_way(tmp_path: Path) -> None:
    def refused(folder: Path, what: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=f"nothing was saved: {what}"):
            save_at(folder, about(2), tensors())
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

    save_at(tmp_path / "ck", about(1), tensors())
    (tmp_path / "ck").rename(tmp_path / "ck.old")  # a copy that a user keeps
    save_at(tmp_path / "ck", about(2), tensors())
    assert Manifest.load(tmp_path / "ck.old").step == 1
    refused(tmp_path / "ck", "'.*ck.old' exists, which is what '.*ck' would be called while another")


def test_a_mistake_of_ours_does_not_keep_the_other_ranks_waiting(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("vpipe.checkpoint.once.merge", out_of_memory)
    with pytest.raises(RunError, match=r"could not save a checkpoint to '.*mine': out of memory"):
        save_at(tmp_path / "mine", about(1), tensors())
    assert not list(tmp_path.iterdir())


def test_a_host_that_does_not_see_the_folder_keeps_no_part_of_it(tmp_path: Path) -> None:
    store = HashStore()

    def save(rank: int) -> None:
        with pytest.raises(RunError, match=r"could not save a checkpoint to '.*mine': No such file or directory"):
            save_at(tmp_path / str(rank) / "mine", about(1), {f"model.{rank}": torch.ones(2)}, rank,
                    StoreVotes(store, rank, 2))
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


@pytest.mark.parametrize(("stored", "says"), [
    (Stored((10**15,), "float32", "rank0.safetensors"), r"as \[4\] F32, but the manifest says \[10{15}\] F32"),
    (Stored((2, 2), "float32", "rank0.safetensors"), r"as \[4\] F32, but the manifest says \[2, 2\] F32"),
    (Stored((4,), "int32", "rank0.safetensors"), r"as \[4\] F32, but the manifest says \[4\] I32")])
def test_a_manifest_that_says_another_shape_is_refused(tmp_path: Path, stored: Stored, says: str) -> None:
    save_at(tmp_path / "mine", about(1), tensors())
    manifest = Manifest.load(tmp_path / "mine")
    other = Manifest.of(manifest, {**manifest.tensors, "model.a.row": stored}, manifest.files)
    with pytest.raises(UserError, match=f"rank0.safetensors holds 'model.a.row' {says}"):
        read(tmp_path / "mine", other, ["model.a.row"])


def test_one_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_at(tmp_path / "mine", about(1), tensors())
    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(RunError, match=r"could not save a checkpoint to '.*mine': No space left on device \(rank 0\)"):
        save_at(tmp_path / "mine", about(2), tensors())
    assert Manifest.load(tmp_path / "mine").step == 1
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def full(*_: object) -> None:
    raise storage.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
