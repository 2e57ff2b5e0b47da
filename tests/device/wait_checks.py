"""What goes wrong without each wait of vpipe's, in one process on the late device.

As a program, this file makes each check with all waits, and without the wait that it is for; it prints what failed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "runtime")]

import late_device  # noqa: E402
import pipeline_checks  # noqa: E402
import torch  # noqa: E402
import waits  # noqa: E402
from torch import Tensor  # noqa: E402

from vpipe import accelerator  # noqa: E402
from vpipe.app.train import peak_flops  # noqa: E402
from vpipe.app.train.torch_profiler import TorchProfiler  # noqa: E402
from vpipe.checkpoint.shards import HostBuffer  # noqa: E402
from vpipe.description import Executor  # noqa: E402
from vpipe.profiling import links  # noqa: E402
from vpipe.runtime.action_recorder import _DeviceTimes  # noqa: E402
from vpipe.schedules.kinds import Op  # noqa: E402
from vpipe.schedules.trace import RecordedAction  # noqa: E402

late: Any = late_device.load() if __name__ == "__main__" else None
DEVICE: Any = torch.device("late", 0) if late else None
SEEDS, SIZE = 5, 64


def full(value: float) -> Tensor:
    return torch.full((SIZE,), float(value), device=DEVICE)


def done() -> bool:
    """Whether the device has done all that was queued in the current stream."""
    return bool(late.current_stream().query())


def check_forwards() -> None:
    """What async_threaded does with its streams, microbatch after microbatch; each stream has other work, too."""
    from vpipe.extras.async_threaded.worker import DeviceStreams

    streams, total, read, sent = DeviceStreams(DEVICE), full(0), [], []
    for number in range(1, 5):
        late.busy(10)
        field = full(number)  # as a batch that the caller has on the device
        given = field.clone()
        read.append(given + 0)
        streams.begin(number, [given])
        with streams.computing(number, ordered=True):
            output = given * 2
            late.busy(60 / number)  # later ones could be done first
            total.mul_(2).add_(given)  # as running statistics
        streams.computed(number)
        streams.prepare_sends([output])
        with streams.sending(number):
            late.busy()
            sent.append(output + 1)
        del given, output  # their memory is given out again
        full(-1)
        with streams.computing(number, ordered=False):
            full(-1)
    streams.gather()
    read.append(total + 0)
    late.busy(200)
    gradient = full(9)
    with streams.sending(None):
        sent.append(gradient + 1)
    late.synchronize()
    assert [tensor[0].item() for tensor in read] == [1, 2, 3, 4, 26]
    assert [tensor[0].item() for tensor in sent] == [3, 5, 7, 9, 10]


def check_clock() -> None:
    clock = accelerator.clock_of(DEVICE)
    late.busy()
    clock()
    assert done()


def check_synchronize() -> None:
    late.busy()
    accelerator.synchronize(DEVICE)
    assert done()


def check_peak() -> None:
    late.busy()
    peak_flops._multiply(*(torch.ones(4, 4, device=DEVICE) for _ in range(3)))
    assert done()


def check_torch_profiler() -> None:
    """Work of earlier steps has ended before torch begins to record."""
    profiler, ended = TorchProfiler.__new__(TorchProfiler), []
    profiler._recording, profiler.made, profiler._begins, profiler._step, profiler._gpu = None, False, 0, 1, True
    profiler._run = SimpleNamespace(pipe=SimpleNamespace(  # type: ignore[assignment]
        device=DEVICE, labelled=lambda: nullcontext(ended.append(done()))))
    profiler._recorder = nullcontext  # type: ignore[method-assign, assignment]
    late.busy()
    profiler.before_step(0)
    profiler._recording[1].close()  # type: ignore[index]
    assert ended == [True]


def check_copies_of_a_save() -> None:
    late.busy()
    copies = HostBuffer().copy({"weight": full(3)})
    assert copies["weight"].tolist() == [3] * SIZE


def check_links() -> None:
    """A transfer is measured to its end."""
    transport: Any = SimpleNamespace(rank=0, post=lambda *_: None, receive=lambda *_: [full(1)],
                                     send=lambda *_: late.busy())
    links._back_and_forth(transport, 1, 64, count(), DEVICE)
    assert done()


def check_begin_of_records() -> None:
    """Seconds of the host and of the device are compared when the device has nothing to do."""
    late.busy()
    before = accelerator.mark(DEVICE)
    _DeviceTimes(DEVICE)
    assert before.query()


def check_end_of_records() -> None:
    times = _DeviceTimes(DEVICE)
    started = times.mark()
    late.busy(3)
    waits = [(started, times.mark())]
    late.busy(2)
    [record] = times.read([(Op.FORWARD, 0, 0, started, times.mark(), (0.0, waits), 0, 0)])
    assert isinstance(record, RecordedAction)
    assert 5 <= record.end_s - record.start_s < 5.1
    assert 3 <= record.waited_s < 3.1


STREAMS = "extras/async_threaded/worker.py "
CHECKS: dict[str, Callable[[], None]] = {
    "accelerator.py clock_of.synchronised: synchronize(device)": check_clock,
    "accelerator.py synchronize: torch.accelerator.synchronize(device)": check_synchronize,
    "app/train/peak_flops.py _multiply: accelerator.synchronize(a.device)": check_peak,
    "app/train/torch_profiler.py TorchProfiler.before_step: accelerator.synchronize(self._run.pipe.device)":
        check_torch_profiler,
    "runtime/action_recorder.py _DeviceTimes.__init__: accelerator.synchronize(device)": check_begin_of_records,
    "runtime/action_recorder.py _DeviceTimes.read: actions[-1][4].synchronize()": check_end_of_records,
    "checkpoint/shards.py HostBuffer.copy: accelerator.synchronize(device)": check_copies_of_a_save,
    "profiling/links.py _back_and_forth: accelerator.synchronize(device)": check_links,
    **{f"{STREAMS}{wait}": check_forwards for wait in (
        "DeviceStreams.begin: stream.wait_stream(caller)", "DeviceStreams.begin: _record(given, caller, stream)",
        "DeviceStreams.computing: stream.wait_stream(self._newest)",
        "DeviceStreams.computed: self._of[microbatch].record_event()",
        "DeviceStreams.prepare_sends: _record(tensors, accelerator.current_stream(self._device), self._sends)",
        "DeviceStreams.sending: self._sends.wait_event(self._ends[microbatch])",
        "DeviceStreams.sending: self._sends.wait_stream(accelerator.current_stream(self._device))",
        "DeviceStreams.gather: caller.wait_event(event)", "_record: tensor.record_stream(stream)")
        if "async_threaded" in Executor.names()},
    "runtime/worker.py NaiveWorker._to_its_end: accelerator.synchronize(here.device)":
        partial(pipeline_checks.check_waits, *pipeline_checks.WAITS["1f1b under naive"])}


def failures(check: Callable[[], None]) -> list[str]:
    """What failed, by seed."""
    found = []
    for seed in range(SEEDS):
        late.configure(seed, patience_ms=0)
        try:
            check()
        except (AssertionError, RuntimeError):
            found.append(f"seed {seed}: {traceback.format_exc()}")
    return found


def told(place: str, check: Callable[[], None]) -> dict[str, list[str]]:
    kept = failures(check)
    with waits.without(place):
        return {"with": kept, "without": failures(check)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    pipeline_checks.late = late
    full(0).sum().item()  # the device begins
    print(json.dumps({place: told(place, check) for place, check in CHECKS.items()}))
