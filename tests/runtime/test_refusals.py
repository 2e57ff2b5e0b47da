"""Arguments of a pipeline that do not fit each other are refused when it is made, each with its remedy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import rich_model, sliced_model, untied_model
from oracles import pipeline_of

from vpipe import Model
from vpipe.errors import UserError

STREAM: dict[str, Any] = {"schedule": "pipedream", "partition": [3, 3, 2]}


def tied_to(owner: str, frozen: bool = False) -> Model:
    """A model whose head borrows a weight."""
    layers = list(untied_model().layers)
    build = layers[-1].build
    layers[-1] = replace(layers[-1], ties={"decoder.weight": owner},
                         build=lambda: build().requires_grad_(not frozen))
    return Model(layers, untied_model().batch)


def sliced(number: int, **changes: Any) -> Model:
    """A model that takes slices, with another layer."""
    layers = list(sliced_model().layers)
    layers[number] = replace(layers[number], **changes)
    return Model(layers, sliced_model().batch, "labels")


SLICED: dict[str, Any] = {"schedule": "seq1f1b", "slices": 2, "model": sliced_model}
SLICES = "sequences are cut into 2 slices, but "


@pytest.mark.parametrize(("words", "what", "hint"), [
    ({"compile": "inducto"}, "torch.compile has no backend 'inducto'", "did you mean 'inductor'?"),
    ({"compile": "eager", "schedule": "zb_h1"},
     "'zb_h1' splits every backward: it intercepts the operations that take a weight, and a compiled layer shows none",
     "choose a schedule with whole backwards, such as 1f1b or interleaved, or do not compile"),
    ({"compile": 3}, "compile is 3", "give a name, such as 'aot_eager'"),
    ({"delay_correction": 1.0}, "delay_correction is 1, but '1f1b' has a flush", "choose a schedule without"),
    *(({**STREAM, "delay_correction": value}, f"delay_correction is {value!r}", "") for value in (
        "predict", -1, math.inf)),
    ({"executor": "native"}, "no executor is called 'native'", "did you mean 'naive'?"),
    ({"precision": "fp61"}, "precision is 'fp61'", "did you mean"),
    ({"precision": "bf16", "loss_scale": 8.0}, "loss_scale is 8.0, but the precision is bf16", "only fp16"),
    ({"precision": "fp16", "loss_scale": 0}, "loss_scale is 0", "a number above 0"),
    ({"precision": "fp16", "loss_scale": True}, "loss_scale is True", "a number above 0"),
    ({**STREAM, "precision": "fp16"}, "loss_scale is dynamic, but the schedule has no flush",
     "set loss_scale to a number such as 1024, or precision to bf16, or choose a schedule with a flush such as 1f1b"),
    ({"precision": "bf16", "compress": "bf16"},
     "compress is bf16, but in precision bf16 tensors between stages", "leave it out"),
    ({"compress": "int4"}, "compress is 'int4'", "did you mean 'int8'?"),
    ({"compress": ["zip"]}, "compress is 'zip'", "known names: bf16, int8, int8_stochastic, none"),
    ({"stages": 4, "compress": ["int8"]}, "compress has 1 entries for the 3 cuts between 4 stages",
     "give one word for all cuts"),
    ({"schedule": "FILE", "stages": 3}, "is a schedule of 2 stages, not 3", ""),
    ({"schedule": "FILE"}, "is a schedule of 2 microbatches, not 4", ""),
    ({"schedule": "FILE", "microbatches": 2, "placement": [[1], [0]]},
     "places the stages as [[0], [1]], not as [[1], [0]]", ""),
    ({"placement": [[0], [1, 2, 3]], "microbatches": 2}, "3 replicas", ""),
    ({"model": tied_to("embed.word.wieght")},
     "'head.decoder.weight' is tied to 'embed.word.wieght', which is no parameter", ""),
    ({"model": tied_to("embed.word.weight", frozen=True)},
     "'head.decoder.weight' [23, 12] (float32, frozen) is tied to 'embed.word.weight' [23, 12] (float32)",
     "train both or none, or leave out the tie"),
    ({"average": 1}, "average is 1.0", "give the decay of the average, below 1"),
    ({"per_token_loss": True},
     "per_token_loss is True, but the model does not say which field of a batch has its labels",
     "name it, if the loss is the mean over its entries that are not -100: Model(layers, batch=..., labels='labels'); "
     "or leave per_token_loss out"),
    ({**SLICED, "model": sliced(2, carried=None)}, f"{SLICES}layer 'lstm' does not say what goes from a slice",
     "carried=() says that"),
    ({**SLICED, "model": Model(rich_model().layers, rich_model().batch, "labels")},
     f"{SLICES}layer 'embed' and 7 other layers do not say what goes", "Layer"),
    ({**SLICED, "model": Model(sliced_model().layers, sliced_model().batch)},
     f"{SLICES}the model does not say which field of a batch has its labels", "labels="),
    pytest.param({**SLICED, "schedule": "gpipe", "executor": "async_threaded"},
                 f"{SLICES}the executor async_threaded adds gradients", "overlapped",
                 marks=pytest.mark.extras("async_threaded")),
    ({**SLICED, "compile": "eager"}, f"{SLICES}layers would be compiled for every length",
     "do not compile, or leave the"),
    ({**SLICED, "compress": "int8"}, f"{SLICES}their transfers are compressed", "leave compress out, or leave")])
def test_arguments_that_do_not_fit(words: dict[str, Any], what: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    words = {name: str(tmp_path / "mine.csv") if value == "FILE" else value for name, value in words.items()}
    with pytest.raises(UserError) as refused:
        pipeline_of(words.pop("model", rich_model), **{
            "schedule": "1f1b", **({} if {"partition", "placement"} & set(words) else {"stages": 2}), **words})
    [problem] = refused.value.problems
    assert what in problem.what
    assert hint in problem.hint
