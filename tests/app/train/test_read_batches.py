"""Batches that a thread prepares ahead: the same run, to its end, its error or its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from threading import enumerate as threads
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attempts import begin, go_on
from golden import refusal
from small_run import job_of, losses, metrics
from torch import Tensor
from torch.utils.data import DataLoader

from vpipe.app.train.job import Job
from vpipe.app.train.loop import read_batches, train
from vpipe.errors import RunError, UserError

GPT: dict[str, Any] = {"model__name": "gpt", "model__preset": None, "model__num_layers": 1, "model__num_heads": 2,
                       "model__vocab_size": -1, "training__evaluation_batches": 1}


def check_thread_ended() -> None:
    assert "vpipe-batches" not in [thread.name for thread in threads()]


def run(folder: Path, **changes: Any) -> list[float]:
    """The losses, the last of an evaluation."""
    folder.mkdir()
    train(job_of(folder, **GPT, **changes), folder)
    check_thread_ended()
    return [*losses(folder), metrics(folder)[1][-1]["evaluation_loss"]]


@pytest.mark.parametrize("changes", [{}, {"parallel__schedule": "pipedream", "training__evaluate_every": 3}])
def test_the_numbers_are_those_without_the_thread(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert run(tmp_path / "with", dataset__num_workers=3, **changes) == run(tmp_path / "without", **changes)


def test_a_run_goes_on_with_the_batch_that_is_due(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", training__max_steps=4)
    begun = begin(tmp_path, **GPT, dataset__num_workers=3, training__max_steps=2, checkpoint__at_end=True)
    go_on(begun, "training.max_steps=4")
    assert [*losses(begun), metrics(begun)[1][-1]["evaluation_loss"]] == whole


MISSING = UserError("the shard a.hdf5 is missing", hint="copy it again", where="data/a.hdf5")


@pytest.mark.parametrize(("workers", "error", "what", "hint"), [
    (0, MISSING, "the shard a.hdf5 is missing (data/a.hdf5)", "copy it again"),
    (4, MISSING, "the shard a.hdf5 is missing (data/a.hdf5)", "copy it again"),
    (0, KeyError("sample 17"), "the data set raised KeyError: 'sample 17'", "fix what raised it")])
def test_a_batch_that_cannot_be_read_ends_the_run_with_its_place(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, error: Exception, what: str, hint: str) -> None:
    job = job_of(tmp_path, **GPT, parallel__model_parallel_size=1, dataset__num_workers=workers)
    batches = list(islice(job.training_batches(job.model.batch), 2))

    def gone(self: Job, fields: tuple[str, ...]) -> Any:
        yield from batches
        raise error

    monkeypatch.setattr(Job, "training_batches", gone)
    assert refusal(train, job, tmp_path, kind=RunError) == (
        f"error: {what} (rank 0, stage 0, action reading batch 2)\nhint: {hint}")
    assert len(losses(tmp_path)) == 2
    check_thread_ended()


@pytest.mark.parametrize("draws", [lambda: torch.randperm(4), lambda: torch.manual_seed(7),
                                   lambda: DataLoader([0, 1], shuffle=True)])
def test_numbers_that_dropout_would_miss_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       draws: Callable[[], object]) -> None:
    job = job_of(tmp_path, **GPT, parallel__model_parallel_size=1, dataset__num_workers=2)
    batches = list(islice(job.training_batches(job.model.batch), 2))

    def drawn(self: Job, fields: tuple[str, ...]) -> Iterator[Any]:
        made = draws()
        list(made if isinstance(made, DataLoader) else [])
        yield from batches

    monkeypatch.setattr(Job, "training_batches", drawn)
    assert refusal(train, job, tmp_path, kind=RunError) == (
        "error: the data set draws random numbers from torch's default generator, or seeds it, which a thread beside "
        "the training must not (rank 0, stage 0, action reading batch 0)\n"
        "hint: give it a torch.Generator of its own, or set dataset.num_workers to 0")
    check_thread_ended()


def test_a_generator_of_its_own_may_be_drawn_from() -> None:
    def batches() -> Iterator[dict[str, Tensor]]:
        random = torch.Generator().manual_seed(3)
        for _ in range(4):
            yield {"rows": torch.randperm(9, generator=random)}

    rank = SimpleNamespace(rank=0, stages=())
    for ahead in (0, 1, 3):
        with read_batches(batches(), "batch", rank, ahead) as given:  # type: ignore[arg-type]
            assert [batch["rows"].tolist() for batch in given] == [batch["rows"].tolist() for batch in batches()]
        check_thread_ended()
        with read_batches(batches(), "batch", rank, ahead) as given:  # type: ignore[arg-type]
            next(given)
        check_thread_ended()
        with read_batches([], "batch", rank, ahead) as given:  # type: ignore[arg-type]
            assert list(given) == []
