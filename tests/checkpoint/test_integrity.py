"""A damaged checkpoint is named, refused, and the one before offered."""

from __future__ import annotations

from pathlib import Path

import pytest
from saved_state import about, tensors

from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import MANIFEST, Manifest
from vpipe.checkpoint.save import save_checkpoint
from vpipe.errors import UserError

FILE = "rank0.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (20, 40, 60):
        save_checkpoint(tmp_path / f"step-{step}", about(step), tensors())
    return tmp_path


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def test_nothing_is_wrong_with_one_that_was_just_written(root: Path) -> None:
    heard: list[tuple[int, int]] = []
    assert Checkpoint.open(root / "step-60").damage(lambda done, total: heard.append((done, total))) == []
    assert heard[-1] == (Manifest.load(root / "step-60").bytes,) * 2
    Checkpoint.open(root / "step-60").check_intact()


def test_a_changed_bit_is_noticed_wherever_it_is(root: Path) -> None:
    path = root / "step-60" / FILE
    whole = path.read_bytes()
    for place in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        flip(path, place)
        found, = Checkpoint.open(root / "step-60").damage()
        assert found.startswith(f"{FILE} was changed: its SHA-256 is ")
        path.write_bytes(whole)
    assert Checkpoint.open(root / "step-60").damage() == []


@pytest.mark.parametrize("length", [0, 1, 500, -1])
def test_a_file_that_was_cut_short_is_told_with_both_sizes(root: Path, length: int) -> None:
    path = root / "step-60" / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    assert Checkpoint.open(root / "step-60").damage() == [
        f"{FILE} has {len(whole[:length]):,} bytes instead of {len(whole):,}"]
    path.unlink()
    assert list(map(str, Checkpoint.open(root / "step-60").damage())) == [f"{FILE} is missing"]


def test_the_newest_intact_one_before_is_offered(root: Path) -> None:
    flip(root / "step-60" / FILE, 500)
    flip(root / "step-40" / MANIFEST, 50)
    with pytest.raises(UserError, match=rf"the checkpoint '{root}/step-60' is damaged: {FILE} was changed: .*\n"
                                        rf"hint: resume from step 20 with: vpipe train --resume {root}/step-20"):
        Checkpoint.open(root / "step-60").check_intact()
    with pytest.raises(UserError, match=f"{FILE} was changed"):
        Checkpoint(root / "step-60", Manifest.load(root / "step-60")).tensors(["model.a.row"])
    (root / "step-20" / FILE).unlink()
    with pytest.raises(UserError, match="hint: no older checkpoint beside it is intact: start the run again"):
        Checkpoint.open(root / "step-60").check_intact()
