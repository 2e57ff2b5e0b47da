"""Pipelines of one process on the late device: the bits of the processor, or of the same device run synchronously.

As a program, this file makes the checks of the groups that its arguments name and prints what failed.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "runtime")]

import late_device  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from models import (  # noqa: E402
    checkpointed_model,
    norm_model,
    rich_batches,
    rich_model,
    thrice_tied_model,
    untied_model,
)
from oracles import DECAY_AND_CLIP, Batches, Build, Momentum, pipeline_of  # noqa: E402
from test_every_schedule import FLUSH, STREAMS, cut  # noqa: E402
from test_exact_in_every_precision import pushed, pushed_model  # noqa: E402
from test_executors import out_of_turn  # noqa: E402
from test_offload import offloading  # noqa: E402
from torch import Tensor  # noqa: E402

from vpipe import Model, Pipeline, accelerator  # noqa: E402
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices  # noqa: E402
from vpipe.checkpoint.shards import HostBuffer  # noqa: E402
from vpipe.description import Executor  # noqa: E402
from vpipe.profiling import RankGroup, measure  # noqa: E402
from vpipe.schedules import registry  # noqa: E402
from vpipe.schedules.registry import RegisteredSchedule  # noqa: E402

late: Any = late_device.load() if __name__ == "__main__" else None

SEEDS = (1, 2)
Found = dict[str, Any]

AUTOCAST = "autocast computes other operations in fp32 on devices than on processors"
FOREACH = "torch's NAdam takes its foreach form on devices, which rounds otherwise"
OWN_NUMBERS = "each device draws its own random numbers"


@dataclass(frozen=True)
class Case:
    """A run: words for :func:`pipeline_of`, and why it differs from the processor's, if it does."""

    words: dict[str, Any]
    model: Build = untied_model
    batches: Callable[[], Batches] = lambda: rich_batches(2, 8)
    other: str | None = None
    draws: bool = False
    skips: bool = False
    apart: bool = False  # threads of the forwards go on as in a process of its own


def case(model: Build = untied_model, other: str | None = None, skips: bool = False, draws: bool = False,
         apart: bool = False, batches: Callable[[], Batches] = lambda: rich_batches(2, 8), **words: Any) -> Case:
    return Case(words, model, batches, other, draws, skips, apart)


def executors(name: str) -> Iterator[str]:
    yield from (executor for executor in ("overlapped", "naive", "async_threaded") if executor in Executor.names()
                and (name == "gpipe" or not Executor.named(executor).threaded))


def settings(name: str) -> OptimizerSettings:
    return OptimizerSettings(name, 0.01, weight_decay=0.1,
                             matrices=hidden_matrices(untied_model()) if name == "muon" else None)


def labelled_model() -> Model:
    return Model(untied_model().layers, untied_model().batch, labels="labels")


def scale_of(schedule: str, precision: str) -> dict[str, Any]:
    """The scale of fp16 where no flush lets it be found."""
    return {"loss_scale": 4096} if precision == "fp16" and schedule in STREAMS else {}


REPLICAS: dict[str, Any] = {"partition": [2, 4, 2], "placement": [[0, 1], [2], [3, 4, 5]]}
CUT: dict[str, Any] = {"partition": [3, 3, 2]}

SCHEDULES = {
    f"{name} {executor}": case(schedule=name, executor=executor, partition=cut(name),
                               update_every=None if name in FLUSH else RegisteredSchedule.named(name).update_every(2))
    for name in (*FLUSH, *STREAMS) for executor in executors(name)}

SINGLE = {
    **{f"several stages per rank {name}": case(schedule=name, partition=[1] * 8, recompute=0.5, **DECAY_AND_CLIP)
       for name in ("interleaved", "looped_bfs", "zb_v", "hanayo")},
    **{f"recompute {name}": case(schedule=name, partition=cut(name), recompute=[0.0, 1.0], **DECAY_AND_CLIP)
       for name in ("1f1b", "zb_h1", "pipedream")},
    **{f"replicas {name} {precision}": case(schedule=name, precision=precision, **scale_of(name, precision),
                                            other=AUTOCAST if precision == "fp16" else None, **REPLICAS,
                                            **DECAY_AND_CLIP)
       for name in ("1f1b", "gpipe", "pipedream") for precision in ("fp32", "bf16_pure", "fp16")},
    **{f"clipping {name}": case(schedule=name, **CUT, **DECAY_AND_CLIP) for name in ("1f1b", "zb_h1", "pipedream")},
    **{f"{precision} {name}": case(schedule=name, **CUT, precision=precision, **scale_of(name, precision),
                                   update_every=every, recompute=0.5,
                                   other=None if precision == "bf16_pure" else AUTOCAST)
       for precision in ("bf16", "bf16_pure", "fp16")
       for name, every in (("1f1b", None), ("pipedream", 1), ("2bw", 4))},
    **{f"skipped update {name}": case(pushed_model, AUTOCAST, skips=True, schedule=name, precision="fp16",
                                      **scale_of(name, "fp16"), partition=[2, 4],
                                      batches=lambda: pushed([20.0, 1.0, 4000.0, 1.0]), **DECAY_AND_CLIP)
       for name in ("1f1b", "zb_h1", "pipedream")},
    **{f"ties {name}": case(thrice_tied_model, schedule=name, partition=[2, 1, 2, 1], recompute=0.5,
                            optimizer=Momentum()) for name in ("1f1b", "zb_h1", "pipedream")},
    **{f"versions {name} every {every}": case(rich_model, schedule=name, partition=[2, 2, 2, 2], update_every=every,
                                              optimizer=Momentum(), batches=lambda: rich_batches(3, 8))
       for name in STREAMS for every in (1, 4) if every >= RegisteredSchedule.named(name).update_every(4)},
    **{f"extrapolation {name} {optimizer}": case(
        schedule=name, **CUT, optimizer=settings(optimizer), update_every=every, delay_correction=1.0,
        other=FOREACH if optimizer == "nadam" else None, batches=lambda: rich_batches(3, 8))
       for name, every in (("pipedream", 1), ("2bw", 4)) for optimizer in ("adamw", "muon", "nadam")},
    **{f"optimizer {optimizer}": case(schedule="1f1b", **CUT, optimizer=settings(optimizer), **DECAY_AND_CLIP,
                                        other=FOREACH if optimizer == "nadam" else None)
       for optimizer in ("muon", "nadam")},
    **{f"buffers {name} {executor}": case(norm_model, schedule=name, executor=executor, partition=[2, 4], recompute=1.0)
       for name, executor in (("1f1b", "overlapped"), ("gpipe", "async_threaded"), ("pipedream", "overlapped"))},
    **{f"dropout {name} {executor}": case(rich_model, OWN_NUMBERS, draws=True, schedule=name, executor=executor, **CUT,
                                          recompute=0.6)
       for name, executor in (("1f1b", "overlapped"), ("gpipe", "async_threaded"), ("pipedream", "overlapped"))},
    **{f"offload {name} {executor}": case(schedule=f"away {name}", executor=executor, partition=cut(name),
                                          recompute=[0.0, 1.0])
       for name, executor in (("1f1b", "overlapped"), ("gpipe", "naive"), ("pipedream", "overlapped"))},
    "layers that checkpoint themselves": case(checkpointed_model, schedule="pipedream", partition=[2, 1, 2]),
    "losses weighed by labels": case(labelled_model, schedule="1f1b", **CUT),
    "a batch is a microbatch": case(schedule="pipedream", **CUT, microbatches=1, batches=lambda: rich_batches(4, 2)),
    "shapes that change": case(schedule="1f1b", **CUT, batches=lambda: rich_batches(4, 8, lengths=(6, 9, 3))),
    **{f"streams at one time {model.__name__}": case(model, apart=True, schedule="gpipe", executor="async_threaded",
                                                     stages=1, batches=lambda: rich_batches(4, 8), **DECAY_AND_CLIP)
       for model in (untied_model, rich_model, norm_model)},
}

SINGLE = {name: single for name, single in SINGLE.items() if single.words.get("executor", "naive") in Executor.names()}

FAST = [name for name in ("1f1b overlapped", "pipedream overlapped", "gpipe async_threaded", "gpipe naive",
                          "zb_h1 overlapped") if name in SCHEDULES]


WAITS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "1f1b": ({"schedule": "1f1b"}, {"copy to host": 1}),
    "zb_h1": ({"schedule": "zb_h1"}, {"copy to host": 1}),
    "pipedream": ({"schedule": "pipedream"}, {"copy to host": 1}),
    "2bw": ({"schedule": "2bw", "update_every": 4}, {"copy to host": 1}),
    "1f1b with recompute": ({"schedule": "1f1b", "recompute": 1.0}, {"copy to host": 1}),
    "1f1b in bf16_pure": ({"schedule": "1f1b", "precision": "bf16_pure"}, {"copy to host": 1}),
    "1f1b with OFFLOAD and FETCH": ({"schedule": "away 1f1b"}, {"copy to host": 1}),
    "pipedream with extrapolation": ({"schedule": "pipedream", "delay_correction": 1.0}, {"copy to host": 1}),
    "gpipe under async_threaded, with streams": ({"schedule": "gpipe", "executor": "async_threaded"},
                                                 {"copy to host": 1}),
    "1f1b with clipping": ({"schedule": "1f1b", "grad_clip": 0.5}, {"copy to host": 4}),
    "pipedream with clipping": ({"schedule": "pipedream", "grad_clip": 0.5}, {"copy to host": 4}),
    "1f1b with skip_not_finite": ({"schedule": "1f1b", "skip_not_finite": True}, {"copy to host": 4}),
    "1f1b in fp16": ({"schedule": "1f1b", "precision": "fp16"}, {"copy to host": 4}),
    "1f1b with 2, 1 and 3 replicas": ({"schedule": "1f1b", **REPLICAS}, {"copy to host": 8}),
    "pipedream in fp16": ({"schedule": "pipedream", "precision": "fp16", "loss_scale": 1024}, {"copy to host": 4}),
    "1f1b under naive": ({"schedule": "1f1b", "executor": "naive"}, {"copy to host": 1, "device": 59})}
WAITS = {name: wanted for name, wanted in WAITS.items() if wanted[0].get("executor", "naive") in Executor.names()}
"""Words of a pipeline of three stages with four microbatches, and how often the host waits in an update, and for what:
docs/devices.md says why."""
EVALUATION = {"copy to host": 2}
"""Of four batches: one per twelve microbatches, as many as go through at a time."""


def told(steps: Sequence[Any]) -> list[list[str]]:
    return [[repr(step.index), repr(step.loss), repr(step.gradient_norm), repr(step.skipped)] for step in steps]


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def pipeline(wanted: Case, device: str) -> Pipeline:
    pipe = pipeline_of(wanted.model, device=device, **wanted.words)
    return out_of_turn(pipe) if wanted.apart else pipe


def run_of(wanted: Case, device: str) -> Found:
    """All that a run shows; the host fills each batch with other numbers once it may, as loaders do."""
    with nullcontext() if wanted.draws else late_device.without_dropout():
        pipe, batches = pipeline(wanted, device), wanted.batches()

        def read() -> Iterator[dict[str, Tensor]]:
            for batch in batches:
                given = {name: torch.empty_like(tensor, pin_memory=device != "cpu").copy_(tensor)
                         for name, tensor in batch.items()}
                yield given
                for tensor in given.values():
                    tensor.zero_()

        steps = list(pipe.train(read()))
        assert not wanted.skips or any(step.skipped for step in steps)
        return {"steps": told(steps), "evaluation": repr(pipe.evaluate(read())),
                "state": on_host(pipe.state_dict()), "saved": on_host(pipe.engine.checkpoint_state())}


def differences(found: Found, expected: Found) -> str:
    parts = [f"{name}: {found[name]} instead of {expected[name]}" for name in found
             if not isinstance(found[name], dict) and found[name] != expected[name]]
    for name, tensors in found.items():
        if isinstance(tensors, dict):
            assert list(tensors) == list(expected[name])
            parts += [f"{name} of {key}" for key, tensor in tensors.items()
                      if tensor.dtype != expected[name][key].dtype or not torch.equal(
                          tensor.nan_to_num(), expected[name][key].nan_to_num())]
    return "; ".join(parts[:4])


def losses_of(found: Found) -> list[float]:
    return [float(loss) for _, loss, *_ in found["steps"]]


def compare(run: Callable[[str], Found], other: str | None = None) -> None:
    """Run on the processor, and on the device with seeds; the bits must be the same.

    Where the device computes otherwise than the processor, they must be those of the device run synchronously.
    """
    expected = run("cpu")
    if other is not None:
        late.configure(synchronous=True)
        synchronous = run("late:0")
        assert differences(synchronous, expected), f"not for {other}"
        if other in (AUTOCAST, FOREACH):
            assert losses_of(synchronous) == pytest.approx(losses_of(expected), rel=0.01, nan_ok=True)
        expected = synchronous
    for seed in SEEDS:
        late.configure(seed, patience_ms=0)
        found = run("late:0")
        waits = late.host_waits()
        assert not (apart := differences(found, expected)), f"seed {seed}: {apart}"
        assert not any(reason.startswith("fallback") for reason in waits), waits


def check_case(wanted: Case) -> None:
    compare(lambda device: run_of(wanted, device), wanted.other)


def waits_of(work: Callable[[], object]) -> dict[str, int]:
    before = late.host_waits()
    work()
    return {reason: count - before.get(reason, 0) for reason, count in late.host_waits().items()
            if count != before.get(reason, 0)}


def check_waits(words: dict[str, Any], each: dict[str, float]) -> None:
    """Once the first microbatches have shown what forwards change."""
    late.configure(1, patience_ms=0)
    batches = rich_batches(8, 8)
    pipe = pipeline_of(untied_model, device="late:0", **{**CUT, **words})
    list(pipe.train(batches[:4]))
    steps: list[Any] = []
    found = waits_of(lambda: steps.extend(pipe.train(batches[4:])))
    assert {reason: count / len(steps) for reason, count in found.items()} == each, found


def check_waits_of_evaluation() -> None:
    """Also where losses are weighed by their labels, which are counted before they are copied to the device."""
    batches = rich_batches(4, 8)
    for model in (untied_model, labelled_model):
        late.configure(1, patience_ms=0)
        pipe = pipeline_of(model, device="late:0", schedule="1f1b", **CUT)
        pipe.evaluate(batches)
        found = waits_of(partial(pipe.evaluate, batches))
        assert found == EVALUATION, found


def check_waits_from_pinned_memory() -> None:
    """A batch that lies there already is copied, too: the host may fill it anew."""
    for name in ("1f1b", "pipedream"):
        late.configure(1, patience_ms=0)
        pinned = [{key: tensor.pin_memory() for key, tensor in batch.items()} for batch in rich_batches(8, 8)]
        steps = pipeline_of(untied_model, device="late:0", schedule=name, update_every=4, **CUT).train(pinned)
        next(steps)
        found = waits_of(partial(list, islice(steps, 4)))
        assert found == {"copy to host": 4}, found


def check_saved_while_training_goes_on() -> None:
    """The copies are of the step at which they were made; a resumed run goes on from them."""
    def run(device: str, name: str) -> Found:
        words = {"schedule": name, "device": device, "optimizer": Momentum(), **CUT}
        pipe, batches = pipeline_of(untied_model, **words), rich_batches(4, 8)
        steps = list(pipe.train(batches[:2]))
        copies = HostBuffer().copy(pipe.engine.checkpoint_state())
        written = {name: tensor.clone() for name, tensor in copies.items()}  # as by the thread that writes
        position = pipe.engine.training.position
        steps += pipe.train(batches[2:])
        resumed = pipeline_of(untied_model, **words)
        resumed.engine.restore(position, copies)
        again = list(resumed.train(batches[2:]))
        return {"steps": told(steps), "again": told(again), "written": written, "copies": copies,
                "state": on_host(resumed.state_dict()),
                "same": on_host(pipe.state_dict())}

    with late_device.without_dropout():
        for name in ("1f1b", "pipedream"):
            compare(partial(run, name=name))


def check_saved_and_resumed_from_files() -> None:
    def run(device: str) -> Found:
        words = {"schedule": "pipedream", "device": device, "precision": "bf16_pure", **CUT}
        pipe, batches = pipeline_of(untied_model, **words), rich_batches(3, 8)
        with tempfile.TemporaryDirectory() as folder:
            list(pipe.train(batches[:2]))
            pipe.save(Path(folder) / "saved")
            resumed = pipeline_of(untied_model, **{**words, "partition": [2, 4, 2]})
            resumed.load(Path(folder) / "saved")
            steps = list(resumed.train(batches[2:]))
        return {"steps": told(steps), "state": on_host(resumed.state_dict())}

    with late_device.without_dropout():
        compare(run)


def check_recorded() -> None:
    """Each action with the bytes that it holds, as on the processor; and recording changes no number."""
    def run(device: str, record: bool = True) -> Found:
        pipe = pipeline_of(untied_model, device=device, schedule="1f1b", recompute=[0.0, 1.0, 0.5], **CUT)
        recorders = pipe.record() if record else {}
        steps = list(pipe.train(rich_batches(2, 8)))
        notes = [note for recorder in recorders.values() for note in recorder.pop_records()]
        assert all(note.start_s <= note.end_s for note in notes)
        return {"steps": told(steps), "state": on_host(pipe.state_dict()), "actions": [
            (str(note.op), note.stage, note.number, note.held_bytes, note.versions) for note in notes]}

    with late_device.without_dropout():
        compare(run)
        plain, recorded = run("late:0", record=False), run("late:0")
        assert not differences({**recorded, "actions": []}, plain)


def check_records_have_the_times_of_the_device() -> None:
    """Where the host only queues forwards that take a second of the device each."""
    late.configure(1, patience_ms=0)
    pipe = pipeline_of(untied_model, device="late:0", schedule="1f1b", **CUT)
    list(pipe.train(rich_batches(1, 8)))
    for stage in pipe.engine.local_stages:
        stage.modules[stage.spec.layers[0]].register_forward_hook(lambda *_: late.busy(1))
    recorders = pipe.record()
    list(pipe.train(rich_batches(2, 8)))
    before = late.host_waits().get("event", 0)
    found = {rank: recorder.pop_records() for rank, recorder in recorders.items()}
    assert late.host_waits().get("event", 0) - before == len(recorders)
    for notes in found.values():
        took = [note.end_s - note.start_s for note in notes if note.op == "F"]
        assert len(took) == 8
        assert all(1 <= seconds < 1.1 for seconds in took), took
        assert all(note.waited_s <= note.end_s - note.start_s < 0.1 for note in notes if note.op != "F")
        assert all(before.end_s <= after.start_s + 1e-6 for before, after in pairwise(notes))


def check_forwards_on_streams_overlap() -> None:
    """Each takes a second of the device's time, all together less than two; the fields of the last microbatch are
    copied meanwhile. Where buffers are written they follow one another."""
    def ended(model: Build) -> tuple[list[float], float]:
        """When each forward ended, and the copies of the last, in ms."""
        late.configure(1, patience_ms=0)
        pipe = out_of_turn(pipeline_of(model, device="late:0", schedule="gpipe", executor="async_threaded", stages=1))
        list(pipe.train(rich_batches(2, 8)))  # forwards have shown what they change
        caller, copied = late.current_stream(), []
        began, ends = caller.record_event(late.Event(enable_timing=True)), []

        def busy(*_: object) -> None:
            late.busy(1)
            ends.append(late.current_stream().record_event(late.Event(enable_timing=True)))
            copied.append(caller.record_event(late.Event(enable_timing=True)))

        pipe.engine.local_stages[0].modules[0].register_forward_hook(busy)
        list(pipe.train(rich_batches(1, 8)))
        return [began.elapsed_time(end) for end in ends], began.elapsed_time(copied[-1])

    with late_device.without_dropout():
        times, copied = ended(untied_model)
        assert len(times) == 4
        assert max(times) < 2000, times
        assert copied < min(times), (copied, times)
        times, _ = ended(norm_model)
        assert max(times) >= 4000, times


def check_offloaded_memory_is_used_again() -> None:
    """By kernels that are queued after the copies, though the host waits for none of these."""
    def peak(schedule: str) -> int:
        late.configure(1, patience_ms=0)
        pipe = pipeline_of(untied_model, device="late:0", schedule=schedule, **CUT)
        list(pipe.train(rich_batches(1, 64)))
        gc.collect()
        before = late.memory_allocated()
        late.reset_peak_memory_stats()
        list(pipe.train(rich_batches(1, 64)))
        return int(late.max_memory_allocated()) - before

    with late_device.without_dropout():
        assert peak("away gpipe") < 0.9 * peak("gpipe"), (peak("away gpipe"), peak("gpipe"))


def check_memory_in_the_summary() -> None:
    late.configure(1, patience_ms=0)
    late.reset_peak_memory_stats()
    before = late.memory_allocated()
    pipe = pipeline_of(untied_model, device="late:0", schedule="1f1b", **CUT)
    weights = sum(tensor.nbytes for tensor in pipe.state_dict().values())
    list(pipe.train(rich_batches(2, 8)))
    for usage in pipe.usage():
        assert usage.peak_memory_bytes == late.max_memory_allocated() > before + 4 * weights  # gradients, moments


def check_profile() -> None:
    """Sizes as on the processor; times of what was queued, not of the queueing; on the current device by its kind."""
    def run(device: str) -> Found:
        device, batches = device.partition(":")[0], rich_batches(1, 2)
        identities = RankGroup(device).identify(untied_model(), batches, model_name="small", optimizer="adamw")
        [profile] = measure(untied_model(), batches, settings("adamw").from_named, identities=identities,
                            device=device, budget_s=0.0)
        assert all(layer.forward.median > 0 for layer in profile.layers)
        return {"layers": [(layer.name, layer.parameter_bytes, layer.optimizer_bytes, layer.saved_bytes, layer.saves,
                            layer.weight_half_bytes, layer.forward_flops, layer.frozen_bytes)
                           for layer in profile.layers]}

    with late_device.without_dropout():
        compare(run)


OTHER_SCHEDULES = {name: partial(check_case, wanted) for name, wanted in SCHEDULES.items() if name not in FAST}

CHECKS: dict[str, dict[str, Callable[[], None]]] = {
    "waits": {**{name: partial(check_waits, *wanted) for name, wanted in WAITS.items()},
              "evaluation": check_waits_of_evaluation, "batches in pinned memory": check_waits_from_pinned_memory},
    "whole": {"saved while training goes on": check_saved_while_training_goes_on,
              "saved and resumed from files": check_saved_and_resumed_from_files, "recorded": check_recorded,
              "records have the times of the device": check_records_have_the_times_of_the_device,
              **({"forwards on streams overlap": check_forwards_on_streams_overlap}
                 if "async_threaded" in Executor.names() else {}),
              "offloaded memory is used again": check_offloaded_memory_is_used_again,
              "memory in the summary": check_memory_in_the_summary, "profile": check_profile},
    "fast": {**{name: partial(check_case, SCHEDULES[name]) for name in FAST},
             **{f"waits of {name}": partial(check_waits, *WAITS[name]) for name in ("1f1b", "pipedream")}},
    "schedules": {name: check for name, check in OTHER_SCHEDULES.items() if not name.endswith("naive")},
    "naive": {name: check for name, check in OTHER_SCHEDULES.items() if name.endswith("naive")},
    "parts": {name: partial(check_case, wanted) for name, wanted in list(SINGLE.items())[:len(SINGLE) // 2]},
    "more parts": {name: partial(check_case, wanted) for name, wanted in list(SINGLE.items())[len(SINGLE) // 2:]}}


def offloading_schedules() -> dict[str, RegisteredSchedule]:
    """Schedules whose activations wait in the host's memory, under the names ``away ...``."""
    found = map(RegisteredSchedule.named, ("1f1b", "gpipe", "pipedream"))
    return {f"away {recipe.name}": replace(recipe, name=f"away {recipe.name}", program=offloading(recipe.program))
            for recipe in found}


def failures(groups: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    for group in groups:
        for name, check in CHECKS[group].items():
            try:
                check()
                yield name, None
            except Exception:
                yield name, traceback.format_exc()


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator.FUSED |= {"late"}  # type: ignore[misc] # as torch's optimizers have them for it
    registry._REGISTERED |= offloading_schedules()
    print(json.dumps(dict(failures(sys.argv[1:]))))
