"""Compare a stage with the plain model: GPT 124M and BERT-large, forward, backward and optimizer step, in turns.

The plain model is the same layers in a loop, under one torch.autocast, with gradient accumulation over the same
microbatches and the same optimizer, fused where torch has it so. The goal is 0.9 of its speed or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from findings import Part
from models import published_jobs
from torch import Tensor, nn

from vpipe import Execution, Model, Pipeline, accelerator
from vpipe.app.train.job import Job
from vpipe.app.train.model_section import model_flops
from vpipe.app.train.peak_flops import known_tflops
from vpipe.model.layer import moved

ROUNDS, BATCHES, GOAL = 5, 3, 0.9


def plain_training(model: Model, batch: Mapping[str, Tensor], job: Job, device: torch.device) -> Callable[[], None]:
    """Return a function that trains on a batch in plain PyTorch."""
    modules = moved(model.materialize(0), device)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-4, fused=device.type in accelerator.FUSED or None)
    microbatches, bf16 = job.config.training.num_microbatches, job.config.training.precision == "bf16"

    def train() -> None:
        for fields in zip(*(batch[name].chunk(microbatches) for name in model.batch), strict=True):
            tensors = dict(zip(model.batch, fields, strict=True))
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                for layer in model.layers:
                    made = modules[layer.name](*(tensors[name] for name in layer.inputs))
                    tensors |= zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True)
            (tensors["loss"] / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def pipeline_training(model: Model, batch: Mapping[str, Tensor], job: Job, device: torch.device) -> Callable[[], None]:
    """Return a function that trains on a batch in a pipeline of one stage."""
    training = job.config.training

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4, fused=device.type in accelerator.FUSED or None)

    pipe = Pipeline(model, adamw, stages=1, schedule="1f1b", microbatches=training.num_microbatches,
                    precision=training.precision, execution=Execution(device=device))
    return lambda: list(pipe.train([batch] * BATCHES)) and None


def main() -> None:
    part = Part(__doc__)
    for name, job in published_jobs(part.small).items():
        batch = {field: value.to(part.device) for field, value in next(job.training_batches(job.model.batch)).items()}
        plain = plain_training(job.model, batch, job, part.device)
        turns = {"plain": lambda plain=plain: [plain() for _ in range(BATCHES)],
                 "pipeline": pipeline_training(job.model, batch, job, part.device)}
        seconds: dict[str, list[float]] = {kind: [] for kind in turns}
        for number in range(1 + (1 if part.small else ROUNDS)):
            for kind, turn in turns.items():
                part.wait()
                started = perf_counter()
                turn()
                part.wait()
                if number:  # the first warms up
                    seconds[kind].append((perf_counter() - started) / BATCHES)
        plain_s, pipe_s = median(seconds["plain"]), median(seconds["pipeline"])
        ratio = median(one / other for one, other in zip(seconds["plain"], seconds["pipeline"], strict=True))
        tokens = batch[job.model.batch[0]].numel()
        flops = 3 * sum(model_flops(job.config.model, len(job.model)) or ()) * tokens
        peak = known_tflops(accelerator.name_of(part.device), job.config.training.precision)
        mfu = f", MFU {flops / pipe_s / peak / 1e12:.1%} of {peak:.0f} TFLOP/s" if peak else ""
        part.add(f"{name}, {job.config.training.precision}, one stage",
                 f"{1e3 * pipe_s:.1f} ms per update of {tokens:,} tokens, plain {1e3 * plain_s:.1f} ms: {ratio:.2f} of "
                 f"its speed (goal {GOAL}){mfu}", None if part.small else ratio >= GOAL)
        del plain, turns, batch
        part.free()


if __name__ == "__main__":
    main()
