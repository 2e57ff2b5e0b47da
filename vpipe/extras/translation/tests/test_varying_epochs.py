"""Epochs of batches that differ in length and in their number of samples."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from attempts import begin, go_on
from hypothesis import given
from hypothesis import strategies as st
from small_run import job_of, metrics

from vpipe.app.train.epochs import Epochs
from vpipe.app.train.job import microbatch_of
from vpipe.extras.translation.synthetic import synthetic_pairs

pytestmark = pytest.mark.jobs

TRANSLATION = {
    "model__name": "translation", "model__preset": None, "model__hidden_size": 8, "model__num_layers": 1,
    "model__num_heads": 2, "model__sequence_length": 8, "model__vocab_size": 16, "parallel__partition": [3, 3],
    "dataset__batch_size": 4, "dataset__samples": 50, "dataset__max_tokens": 48, "training__num_microbatches": 2}


def epochs_of(microbatches: int = 2) -> Epochs:
    return Epochs(synthetic_pairs(40, 8, 50, batch_size=4, max_tokens=48), 4, microbatches, 8, lambda epoch: 7 * epoch)


@cache
def read(microbatches: int) -> tuple[Epochs, list[int], list[int]]:
    """Five epochs, and the samples and labels of every microbatch of theirs."""
    epochs, sizes, labels = epochs_of(microbatches), list[int](), list[int]()
    for epoch in range(5):
        for batch in epochs.dataset.batches("train", 4, seed=7 * epoch):
            each = len(batch["labels"]) // microbatches
            sizes += [each] * microbatches
            labels += [int((part != -100).sum()) for part in batch["labels"].split(each)]
    return epochs, sizes, labels


@given(st.integers(0, 200), st.sampled_from([1, 2, 4]), st.integers(1, 6))
def test_steps_are_the_samples_and_tokens_of_their_microbatches(done: int, microbatches: int, per_step: int) -> None:
    epochs, sizes, labels = read(microbatches)
    assert (epochs.samples, epochs.tokens) == (
        sum(sizes[:epochs.batches * microbatches]), sum(labels[:epochs.batches * microbatches])) == (48, epochs.tokens)
    done = min(done, len(sizes) - 40)
    samples = sum(sizes[:done])
    assert epochs.microbatches_done(samples) == done
    at = epochs.locate(samples)
    assert (at.epoch * epochs.batches + at.batch, at.done) == (
        done // microbatches, sum(sizes[done - done % microbatches:done]))
    steps = epochs.steps(samples, per_step)
    assert steps is not None
    expected = [(sum(sizes[i:i + per_step]), sum(labels[i:i + per_step])) for i in range(done, done + 30, per_step)]
    assert list(islice(steps, len(expected))) == expected


def test_a_run_counts_real_samples_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path, **TRANSLATION, training__max_steps=None, training__epochs=2)
    job = job_of(tmp_path, **TRANSLATION, training__max_steps=None, training__epochs=2)
    batches = list(job.training_batches(job.model.batch))
    assert len({batch["labels"].shape for batch in batches}) > 1
    assert all(len(batch["labels"]) * max(batch["labels"].shape[1], batch["source_ids"].shape[1]) <= 48
               for batch in batches)
    lines = metrics(run)[0]
    assert [round(line["samples_per_s"] * line["step_s"], 2) for line in lines] == [
        pytest.approx(len(batch["labels"]), abs=0.05) for batch in batches]
    assert [line["tokens_per_s"] * line["step_s"] for line in lines] == [
        pytest.approx(int((batch["labels"] != -100).sum()), abs=0.5) for batch in batches]
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches) // 2
    assert f"an epoch: 50 samples, {tokens} tokens, {len(batches) // 2} updates, " in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{}, {"parallel__schedule": "pipedream", "parallel__update_every": 1}])
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, changes: dict[str, Any]) -> None:
    keys = {**TRANSLATION, **changes, "training__max_steps": None, "training__epochs": 2, "checkpoint__every_steps": 5,
            "checkpoint__keep": None}
    run = begin(tmp_path, **keys)
    before = metrics(run)[0]
    at = 5 if not changes else 10
    go_on(run, at=at)
    after = metrics(run)[0]
    assert [line["loss"] for line in after] == [line["loss"] for line in before]
    for line, again in zip(before, after, strict=True):
        assert again["samples_per_s"] * again["step_s"] == pytest.approx(line["samples_per_s"] * line["step_s"], abs=.1)


def test_the_largest_batch_is_profiled(tmp_path: Path) -> None:
    job = job_of(tmp_path, **TRANSLATION)
    shapes = [(max(batch["labels"].shape[1], batch["source_ids"].shape[1]), len(batch["labels"]))
              for batch, _ in zip(job.training_batches(job.model.batch), range(job.epochs.batches), strict=False)]
    longest, samples = max(shapes)
    batch = microbatch_of(job, job.config.microbatch_size)
    assert len(batch["labels"]) == samples // 2 == job.microbatch_samples(job.config.microbatch_size)
    assert max(batch["labels"].shape[1], batch["source_ids"].shape[1]) == longest
