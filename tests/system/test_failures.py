"""Every failure of a rank at every moment, really made: the run ends or goes on within seconds, nothing stays behind,
and ``--resume`` gives bit for bit what a run without the failure gives, with every sample used once."""

from __future__ import annotations

import re
import signal

import pytest
from bench import MOMENTS, SOON_S, Bench, Outcome, Place, alone, check_resumed, failure, failures_at
from failures import RANKS, TIMEOUT_S, Failure
from small_run import oracle

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job

KILLED_SAYS = "died without a message, killed by signal 9 (SIGKILL)"
PLACES = list(MOMENTS["pipedream"])
KILLED = [("1f1b", moment, rank) for moment in PLACES for rank in range(RANKS)] + [
    ("pipedream", moment, number % RANKS) for number, moment in enumerate(PLACES)]
STOPPED = [("pipedream" if number % 2 else "1f1b", moment, 2 - number % RANKS) for number, moment in enumerate(PLACES)]
OUT_OF_MEMORY = [("1f1b" if number % 2 else "pipedream", moment, (number + 1) % RANKS)
                 for number, moment in enumerate(PLACES) if moment != "write"]


@failures_at("kill", KILLED)
def test_a_killed_rank(place: Place, outcome: Outcome, bench: Bench) -> None:
    run, ended, seconds, resumed = outcome
    rank = place[2]
    assert ended.status == 1
    [error] = ended.errors
    assert error.startswith(f"error: rank {rank} (stage {rank}) {KILLED_SAYS}")
    assert "Traceback" not in ended.out + ended.err
    assert seconds < SOON_S
    check_resumed(run, resumed, bench)


@failures_at("stop", STOPPED)
def test_a_stopped_rank(place: Place, outcome: Outcome, bench: Bench) -> None:
    run, ended, seconds, resumed = outcome
    rank = place[2]
    assert ended.status == 1
    [error] = ended.errors
    assert re.match(rf"error: rank {rank} \(stage {rank}\) gave no sign of life for \d+\.?\d* s; ", error), error
    assert seconds < TIMEOUT_S + SOON_S
    check_resumed(run, resumed, bench)


@failures_at("memory", OUT_OF_MEMORY)
def test_out_of_memory(place: Place, outcome: Outcome, bench: Bench) -> None:
    run, ended, seconds, resumed = outcome
    rank = place[2]
    assert ended.status == 1
    [error] = ended.errors
    assert re.match(r"error: (the optimizer step raised )?OutOfMemoryError: CUDA out of memory. Tried to allocate "
                    rf"2.00 GiB \(rank {rank}, stage {rank}, (microbatch \d+, )?action {rank}", error), error
    assert seconds < SOON_S
    check_resumed(run, resumed, bench)


@alone(failure("terminate", "pipedream", "steady", 1))
def test_a_rank_that_is_asked_to_end(outcome: Outcome) -> None:
    """As SLURM asks: all leave off after the same step, and save. The pipeline runs empty there, once more than in a
    run that is not asked to."""
    run, ended, seconds, resumed = outcome
    assert ended.status == 128 + signal.SIGTERM
    stopped = re.search(r"stopped by SIGTERM after update (\d+): saved", ended.err)
    assert stopped, ended.err
    assert seconds < SOON_S
    assert resumed.status == 0, resumed.err
    drained = tuple(sorted({5, 7, 10, 14, 15, int(stopped[1])}))
    assert run.losses() == oracle(Job.from_config(load_config(run.config)), 16, drained).losses
    assert len(run.samples()) == 16
    run.check_tidy()


@pytest.mark.parametrize(("schedule", "drained"), [("1f1b", ()), ("pipedream", (5, 7, 10, 14, 15))])
def test_the_runs_that_all_are_held_to(schedule: str, drained: tuple[int, ...], bench: Bench) -> None:
    run = bench.result(schedule)
    assert run.losses() == oracle(Job.from_config(load_config(run.config)), len(run.losses()), drained).losses
    run.check_tidy()


@alone(Failure("1f1b", {"rank": 2, "moment": "forward", "count": 20, "do": "terminate"}))
def test_a_run_asked_to_end_where_it_would_have_evaluated_does_so_when_it_goes_on(outcome: Outcome,
                                                                                  bench: Bench) -> None:
    """After step 6: with a flush the pipeline is empty there anyway."""
    run, ended, _, resumed = outcome
    assert ended.status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after update 6: saved" in ended.err
    check_resumed(run, resumed, bench)


@alone(failure("kill", "pipedream", "cooldown", 2, words=("--restarts", "1")))
def test_a_run_that_is_started_again_by_itself(outcome: Outcome, bench: Bench) -> None:
    run, ended, _, _ = outcome
    assert ended.status == 0, ended.err
    [attempt] = [line for line in ended.err.splitlines() if line.startswith("attempt ")]
    assert attempt.startswith(f"attempt 2 of 2: rank 2 (stage 2) {KILLED_SAYS}")
    assert re.search(r"; going on from step (5|10)$", attempt), "step 10 is written while training goes on"
    run.check_equals(bench.result("pipedream"))
