"""Runs under each executor: what they are held to, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import job_of, losses

from vpipe.app.train.headline import headline
from vpipe.app.train.loop import NO_GAIN, train
from vpipe.app.verify import batches_for_steps, references, run_in_process
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
