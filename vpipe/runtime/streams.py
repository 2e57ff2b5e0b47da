"""Where work of the executor ``async_threaded`` is queued: on a GPU in a stream per microbatch and two for transfers.

What holds on a GPU:

- A stream waits for another by an event, never the host, so that forwards of several microbatches run at one time.
- A tensor that is used in another stream than it was allocated in is recorded there (``Tensor.record_stream``), or its
  memory could be given away while it is still read.
- Forwards of a stage with buffers that are saved (running statistics) have their streams in the order of the
  microbatches: each writes what the next one reads.
- Autograd runs the backward of an operation in the stream of its forward, waits where tensors cross, and lets the
  stream in which ``backward`` was called wait for the leaves at its end (PyTorch, CUDA semantics: stream semantics of
  backward passes). So gradients may be read where the backward was called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class Streams:
    """On a CPU: everything is done when its call returns. What is said here holds for :class:`CudaStreams`, too."""

    def taking(self) -> AbstractContextManager[None]:
        """While something is received, or copied to the device; what follows in the caller's stream waits for it."""
        return nullcontext()

    def begin(self, microbatch: int, given: Iterable[Tensor]) -> None:
        """Let a microbatch's stream wait for the caller's, in which it was ``given`` tensors."""

    def computing(self, microbatch: int, *, ordered: bool) -> AbstractContextManager[None]:
        """While the forward of a microbatch is queued, in whatever thread.

        Args:
            ordered: it is computed after the one that was queued before it, whatever the stream.
        """
        return nullcontext()

    def computed(self, microbatch: int) -> None:
        """All of a forward has been queued."""

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors of any stream be sent, and read by the caller."""

    def sending(self, microbatch: int | None) -> AbstractContextManager[None]:
        """While something is sent: what the forward of a microbatch made, or what the caller's stream has."""
        return nullcontext()

    def gather(self) -> None:
        """Let the caller's stream wait for all forwards."""


class CudaStreams(Streams):
    """On a GPU.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._receives, self._sends = _stream(device), _stream(device)
        self._of: dict[int, torch.cuda.Stream] = {}
        self._ends: dict[int, torch.cuda.Event] = {}
        self._newest: torch.cuda.Stream | None = None  # that a forward was queued in
        # The microbatches' graphs share the nodes that accumulate a weight's gradient; they have the stream of one of
        # them. Autograd waits there as it should; that it is a mismatch is meant.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    @contextmanager
    def taking(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self._device)
        self._receives.wait_stream(caller)
        with torch.cuda.stream(self._receives):
            yield
        caller.wait_stream(self._receives)

    def begin(self, microbatch: int, given: Iterable[Tensor]) -> None:
        if microbatch not in self._of:
            self._of[microbatch] = _stream(self._device)
        stream, caller = self._of[microbatch], torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        _record(given, caller, stream)

    @contextmanager
    def computing(self, microbatch: int, *, ordered: bool) -> Iterator[None]:
        stream = self._of[microbatch]
        if ordered and self._newest is not None:
            stream.wait_stream(self._newest)
        self._newest = stream
        with torch.cuda.stream(stream):
            yield

    def computed(self, microbatch: int) -> None:
        self._ends[microbatch] = self._of[microbatch].record_event()

    def lend(self, tensors: Iterable[Tensor]) -> None:
        _record(tensors, torch.cuda.current_stream(self._device), self._sends)

    @contextmanager
    def sending(self, microbatch: int | None) -> Iterator[None]:
        if microbatch in self._ends:
            self._sends.wait_event(self._ends[microbatch])
        else:  # the caller's stream has waited for it
            self._sends.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._sends):
            yield

    def gather(self) -> None:
        caller = torch.cuda.current_stream(self._device)
        for event in self._ends.values():
            caller.wait_event(event)
        self._ends.clear()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _record(tensors: Iterable[Tensor], *streams: torch.cuda.Stream) -> None:
    """Keep the memory of tensors until these streams have come past what is queued there when they are let go."""
    for tensor in tensors:
        for stream in streams:
            if tensor.is_cuda:
                tensor.record_stream(stream)


def streams_of(device: torch.device) -> Streams:
    """The streams of a rank."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
