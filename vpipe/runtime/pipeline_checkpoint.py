"""Save a pipeline to a folder and load it; training waits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vpipe.checkpoint.checkpoint import Checkpoint
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import Manifest, Position
from vpipe.checkpoint.save import save_checkpoint
from vpipe.checkpoint.shards import check_dtypes
from vpipe.distributed.watchdog import watch
from vpipe.errors import UserError
from vpipe.model.model import Model
from vpipe.runtime.engine import Engine


class PipelineCheckpoint:
    """A folder with the state of a pipeline; every rank makes the same calls.

    Args:
        batch: microbatches of a batch.
        seed: of the run.
        folder: of a checkpoint, with any name.
    """

    def __init__(self, engine: Engine, batch: int, seed: int, folder: Path) -> None:
        self._engine, self._batch, self._seed, self._folder = engine, batch, seed, folder

    def save(self, arrangement: Mapping[str, Any]) -> None:
        """Write the checkpoint; see :meth:`vpipe.Pipeline.save`."""
        with watch.activity.during("saving a checkpoint"), self._engine.collectives.problems_of_all():
            tensors = self._engine.checkpoint_state()
            check_dtypes(tensors)
        position = self._engine.position
        about = Manifest(position.steps, position.samples, self._seed, numbers=position.as_numbers(self._batch),
                         arrangement={**arrangement, **self._optimizers()})
        with watch.activity.during("saving a checkpoint"):
            save_checkpoint(self._folder, about, tensors, self._engine.collectives.job, self._engine.interrupts)

    def load(self, model: Model) -> Position:
        """Load the checkpoint, or the newest of a run's folder; return its position. See :meth:`vpipe.Pipeline.load`.

        Raises:
            UserError: it does not fit, or is damaged; on every rank with the problems of the first that has any.
        """
        with watch.activity.during("loading a checkpoint"), self._engine.collectives.problems_of_all():
            folder = Checkpoints.find(self._folder, _load_call)
            manifest = Manifest.load(folder)
            manifest.check_compatible(model, "load it into a pipeline of the model that saved it")
            self._check_run(manifest)
            position = manifest.position(self._batch)
            self._engine.check_restorable(position)
            tensors = Checkpoint(folder, manifest).tensors(filter(self._engine.wants, manifest.tensors),
                                                           resume_hint=_load_call)
        warning = self._engine.restore(position, tensors)
        if self._engine.collectives.job.rank == 0 and warning is not None:
            warnings.warn(warning, stacklevel=3)
        return position

    def _optimizers(self) -> dict[str, Any]:
        """Return the classes of all ranks' optimizers; of several, also the one that steps each parameter."""
        kind_of = self._engine.collectives.exchange.united(self._own_kinds())
        kinds = sorted(set(kind_of.values()))
        return {"optimizers": kinds, **({"optimizer_of": kind_of} if len(kinds) > 1 else {})}

    def _own_kinds(self) -> dict[str, str]:
        """Return the class of the optimizer that steps each parameter of this process."""
        return {name: type(optimizer).__name__ for worker in self._engine.workers.values()
                for stage in worker.optimizer_steps.optimizers.values()
                for name, (optimizer, _) in stage.of_parameter.items()}

    def _check_run(self, manifest: Manifest) -> None:
        if manifest.arrangement.get("imported"):  # weights alone
            return
        if manifest.seed != self._seed:
            raise UserError(f"the checkpoint is of a run with seed {manifest.seed}, this pipeline has {self._seed}",
                            hint=f"give it seed={manifest.seed}: dropout follows it")
        theirs, mine = manifest.arrangement.get("optimizers", []), self._own_kinds()
        if theirs and mine and not set(theirs) & set(mine.values()):
            raise UserError(f"the checkpoint has the state of {' and '.join(theirs)}, this pipeline trains with "
                            f"{' and '.join(sorted(set(mine.values())))}",
                            hint="give it an optimizer of the same kind")
        kind_of = manifest.arrangement.get("optimizer_of") or (
            dict.fromkeys(mine, theirs[0]) if len(theirs) == 1 else {})
        for name, kind in mine.items():
            if kind_of.get(name, kind) != kind and any(key.startswith(f"optim.{name}.") for key in manifest.tensors):
                raise UserError(f"the checkpoint has the state of {kind_of[name]} for '{name}', which {kind} steps in "
                                "this pipeline", hint="give every parameter an optimizer of the kind that saved")


def _load_call(folder: Path) -> str:
    """Return the call that resumes from a checkpoint."""
    return f"pipe.load({str(folder)!r})"
