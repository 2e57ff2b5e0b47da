"""A user's script under a launcher: trains without end; tells of every step and of its end, with the time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from vpipe import Model, Pipeline, Transfers
from vpipe.errors import VpipeError


def batches() -> Iterator[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)  # on every rank the same
    while True:
        yield {"input": torch.randn(8, 16, generator=drawn), "target": torch.randn(8, 16, generator=drawn)}


def main(timeout_s: float) -> None:
    torch.set_num_threads(1)
    model = Model.sequential(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), loss=nn.MSELoss())
    try:
        pipe = Pipeline(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01), stages=4, schedule="1f1b",
                        microbatches=4, transfers=Transfers(timeout_s=timeout_s))
        for step in pipe.train(batches()):
            print(f"step {step.index}", flush=True)
            time.sleep(0.02)
    except VpipeError as error:
        print(error, flush=True)
        raise SystemExit(error.exit_status) from None


if __name__ == "__main__":
    import sys

    main(float(sys.argv[1]))
