"""A file of lines on a disk that is full for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vpipe.errors import UserError
from vpipe.train.metrics import LineWriter


class Disk:
    """``os.write`` with room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 0
        self._write = os.write
        monkeypatch.setattr("vpipe.train.metrics.os.write", self.write)

    def write(self, file: int, data: bytes) -> int:
        taken = min(self.room, len(data))
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return self._write(file, bytes(data[:taken]))


def test_lines_wait_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "a"
    path.write_text("before\n")
    lines = LineWriter(path, truncate=False)
    disk.room = 7
    lines.write("one")
    lines.write("two")  # half of it
    assert (path.read_text(), lines.waiting, lines.error) == ("before\none\ntwo", 1, "No space left on device")
    lines.write("three")
    assert lines.waiting == 2
    disk.room = 100
    lines.write("four")
    assert (lines.waiting, lines.error) == (0, None)
    lines.sync()
    lines.close()
    assert path.read_text() == "before\none\ntwo\nthree\nfour\n"


def test_what_waits_is_tried_again_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "a"
    path.write_text("before\n")
    lines = LineWriter(path, truncate=True)
    lines.write("one")
    assert path.read_text() == ""
    disk.room = 100
    lines.close()
    lines.close()
    lines.sync()  # the saver's thread may come late
    assert (path.read_text(), lines.error) == ("one\n", None)


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write '.*none/a': No such file"):
        LineWriter(tmp_path / "none" / "a", truncate=True)
