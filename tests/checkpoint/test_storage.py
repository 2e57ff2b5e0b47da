"""What is written is read again bit for bit, by whichever rank wants it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saved_state import about, of_every_kind, same, tensors
from torch import Tensor

from vpipe.checkpoint import storage
from vpipe.checkpoint.folder import find
from vpipe.checkpoint.manifest import FileFacts, Manifest
from vpipe.checkpoint.once import save_at
from vpipe.checkpoint.restore import read
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


def test_one_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_at(tmp_path / "mine", about(1), tensors())
    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(RunError, match=r"could not save a checkpoint to '.*mine': No space left on device \(rank 0\)"):
        save_at(tmp_path / "mine", about(2), tensors())
    assert Manifest.load(tmp_path / "mine").step == 1
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def full(*_: object) -> None:
    raise storage.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
