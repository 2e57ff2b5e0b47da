"""What the late device does, and layers on it.

As a program, this file makes each check and prints what failed; with an argument, it touches memory of the device.
"""

from __future__ import annotations

import copy
import ctypes
import io
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import late_device
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from vpipe import accelerator

late: Any = late_device.load() if __name__ == "__main__" else None


# -- layers: as on the same device run synchronously, and as on the processor ------------------------------------------

class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads * 2, heads + 1, is_causal=True).transpose(1, 2).flatten(2)


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.flatten(0, 1), torch.arange(10, device=x.device) % 7)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 16), "layer norm": lambda: nn.LayerNorm(16), "attention": Attention,
    "gelu": nn.GELU, "dropout": lambda: nn.Dropout(0.5), "cross entropy": Loss,
    "embedding": lambda: nn.Sequential(nn.Flatten(0), nn.Embedding(10, 16))}

NOT_AS_ON_PROCESSOR = {
    "dropout": "each device draws its own random numbers",
    "attention": "torch takes its kernel in parts (SDPBackend.MATH), as it does on devices that it does not know"}


def through(make: Callable[[], nn.Module], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients."""
    torch.manual_seed(0)
    layer = make().to(device, dtype)
    x = torch.randn(2, 5, 16).to(device, dtype).requires_grad_()
    given = torch.arange(10, device=device) if isinstance(layer, nn.Sequential) else x
    y = layer(given)
    (y * torch.linspace(0, 1, y.numel(), device=device, dtype=dtype).view_as(y)).sum().backward()
    return [tensor.detach().cpu() for tensor in (y, x.grad, *(each.grad for each in layer.parameters()))
            if tensor is not None]


def check_layers() -> None:
    for name, make in LAYERS.items():
        for dtype in (torch.float32, torch.bfloat16):
            late.configure(1, 0)
            found = through(make, "late", dtype)
            assert not any(waits.startswith("fallback") for waits in late.host_waits()), late.host_waits()
            late.configure(synchronous=True)
            assert_equal(found, through(make, "late", dtype), name)
            expected = through(make, "cpu", dtype)
            if name not in NOT_AS_ON_PROCESSOR:
                assert_equal(found, expected, name)
            elif name == "attention":
                torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
                with sdpa_kernel(SDPBackend.MATH):
                    assert_equal(found, through(make, "cpu", dtype), name)
            assert name != "dropout" or abs(int(found[0].count_nonzero()) - 80) < 30  # of 160


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert len(found) == len(expected), what
    assert all(map(torch.equal, found, expected)), what


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(17, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 17))


def trained(device: str, dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    """Losses and weights after three steps with clipped gradients."""
    torch.manual_seed(0)
    layers = model().to(device, dtype)
    optimizer = make(layers.parameters(), lr=0.1, **options)
    tokens = torch.randint(17, (2, 8)).to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(layers(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(layers.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [tensor.detach().cpu() for tensor in (*losses, *layers.parameters())]


def check_optimizers() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}), (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.AdamW, {"foreach": False}), (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True})]
    for make, options in cases:
        for dtype in (torch.float32, torch.bfloat16):
            for seed in range(3):
                late.configure(seed, 0)
                found = trained("late", dtype, make, **options)
                waits = late.host_waits()
                assert set(waits) == {"copy to device", "copy to host"}, waits
                assert waits["copy to device"] == len(list(model().parameters())) + 1, waits
            late.configure(synchronous=True)
            assert_equal(found, trained("late", dtype, make, **options), f"{make} {options}")
            assert_equal(found, trained("cpu", dtype, make, **options), f"{make} {options}")


def check_backward_on_streams() -> None:
    """Autograd computes the gradients on the streams of the forward, and lets the caller's wait."""
    for seed in range(5):
        late.configure(seed, 0)
        weight = torch.ones(8, device="late", requires_grad=True)
        first, second = late.Stream(), late.Stream()
        first.wait_stream(late.current_stream())
        with late.stream(first):
            late.busy()
            x = weight * 2
        second.wait_stream(first)
        with late.stream(second):
            late.busy()
            y = (x * x).sum()
        late.current_stream().wait_stream(second)
        y.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert weight.grad.tolist() == [8.0] * 8
        late.synchronize()


def check_recompute_draws_the_same() -> None:
    late.configure(3, 0)
    torch.manual_seed(1)
    x = torch.ones(64, device="late", requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * y.detach())


# -- the device --------------------------------------------------------------------------------------------------------

def check_accelerator() -> None:
    assert str(torch.accelerator.current_accelerator()) == "late"
    assert torch.accelerator.device_count() == late.device_count() == 2
    assert torch.get_device_module("late") is late
    with late.device(1):
        assert late.current_device() == 1
        assert torch.empty(3, device="late").device.index == 1
    assert late.current_device() == 0
    x = torch.ones(3, device="late:1")
    assert (x + x.to("late:0").to("late:1")).tolist() == [2, 2, 2]
    assert "on the same device" in refused(lambda: x + torch.ones(3, device="late:0"))
    assert "on the same device" in refused(lambda: x + torch.ones(3))
    assert "there are 2 devices" in refused(lambda: torch.ones(3, device="late:2"))


def refused(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it is not refused")


def check_nothing_runs_before_it_must() -> None:
    late.configure(1, 0)
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4, device="late"), non_blocking=True)
    done = late.current_stream().record_event()
    time.sleep(0.05)
    assert host.tolist() == [0] * 4
    asked = 0
    while not done.query():
        asked += 1
    assert asked > 1, "a query lets the device do one task"
    assert host.tolist() == [1] * 4
    assert late.host_waits() == {}


def check_idle_host() -> None:
    """A host that waits for something else finds the work done."""
    late.configure(1, patience_ms=5)
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4, device="late"), non_blocking=True)
    end = time.monotonic() + 20
    while host.tolist() != [1] * 4:
        assert time.monotonic() < end
        time.sleep(0.01)


def check_outputs_are_nan_until_they_have_run() -> None:
    late.configure(1, 0)
    stream = late.Stream()
    late.busy()
    x = torch.ones(4, device="late") + 1
    with late.stream(stream):
        assert x.isnan().all().item()
    assert x.tolist() == [2] * 4


def check_events() -> None:
    late.configure(1, 0)
    first, second = late.Event(enable_timing=True), late.Event(enable_timing=True)
    assert first.query()
    first.record()
    late.busy(0.25)
    second.record()
    assert not second.query()
    second.synchronize()
    assert 250 <= first.elapsed_time(second) < 260
    assert late.host_waits() == {"event": 1}


def check_delays_are_the_seeds() -> None:
    def times(seed: int) -> list[float]:
        late.configure(seed, 0)
        events = [late.Event(enable_timing=True) for _ in range(9)]
        x = torch.ones(4, device="late")
        for event in events:
            x.add_(1)
            event.record()
        late.synchronize()
        return [events[0].elapsed_time(event) for event in events]

    assert times(1) == times(1) != times(2)


def check_memory() -> None:
    late.configure(1, 0)
    before = late.memory_allocated()
    late.reset_peak_memory_stats()
    x = torch.empty(1000, device="late")
    assert late.memory_allocated() == before + 4096
    address = x.data_ptr()
    del x
    assert late.memory_allocated() == before
    assert late.max_memory_allocated() == before + 4096
    side = late.Stream()
    with late.stream(side):
        other = torch.empty(1000, device="late")
    assert other.data_ptr() != address, "the memory of another stream"
    x = torch.empty(1000, device="late")
    assert x.data_ptr() == address, "its own stream has it at once"
    with late.stream(side):
        late.busy()
    x.record_stream(side)
    del x
    following = torch.empty(1000, device="late")
    assert following.data_ptr() != address, "the side stream has not come so far"
    side.synchronize()
    assert torch.empty(1000, device="late").data_ptr() == address
    late.reset_peak_memory_stats()
    assert late.max_memory_allocated() == late.memory_allocated()
    assert "out of memory" in refused(lambda: torch.empty(1 << 40, device="late"))


def check_pinned_memory_waits_for_its_copies() -> None:
    late.configure(1, 0)
    x = torch.ones(1 << 18).pin_memory()
    address = x.data_ptr()
    late.busy()
    y = x.to("late", non_blocking=True)
    del x
    assert torch.empty(1 << 18, pin_memory=True).data_ptr() != address
    late.synchronize()
    assert torch.empty(1 << 18, pin_memory=True).data_ptr() == address
    assert y.sum().item() == 1 << 18
    assert y.to("cpu", non_blocking=True).is_pinned()


def check_host_waits() -> None:
    late.configure(1, 0)
    x = torch.arange(4.0).to("late")
    x.sum().item()
    x.tolist()
    x[x > 1]
    x[x.to(torch.int64)]
    late.current_stream().synchronize()
    late.synchronize()
    x.to("cpu")
    assert late.host_waits() == {"copy to device": 1, "item": 1, "copy to host": 2, "shape of aten::index": 1,
                                 "stream": 1, "device": 1}


def check_random_numbers() -> None:
    late.configure(1, 0)
    torch.manual_seed(5)
    state = late.get_rng_state()
    first = torch.randn(100, device="late")
    second = torch.randn(100, device="late")
    late.set_rng_state(state)
    with torch.random.fork_rng(devices=[0], device_type="late"):
        torch.rand(3, device="late")
    assert torch.equal(first.cpu(), torch.randn(100, device="late").cpu())
    assert not torch.equal(first, second)
    own = torch.Generator("late").manual_seed(5)
    assert torch.equal(first, torch.randn(100, device="late", generator=own))
    assert late.default_generators[1].initial_seed() == 5


def check_kernels_that_fail() -> None:
    late.configure(1, 0)
    table = torch.ones(4, 2, device="late")
    rows = F.embedding(torch.tensor([7]).to("late"), table)
    assert "index out of range" in refused(rows.sum().item)
    assert table.sum().item() == 8


def check_copies() -> None:
    for seed in range(3):
        late.configure(seed, 0)
        x = torch.arange(12.0).view(3, 4).to("late")
        part = x.t()[1:3]
        assert part.tolist() == [[1, 5, 9], [2, 6, 10]]
        part.zero_()
        assert x.view(torch.int32).dtype == torch.int32
        assert x.sum(1).to(torch.int64).tolist() == [3, 11, 19]
        x[:, 0] = torch.tensor([7.0, 8.0, 9.0])
        x[0, 3] = 2
        assert x[torch.tensor([0, 2])].tolist() == [[7, 0, 0, 2], [9, 0, 0, 11]]
        assert torch.cat([x, x]).unfold(0, 2, 2).shape == (3, 4, 2)
        assert copy.deepcopy(x).tolist() == x.tolist()
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        assert torch.load(file).tolist() == x.tolist()
        x.resize_(5, 4)
        assert x[:3].tolist() == copy.deepcopy(x[:3]).tolist()
        x.untyped_storage().resize_(0)
        assert torch.tril_indices(2, 2, device="late").tolist() == torch.tril_indices(2, 2).tolist()


def check_seen_by_vpipe() -> None:
    late.configure(1, 0)
    assert accelerator.kind() == "late"
    assert accelerator.collectives() == "gloo"
    assert accelerator.choose("late:1", None, accelerator.Visible.here(0)) == torch.device("late:1")
    device = accelerator.choose(None, None, accelerator.Visible.here(0))
    assert device == accelerator.current() == torch.device("late:0")
    assert (accelerator.name_of(device), accelerator.total_bytes(device)) == ("late", 4 << 30)
    assert accelerator.pinned_bytes(3).is_pinned()
    stream = accelerator.new_stream(device, -1)
    before = accelerator.current_stream(device)
    with accelerator.using(device, stream):
        assert accelerator.current_stream(device) == stream
    assert accelerator.current_stream(device) == before
    assert accelerator.handle_of(device, stream) != accelerator.handle_of(device, before)
    accelerator.reset_peak(device)
    tensor = torch.empty(1 << 20, device=device)
    assert accelerator.peak_bytes(device) == accelerator.held_bytes(device) >= tensor.nbytes
    with accelerator.seeded(7):
        drawn = torch.rand(3, device=device)
    accelerator.generators_of(device)[1].manual_seed(7)
    assert torch.equal(drawn, torch.rand(3, device=device))
    accelerator.seed_all(7)
    assert torch.equal(drawn, torch.rand(3, device=device))
    clock = accelerator.clock_of(device)
    assert clock() <= clock()
    late.busy()
    batch = torch.arange(4.0).to(device) + 1
    late.busy()
    assert accelerator.queued_copy(batch, torch.device("cpu")).tolist() == [1, 2, 3, 4], "the host reads what has come"


def check_threads() -> None:
    """Each thread of the host has its own current stream."""
    late.configure(1, 0)
    totals = []

    def work(value: int) -> None:
        with late.stream(late.Stream()):
            x = torch.full((100,), float(value), device="late")
            for _ in range(10):
                x = x + 1
            totals.append(x.sum().item() == 100 * (value + 10))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [True] * 4
    assert late.current_stream() == late.default_stream()


def check_gates() -> None:
    """What is behind a closed gate waits, and nothing else does; the host finds that it has not been done."""
    for synchronous in (False, True):
        late.configure(1, 0, synchronous)
        gate, opened = (0, 40), late_device.library().late_open
        behind = late.Stream(stream_id=40, device_index=0, device_type=late.current_stream().device_type)
        late_device.library().late_gate(*gate)
        x = torch.ones(4, device="late")
        with late.stream(behind):
            x.record_stream(behind)
            behind.wait_stream(late.default_stream())
            x.add_(1)
            done = behind.record_event()
        assert not done.query()
        assert not behind.query()
        assert torch.ones(4, device="late").sum().item() == 4
        opened(*gate)
        late.current_stream().wait_event(done)
        assert x.sum().item() == 8
        assert done.query()
    late_device.library().late_gate(*gate)
    late.configure(1, 0)  # opens it, as the end of a process does


CHECKS = {name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")}


def failures() -> Iterator[tuple[str, str | None]]:
    for name, check in CHECKS.items():
        try:
            check()
            yield name, None
        except Exception:
            yield name, traceback.format_exc()
        late.configure()


ACCESSES: dict[str, Callable[[int], object]] = {
    "read": lambda address: ctypes.string_at(address, 4), "write": lambda address: ctypes.memset(address, 0, 4)}

if __name__ == "__main__":
    if sys.argv[1:]:
        tensor = torch.ones(4, device="late")
        late.synchronize()
        print("before", flush=True)
        ACCESSES[sys.argv[1]](tensor.data_ptr())
    else:
        print(json.dumps(dict(failures())))
