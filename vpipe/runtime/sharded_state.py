"""The state of a pipeline for ``torch.distributed.checkpoint`` (DCP): a rank has the tensors of its stages, of DTensors
its shards.

It is nested as ``get_state_dict(model, optimizers, options=StateDictOptions(flatten_optimizer_state_dict=True))`` of
torch nests what a plain model has, so that DCP loads one into the other, whatever the mesh and the cut::

    model      <layer>.<parameter or buffer>
    optimizer  state.<layer>.<parameter>.<entry>
    vpipe      position; and what else a pipeline resumes from, see :mod:`vpipe.runtime.state_dict`
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.checkpoint.manifest import Position
from vpipe.description.description import Description
from vpipe.errors import UserError
from vpipe.runtime.engine import Engine
from vpipe.runtime.sharded_tensors import is_sharded, whole
from vpipe.runtime.stage_optimizer import StageOptimizer
from vpipe.runtime.state_dict import optimizer_entries
from vpipe.runtime.weight_versions import WeightVersions

_POSITION = "position"


class ShardedState:
    """What ``torch.distributed.checkpoint`` calls stateful: ``dcp.save({"pipe": pipe.sharded}, checkpoint_id=folder)``,
    and ``dcp.load`` with the same into a new pipeline. All ranks call both."""

    def __init__(self, engine: Engine, description: Description) -> None:
        self._engine, self._batch, self._make_optimizer = engine, description.microbatches, \
            description.update.make_optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; an asynchronous pipeline drains first.

        Tensors are the pipeline's own, or whole ones: DCP copies them when it saves, and loads into them. Before the
        first update optimizers have no state: there it is as steps without gradients would leave it, for DCP to load
        into.
        """
        here = self._engine.tensors_here()
        position, optimizer = self._engine.position, dict[str, Tensor]()
        # Also without a step of its own a pipeline may have the state that a plain model saved.
        there = any(self._engine.collectives.job.all_gather(any(name.startswith("optim.") for name in here)))
        for worker in self._engine.workers.values():
            for stage, made in worker.optimizer_steps.optimizers.items():
                weights = worker.stages[stage].weights
                entries = optimizer_entries(
                    made if there else self._stepped_without_gradients(stage, weights), weights)
                optimizer |= {f"state.{name.removeprefix('optim.')}": tensor for name, tensor in entries.items()}
        numbers = [int(there), position.steps, position.samples, *position.as_numbers(self._batch).values()]
        model = {name: value for stage in self._engine.local_stages for name, value in stage.state().items()}
        others = {name: tensor for name, tensor in here.items() if not name.startswith(("model.", "optim."))}
        return {part: {name: _in_one_block(tensor) for name, tensor in tensors.items()} for part, tensors in (
            ("model", model), ("optimizer", optimizer), ("vpipe", {_POSITION: torch.tensor(numbers), **others}))}

    def _stepped_without_gradients(self, stage: int, weights: WeightVersions) -> StageOptimizer:
        """Return optimizers of copies of a stage's parameters, with the entries that real ones have after a step."""
        copies = {name: nn.Parameter(master.detach().clone()) for name, master in weights.masters.items()}
        scratch = StageOptimizer.build(self._make_optimizer, copies, stage)
        if weights.owned is not None:
            scratch.own(weights.owned)
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        scratch.step()
        return scratch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned and DCP has filled, on every rank, before the pipeline trains.

        A model's part alone will do, and so will what a plain model saved, which says nothing of ``vpipe``.

        Raises:
            UserError: training has begun, or a tensor of the model is missing.
        """
        if "model" not in state:
            raise UserError(f"the state has the parts {', '.join(map(str, state)) or 'none'}, but not 'model'",
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
            warnings.warn(line, stacklevel=3)


def _in_one_block(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor of which a rank has several blocks, such as rows of each part of a fused projection.

    DCP takes them for one block: it refuses to save them, and would load others (torch 2.13).
    """
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Replicate, Shard
    # Where a later dimension of the mesh divides on, as under FSDP2 with tensor parallelism, they are one.
    return tensor if type(tensor.placements[-1]) in (Shard, Replicate) else whole(tensor)
