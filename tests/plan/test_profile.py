"""Which tensors are alive where, by hand; that a stage really holds so much is tested with the profiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from profiles import layer, profile

from vpipe.errors import UserError
from vpipe.plan.profile import Profile


@pytest.fixture
def skipping() -> Profile:
    """``a`` skips a layer, ``h`` is written again, layer 2 keeps what it writes, layer 3 what it reads."""
    return profile([
        layer("first", reads=("ids",), writes="a", out=10, saved=1000, saves=()),
        layer("second", reads=("a", "mask"), writes="h", out=20, saved=2000, saves=("in:a",)),
        layer("third", reads=("h",), writes="h", out=30, saved=4000, saves=("out:h",)),
        layer("last", reads=("h", "a"), writes="loss", out=4, saved=8000, saves=("in:h", "in:a"))],
        fields={"ids": 100, "mask": 200})


def test_a_name_that_is_written_again_is_another_tensor(skipping: Profile) -> None:
    held = skipping.activations
    assert (held.output_bytes(2), held.output_bytes(3)) == (10 + 20, 10 + 30)
    assert held.gradient_bytes(3) == 40


@pytest.mark.parametrize(("layers", "recomputed", "kept", "full"), [
    (range(0, 4), (), 15000 + 300 + 10 + 30, None),  # a and the second h are kept, each once, and the fields
    (range(2, 4), (), 12000 + 10 + 20 + 30, None),  # both that arrive are held, although nobody keeps the first h
    (range(0, 4), (0, 1, 2, 3), 300, 15000 + 300 + 40),  # nothing arrives
    (range(2, 4), (2, 3), 30, 12000 + 60),
    (range(0, 4), (3,), 7000 + 300 + 40, 15000 + 300 + 40),  # a and h begin the dropped span: held, and kept anyway
    (range(2, 4), (2,), 8000 + 60, 12000 + 60 + 30),  # the second h stays for layer 3; recomputed it is there twice
    (range(0, 4), (1,), 13000 + 300 + 10 + 20 + 30, 15000 + 300 + 60)])
def test_kept_with_and_without_dropping(skipping: Profile, layers: range, recomputed: tuple[int, ...], kept: int,
                                        full: int | None) -> None:
    held = skipping.activations
    assert held.held(layers, recomputed)[:2] == (kept, kept if full is None else full)


def test_a_text_is_not_taken_for_true(skipping: Profile, tmp_path: Path) -> None:
    skipping.save(tmp_path / "profile.json")
    text = (tmp_path / "profile.json").read_text()
    (tmp_path / "profile.json").write_text(text.replace('"wants_gradient": true', '"wants_gradient": "false"'))
    with pytest.raises(UserError, match="'false' is neither true nor false"):
        Profile.load(tmp_path / "profile.json")
