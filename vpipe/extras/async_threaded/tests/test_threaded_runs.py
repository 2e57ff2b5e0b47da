"""Runs with forwards in threads: what they are held to, what they say, and which configs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import job_of, losses, write_config

from vpipe.app.config.config import load_config
from vpipe.app.train.loop import train
from vpipe.app.train.summary import headline
from vpipe.app.verify import batches_for_steps, references, run_in_process
from vpipe.errors import UserError
from vpipe.extras.async_threaded.on_cpus import NO_GAIN
from vpipe.testing import compare


def test_async_threaded_equals_the_oracle_bit_for_bit(tmp_path: Path) -> None:
    """Its backwards are turned round, but its sums are not: plain PyTorch's bits, also with a tied head."""
    job = job_of(tmp_path, parallel__executor="async_threaded", parallel__schedule="gpipe", training__grad_clip=0.5,
                 parallel__recompute=0.5)
    batches = batches_for_steps(job, 2)
    exact, *_ = references(job, batches)
    assert exact.bound == 0
    assert all(difference.within(0) for difference in compare(run_in_process(job, batches), exact.trajectory))
    assert headline(job) == ("bert: 5 layers in 2 stages [3, 2], schedule gpipe, executor async_threaded, one process "
                             "per stage")


def test_runs_have_the_same_losses_and_say_once_what_brings_no_gain(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    ran = {}
    for executor in ("naive", "async_threaded"):
        folder = tmp_path / executor
        folder.mkdir()
        train(job_of(folder, parallel__schedule="gpipe", parallel__executor=executor, training__max_steps=2), folder)
        ran[executor] = losses(folder)
        said = capsys.readouterr()
        assert (said.out + said.err).count(NO_GAIN) == (executor == "async_threaded")
    assert ran["naive"] == ran["async_threaded"]


@pytest.mark.parametrize(("changes", "what", "hint"), [
    ({}, "parallel.executor is async_threaded, which runs the schedule gpipe alone, but the schedule is 1f1b",
     "use the schedule gpipe, or the executor overlapped, which runs any"),
    ({"parallel__schedule": "gpipe", "parallel__tensor": 2},
     "parallel.executor is async_threaded, but tensor is 2: threads would begin the collectives of layers in another "
     "order on each rank", "use the executor overlapped"),
    ({"parallel__schedule": "gpipe", "trace": True},
     "trace is true, but the forwards of the executor async_threaded go on in threads, several at one time: there is "
     "no timeline of actions one after the other", "use the executor overlapped, which computes the same numbers")])
def test_what_does_not_go_with_threads_is_refused(changes: dict[str, Any], what: str, hint: str,
                                                  tmp_path: Path) -> None:
    settings = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    with pytest.raises(UserError) as caught:
        load_config(write_config(tmp_path, parallel__executor="async_threaded"), settings)
    assert [(problem.what, problem.hint) for problem in caught.value.problems] == [(what, hint)]
