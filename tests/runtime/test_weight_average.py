"""An average follows the weights: that of the oracle's updates, evaluated, saved, and loaded under another cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden import refusal
from models import rich_batches, rich_model
from oracles import averages_of, oracle_of, pipeline_of

from vpipe.testing import evaluate_oracle

DECAY = 0.75


@pytest.mark.parametrize("words", [
    {"schedule": "1f1b", "stages": 3, "recompute": 1.0}, {"schedule": "zb_v", "stages": 4},
    {"schedule": "1f1b", "placement": [[0, 1], [2]], "stages": 2, "zero1": True, "grad_clip": 0.5},
    {"schedule": "pipedream", "stages": 3, "delay_correction": 1.0},
    {"schedule": "2bw", "placement": [[0], [1, 2]], "stages": 2, "precision": "bf16_pure", "zero1": True}], ids=str)
def test_it_is_the_average_of_the_oracles_weights(tmp_path: Path, words: dict[str, Any]) -> None:
    batches, held_out = rich_batches(3, 8), rich_batches(1, 5, seed=9)
    pipe = pipeline_of(rich_model, average=DECAY, **words)
    list(pipe.train(batches))
    weights, average = pipe.state_dict(), pipe.state_dict(averaged=True)
    begin = pipeline_of(rich_model, stages=1).state_dict()
    theirs = averages_of(oracle_of(pipe, batches), begin, DECAY)
    assert list(average) == list(theirs)
    assert [name for name in theirs if not torch.equal(average[name], theirs[name])] == []
    assert any(not torch.equal(average[name], weights[name]) for name in weights)

    usage = pipe.usage()
    found = pipe.evaluate(held_out, averaged=True)
    assert [stage.bytes_sent for stage in pipe.usage()] == [stage.bytes_sent for stage in usage]
    if "precision" not in words:
        tied = {"head.decoder.weight": average["embed.word.weight"]}
        assert found == evaluate_oracle(pipe.model, average | tied, held_out, 4)
    assert all(torch.equal(value, weights[name]) for name, value in pipe.state_dict().items()), "they are back"

    pipe.save(tmp_path / "saved")
    kept = {key: words[key] for key in ("delay_correction", "precision") if key in words}
    cut = {"stages": 3} if kept.get("delay_correction") else {"stages": 2}  # where they look ahead, a cut changes it
    other = pipeline_of(rich_model, average=DECAY, schedule="pipedream" if kept else "gpipe", **kept, **cut)
    other.load(tmp_path / "saved")
    assert all(torch.equal(value, average[name]) for name, value in other.state_dict(averaged=True).items())


@pytest.mark.parametrize("averaged", [False, True])
def test_it_begins_with_loaded_weights_unless_an_average_is_loaded(averaged: bool, tmp_path: Path) -> None:
    first, second = (pipeline_of(rich_model, stages=2, average=each) for each in (DECAY if averaged else None, DECAY))
    batches = rich_batches(3, 8)
    list(first.train(batches[:2]))
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    begin = first.state_dict(averaged=averaged)
    assert all(torch.equal(value, begin[name]) for name, value in second.state_dict(averaged=True).items())
    list(second.train(batches[2:]))
    trained = {name for name, value in first.state_dict().items() if not torch.equal(value, second.state_dict()[name])}
    for name, value in second.state_dict(averaged=True).items():
        if name in trained:
            torch.testing.assert_close(value, DECAY * begin[name] + (1 - DECAY) * second.state_dict()[name])


def test_what_has_no_average_is_refused() -> None:
    pipe = pipeline_of(rich_model, stages=2)
    for look in (lambda: pipe.state_dict(averaged=True), lambda: pipe.evaluate(rich_batches(1, 8), averaged=True)):
        assert refusal(look) == (
            "error: averaged is True, but no average follows the weights\n"
            "hint: keep one from the start: Update(optimizer, average=0.999)")
