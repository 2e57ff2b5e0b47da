"""Ten published bugs of programs with streams, each in a few lines of plain torch, and each mended.

A function returns whether its results are right. ``late.busy()`` is the other work of a stream, without which nobody
would use several. As a program, this file tries them all on the late device, or on a GPU (``stream_bugs.py cuda``), and
prints what came out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import late_device
import torch

SEEDS = range(20)
SIZE = 256

KIND = (sys.argv[1:] or [late_device.NAME])[0] if __name__ == "__main__" else late_device.NAME


class Hardware:
    """A GPU with what the late device has beside the functions of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def configure(self, seed: int, patience_ms: float, synchronous: bool) -> None:
        """Begin anew; nothing can be drawn from a seed."""
        torch.cuda.synchronize()

    def busy(self) -> None:
        """Keep the current stream busy for some 10 ms."""
        torch.cuda._sleep(20_000_000)


late: Any = None if __name__ != "__main__" else Hardware() if KIND == "cuda" else late_device.load()


def full(value: float) -> torch.Tensor:
    return torch.full((SIZE,), float(value), device=KIND)


def torchtune_1867(mended: bool) -> bool:
    """An activation that came back on the transfers' stream is dropped before the computing stream has read it: the
    transfers' stream puts the next one into its memory (meta-pytorch/torchtune, issue 1867)."""
    computing, transfers = late.current_stream(), late.Stream()
    sums = []
    for host in (torch.full((SIZE,), 1.0).pin_memory(), torch.full((SIZE,), 2.0).pin_memory()):
        with late.stream(transfers):
            activation = host.to(KIND, non_blocking=True)
        computing.wait_stream(transfers)
        late.busy()
        sums.append(activation.sum())
        if mended:
            activation.record_stream(computing)
        del activation
    return [total.item() for total in sums] == [SIZE, 2 * SIZE]


def megatron_7398(mended: bool) -> bool:
    """An activation is loaded from its pinned buffer before it has been stored there (NVIDIA/Megatron-LM, issue
    7398)."""
    computing, storing = late.current_stream(), late.Stream()
    activation = full(3)
    buffer = torch.zeros(SIZE, pin_memory=True)
    storing.wait_stream(computing)
    with late.stream(storing):
        late.busy()
        buffer.copy_(activation, non_blocking=True)
    stored = storing.record_event()
    activation.record_stream(storing)
    del activation
    if mended:
        computing.wait_event(stored)
    return buffer.to(KIND, non_blocking=True).sum().item() == 3 * SIZE


def trl_7195_cached_stream(mended: bool) -> bool:
    """The transfers' stream waits for the stream that was current when the wrapper was made, not for that which
    computes (huggingface/trl, pull request 7195)."""
    cached, transfers = late.current_stream(), late.Stream()
    host = torch.zeros(SIZE, pin_memory=True)
    with late.stream(late.Stream()):
        late.busy()
        activation = full(3)
        transfers.wait_stream(late.current_stream() if mended else cached)
        with late.stream(transfers):
            host.copy_(activation, non_blocking=True)
        activation.record_stream(transfers)
    transfers.synchronize()
    return host.sum().item() == 3 * SIZE


def trl_7195_late_clone(mended: bool) -> bool:
    """A part of a tensor is cloned on the transfers' stream, which no reader of the clone waits for (huggingface/trl,
    pull request 7195)."""
    computing, transfers = late.current_stream(), late.Stream()
    labels = torch.arange(SIZE + 1, device=KIND)
    if mended:
        shifted = labels[1:].clone()
    transfers.wait_stream(computing)
    with late.stream(transfers):
        late.busy()
        if not mended:
            shifted = labels[1:].clone()
    return (shifted + 1).sum().item() == sum(range(2, SIZE + 2))


def torchtitan_3413(mended: bool) -> bool:
    """Indices are masked on the computing stream, and read on the stream of communication at once
    (pytorch/torchtitan, issue 3413)."""
    computing, communication = late.current_stream(), late.Stream()
    experts = torch.arange(SIZE, device=KIND) % 4
    scores = full(1)
    scores[: SIZE // 2] = 0
    communication.wait_stream(computing)
    late.busy()
    experts = experts.masked_fill(scores == 0, -1)
    if mended:
        communication.wait_stream(computing)
    with late.stream(communication):
        tokens = (experts >= 0).sum()
        return tokens.item() == SIZE // 2


def missing_record_stream(mended: bool) -> bool:
    """A tensor is freed while another stream has yet to read it: its own stream takes the memory for the next."""
    side = late.Stream()
    tensor = full(1)
    side.wait_stream(late.current_stream())
    with late.stream(side):
        late.busy()
        total = tensor.sum()
    if mended:
        tensor.record_stream(side)
    del tensor
    following = full(5)
    side.synchronize()
    return total.item() == SIZE and following.sum().item() == 5 * SIZE


def pinned_buffer_refilled(mended: bool) -> bool:
    """The host fills a pinned buffer anew before the copy out of it has begun."""
    buffer = torch.empty(SIZE, pin_memory=True)
    copied = late.Event()
    copies = []
    for value in (1, 2):
        if mended:
            copied.synchronize()
        buffer.fill_(value)
        copies.append(buffer.to(KIND, non_blocking=True))
        copied.record()
    return [copy.sum().item() for copy in copies] == [SIZE, 2 * SIZE]


def event_on_wrong_stream(mended: bool) -> bool:
    """``record`` without a stream is outside the context of the stream that it is meant for."""
    side, done = late.Stream(), late.Event()
    with late.stream(side):
        late.busy()
        tensor = full(3)
    if mended:
        done.record(side)
    else:
        done.record()
    late.current_stream().wait_event(done)
    return (tensor + 1).sum().item() == 4 * SIZE


def read_without_wait(mended: bool) -> bool:
    """The host reads what it asked for without waiting (``non_blocking``) before it has come."""
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(full(3), non_blocking=True)
    if mended:
        late.current_stream().synchronize()
    return host.sum().item() == 3 * SIZE


def buffer_reused_by_another_stream(mended: bool) -> bool:
    """A buffer of the program's own is written for the next microbatch while another stream still reads it."""
    writing, reading, read = late.Stream(), late.Stream(), late.Event()
    with late.stream(writing):
        buffer = torch.empty(SIZE, device=KIND)
    sums = []
    for value in (1, 2):
        with late.stream(writing):
            if mended:
                read.wait()
            buffer.fill_(value)
        reading.wait_stream(writing)
        with late.stream(reading):
            late.busy()
            sums.append(buffer.sum())
            read.record()
    late.synchronize()
    return [total.item() for total in sums] == [SIZE, 2 * SIZE]


BUGS: tuple[Callable[[bool], bool], ...] = (
    torchtune_1867, megatron_7398, trl_7195_cached_stream, trl_7195_late_clone, torchtitan_3413, missing_record_stream,
    pinned_buffer_refilled, event_on_wrong_stream, read_without_wait, buffer_reused_by_another_stream)


def tried(bug: Callable[[bool], bool], mended: bool, synchronous: bool = False) -> list[bool]:
    """Whether it was right, of each seed."""
    results = []
    for seed in SEEDS:
        late.configure(seed, patience_ms=0, synchronous=synchronous)
        results.append(bug(mended))
    return results


if __name__ == "__main__":
    print(json.dumps({bug.__name__: {"wrong": tried(bug, False), "mended": tried(bug, True),
                                     "wrong, synchronous": tried(bug, False, True)} for bug in BUGS}))
