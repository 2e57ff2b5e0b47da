"""The log of a rank on a disk that is full."""

from __future__ import annotations

import logging

import pytest

from vpipe.app.launch.rank_main import RankLog


def test_a_full_disk_is_told_once_and_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("one")
    log.addHandler(handler := RankLog("/dev/full"))
    for _ in range(3):
        log.info("a step")
    assert capsys.readouterr().err == "warning: cannot write '/dev/full': No space left on device\n"
    assert handler.stream is not None
    with pytest.raises(OSError, match="No space"):
        handler.stream.close()  # which logging does, and ignores, as a process ends
