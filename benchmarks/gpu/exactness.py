"""Train every schedule in one process on the device, beside its oracle on the same device.

The oracle is plain PyTorch with gradient accumulation, or, without a flush, the sequential program of
``vpipe.testing.reference``; it uses the same dropout masks. torch is told to be deterministic. On one processor thread
both are equal to the last bit; on a device that is reported, and a relative difference of 1e-5 of a loss is allowed in
fp32 (1e-2 in reduced precision), because a kernel may add in another order.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import torch
from findings import Part
from models import CONFIGS, SMALL, small_batches, small_model

from vpipe import Cut, Execution, Pipeline, Precision, accelerator
from vpipe.errors import PerformanceWarning
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing import ReferencePrecision, TrainingRecipe, asynchronous_oracle, flush_oracle, version_rule

RANKS, MICROBATCHES, BLOCKS, SAMPLES = (2, 4, 2, 8) if SMALL else (4, 8, 14, 16)
FP32 = Precision("fp32")
MOST, MOST_REDUCED = 1e-5, 1e-2


def trained(schedule: RegisteredSchedule, device: torch.device, recompute: float = 0.0,
            precision: Precision = FP32) -> tuple[Pipeline, list[float]]:
    """Train on the small model, and return the pipeline and its losses."""
    pipe = Pipeline(small_model(BLOCKS), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
                    stages=Cut(RANKS * schedule.chunks, recompute), schedule=schedule.name, microbatches=MICROBATCHES,
                    precision=precision, execution=Execution(device), seed=1)
    return pipe, [step.loss for step in pipe.train(small_batches(SAMPLES))]


def expected(schedule: RegisteredSchedule, pipe: Pipeline, device: torch.device, precision: Precision) -> list[float]:
    """Return the losses of the oracle."""
    recipe = TrainingRecipe(lambda named: torch.optim.SGD(list(named.values()), lr=0.1, momentum=0.9), MICROBATCHES, 1,
                            precision=ReferencePrecision(precision.name, precision.loss_scale), device=device)
    batches = small_batches(SAMPLES)
    if schedule.flush:
        return flush_oracle(small_model(BLOCKS), batches, recipe, pipe.partition).losses
    return asynchronous_oracle(small_model(BLOCKS), batches, recipe, pipe.partition, pipe.update_every or 1,
                               version_of=version_rule(schedule.name)).losses


def add(part: Part, subject: str, ours: list[float], theirs: list[float], bound: float) -> None:
    """Write how far losses are from those that they must be."""
    off = max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
    part.add(subject, f"{len(ours)} losses equal to the last bit" if off == 0 else
             f"{len(ours)} losses, the largest relative difference is {off:.1e} (allowed {bound:.0e})", off <= bound)


def verify(part: Part, precision: str) -> None:
    """Run ``vpipe verify`` on the device, in one process and in four that share it."""
    shorter = ["--set", "model.num_layers=4", "--set", "parallel.partition=auto"] if SMALL else []
    done = subprocess.run(
        [sys.executable, "-m", "vpipe", "verify", CONFIGS / "gpt_small.yaml", "--device", part.device.type, "--steps",
         "2", "--set", "dataset.name=synthetic", "--set", "dataset.path=null", "--set", "model.vocab_size=512", "--set",
         f"training.precision={precision}", *shorter], cwd=CONFIGS.parent, capture_output=True, text=True,
        check=False)
    end = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-3:]
    part.add(f"vpipe verify configs/gpt_small.yaml, {precision}", " / ".join(end), done.returncode == 0)


def main() -> None:
    part = Part(__doc__)
    warnings.simplefilter("ignore", PerformanceWarning)
    accelerator.add_in_fixed_order(part.device)
    known = {schedule.name: schedule for schedule in RegisteredSchedule.imported() if schedule.search is None}
    for name, schedule in known.items():
        pipe, losses = trained(schedule, part.device)
        add(part, f"{name}, fp32", losses, expected(schedule, pipe, part.device, FP32), MOST)
    for reduced in ("bf16", "bf16_pure", "fp16"):
        for name in ("1f1b", "pipedream"):
            scale = 1024 if reduced == "fp16" and not known[name].flush else None
            computed = Precision(reduced, loss_scale=scale)
            pipe, losses = trained(known[name], part.device, precision=computed)
            add(part, f"{name}, {reduced}", losses, expected(known[name], pipe, part.device, computed), MOST_REDUCED)
    for name in ("1f1b", "zb_h1", "pipedream"):
        add(part, f"{name}, everything recomputed: the same dropout", trained(known[name], part.device,
            recompute=1.0)[1], trained(known[name], part.device)[1], MOST)
    kind = part.device.type
    indices = () if part.on_processor else range(accelerator.count())
    first = trained(known["1f1b"], torch.device(kind, 0))[1] if indices else []
    for index in indices:
        accelerator.make_current(torch.device(kind, index))
        for device in (torch.device(kind), torch.device(kind, index)):
            add(part, f"current device {index}, device={device}: the same dropout",
                trained(known["1f1b"], device, recompute=1.0)[1], first, MOST)
    if not indices:
        part.add("dropout by the index of the device", "left out: a processor has none")
    for precision in ("fp32", "bf16"):
        verify(part, precision)


if __name__ == "__main__":
    main()
