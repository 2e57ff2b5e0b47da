"""Train under a schedule of vpipe's with PyTorch's own pipeline runtime (torch 2.13), without vpipe.

    vpipe schedule v_min --ranks 4 --microbatches 8 --format torch > v_min.csv
    torchrun --nproc-per-node 4 examples/torch_runtime.py v_min.csv
"""
import csv
import re
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

dist.init_process_group("gloo")  # on GPUs nccl, and each stage on its rank's device
with open(sys.argv[1], newline="") as file:  # a row per rank, an action per cell: stage, F B I or W, microbatch
    rows = [[tuple(map(int, re.findall(r"\d+", cell))) for cell in row] for row in csv.reader(file)]
stages, microbatches = (1 + max(cell[i] for row in rows for cell in row) for i in range(2))
own = sorted({stage for stage, _ in rows[dist.get_rank()]})

torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)])
parts = [net[12 * stage // stages:12 * (stage + 1) // stages] for stage in own]
runtime = _PipelineScheduleRuntime([PipelineStage(part, stage, stages, torch.device("cpu"))
                                    for stage, part in zip(own, parts, strict=True)],
                                   microbatches, loss_fn=nn.MSELoss())
runtime._load_csv(sys.argv[1])
optimizer = torch.optim.SGD([weight for part in parts for weight in part.parameters()], lr=0.5)

for _ in range(5):
    batch, losses = torch.randn(64, 32), []
    inputs = [batch] if 0 in own else []
    runtime.step(*inputs, target=batch.flip(1) if stages - 1 in own else None, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        print(f"{torch.stack(losses).mean().item():.6f}")
dist.destroy_process_group()
