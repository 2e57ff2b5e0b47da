"""Compiled layers: the numbers of plain PyTorch with the same compiled layers, and code that is made once."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from models import Average, rich_batches, rich_model
from oracles import AdamW, equals_its_oracle
from small_run import job_of
from test_every_schedule import MICROBATCHES, STREAMS, cut
from torch import nn
from torch._dynamo.utils import counters

from vpipe import Cut, Execution, Layer, Model, Pipeline
from vpipe.errors import RunError, UserError
from vpipe.runtime.compiled import check_compiler

# Dynamo reads the gradient of every input that it sees.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.mark.parametrize(("name", "backend", "recompute", "precision"), [
    *((name, "eager", 0.6, "fp32") for name in ("gpipe", "chimera", *STREAMS)), ("1f1b", "aot_eager", 0.0, "fp32"),
    ("interleaved", "aot_eager", 0.6, "fp32"), ("pipedream", "aot_eager", 0.6, "fp32"),
    ("1f1b", "aot_eager", 0.0, "bf16_pure"), ("pipedream", "aot_eager", 0.0, "bf16")])
def test_equal_to_plain_pytorch_with_the_same_compiled_layers(name: str, backend: str, recompute: float,
                                                              precision: str) -> None:
    equals_its_oracle(rich_model, rich_batches(2, MICROBATCHES), microbatches=MICROBATCHES, grad_clip=0.5,
                      schedule=name, partition=cut(name), recompute=recompute, precision=precision, compile=backend)


@pytest.mark.parametrize(("name", "recompute"), [("1f1b", 1.0), ("pipedream", 0.0), ("pipedream", 1.0)])
def test_versions_and_microbatches_compile_nothing_again(name: str, recompute: float) -> None:
    """All versions that there are have been seen by the 8th microbatch; nothing is compiled from then on."""
    pipe = Pipeline(rich_model(), AdamW(), stages=Cut(4, recompute=recompute), schedule=name, microbatches=8,
                    execution=Execution(compile="aot_eager"))
    made = []
    for step in pipe.train(rich_batches(6, 8)):
        if step.index >= (8 if name == "pipedream" else 1):
            made.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    assert len(made) > 3
    assert len(set(made)) == 1


def test_a_config_names_the_backend(tmp_path: Path) -> None:
    for said, backend in ((False, None), (True, "inductor"), ("aot_eager", "aot_eager")):
        assert job_of(tmp_path, training__compile=said).description(None).execution.backend == backend


def test_layers_of_one_class_share_their_code() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(h))

    model = Model([*(Layer(f"block{i}", Block, inputs=("x",) if i == 0 else ("h",)) for i in range(6)),
                   Layer("loss", Average, outputs=("loss",))], batch=("x",))
    before = counters["stats"]["unique_graphs"]
    list(Pipeline(model, AdamW(), stages=3, schedule="pipedream", microbatches=4,
                  execution=Execution(compile="eager")).train(
        [{"x": torch.randn(8, 8)} for _ in range(4)]))
    # The first stage's input needs no gradient, that of the others does.
    assert counters["stats"]["unique_graphs"] - before <= 3


class Scaled(nn.Linear):
    """A layer whose code has a number in it, so each number is a variant."""

    def __init__(self, factor: str) -> None:
        super().__init__(3, 3)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * len(self.factor)


def test_every_layer_is_compiled_however_many_variants_there_are() -> None:
    """By default torch keeps 8 variants of a class's code (here 4), and runs its further layers without compiling,
    silently."""
    with torch._dynamo.config.patch(recompile_limit=4):
        layers = [Layer(f"scaled{i}", partial(Scaled, "x" * (i + 1)), ("x",) if i == 0 else ("h",)) for i in range(6)]
        pipe = Pipeline(Model([*layers, Layer("loss", Average, ("h",), ("loss",))], batch=("x",)), AdamW(), stages=2,
                        microbatches=2, execution=Execution(compile="eager"))
        before = counters["stats"]["unique_graphs"]
        pipe.evaluate([{"x": torch.randn(4, 3)}])
        list(pipe.train([{"x": torch.randn(4, 3)}]))
        assert counters["stats"]["unique_graphs"] - before >= 2 * len(layers)


def test_a_layer_that_would_be_compiled_for_every_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.runtime.compiled.VARIANTS", 4)

    class Counting(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.factor += "x"
            return super().forward(x)

    with torch._dynamo.config.patch(recompile_limit=8):
        model = Model([Layer("count", lambda: Counting("x"), ("x",)), Layer("loss", Average, outputs=("loss",))],
                      batch=("x",))
        pipe = Pipeline(model, AdamW(), stages=1, execution=Execution(compile="eager"))
        with pytest.raises(RunError, match="a layer that is compiled again for every call"):
            list(pipe.train([{"x": torch.randn(2, 3)}] * 60))


def test_without_a_compiler_inductor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, and there is no g\+\+-99"):
        check_compiler("inductor", torch.device("cpu"))


@pytest.mark.system
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_is_near() -> None:
    """It fuses operations, so it adds in another order; weight versions are as they must be."""
    model = Model.sequential(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))),
                             loss=nn.MSELoss())
    batches = [{"input": torch.randn(8, 8), "target": torch.randn(8, 8)}] * 3
    plain, fused = ([step.loss for step in Pipeline(
        model, partial(torch.optim.AdamW, lr=1e-2), stages=2, schedule="pipedream", microbatches=4,
        execution=Execution(compile=how)).train(batches)] for how in (False, True))
    assert fused == pytest.approx(plain, rel=1e-4)
