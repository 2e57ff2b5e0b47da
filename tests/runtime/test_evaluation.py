"""A held-out set of any size is evaluated: the mean over its samples is that of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jobs
import nccl_jobs
import pytest
import torch
from everywhere import HARDEST
from golden import assert_golden, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from models import rich_batches, rich_model
from world import World

from vpipe import Cut, Execution, Model, Pipeline
from vpipe.runtime.microbatches import Batch
from vpipe.testing import evaluate_oracle

PLACEMENTS: list[list[list[int]]] = [
    [[0], [1], [2]], [[0, 1], [2], [3]], [[0], [1, 2, 3]], [[0, 1], [2, 3, 4]], [[0, 1, 2]]]
EPS = torch.finfo(torch.float32).eps


def plain(model: Model, pipe: Pipeline, batches: Sequence[Batch], parts: int = 1) -> tuple[float, torch.Tensor]:
    """The mean over all samples by the model in one piece, of so many parts of a batch at a time, and what the last
    layer reads."""
    modules, total, read = model.materialize(0).eval(), 0.0, []
    state = pipe.state_dict()
    modules.load_state_dict(state | {"head.decoder.weight": state["embed.word.weight"]})
    for batch, place in [(one, place) for one in batches for place in range(min(parts, len(one["ids"])))]:
        tensors = {name: field.tensor_split(min(parts, len(field)))[place] for name, field in batch.items()}
        with torch.no_grad():
            for layer in model.layers:
                if layer is model.layers[-1]:
                    read.append(tensors["h"])
                out = modules[layer.name](*(tensors[name] for name in layer.inputs))
                tensors |= zip(layer.outputs, out if isinstance(out, tuple) else (out,), strict=True)
        total += float(tensors["loss"]) * len(tensors["ids"])
    return total / sum(len(batch["ids"]) for batch in batches), torch.cat(read)


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=10), microbatches=st.integers(1, 5),
       placement=st.sampled_from(PLACEMENTS), schedule=st.sampled_from(["gpipe", "pipedream"]),
       executor=st.sampled_from(["overlapped", "naive"]))
def test_batches_of_any_sizes(sizes: list[int], microbatches: int, placement: list[list[int]], schedule: str,
                              executor: Any) -> None:
    microbatches = max(microbatches, *map(len, placement))  # each replica has one in training
    model, batches = rich_model(), [rich_batches(1, samples, seed=i)[0] for i, samples in enumerate(sizes)]
    pipe = Pipeline(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                    stages=Cut(len(placement), ranks=placement), schedule=schedule, microbatches=microbatches,
                    execution=Execution(executor=executor), seed=2)
    (found, outputs), state = pipe.evaluate(batches, ("labels", "h")), pipe.state_dict()
    state["head.decoder.weight"] = state["embed.word.weight"]
    assert found == evaluate_oracle(model, state, batches, microbatches), "the same cut, the same bits"
    assert found == pytest.approx(plain(model, pipe, batches)[0], rel=16 * EPS)
    assert torch.equal(outputs["h"], plain(model, pipe, batches, microbatches)[1])
    assert torch.equal(outputs["labels"], torch.cat([batch["labels"] for batch in batches])), "in the samples' order"
    loss, made = pipe.evaluate(batches, lambda tensors: {"sums": tensors["h"].sum((1, 2))})
    assert (loss, list(made)) == (found, ["sums"])
    assert torch.equal(made["sums"], torch.cat([h.sum((1, 2)) for h in outputs["h"].split(1)]))


OUTPUTS: list[Any] = [
    "logits", 3, lambda tensors: tensors["output"], lambda tensors: {"a": tensors["logit"]}, "loss",
    lambda tensors: {"x": tensors["h"].new_ones(2, int(tensors["target"][0]))}]


def test_what_is_no_output_of_all_samples_is_refused() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    pipe = Pipeline(Model.sequential(net, torch.nn.CrossEntropyLoss()), torch.optim.SGD, stages=[2, 1], microbatches=2)
    batch, texts = {"input": torch.ones(4, 3), "target": torch.tensor([0, 0, 1, 1])}, []
    for outputs in OUTPUTS:
        texts.append(refusal(pipe.evaluate, [batch], outputs))
        assert torch.equal(pipe.evaluate([batch], "target")[1]["target"], batch["target"]), "usable still"
    assert_golden(__file__, "outputs", texts)


@pytest.mark.parametrize(("arguments", "under_rules"), [
    ({"schedule": "1f1b", "stages": 4, "hide": True}, False),
    ({"schedule": "zb_v", "stages": 8, "executor": "naive"}, True),
    pytest.param({"schedule": "gpipe", "stages": 4, "executor": "async_threaded", "shared_memory": False,
                  "compress": "bf16"}, False, marks=pytest.mark.extras("async_threaded")),
    ({"schedule": "pipedream", "placement": [[0, 1], [2], [3]], "stages": 3, "average": 0.9}, True)],
    ids=["hidden fields", "several stages per rank", "gloo alone", "replicas and an average"])
def test_four_processes_find_what_one_does(world: World, arguments: dict[str, Any], under_rules: bool) -> None:
    """More batches than are read at once, and a last one that has fewer samples than others have microbatches; also
    under the rules of nccl."""
    arguments |= {"sizes": [8, 1, 5, 8, 9, 8, 8, 3], "microbatches": 4}
    expected = jobs.evaluate(**arguments)
    assert world.run(jobs.evaluate, **arguments) == [expected] * 4
    if under_rules:
        assert world.run(nccl_jobs.under, run="jobs.evaluate", **HARDEST, **arguments) == [expected] * 4
