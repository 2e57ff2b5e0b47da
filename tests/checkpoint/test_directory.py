"""Which checkpoints a folder has, whatever was going on when its run died."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from saved_state import names

from vpipe.checkpoint.directory import LATEST, Checkpoints, previous
from vpipe.checkpoint.manifest import MANIFEST, Manifest
from vpipe.errors import UserError
from vpipe.files import replace_text


def write(root: Path, step: int, seed: int = 0) -> Path:
    """A checkpoint without tensors, put in its place."""
    folder = Checkpoints(root)
    folder.partial(step).mkdir(parents=True)
    Manifest(step, step, seed).save(folder.partial(step))
    return folder.commit(step)


def test_the_newest_is_that_of_the_most_steps(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write(tmp_path, step)
    assert [path.name for path in Checkpoints(tmp_path).all()] == ["step-9", "step-20", "step-100"]
    assert Checkpoints.find(tmp_path) == tmp_path / "step-100"
    assert previous(tmp_path / "step-100") == tmp_path / "step-20"
    assert previous(tmp_path / "step-9") is None
    assert previous(tmp_path) is None


def test_latest_names_it_and_goes_with_it(tmp_path: Path) -> None:
    folder = Checkpoints(tmp_path)
    write(tmp_path, 3)
    folder.update_latest()
    assert (tmp_path / LATEST).read_text() == "step-3\n"
    (tmp_path / "step-3").rename(tmp_path / "elsewhere")
    folder.update_latest()
    assert names(tmp_path) == {"elsewhere"}


def test_a_disk_that_is_full_leaves_the_text_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(tmp_path / LATEST, "step-3\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / LATEST, "step-4\n")
    assert names(tmp_path) == {LATEST}
    assert (tmp_path / LATEST).read_text() == "step-3\n"


def test_one_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 3)
    Checkpoints(tmp_path).partial(4).mkdir()
    Manifest(4, 4, 0).save(Checkpoints(tmp_path).partial(4))
    (tmp_path / "step-5").write_text("a file")
    (tmp_path / "step-x").mkdir()
    assert [path.name for path in Checkpoints(tmp_path).all()] == ["step-3"]
    for path in (tmp_path / "step-4.tmp", tmp_path / "step-4.tmp" / "."):
        with pytest.raises(UserError, match=rf"'.*step-4.tmp' is no checkpoint: its writing, or its removal, was cut "
                           rf"short\nhint: the newest beside it: vpipe train --resume {tmp_path}/step-3"):
            Checkpoints.find(path)


def test_one_that_lost_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    for step in (3, 4, 5):
        write(tmp_path, step)
    (tmp_path / "step-5" / "rank0.safetensors").write_bytes(b"whatever")
    (tmp_path / "step-5" / MANIFEST).unlink()
    assert Checkpoints.find(tmp_path) == Checkpoints.find(tmp_path / "step-5") == tmp_path / "step-5"
    with pytest.raises(UserError, match=r"'.*step-5' is damaged: checkpoint.json is missing\nhint: resume from"):
        Manifest.load(Checkpoints.find(tmp_path))
    folder = Checkpoints(tmp_path)
    folder.update_latest()
    folder.prune(1)
    assert names(tmp_path) == {"step-4", "step-5", LATEST}
    assert (tmp_path / LATEST).read_text() == "step-4\n"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    (tmp_path / "step-1.tmp").mkdir()  # of a removal that was cut short
    Checkpoints(tmp_path).prune(2)
    assert names(tmp_path) == {"step-3", "step-10"}


def test_a_step_that_is_saved_again_replaces_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 3, seed=1)
    write(tmp_path, 3, seed=2)
    assert names(tmp_path) == {"step-3"}
    assert Manifest.load(tmp_path / "step-3").seed == 2


def test_the_one_before_counts_until_it_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 3, seed=1).rename(tmp_path / "step-3.old")
    folder = Checkpoints(tmp_path)
    assert Manifest.load(Checkpoints.find(tmp_path)).seed == 1
    assert Checkpoints.find(tmp_path / "step-3") == tmp_path / "step-3.old"
    write(tmp_path, 4)
    assert previous(tmp_path / "step-4") == tmp_path / "step-3.old"
    folder.clear_leftovers()
    assert names(tmp_path) == {"step-3.old", "step-4", LATEST}
    write(tmp_path, 3, seed=2)
    assert names(tmp_path) == {"step-3", "step-4", LATEST}
    (tmp_path / "step-3").rename(tmp_path / "step-3.old")
    folder.prune(1)
    assert names(tmp_path) == {"step-4", LATEST}


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 3, seed=1)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "step-3.tmp":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, 3, seed=2)
    assert Manifest.load(tmp_path / "step-3").seed == 1
    Checkpoints(tmp_path).abort(3)
    assert names(tmp_path) == {"step-3"}


def test_leftovers_are_cleared(tmp_path: Path) -> None:
    write(tmp_path, 3)
    for name in ("step-4.tmp", "step-3.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.safetensors").write_bytes(b"half")
    (tmp_path / f"{LATEST}.tmp").write_text("step-")
    (tmp_path / "seen-by-all-0123").write_text("for a moment")
    Checkpoints(tmp_path).clear_leftovers()
    assert names(tmp_path) == {"step-3", LATEST}
    Checkpoints(tmp_path / "nowhere").clear_leftovers()
    assert not (tmp_path / "nowhere").exists()


def test_a_run_a_folder_of_checkpoints_and_a_checkpoint_can_be_given(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    step = write(tmp_path / "run" / "checkpoints", 7)
    monkeypatch.chdir(step)
    assert Checkpoints.find(Path(".")) == Path(".")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", step):
        assert Checkpoints.find(path) == step


@pytest.mark.parametrize(("name", "what"), [
    ("/", r"there is no checkpoint in '/': "),
    ("nowhere", r"cannot resume from '.*nowhere': it does not exist"),
    ("file", r"cannot resume from '.*file': it is a file"),
    ("empty", r"there is no checkpoint in '.*empty': neither checkpoint.json, nor step-N or checkpoints/step-N")])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty" / "checkpoints" / "step-3.tmp").mkdir(parents=True)
    with pytest.raises(UserError, match=what):
        Checkpoints.find(tmp_path / name)


def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match=f"cannot search for a checkpoint in '{tmp_path}': Permission denied"):
        Checkpoints.find(tmp_path)
