"""One rank of a world: measures, predicts, and does it, setting after setting, round after round."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, SETTINGS, Case, Setting, adamw, busy_s

from vpipe import Asynchronous, Cut, Execution, Pipeline, Plan
from vpipe.description.cut import balanced
from vpipe.errors import VpipeError
from vpipe.model.model import Model
from vpipe.plan.prediction import SimulatedPlan, predict
from vpipe.plan.profile import Profile
from vpipe.profiling import RankGroup, measure
from vpipe.runtime.action_recorder import Recorder
from vpipe.runtime.worker import Worker
from vpipe.schedules.kinds import Action
from vpipe.schedules.trace import RecordedAction

TIMEOUT_S = 120
MICROBATCHES = 8
WARM_UP = 2
"""Batches before those that count."""


def work(case: str, rounds: int, batches: int, only: str, out: Path) -> None:
    """A profile, then every setting in turn, and again; the first rank writes what was found as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, ranks, parent, here = dist.get_rank(), dist.get_world_size(), os.getppid(), CASES[case]
    settings = [setting for setting in SETTINGS if only in str(setting)]
    model, started = here.model(), perf_counter()
    cut: list[int] | None = None
    found: list[dict[str, Any]] = []
    try:
        for number in range(rounds):
            profile = measured(model, here, case, ranks)
            cut = cut or balanced([layer.forward.median + layer.backward.median for layer in profile.layers], ranks)
            if rank == 0:
                print(f"  {case}, {ranks} ranks, round {number + 1} of {rounds}, {perf_counter() - started:.0f} s: "
                      f"profile in {profile.took_s:.0f} s, cut {cut}", flush=True)
            for setting in settings:
                if os.getppid() != parent:
                    raise SystemExit(f"rank {rank}: the program that started it is gone")
                one = done(setting, model, here, cut, profile, batches)
                found.append({"case": case, "ranks": ranks, "round": number, **one})
                if rank == 0:
                    print(f"    {setting!s:24} predicted {1e3 * one['predicted_s']:5.0f} ms, measured "
                          f"{1e3 * median(one['step_s']):5.0f}, others used {one['others']:.0%} of the cores",
                          flush=True)
    except VpipeError as error:
        raise SystemExit(f"rank {rank}, {case}: {error}") from error
    dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(found))
    os._exit(0)  # the streams' threads need no farewell


def measured(model: Model, case: Case, name: str, ranks: int) -> Profile:
    """The profile, as ``vpipe profile`` measures it; the same on every rank."""
    microbatch = case.microbatch()
    identities = RankGroup("cpu").identify(model, [microbatch], model_name=name, optimizer="adamw")
    profile, = measure(model, [microbatch], lambda named: adamw(list(named.values())), identities=identities)
    return profile


def done(setting: Setting, model: Model, case: Case, cut: Sequence[int], profile: Profile,
         batches: int) -> dict[str, Any]:
    """What was predicted of a setting, and what it did."""
    plan = Plan(Cut(tuple(cut), recompute=(setting.recompute,) * len(cut)),
                Asynchronous(setting.schedule, update_every=setting.update_every), microbatches=MICROBATCHES)
    predicted = predict(profile, plan)
    pipe = Pipeline(model, adamw, stages=plan, schedule=Asynchronous("1f1b", update_every=setting.update_every),
                    microbatches=MICROBATCHES, execution=Execution(device="cpu"))
    recorder, = pipe.engine.record(1 << 30).values()
    seconds_by_op = clocked(recorder.worker)
    updates = MICROBATCHES // (setting.update_every or MICROBATCHES)
    stream = pipe.train(case.batches(MICROBATCHES))
    for _ in range(WARM_UP * updates):
        next(stream)
    warm = recorder.pop_records()
    seconds_by_op.clear()
    dist.barrier()
    busy, started, seconds = busy_s(), perf_counter(), []
    ours = os.times()
    for _ in range(batches):
        begun = perf_counter()
        for _ in range(updates):
            next(stream)
        seconds.append((perf_counter() - begun) / updates)
    spent = os.times()
    mine = spent.user + spent.system - ours.user - ours.system
    wall, busy = perf_counter() - started, busy_s() - busy
    notes = recorder.pop_records()
    pipe.engine.training.drain()
    shared: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(shared, {"cpu_s": mine, "held": held(recorder, [*warm, *notes]),
                                    "ops": {key: median(values) for key, values in seconds_by_op.items()}})
    return {"setting": str(setting), "step_s": seconds, "predicted_s": predicted.prediction.step_s,
            "others": max(0.0, busy - sum(one["cpu_s"] for one in shared)) / wall / (os.cpu_count() or 1),
            "held": [one["held"] for one in shared], "predicted_held": expected(predicted),
            "ops": {key: value for one in shared for key, value in one["ops"].items()},
            "predicted_ops": expected_ops(predicted)}


def held(recorder: Recorder, notes: Sequence[object]) -> int:
    """The most that a rank held: activations kept for backwards, and versions of weights; counted, in bytes."""
    weights, versions, most = recorder.weight_bytes(), dict.fromkeys(recorder.weight_bytes(), 1), 0
    for note in notes:
        if isinstance(note, RecordedAction):
            if note.stage in versions and note.versions:
                versions[note.stage] = note.versions
            most = max(most, note.held_bytes + sum(weights[stage] * count for stage, count in versions.items()))
    return most


def expected(predicted: SimulatedPlan) -> list[int]:
    """The same as predicted, rank after rank; every rank here has one stage."""
    return [stage.memory.activations + stage.memory.weights + stage.memory.stashed
            for stage in predicted.prediction.stages]


def clocked(worker: Worker) -> dict[str, list[float]]:
    """Seconds of a core that the worker's actions take from now on, by stage and kind, such as ``0F``."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(action: Action, run: Callable[[], None]) -> None:
        started = thread_time()
        run()
        seconds[f"{action.stage}{action.op}"].append(thread_time() - started)

    worker.around.append(timed)
    return seconds


def expected_ops(predicted: SimulatedPlan) -> dict[str, float]:
    """The same as predicted."""
    return {f"{stage}{op}": float(value) for stage, cost in enumerate(predicted.timeline.costs.stages) for op, value in
            (("F", cost.forward_s), ("B", cost.input_s + cost.weight_s), ("I", cost.input_s), ("W", cost.weight_s),
             ("R", cost.recompute_s), ("STEP", cost.step_s))}
