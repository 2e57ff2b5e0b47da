"""Gather the weights of stages that ``fully_shard`` (FSDP2) divides over lanes, sum their gradients, and divide both
again, when the schedule says so.

By itself ``fully_shard`` gathers in hooks around every forward and reduces in every backward. Its hooks find nothing to
do here: weights are gathered before the first forward of an update, once, and it is told not to synchronise gradients.
They accumulate in the gathered parameters, also those of weight halves, and are summed in the order of the lanes, as
the replicas of a stage are. Of FSDP2 only public names are used.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from vpipe.errors import UserError
from vpipe.runtime.sharded_tensors import is_sharded, local, wrapped
from vpipe.runtime.stage import Stage


class FullyShardedStages:
    """The stages of a rank whose weights lanes share out.

    Args:
        stages: of the rank.
        group: of the ranks with the same place in lanes that average their gradients, in their order; None without any.

    Attributes:
        place, lanes: of this rank's lane among these, and how many they are.
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
        self._divided = {s: stage.weights.leaves() for s, stage in stages.items()}
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
        gradients, found = weights.pop_gradients(), dict[int, Tensor | None]()
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, leaf in enumerate(weights.graded()):
            by_dtype[leaf.dtype].append(i)
        for members in by_dtype.values():
            found |= zip(members, self._summed([gradients[i] for i in members],
                                               [weights.graded()[i] for i in members],
                                               [self._divided[stage][i] for i in members]), strict=True)
        self._sums[stage] = [found[i] for i in range(len(gradients))]

    def _summed(self, gradients: Sequence[Tensor | None], whole: Sequence[nn.Parameter],
                divided: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the sums of this rank's parts of gradients, which may be missing in some lanes.

        One message to every lane: its parts, then for each gradient whether there is one.
        """
        full = [torch.zeros_like(local(leaf)) if gradient is None else local(gradient)
                for gradient, leaf in zip(gradients, whole, strict=True)]
        there = full[0].new_tensor([gradient is not None for gradient in gradients])
        parts = [_parts(each, _dimension(leaf), self.lanes) for each, leaf in zip(full, divided, strict=True)]
        messages = [torch.cat([*(of_all[lane].reshape(-1) for of_all in parts), there]) for lane in range(self.lanes)]
        mine = messages[self.place].numel()
        arrived = torch.empty(self.lanes * mine, dtype=there.dtype, device=there.device)
        dist.all_to_all_single(arrived, torch.cat(messages), [mine] * self.lanes,
                               [message.numel() for message in messages], group=self._group)
        total, *others = arrived.view(self.lanes, mine)
        for other in others:
            total += other
        sums = torch.split(total, [*(local(leaf).numel() for leaf in divided), len(divided)])
        return [wrapped(each.view(local(leaf).shape), leaf) if count else None
                for each, leaf, count in zip(sums, divided, sums[-1].tolist(), strict=False)]

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
    if stage.borrowed:
        raise UserError(f"stage {stage.spec.index} shares weights with another, and both are divided by fully_shard",
                        hint="place the layers that share a weight in one stage, or do not tie them")
    for number, layer in stage.modules.items():
        if any(isinstance(part, _NormBase) and part.track_running_stats for part in layer.modules()):
            raise UserError(f"layer '{stage.layer_names[number]}' keeps running statistics, which lanes with batches "
                            "of their own would keep apart", hint="use layer or group norm, or replicas of the stage")


def _dimension(divided: nn.Parameter) -> int:
    """Return the dimension along which fully_shard has divided a parameter: the first of its mesh's."""
    assert is_sharded(divided)
    return int(getattr(divided.placements[0], "dim", 0))


def _parts(full: Tensor, dim: int, count: int) -> list[Tensor]:
    """Return the parts of a tensor as DTensor shares it out: the last ones may be smaller, or empty."""
    each = -(-full.shape[dim] // count)
    return [full.narrow(dim, start := min(each * i, full.shape[dim]), min(each, full.shape[dim] - start))
            for i in range(count)]
