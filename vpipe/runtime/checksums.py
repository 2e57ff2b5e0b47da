"""Make checksums by which ranks compare what they have: batches, arguments, weights."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from vpipe.errors import counted
from vpipe.runtime.sharded_tensors import is_sharded, local

WHOLE_BYTES = 1 << 18
"""Size of the largest field of which all values are compared; of a larger one some values of every sample are."""

SPREAD_VALUES = 1 << 15
FIRST_VALUES = 64
"""Values at the beginning of every sample that are compared besides values spread over it: a short sequence fills
only the beginning."""


def whole_checksum(tensor: Tensor) -> str:
    """Return a checksum of all values of this rank's part of a tensor, which only equal ones share."""
    return hashlib.sha256(local(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


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


def compared_text(value: object) -> str:
    """Return the text of an argument by which ranks compare it: of a whole state a checksum, of a function the name."""
    if isinstance(value, Mapping):
        sums = {name: checksum(each) for name, each in value.items()
                if isinstance(each, Tensor) and not is_sharded(each)}
        return f"{counted(len(sums), 'tensor')}, checksum {zlib.crc32(repr(sums).encode()):08x}" if sums else ""
    if callable(value):
        return getattr(value, "__qualname__", "")
    return str(sorted(value) if isinstance(value, (set, frozenset)) else value)
