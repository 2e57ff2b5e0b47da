"""Describe how a rank executes its actions: on which device, by which executor, with compiled layers or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from vpipe.arguments import Arguments, shown
from vpipe.errors import nearest

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Execution:
    """How a rank executes its actions.

    Attributes:
        device: of this process: ``cpu``, ``cuda`` or ``cuda:1``. When None, a GPU where there is one: that of
            ``LOCAL_RANK`` (ranks that outnumber GPUs share them), or the one that ``torch.cuda.set_device`` chose; else
            the processor. ``cuda`` means the same GPU. It becomes the current one of this process.
        executor: ``overlapped``, ``naive`` (each action has ended when the next begins) or, with the schedule
            ``gpipe``, ``async_threaded``. The numbers are the same; see docs/executors.md.
        compile: compile every layer with torch.compile: True for its default backend, or the name of another one.
            Schedules that split the backward are refused.
        mesh: of all ranks, one of whose dimensions is called ``pp``: along it lie the ranks of a pipeline, and each
            combination of its other coordinates is a lane with a pipeline of its own, whose layers compute together
            with those of the lanes beside it. All ranks are one pipeline when None.
        data: the dimension of the mesh along which lanes train on batches of their own, if any: ``fully_shard`` must
            divide all their parameters over it.

    Raises:
        UserError: a value is of another kind.
    """

    Executor = Literal["overlapped", "naive", "async_threaded"]
    """``overlapped``: transfers run beside the compute. ``naive``: an action, with its transfers, ends before the next
    begins. ``async_threaded``: the forwards of a batch run in a thread each, on a GPU in a stream each, then the
    backwards from the last to the first. The numbers are the same to the bit."""

    device: torch.device | str | None = None
    executor: Executor = "overlapped"
    compile: bool | str = False
    mesh: DeviceMesh | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        given = Arguments()
        if self.executor not in (known := get_args(Execution.Executor)):
            given.refuse(f"no executor is called {shown(self.executor)}", nearest(str(self.executor), known))
        if self.data is not None and self.mesh is None:
            given.refuse(f"data is {shown(self.data)} without a mesh", "give the mesh that has this dimension, too")
        if not isinstance(self.compile, bool | None):
            given.name("compile", self.compile, "aot_eager")
        given.check()

    @property
    def threaded(self) -> bool:
        """Whether the forwards of a batch run in threads."""
        return self.executor == "async_threaded"

    @property
    def no_timeline(self) -> tuple[str, str] | None:
        """Why a run has no timeline of actions, and what to do instead; None where it has one."""
        return ("the forwards of the executor async_threaded go on in threads, several at one time: there is no "
                "timeline of actions one after the other", "use the executor overlapped, which computes the same "
                "numbers") if self.threaded else None

    @property
    def backend(self) -> str | None:
        """The backend of torch.compile: torch's default one for True; None where layers are not compiled."""
        return ("inductor" if self.compile is True else str(self.compile)) if self.compile else None
