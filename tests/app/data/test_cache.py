"""``vpipe cache`` lists what is in the cache, and removes all but what a process prepares, or others put there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from vpipe.app.cli import main
from vpipe.app.data.cache import cached_folder


def build(folder: Path) -> dict[str, Any]:
    (folder / "tokens.bin").write_bytes(b"x" * 5000)
    return {"vocab_size": 3}


def test_a_build_leaves_no_lock_and_clearing_leaves_what_is_not_its_own(tmp_path: Path,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    folder = cached_folder("tokens", {"of": 1}, build, tmp_path).folder
    assert list(tmp_path.iterdir()) == [folder], "its lock is gone"
    busy = tmp_path / f"bert-{'0' * 16}.lock"
    strangers = [tmp_path / "tokens-mine", tmp_path / "notes.txt", tmp_path / "profiles" / "mine.json"]
    for path in (tmp_path / f"pairs-{'1' * 16}.lock", tmp_path / f"pairs-{'2' * 16}.new" / "a",
                 tmp_path / "profiles" / f"{'a' * 12}.json", *strangers):
        path.parent.mkdir(exist_ok=True)
        path.write_text("text" * (path.suffix != ".lock"))
    with FileLock(busy):
        assert main(["cache", str(tmp_path)]) == 0
        *rows, total = capsys.readouterr().out.splitlines()
        assert [row.split()[-1] for row in rows] == [f"pairs-{'2' * 16}", "profiles", folder.name]
        assert total.endswith(f" in {tmp_path}, and 2 locks without data")
        assert main(["cache", str(tmp_path), "--clear"]) == 0
        assert f"{busy.stem} stays: a process is preparing it" in capsys.readouterr().out
        assert {*tmp_path.rglob("*")} == {busy, tmp_path / "profiles", *strangers}
    assert cached_folder("tokens", {"of": 1}, build, tmp_path).folder.exists(), "it is prepared again"
    assert main(["cache", str(tmp_path), "--clear"]) == 0
    assert not busy.exists()
