"""Gather the weights of stages that ``fully_shard`` (FSDP2) divides over lanes, sum their gradients, and divide both
again, when the schedule says so.

By itself ``fully_shard`` gathers in hooks around every forward and reduces in every backward. Its hooks find nothing to
do here: weights are gathered before the first forward of an update, once, and it is told not to synchronise gradients.
They accumulate in the gathered parameters, also those of weight halves, and are summed in the order of the lanes, as
the replicas of a stage are. Of FSDP2 only public names are used.

Of n lanes a rank holds 1/n of the weights and of the optimizer's state of its stages, from UNSHARD to RESHARD also the
whole weights, from the first backward to REDUCE_GRAD the whole gradients, and then 1/n of their sums until the step. A
sum takes a bucket's memory (:data:`~vpipe.runtime.reducer.BUCKET_BYTES`) besides. With a flush the last stage of a rank
has its last backward while all others of the rank are gathered: at most all are at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.reducer import by_size
from vpipe.runtime.sharded_tensors import added, is_sharded, local, wrapped
from vpipe.runtime.stage import Stage


class FullyShardedStages:
    """The stages of a rank whose weights lanes share out.

    Args:
        stages: of the rank.
        group: of the ranks with the same place in lanes that average their gradients, in their order; None without any.

    Attributes:
        place, lanes: of this rank's lane among these, and how many they are.
        divided: by stage what this rank has of its parameters.
    """

    def __init__(self, stages: Mapping[int, Stage], group: dist.ProcessGroup | None = None) -> None:
        self._stages, self._group = stages, group
        self.place, self.lanes = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if group is None:
            return
        fsdp = sys.modules.get("torch.distributed.fsdp")  # what nobody has imported is not in use
        kinds: tuple[type, ...] = () if fsdp is None else (fsdp.FSDPModule,)
        self._modules: dict[int, list[Any]] = {
            s: [part for layer in stage.modules.values() for part in layer.modules() if isinstance(part, kinds)]
            for s, stage in stages.items()}
        for part in (part for modules in self._modules.values() for part in modules):
            part.set_requires_gradient_sync(False, recurse=False)
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
        self.divided = {s: stage.weights.leaves() for s, stage in stages.items()}
        self._sums: dict[int, Sequence[Tensor | None]] = {}

    def __contains__(self, stage: int) -> bool:
        return self._group is not None and stage in self._stages

    def unshard(self, stage: int, update: int = 0) -> None:
        """Gather the weights of a stage."""
        for part in self._modules[stage]:
            part.unshard()
        self._stages[stage].weights.adopt()

    def reduce(self, stage: int, update: int) -> None:
        """Add up the gradients of a stage over lanes; this rank takes the sums of what it has of the weights."""
        weights = self._stages[stage].weights
        weights.complete_gradients()
        gradients = weights.pop_gradients()
        for members in by_size([*map(local, weights.graded())]):
            for i, total in zip(members, self._summed(stage, members, gradients), strict=True):
                gradients[i] = total
        self._sums[stage] = gradients

    def _summed(self, stage: int, members: Sequence[int], gradients: list[Tensor | None]) -> Iterator[Tensor | None]:
        """Yield the sums of this rank's parts of some gradients, which may be missing in some lanes."""
        message, sizes = self._message(stage, members, gradients)
        for i in members:  # they have been copied: their memory is for what arrives
            gradients[i] = None
        mine, divided = sizes[self.place], [self.divided[stage][i] for i in members]
        arrived = message.new_empty(self.lanes * mine)
        dist.all_to_all_single(arrived, message, [mine] * self.lanes, sizes, group=self._group)
        del message
        first, *others = arrived.view(self.lanes, mine)
        sums = torch.split(added(first, others).clone(), [*(local(leaf).numel() for leaf in divided), len(members)])
        for each, leaf, count in zip(sums, divided, sums[-1].tolist(), strict=False):
            yield wrapped(each.view(local(leaf).shape), leaf) if count else None

    def _message(self, stage: int, members: Sequence[int],
                 gradients: Sequence[Tensor | None]) -> tuple[Tensor, list[int]]:
        """Return what every lane gets: its parts of gradients, then for each whether there is one; and the sizes."""
        whole, divided = self._stages[stage].weights.graded(), self.divided[stage]
        parts = [_parts(torch.zeros_like(local(whole[i])) if (gradient := gradients[i]) is None else local(gradient),
                        divided[i], self.lanes) for i in members]
        there = parts[0][0].new_tensor([gradients[i] is not None for i in members])
        pieces = [[*(of_all[lane] for of_all in parts), there] for lane in range(self.lanes)]
        sizes = [sum(piece.numel() for piece in of_lane) for of_lane in pieces]
        message, flat = there.new_empty(sum(sizes)), [piece for of_lane in pieces for piece in of_lane]
        for place, piece in zip(torch.split(message, [piece.numel() for piece in flat]), flat, strict=True):
            place.view(piece.shape).copy_(piece)
        return message, sizes

    def reshard(self, stage: int, update: int = 0) -> None:
        """Give back the gathered weights of a stage, and give its own parts the sums of their gradients."""
        weights = self._stages[stage].weights
        for part in self._modules[stage]:
            part.reshard()
        weights.adopt()
        if (sums := self._sums.pop(stage, None)) is not None:
            weights.put_gradients(sums)


def check_divided(stage: Stage) -> None:
    """Refuse what lanes with batches of their own would train apart."""
    for name, leaf in zip(stage.weights.names, stage.weights.leaves(), strict=True):
        if not is_sharded(leaf):
            raise UserError(f"'{name}' is not divided by fully_shard, but lanes train on batches of their own: each "
                            "would have its own gradient", hint="apply fully_shard to every layer with parameters")
        if leaf.dtype is not stage.dtypes[name]:
            raise UserError(f"'{name}' was {stage.dtypes[name]} when fully_shard divided it, but precision "
                            f"'{stage.precision.name}' trains {leaf.dtype}", hint="make the layer fp32 before: "
                                                                             "fully_shard(layer.float(), ...)")
    if stage.spec.borrowed:
        raise UserError(f"stage {stage.spec.index} shares weights with another, and both are divided by fully_shard",
                        hint="place the layers that share a weight in one stage, or do not tie them")
    for number, layer in stage.modules.items():
        if any(getattr(part, "track_running_stats", False) for part in layer.modules()):
            raise UserError(f"layer '{stage.layer_names[number]}' keeps running statistics, which lanes with batches "
                            "of their own would keep apart", hint="use layer or group norm, or replicas of the stage")


def _parts(full: Tensor, divided: nn.Parameter, count: int) -> list[Tensor]:
    """Return the parts of a tensor as fully_shard has divided its parameter: the last ones may be smaller, or empty."""
    assert is_sharded(divided)
    dim = int(getattr(divided.placements[0], "dim", 0))  # the first of the mesh's
    each = -(-full.shape[dim] // count)
    return [full.narrow(dim, start := min(each * i, full.shape[dim]), min(each, full.shape[dim] - start))
            for i in range(count)]
