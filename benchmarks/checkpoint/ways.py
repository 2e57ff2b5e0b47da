"""Three ways to save what the ranks of a pipeline hold, and to read it again."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import Manifest
from vpipe.checkpoint.save import Saver
from vpipe.distributed import exchange


class Way(Protocol):
    """A way to save, with all ranks, into ``root``, which holds the latest checkpoint only.

    Attributes:
        pauses: whether training must wait until the checkpoint is complete.
    """

    root: Path
    pauses: bool

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Returns when training may go on."""

    def ended(self) -> float:
        """Wait until the last checkpoint is complete; when that was, as ``perf_counter`` counts."""

    def load(self, into: dict[str, Tensor]) -> None:
        """Read this rank's part of the last checkpoint again."""

    def remove_older(self) -> None:
        """On one rank, now that the last is complete: as in training, that before it stays until then."""


class Ours:
    """vpipe's saver: a copy in memory that is kept, then a thread writes, checks and renames."""

    pauses = False

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self._saver = Saver(root, 1, exchange("checkpoints"))
        self._began = 0.0

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        self._began = time.perf_counter()
        self._saver.save(Manifest(step, step, 0), tensors)

    def ended(self) -> float:
        self._saver.wait()
        saved = self._saver.results[-1]
        assert saved.error is None, saved.error
        return self._began + saved.seconds

    def load(self, into: dict[str, Tensor]) -> None:
        newest = Checkpoints(self.root).newest()
        assert newest is not None
        into.update(Checkpoint(newest, Manifest.load(newest)).tensors(into))

    def remove_older(self) -> None:
        """Done: the saver keeps one."""


class Plain:
    """``dcp.save``: training waits for all of it."""

    pauses = True

    def __init__(self, root: Path) -> None:
        self.root, self._last, self._ended = root, 0, 0.0

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        dcp.save(dict(tensors), checkpoint_id=self.root / str(step))
        self._last, self._ended = step, time.perf_counter()

    def ended(self) -> float:
        return self._ended

    def load(self, into: dict[str, Tensor]) -> None:
        dcp.load(into, checkpoint_id=self.root / str(self._last))

    def remove_older(self) -> None:
        for path in self.root.iterdir():
            if path.name != str(self._last):
                shutil.rmtree(path)


class Asynchronous(Plain):
    """``dcp.async_save`` as it comes, over a process group of its own: a copy, then a thread writes."""

    pauses = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._group = dist.new_group(backend="gloo")

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._future = dcp.async_save(dict(tensors), checkpoint_id=self.root / str(step),
                                          process_group=self._group)
        self._future.add_done_callback(lambda _: setattr(self, "_ended", time.perf_counter()))
        self._last = step

    def ended(self) -> float:
        self._future.result()
        return self._ended


WAYS = {"vpipe": Ours, "dcp.save": Plain, "dcp.async_save": Asynchronous}
