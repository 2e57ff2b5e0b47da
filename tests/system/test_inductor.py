"""Layers compiled by inductor, which calls a C++ compiler: near to layers that are not compiled."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from pipelines import parts
from torch import nn

from vpipe import Model, Pipeline


@pytest.mark.long
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_is_near() -> None:
    """It fuses operations, so it adds in another order; weight versions are as they must be."""
    def losses(**settings: Any) -> list[float]:
        model = Model.sequential(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))),
                                 loss=nn.MSELoss())
        pipe = Pipeline(model,
                        **parts(stages=2, schedule="pipedream", microbatches=4, **settings,
                                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2)))
        generator = torch.Generator().manual_seed(0)
        return [step.loss for step in pipe.train([{"input": torch.randn(8, 8, generator=generator),
                                                   "target": torch.randn(8, 8, generator=generator)}] * 3)]

    torch.manual_seed(0)
    plain = losses()
    torch.manual_seed(0)
    assert losses(compile=True) == pytest.approx(plain, rel=1e-4)
