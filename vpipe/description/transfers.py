"""Describe the transfers between stages: what carries them, how they are encoded, and when they have failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.accelerator import DIRECT
from vpipe.arguments import Arguments, shown
from vpipe.errors import UserError, nearest
from vpipe.plugins import PluginGroup

CODECS = ("none", "bf16", "int8", "int8_stochastic")
"""What activations and gradients between stages are encoded as: as they are; rounded to 16 bits; a byte per number,
rounded to the nearest or stochastically."""

TRANSPORTS = PluginGroup("vpipe.transports", "transport")
"""What carries tensors between ranks beside gloo; each is a class (docs/add-a-transport.md)."""

COMPRESSION = "compression"
"""The one of them that encodes what another transport carries: of that transport, codecs and a seed."""


@dataclass(frozen=True)
class Transfers:
    """The transfers between stages on different ranks.

    Attributes:
        backend: ``nccl`` or ``gloo``; when None, nccl where every rank has a GPU of its own, else gloo. A process group
            that is initialised already is used as it is. Or the name of a transport of :data:`TRANSPORTS`, beside gloo.
        timeout_s: seconds after which a transfer counts as failed.
        shared_memory: whether ranks of one host that compute on processors pass tensors through shared memory; else,
            and where there is none, or its extra is deleted, over gloo. The numbers are the same.
        compress: a name of :data:`CODECS` for activations and gradients; one for all, or one for each of the
            ``stages - 1`` cuts. It changes the numbers.

    Raises:
        UserError: a value is of another kind.
    """

    backend: str | None = None
    timeout_s: float = 60.0
    shared_memory: bool = True
    compress: str | Sequence[str] = "none"

    def __post_init__(self) -> None:
        given = Arguments()
        if self.backend is not None:
            given.name("backend", self.backend, "gloo", *DIRECT)
        object.__setattr__(self, "timeout_s", given.number("timeout_s", self.timeout_s, 60, most=1e9))
        given.flag("shared_memory", self.shared_memory)
        named = (self.compress,) if isinstance(self.compress, str) else self.compress
        if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
            given.refuse(f"compress is {shown(self.compress)}", f"write one of {', '.join(CODECS)}, or a list of them")
        else:
            for name in dict.fromkeys(named):
                if name not in CODECS:
                    given.refuse(f"compress is '{name}'", nearest(name, CODECS))
        given.check()

    @property
    def group(self) -> str | None:
        """The backend of the process group."""
        return "gloo" if self.backend in {*TRANSPORTS.names} - {COMPRESSION} else self.backend

    @property
    def transport(self) -> str | None:
        """The transport beside gloo, by its name; empty where none is wanted, None where the wanted one is missing."""
        wanted = "shared_memory" * self.shared_memory if self.backend == self.group else self.backend
        return wanted if not wanted or wanted in TRANSPORTS.names else None

    def codecs(self, stages: int) -> tuple[str, ...]:
        """Return the codec of every cut between so many stages. Raises UserError when there are others."""
        named = (self.compress,) * (stages - 1) if isinstance(self.compress, str) else tuple(self.compress)
        if len(named) != stages - 1:
            raise UserError(f"compress has {len(named)} entries for the {stages - 1} cuts between {stages} stages",
                            hint="give one word for all cuts, or one entry per cut")
        if set(named) - {"none"} and COMPRESSION not in TRANSPORTS.names:
            raise UserError(f"compress is {shown(self.compress)}, but the extra that compresses is deleted",
                            hint="put vpipe/extras/compression back, or leave compress out")
        return named
