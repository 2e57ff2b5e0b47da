"""Record what a script trains: progress, figures, a timeline, charts; end it by a call, or by a signal.

    python examples/recorded_run.py                              all four stages in this process
    torchrun --nproc-per-node 4 examples/recorded_run.py         one process per stage: the same losses

    vpipe watch output/spirals                                   in another terminal, while it trains or later
    vpipe trace output/spirals                                   writes the timeline and a report
"""

import shutil
from itertools import count

import torch
from torch import nn

from vpipe import Model, Pipeline
from vpipe.app import RecordedRun

# %% Points in two interleaved spirals, a batch made from its number; a point is a sample and a token.
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                    nn.Linear(64, 2))
flops = [2 * layer.weight.numel() if isinstance(layer, nn.Linear) else 0 for layer in net]


def batch_of(number, samples=64):
    random = torch.Generator().manual_seed(number)
    label, radius = torch.randint(2, (samples,), generator=random), torch.rand(samples, generator=random)
    angle = 5 * radius + torch.pi * label
    return {"input": torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), "target": label}


held_out = [batch_of(-1 - number) for number in range(4)]

# %% Training. The folder must not have a run: here that of the last time is removed.
pipe = Pipeline(Model.sequential(net, loss=nn.CrossEntropyLoss()),
                lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), stages=4, microbatches=4)
folder = "output/spirals"
if pipe.rank == 0:
    shutil.rmtree(folder, ignore_errors=True)
with RecordedRun(pipe, folder, updates=400, flops=flops, peak_tflops=0.05, print_every=100, trace=True) as run:
    for step in run.train(batch_of(number) for number in count()):
        if (step.index + 1) % 20 == 0:
            loss, found = run.evaluate(held_out, outputs=lambda tensors: {
                "right": tensors["output"].argmax(-1) == tensors["target"]})
            accuracy = found["right"].float().mean()
            run.log(accuracy=accuracy)
            if pipe.rank == 0:
                print(f"update {step.index + 1}: held out {loss:.4f}, accuracy {accuracy:.1%}")
            if accuracy > 0.95:
                pipe.stop()  # ends training on all ranks after the next update

    # %% The figures, as values on every rank; those of the stages are seconds of all updates that count.
    figures = run.figures()
if pipe.rank == 0:
    bubble = "-" if figures.bubble is None else f"{figures.bubble:.1%}"  # ranks that take turns in one process
    print(f"{figures.steps} updates, {figures.samples_per_s:,.0f} samples/s, MFU {figures.mfu:.2%}, "
          f"bubble {bubble}, {figures.sent_bytes:,.0f} bytes sent per update")
    for number, stage in enumerate(figures.stages):
        forward_s, backward_s = stage.forward_s / figures.usage_steps, stage.backward_s / figures.usage_steps
        print(f"stage {number}: forward {1e3 * forward_s:.2f} ms, backward {1e3 * backward_s:.2f} ms per update")
