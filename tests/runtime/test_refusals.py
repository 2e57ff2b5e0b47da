"""Arguments of a pipeline that do not fit each other are refused when it is made, each with its remedy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden import assert_golden, refusal
from models import rich_model, sliced_model, untied_model
from oracles import pipeline_of

from vpipe import Model

STREAM: dict[str, Any] = {"schedule": "pipedream", "partition": [3, 3, 2]}


def tied_to(owner: str, frozen: bool = False) -> Model:
    """A model whose head borrows a weight."""
    layers = list(untied_model().layers)
    build = layers[-1].build
    layers[-1] = replace(layers[-1], ties={"decoder.weight": owner}, build=lambda: build().requires_grad_(not frozen))
    return Model(layers, untied_model().batch)


def sliced(number: int, **changes: Any) -> Model:
    """A model that takes slices, with another layer."""
    layers = list(sliced_model().layers)
    layers[number] = replace(layers[number], **changes)
    return Model(layers, sliced_model().batch, "labels")


SLICED: dict[str, Any] = {"schedule": "seq1f1b", "slices": 2, "model": sliced_model}


ARGUMENTS: list[dict[str, Any]] = [
    {"compile": "inducto"}, {"compile": "eager", "schedule": "zb_h1"}, {"compile": 3}, {"delay_correction": 1.0},
    *({**STREAM, "delay_correction": value} for value in ("predict", -1, math.inf)), {"executor": "native"},
    {"precision": "fp61"}, {"precision": "bf16", "loss_scale": 8.0}, {"precision": "fp16", "loss_scale": 0},
    {"precision": "fp16", "loss_scale": True}, {**STREAM, "precision": "fp16"},
    {"precision": "bf16", "compress": "bf16"}, {"compress": "int4"}, {"compress": ["zip"]},
    {"stages": 4, "compress": ["int8"]}, {"schedule": "mine.csv", "stages": 3}, {"schedule": "mine.csv"},
    {"schedule": "mine.csv", "microbatches": 2, "placement": [[1], [0]]},
    {"placement": [[0], [1, 2, 3]], "microbatches": 2}, {"model": tied_to("embed.word.wieght")},
    {"model": tied_to("embed.word.weight", frozen=True)}, {"average": 1}, {"per_token_loss": True},
    {**SLICED, "model": sliced(2, carried=None)},
    {**SLICED, "model": Model(rich_model().layers, rich_model().batch, "labels")},
    {**SLICED, "model": Model(sliced_model().layers, sliced_model().batch)}, {**SLICED, "compile": "eager"},
    {**SLICED, "compress": "int8"}]


def refused(words: dict[str, Any]) -> str:
    return refusal(pipeline_of, **{"model": rich_model, "schedule": "1f1b",
                                   **({} if {"partition", "placement"} & set(words) else {"stages": 2}), **words})


def test_arguments_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert_golden(__file__, "arguments", map(refused, ARGUMENTS))


@pytest.mark.extras("async_threaded")
def test_threads_take_no_slices() -> None:
    assert "but the executor async_threaded adds gradients" in refused(
        {**SLICED, "schedule": "gpipe", "executor": "async_threaded"})
