"""Save a pipeline to a folder and load it, while training waits; give its state to ``torch.distributed.checkpoint``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vpipe.arguments import shown
from vpipe.checkpoint.checkpoint import Checkpoint
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import Manifest, Position
from vpipe.checkpoint.save import save_checkpoint
from vpipe.checkpoint.shards import check_dtypes
from vpipe.distributed.watchdog import watch
from vpipe.errors import UserError
from vpipe.model.model import Model
from vpipe.runtime.collectives import together
from vpipe.runtime.engine import Engine
from vpipe.runtime.sharded_tensors import is_sharded, whole
from vpipe.runtime.stage_optimizer import stepped_without_gradients
from vpipe.runtime.state_dict import optimizer_entries

_POSITION, _OPTIONS = "position", (bool, int, float, str, tuple, Tensor, type(None))


def save_pipeline(engine: Engine, folder: Path, arrangement: Mapping[str, Any]) -> None:
    """Write a checkpoint; see :meth:`vpipe.Pipeline.save`."""
    with watch.activity.during("saving a checkpoint"), engine.collectives.job.whole():
        tensors = engine.checkpoint_state()
        check_dtypes(tensors)
    position, run = engine.training.position, engine.description
    kind_of = engine.collectives.exchange.united(_own_kinds(engine))
    kinds = sorted(set(kind_of.values()))
    optimizers = {"optimizers": kinds, **({"optimizer_of": kind_of} if len(kinds) > 1 else {})}
    about = Manifest(position.steps, position.samples, run.seed, numbers=position.as_numbers(run.microbatches),
                     arrangement={**arrangement, **optimizers})
    with watch.activity.during("saving a checkpoint"):
        save_checkpoint(folder, about, tensors, engine.collectives.job, engine.interrupts)


def load_pipeline(engine: Engine, path: Path, model: Model) -> Position:
    """Load a checkpoint, or the newest of a run's folder; return its position. See :meth:`vpipe.Pipeline.load`.

    Raises:
        UserError: it does not fit, or is damaged; on every rank with the problems of the first that has any.
    """
    with watch.activity.during("loading a checkpoint"), engine.collectives.job.whole():
        folder = Checkpoints.find(path, _load_call)
        manifest = Manifest.load(folder)
        manifest.check_compatible(model, "load it into a pipeline of the model that saved it")
        _check_run(engine, manifest)
        position = manifest.position(engine.description.microbatches)
        engine.training.check_restorable(position)
        tensors = Checkpoint(folder, manifest).tensors(filter(engine.wants, manifest.tensors), resume_hint=_load_call)
    warning = engine.restore(position, tensors)
    if engine.collectives.job.rank == 0 and warning is not None:
        warnings.warn(warning, stacklevel=4)
    return position


def _own_kinds(engine: Engine) -> dict[str, str]:
    """Return the class of the optimizer that steps each parameter of this process."""
    return {name: type(optimizer).__name__ for worker in engine.workers.values()
            for stage in worker.optimizer_steps.optimizers.values()
            for name, (optimizer, _) in stage.of_parameter.items()}


def _check_run(engine: Engine, manifest: Manifest) -> None:
    if manifest.arrangement.get("imported"):  # weights alone
        return
    if manifest.seed != (seed := engine.description.seed):
        raise UserError(f"the checkpoint is of a run with seed {manifest.seed}, this pipeline has {seed}",
                        hint=f"give it seed={manifest.seed}: dropout follows it")
    theirs, mine = manifest.arrangement.get("optimizers", []), _own_kinds(engine)
    if theirs and mine and not set(theirs) & set(mine.values()):
        raise UserError(f"the checkpoint has the state of {' and '.join(theirs)}, this pipeline trains with "
                        f"{' and '.join(sorted(set(mine.values())))}", hint="give it an optimizer of the same kind")
    kind_of = manifest.arrangement.get("optimizer_of") or (dict.fromkeys(mine, theirs[0]) if len(theirs) == 1 else {})
    for name, kind in mine.items():
        if kind_of.get(name, kind) != kind and any(key.startswith(f"optim.{name}.") for key in manifest.tensors):
            raise UserError(f"the checkpoint has the state of {kind_of[name]} for '{name}', which {kind} steps in this "
                            "pipeline", hint="give every parameter an optimizer of the kind that saved")


def _load_call(folder: Path) -> str:
    """Return the call that resumes from a checkpoint."""
    return f"pipe.load({str(folder)!r})"


class ShardedState:
    """The state of a pipeline for ``torch.distributed.checkpoint`` (DCP): a rank has the tensors of its stages, of
    DTensors its shards.

    It is what DCP calls stateful: ``dcp.save({"pipe": pipe.sharded}, checkpoint_id=folder)``, and ``dcp.load`` with the
    same into a new pipeline. All ranks call both.

    It is nested as ``get_state_dict(model, optimizers, options=StateDictOptions(flatten_optimizer_state_dict=True))``
    of torch nests what a plain model has, so that DCP loads one into the other, whatever the mesh and the cut::

        model      <layer>.<parameter or buffer>
        optimizer  state.<layer>.<parameter>.<entry>; param_groups.<layer>.<parameter>.<option>, which a pipeline does
                   not load: it has those of its own optimizers
        vpipe      position; and what else a pipeline resumes from, see :mod:`vpipe.runtime.state_dict`
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._batch = engine, engine.description.microbatches

    @together
    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; an asynchronous pipeline drains first.

        Tensors are the pipeline's own, or whole ones: DCP copies them when it saves, and loads into them. Before the
        first update optimizers have no state: there it is as steps without gradients would leave it, for DCP to load
        into.
        """
        here = self._engine.tensors_here()
        position, optimizer = self._engine.training.position, dict[str, Any]()
        # Also without a step of its own a pipeline may have the state that a plain model saved.
        there = any(self._engine.collectives.job.all_gather(any(name.startswith("optim.") for name in here)))
        for worker in self._engine.workers.values():
            for stage, made in worker.optimizer_steps.optimizers.items():
                weights = worker.stages[stage].weights
                entries = optimizer_entries(made if there else stepped_without_gradients(made), weights)
                optimizer |= {f"state.{name.removeprefix('optim.')}": tensor for name, tensor in entries.items()}
                optimizer |= {f"param_groups.{name}.{key}": deepcopy(value)
                              for name, (each, group) in made.of_parameter.items() if weights.owns(name)
                              for key, value in each.param_groups[group].items()
                              if key != "params" and isinstance(value, _OPTIONS)}
        numbers = [int(there), position.steps, position.samples, *position.as_numbers(self._batch).values()]
        model = {name: value for stage in self._engine.local_stages for name, value in stage.state().items()}
        others = {name: tensor for name, tensor in here.items() if not name.startswith(("model.", "optim."))}
        return {part: {name: _in_one_block(tensor) for name, tensor in tensors.items()} for part, tensors in (
            ("model", model), ("optimizer", optimizer),
            ("vpipe", {_POSITION: torch.tensor(numbers, device="cpu"), **others}))}

    @together
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned and DCP has filled, on every rank, before the pipeline trains.

        A model's part alone will do, and so will what a plain model saved, which says nothing of ``vpipe``.

        Raises:
            UserError: training has begun, or a tensor of the model is missing.
        """
        with self._engine.collectives.job.whole():
            if not isinstance(state, Mapping) or "model" not in state:
                parts = ", ".join(map(str, state)) or "none" if isinstance(state, Mapping) else shown(state)
                raise UserError(f"the state has the parts {parts}, but not 'model'",
                                hint="give what pipe.state_dict(sharded=True) returned, filled by dcp.load")
            others = dict(state.get("vpipe", {}))
            position, there = Position(0, 0), 1
            if (numbers := others.pop(_POSITION, None)) is not None:
                there, steps, samples, microbatches, begun, batch = numbers.tolist()
                position = Position.from_numbers(steps, samples, {"microbatches": microbatches, "begun": begun,
                                                                  "batch": batch}, self._batch)
            optimizer = state.get("optimizer", {}) if there else {}
            tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
            tensors |= {f"optim.{name.removeprefix('state.')}": tensor for name, tensor in optimizer.items()
                        if name.startswith("state.")}
        if (line := self._engine.restore(position, tensors | others)) and self._engine.collectives.job.rank == 0:
            warnings.warn(line, stacklevel=5)


def _in_one_block(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor of which a rank has several blocks, such as rows of each part of a fused projection.

    DCP takes them for one block: it refuses to save them, and would load others (torch 2.13).
    """
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Replicate, Shard
    # Where a later dimension of the mesh divides on, as under FSDP2 with tensor parallelism, they are one.
    return tensor if type(tensor.placements[-1]) in (Shard, Replicate) else whole(tensor)
