"""Describe how a rank executes its actions: on which device, by which executor, with compiled layers or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from vpipe.arguments import Arguments, shown
from vpipe.errors import UserError, nearest
from vpipe.plugins import PluginGroup

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_BACKEND = "inductor"
"""Of torch.compile."""


@dataclass(frozen=True)
class Executor:
    """An executor: the class of the workers that execute a rank's actions, and what does not go with it.

    A package adds one by :meth:`register`, in a module to which an entry point in the group ``vpipe.executors`` points
    under the executor's name (docs/executors.md). A config that names it imports the module, which needs no torch.

    Attributes:
        name: in a config.
        worker: the class, ``module:class``, of :class:`vpipe.runtime.Worker`; a pipeline that is built imports it.
        threaded: the forwards of a batch run in threads, then the backwards from the last microbatch to the first; the
            gradients are nevertheless added in the order of the microbatches. The schedule must be ``reversible``.
        refuses: by what it does not do (docs/executors.md lists the words), why, and what to do instead.
    """

    name: str
    worker: str
    threaded: bool = False
    refuses: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def register(self) -> None:
        """Add the executor to those that a pipeline may have.

        Raises:
            UserError: another one has its name.
        """
        known = _EXECUTORS.setdefault(self.name, self)
        if known != self:
            raise UserError(f"there is already an executor called '{self.name}': {known.worker}",
                            hint="choose another name")

    @classmethod
    def named(cls, name: str) -> Executor:
        """Return the executor called ``name``.

        Raises:
            UserError: there is none (the hint names the nearest), or several, or its package cannot be imported.
        """
        return PLUGINS.named(name, _EXECUTORS, lambda executor: __name__ if executor in _OWN else "", cls.names)

    @classmethod
    def names(cls) -> list[str]:
        """Return every name of :meth:`named`, without importing the packages that announce them."""
        return sorted({*_EXECUTORS, *PLUGINS.names})


PLUGINS = PluginGroup("vpipe.executors", "executor")
_OWN = (Executor("overlapped", "vpipe.runtime.worker:Worker"), Executor("naive", "vpipe.runtime.worker:NaiveWorker"))
_EXECUTORS = {executor.name: executor for executor in _OWN}


@dataclass(frozen=True)
class Execution:
    """How a rank executes its actions.

    Attributes:
        device: of this process: ``cpu``, ``cuda`` or ``cuda:1``. When None, a GPU where there is one: that of
            ``LOCAL_RANK`` (ranks that outnumber GPUs share them), or the one that ``torch.cuda.set_device`` chose; else
            the processor. ``cuda`` means the same GPU. It becomes the current one of this process.
        executor: ``overlapped``, whose transfers run beside the compute; ``naive``, under which an action, with its
            transfers, has ended when the next begins; or another :class:`Executor`. The numbers are the same to the
            bit; see docs/executors.md.
        compile: compile every layer with torch.compile: True for its default backend, or the name of another one.
            Schedules that split the backward are refused.
        mesh: of all ranks, one of whose dimensions is called ``pp``: along it lie the ranks of a pipeline, and each
            combination of its other coordinates is a lane with a pipeline of its own, whose layers compute together
            with those of the lanes beside it. All ranks are one pipeline when None.
        data: the dimension of the mesh along which lanes train on batches of their own, if any: ``fully_shard`` must
            divide all their parameters over it.

    Raises:
        UserError: a value is of another kind, or torch.compile has no such backend.
    """

    device: torch.device | str | None = None
    executor: str = "overlapped"
    compile: bool | str = False
    mesh: DeviceMesh | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        given = Arguments()
        given.name("executor", self.executor, *Executor.names())
        if self.data is not None and self.mesh is None:
            given.refuse(f"data is {shown(self.data)} without a mesh", "give the mesh that has this dimension, too")
        if not isinstance(self.compile, bool | None):
            given.name("compile", self.compile, "aot_eager")
        given.check()
        if (backend := self.backend) is not None:
            import torch  # here, for a config is read without torch

            if backend not in torch.compiler.list_backends(exclude_tags=()):
                raise UserError(f"torch.compile has no backend '{backend}'",
                                hint=nearest(backend, (DEFAULT_BACKEND, "aot_eager", "eager", "cudagraphs")))
        _ = self.threaded  # refuses an executor that is not there

    @cached_property
    def threaded(self) -> bool:
        """Whether the forwards of a batch run in threads."""
        return Executor.named(self.executor).threaded

    @property
    def no_timeline(self) -> tuple[str, str] | None:
        """Why a run has no timeline of actions, and what to do instead; None where it has one."""
        return self.refused("timeline")

    def refused(self, what: str) -> tuple[str, str] | None:
        """Return why the executor does not do something, and what to do instead; None where it does."""
        return Executor.named(self.executor).refuses.get(what)

    @cached_property
    def backend(self) -> str | None:
        """The backend of torch.compile: torch's default one for True; None where layers are not compiled."""
        return (DEFAULT_BACKEND if self.compile is True else str(self.compile)) if self.compile else None
