"""Compare predictions with what happens: the memory and the step time of GPT 124M and BERT-large, one stage.

A profile is measured as ``vpipe profile`` does, each plan is predicted from it and trained. Memory is that which
torch's allocator had given out at most (such as ``torch.cuda.max_memory_allocated``) during the steps.
"""

from __future__ import annotations

from itertools import repeat
from statistics import median
from time import perf_counter

from findings import Part
from models import SMALL, published_jobs

from vpipe import Cut, Execution, Order, Pipeline, Plan, accelerator
from vpipe.app.train.job import Job, microbatch_of
from vpipe.plan.prediction import predict
from vpipe.profiling import RankGroup, measure

BUDGET_S, BATCHES, WITHIN = *((2.0, 2) if SMALL else (8.0, 6)), 0.2


def compare(part: Part, name: str, job: Job) -> None:
    """Measure a profile, then predict and train the model with nothing, half and all of it recomputed."""
    training, factory = job.config.training, job.optimizer
    microbatch = microbatch_of(job, job.config.microbatch_size)
    identities = RankGroup(part.device).identify(job.model, [microbatch], model_name=name,
                                                 optimizer=training.optimizer, precision=training.precision)
    started = perf_counter()
    profile, = measure(job.model, [microbatch], factory.from_named, identities=identities, device=part.device,
                       budget_s=BUDGET_S)
    part.add(f"{name}: profile", f"{len(profile.layers)} layers in {perf_counter() - started:.0f} s")
    batch = next(job.training_batches(job.model.batch))
    for recompute in (0.0, 0.5, 1.0):
        plan = Plan(Cut((len(job.model),), recompute=(recompute,)), Order("1f1b"),
                    microbatches=training.num_microbatches)
        predicted = predict(profile, plan).prediction
        part.free()  # an earlier pipeline
        counted = not part.on_processor and accelerator.counts_memory(part.device)
        before = accelerator.held_bytes(part.device) if counted else 0
        pipe = Pipeline(job.model, factory, stages=plan, precision=training.precision,
                        execution=Execution(device=part.device))
        steps = pipe.train(repeat(batch))
        next(steps), next(steps)  # warm up
        part.wait()
        if counted:
            accelerator.reset_peak(part.device)
        seconds = []
        for _ in range(BATCHES):
            started = perf_counter()
            next(steps)
            part.wait()
            seconds.append(perf_counter() - started)
        step_s, expected = median(seconds), predicted.stages[0].memory.peak
        if counted:
            used = accelerator.peak_bytes(part.device) - before
            memory, near = f"{used / 2**20:,.0f} MiB ({expected / used - 1:+.0%})", abs(expected / used - 1) <= WITHIN
        else:
            memory, near = f"torch counts none on {part.device.type}", True
        off = predicted.step_s / step_s - 1
        part.add(f"{name}: {recompute:.0%} recomputed",
                 f"step {1e3 * predicted.step_s:.1f} ms predicted, {1e3 * step_s:.1f} ms measured ({off:+.0%}); "
                 f"memory {expected / 2**20:,.0f} MiB predicted, {memory}",
                 None if part.small else near and abs(off) <= WITHIN)
        del pipe, steps


def main() -> None:
    part = Part(__doc__)
    for name, job in published_jobs(part.small).items():
        compare(part, name, job)


if __name__ == "__main__":
    main()
