"""Compare the batches that ranks read: with different ones, inputs would be trained with the labels of others.

When a rank reads a batch, it computes a checksum of every field whose values it has, and tells rank 0 before it uses
the batch. When two ranks have told something different, all fail at once, since one may wait for a transfer of another
size than is sent. Before a rank makes an update, it waits until all ranks have told the same of all batches of the
update; as a rule they have by then.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from vpipe.distributed.read_batches import ReadBatch
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import RunError, UserError
from vpipe.runtime.microbatches import Batch

WHOLE_BYTES = 1 << 18
"""Size of the largest field of which all values are compared; of a larger one some values of every sample are."""

SPREAD_VALUES = 1 << 15
FIRST_VALUES = 64
"""Values at the beginning of every sample that are compared besides values spread over it: a short sequence fills
only the beginning."""

def checksum(field: Tensor) -> int:
    """Return a checksum of 32 bits of a field's values, whatever their layout in memory. The host waits for a GPU."""
    total = zlib.crc32(str(field.dtype).encode())
    for part in (field,) if field.nbytes <= WHOLE_BYTES else (_first_values(field), _spread_values(field)):
        on_host = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
        total = zlib.crc32(on_host.view(-1).view(torch.uint8).numpy().data, total)
    return total


def _first_values(field: Tensor) -> Tensor:
    """Return the first values of every sample along the last dimension."""
    while field.dim() > 2:
        field = field[:, 0]
    return field[:, :FIRST_VALUES] if field.dim() == 2 else field


def _spread_values(field: Tensor) -> Tensor:
    """Return every n-th value along each dimension except the samples', n a power of 2 that leaves few enough."""
    steps = [1] * field.dim()
    sizes = list(field.shape)
    while torch.Size(sizes).numel() > max(SPREAD_VALUES, sizes[0]):
        widest = max(range(1, len(sizes)), key=sizes.__getitem__)
        steps[widest] *= 2
        sizes[widest] = -(-field.shape[widest] // steps[widest])
    return field[tuple(slice(None, None, step) for step in steps)]


class BatchComparison:
    """Compare the batches of one rank with those of all others, which read as many.

    With a flush, and in evaluations, ranks tell of their batches in the exchange that begins a step
    (:meth:`take`, :meth:`expect`). Without a flush a rank tells of a batch when it reads the batch (:meth:`tell`), in
    an exchange beside that of calls: ranks read ahead of one another there.

    Args:
        exchange: for streams.
        fields: of a batch.
        group: of ranks that read the same batches; others read as many, of as many samples.

    Attributes:
        untold: batches that were read, of which the others are not told yet.
    """

    def __init__(self, exchange: Exchange, fields: Sequence[str], group: int) -> None:
        self._exchange, self._fields, self._group = exchange, fields, group
        self.untold: list[ReadBatch] = []
        self._expected: deque[tuple[int, Callable[[], object]]] = deque()  # by first microbatch, the waits

    def read(self, first: int, number: int, batch: Batch | None, error: BaseException | None) -> None:
        """Describe a batch that was read, from this microbatch of its loader on."""
        samples, fields = 0, {}
        if batch is not None:
            samples = next(iter(batch.values())).shape[0]
            fields = {name: [zlib.crc32(str(tuple(batch[name].shape)).encode()),
                             None if batch[name].is_meta else checksum(batch[name])] for name in self._fields}
        why = "" if error is None else first_line(error)
        self.untold.append(ReadBatch(number, first, samples, why, self._group, fields))

    def take(self) -> list[ReadBatch]:
        """Return the batches that were read, and that the others are told of now."""
        batches, self.untold = self.untold, []
        return batches

    def expect(self, first: int, all_told: Callable[[], object]) -> None:
        """Let :meth:`confirm` wait until all have told of the batch with this first microbatch."""
        self._expected.append((first, all_told))

    def tell(self, batches: Sequence[ReadBatch]) -> None:
        """Tell the others of batches of a stream. All ranks have read the same ones when a stream is drained."""
        for batch in batches:
            self.expect(batch.first, self._exchange.note("reading training batches", None, "later", [batch]))

    def confirm(self, until: float = inf) -> None:
        """Wait until all ranks have told the same of the batches up to a microbatch.

        Raises:
            RunError: they have not, or a rank failed.
        """
        while self._expected and self._expected[0][0] < until:
            self._expected.popleft()[1]()


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    if isinstance(error, RunError):
        return error.what
    if isinstance(error, UserError):
        return error.problems[0].what
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
