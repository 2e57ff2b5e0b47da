"""What carries tensors from rank to rank, for packages that add a transport (docs/add-a-transport.md)."""

from vpipe.distributed.connection import close_in_child
from vpipe.model.layer import seed_of
from vpipe.runtime.transport.process_group import DistributedTransport, PeerTransfer, say_once
from vpipe.runtime.transport.transport import (
    TensorSpec,
    TransferKey,
    TransferKind,
    contiguous,
    decode_specs,
    encode_specs,
)

__all__ = ["DistributedTransport", "PeerTransfer", "TensorSpec", "TransferKey", "TransferKind", "close_in_child",
           "contiguous", "decode_specs", "encode_specs", "say_once", "seed_of"]
