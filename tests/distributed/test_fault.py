"""Which of several observations of a failure is the cause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vpipe.app.launch.failure_report import End, cause
from vpipe.distributed.fault import Fault, may_follow

RAISED = Fault.failed(0, IndexError("7"))
CUT_OFF = Fault.failed(0, RuntimeError("[3] Connection reset by peer"))
KILLED, ABORTED, LEFT = End.with_status(-9), End.with_status(-6), End.with_status(3)
AWAY = End("as ssh to hostB ended with exit status 255", forced=True)


def place(rank: int) -> str:
    return f"rank {rank}"


@pytest.mark.parametrize(("faults", "ends", "told"), [
    ([], {}, None),
    ([RAISED], {}, "rank 0 failed: IndexError: 7"),
    ([Fault.ended(0), RAISED], {}, "rank 0 failed: IndexError: 7"),  # rank 1 saw the end of rank 0 only
    ([RAISED], {2: ABORTED}, "rank 0 failed: IndexError: 7"),
    ([CUT_OFF], {}, "rank 0 failed: RuntimeError: [3] Connection reset by peer"),
    ([CUT_OFF], {2: KILLED}, "rank 2 died without a message, killed by signal 9 (SIGKILL)"),
    ([CUT_OFF], {1: LEFT}, "rank 0 failed: RuntimeError: [3] Connection reset by peer"),
    ([Fault.ended(2)], {}, "rank 2 died without a message"),  # under torchrun and srun
    ([Fault.ended(2)], {0: ABORTED, 2: KILLED}, "rank 2 died without a message, killed by signal 9 (SIGKILL)"),
    ([Fault.ended(2)], {0: ABORTED, 2: LEFT}, "rank 2 died without a message, with exit status 3"),
    ([Fault.ended(2, 3)], {2: AWAY, 3: AWAY},
     "rank 2, rank 3 died without a message, as ssh to hostB ended with exit status 255"),
    ([Fault.hung_up(2, 1)], {2: KILLED}, "rank 2 died without a message, killed by signal 9 (SIGKILL)"),
    ([Fault.circle(1, 2)], {2: KILLED}, "rank 2 died without a message, killed by signal 9 (SIGKILL)"),
    ([Fault.busy(1)], {0: LEFT, 2: KILLED}, "rank 2 died without a message, killed by signal 9 (SIGKILL)"),
    ([Fault.busy(1)], {0: LEFT}, "rank 1 is running but did not answer in time"),
    ([Fault.silent(45, 1)], {}, "rank 1 gave no sign of life for 45 s"),
    ([], {0: LEFT, 1: LEFT}, "rank 0 died without a message, with exit status 3"),
    ([], {0: LEFT, 1: KILLED, 2: ABORTED},
     "rank 1, rank 2 died without a message, killed by signal 9 (SIGKILL) and killed by signal 6 (SIGABRT)"),
])
def test_the_cause(faults: Sequence[Fault], ends: dict[int, End], told: str | None) -> None:
    found = cause(faults, ends)
    assert (found if found is None else found.sentence(place)) == told


@pytest.mark.parametrize(("text", "may"), [
    ("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:35211", True),
    ("[Errno 104] Connection reset by peer", True), ("[Errno 32] Broken pipe", True),
    ("remote process exited or there was a network error", True), ("list index out of range", False),
    ("the forward of layer 3 'connection' on h float32[2] raised KeyError: 0", False)])
def test_errors_that_may_follow_from_anothers_end(text: str, may: bool) -> None:
    assert may_follow(text) == may
