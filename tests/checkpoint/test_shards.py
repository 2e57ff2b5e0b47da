"""What is written is read again bit for bit, by whichever rank wants it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saved_state import about, names, of_every_kind, read_all, same, tensors
from torch import Tensor

from vpipe.checkpoint import Checkpoint, shards
from vpipe.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from vpipe.checkpoint.save import save_checkpoint
from vpipe.errors import UserError


@pytest.mark.parametrize("state", [tensors, of_every_kind, dict], ids=["of every sort", "of every kind", "none at all"])
def test_tensors_come_back_as_they_were(tmp_path: Path, state: object) -> None:
    saved = state()  # type: ignore[operator]
    save_checkpoint(tmp_path / "mine", about(40), saved)
    assert same(read_all(tmp_path / "mine"), saved)
    assert Manifest.load(tmp_path / "mine").step == 40
    assert names(tmp_path) == {"mine"}


def test_the_copies_are_no_parts_of_anything(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "mine", about(1), tensors())
    found = read_all(tmp_path / "mine")
    assert all(not tensor.requires_grad and tensor.is_contiguous() for tensor in found.values())
    found["model.a.weight"].zero_()
    assert same(read_all(tmp_path / "mine"), tensors())


def test_who_may_read_the_folder_may_read_what_is_in_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "mine", about(1), tensors())
    mode = tmp_path.joinpath("mine").stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o666 for path in (tmp_path / "mine").iterdir()} == {mode}


def test_many_tensors_go_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 40)
    saved = {"model.a": torch.ones(5), "model.b": torch.ones(5), "model.c": torch.ones(30), "model.d": torch.ones(1)}
    save_checkpoint(tmp_path / "mine", about(1), saved)
    manifest = Manifest.load(tmp_path / "mine")
    assert {name: stored.file for name, stored in manifest.tensors.items()} == {
        "model.a": "rank0.0.safetensors", "model.b": "rank0.0.safetensors", "model.c": "rank0.1.safetensors",
        "model.d": "rank0.2.safetensors"}
    assert same(read_all(tmp_path / "mine"), saved)


def test_only_the_files_that_are_wanted_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 1)
    save_checkpoint(tmp_path / "mine", about(1), tensors())
    manifest = Manifest.load(tmp_path / "mine")
    (tmp_path / "mine" / manifest.tensors["model.b.mask"].file).unlink()
    heard: list[tuple[int, int]] = []
    found = Checkpoint(tmp_path / "mine", manifest).tensors(["model.a.row"],
                         progress=lambda done, total: heard.append((done, total)))
    assert same(found, {"model.a.row": tensors()["model.a.row"]})
    size = manifest.files[manifest.tensors["model.a.row"].file].bytes
    assert heard == [(size, size)]
    with pytest.raises(UserError, match=r"safetensors is missing"):
        Checkpoint(tmp_path / "mine", manifest).tensors(["model.b.mask"])


def test_a_name_that_is_not_there_is_told(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "mine", about(1), tensors())
    with pytest.raises(UserError, match=r"has no 'model.x', nor 1 more that .*\nhint: it has 11 tensors"):
        Checkpoint(tmp_path / "mine", Manifest.load(tmp_path / "mine")).tensors(["model.a.row", "model.x", "model.y"])


def test_a_file_that_is_no_safetensors_is_refused_though_its_sum_is_right(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "mine", about(1), tensors())
    path, manifest = tmp_path / "mine" / "rank0.safetensors", Manifest.load(tmp_path / "mine")
    path.write_bytes(b"nonsense")
    facts = {path.name: FileEntry.of(path)}
    with pytest.raises(UserError, match=r"cannot read the checkpoint '.*mine': "):
        Checkpoint(tmp_path / "mine", replace(about(1), tensors=manifest.tensors, files=facts)).tensors(["model.a.row"])


@pytest.mark.parametrize("odd", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()],
                         ids=["complex128", "sparse"])
def test_values_that_files_cannot_hold_are_refused_by_name(tmp_path: Path, odd: Tensor) -> None:
    with pytest.raises(UserError, match=r"'model.odd' is .*, which a checkpoint cannot hold"):
        save_checkpoint(tmp_path / "mine", about(1), {"model.odd": odd})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stored", "says"), [
    (TensorEntry((10**15,), "float32", "rank0.safetensors"),
     r"as \[4\] float32, but the manifest says \[10{15}\] float32"),
    (TensorEntry((2, 2), "float32", "rank0.safetensors"), r"as \[4\] float32, but the manifest says \[2, 2\] float32"),
    (TensorEntry((4,), "int32", "rank0.safetensors"), r"as \[4\] float32, but the manifest says \[4\] int32")])
def test_a_manifest_that_says_another_shape_is_refused(tmp_path: Path, stored: TensorEntry, says: str) -> None:
    save_checkpoint(tmp_path / "mine", about(1), tensors())
    manifest = Manifest.load(tmp_path / "mine")
    other = replace(manifest, tensors={**manifest.tensors, "model.a.row": stored})
    with pytest.raises(UserError, match=f"rank0.safetensors holds 'model.a.row' {says}"):
        Checkpoint(tmp_path / "mine", other).tensors(["model.a.row"])


