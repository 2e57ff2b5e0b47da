"""What the ranks that torchrun or srun started find wrong before they train; and a log on a disk that is full."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vpipe.app.launch.rank_main import RankLog, address_towards, combined_error
from vpipe.distributed.environment import RankEnvironment
from vpipe.errors import RunError, UserError


def state(host: str, *problems: str, status: int = 0, data: str = "d0") -> dict[str, Any]:
    return {"host": host, "status": status, "data": data, "problems": [[what, "mend it", None] for what in problems]}


def test_all_that_is_wrong_is_said() -> None:
    """A failure of one rank does not hide the mistakes that others found."""
    mixed = combined_error([state("a", "no data", status=2), state("b", "no data", "broken", status=1)])
    assert isinstance(mixed, RunError)
    assert str(mixed) == ("error: no data\nhint: mend it\nerror: broken (rank 1 on b)\nhint: mend it")
    mistakes = combined_error([state("a", "no data", status=2), state("b", "no GPU", status=2)])
    assert isinstance(mistakes, UserError)
    assert [problem.what for problem in mistakes.problems] == ["no data (rank 0 on a)", "no GPU (rank 1 on b)"]


def test_other_data_on_another_host_are_refused() -> None:
    assert combined_error([state("a"), state("b")]) is None
    refused = combined_error([state("a"), state("a"), state("b", data="d1")])
    assert isinstance(refused, UserError)
    assert "do not read the same data: ranks 0, 1 on a read d0; rank 2 on b read d1 (" in str(refused)


def test_the_interface_is_the_one_that_leads_to_others() -> None:
    """On the first host, whose name may mean a loopback address there, it is not that of its own address."""
    first, second = RankEnvironment("srun", 0, 3, 0, "a", "a", 1), RankEnvironment("srun", 1, 3, 0, "b", "a", 1)
    several = ["127.0.1.1", "10.0.0.2", "10.0.0.2"]
    assert [address_towards(rank, several) for rank in (first, second)] == ["10.0.0.2", "a"]
    assert address_towards(first, ["127.0.0.1"] * 2) == "a"  # nodes of one machine


def test_a_full_disk_is_told_once_and_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("one")
    log.addHandler(handler := RankLog("/dev/full"))
    for _ in range(3):
        log.info("a step")
    assert capsys.readouterr().err == "warning: cannot write '/dev/full': No space left on device\n"
    assert handler.stream is not None
    with pytest.raises(OSError, match="No space"):
        handler.stream.close()  # which logging does, and ignores, as a process ends
