"""Compute what a stage costs from the profile of its layers: seconds and bytes for the simulator, memory by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, NamedTuple

from vpipe.description.cut import kept_inputs, ranges, stage_specs
from vpipe.plan.profile import LayerProfile, Profile
from vpipe.schedules.assignment import Placement
from vpipe.schedules.costs import Costs, Link, StageCosts


def stage_costs(profile: Profile, layers: range, recomputed: Collection[int] = (), split: bool = False,
                versions: int = 1, per_update: int | None = None, width: int = 1, shared: int = 0) -> StageCosts:
    """Return the costs of a stage of ``layers`` per microbatch.

    The seconds of a stage are those of its layers, of carrying out the action, of a receive and a send at every cut,
    and in steps of copying the weights where an older version is still in use. Backwards are measured while they add to
    existing gradients. The first backward of an update adds to none; what that saves is shared by all of the update.

    Args:
        layers: their numbers in the model.
        recomputed: those of them that drop their activations.
        split: the schedule halves backwards. If not, the halves here add up to a whole backward, which takes less time.
        versions: of its weights that it holds.
        per_update: microbatches of an update that one replica takes; None: so many that it makes no difference.
        width: replicas, which share the step where the profile says so.
        shared: bytes that count elsewhere, see :class:`KeptBytes`.
    """
    own, activations, sizes = [profile.layers[n] for n in layers], profile.activations, StageBytes.of(profile, layers)
    here = sorted(set(recomputed).intersection(layers))
    kept, full, _ = activations.held(layers, here)
    input_s = sum(layer.input_half.median for layer in own)
    weight_s = sum(layer.weight_half.median for layer in own)
    if not split:
        backward_s = sum(layer.backward.median for layer in own)
        share = input_s / (input_s + weight_s) if input_s + weight_s else 0.5
        input_s, weight_s = share * backward_s, (1 - share) * backward_s
    if per_update and profile.accumulate_bytes_per_s:
        weight_s = max(0.0, weight_s - sizes.trained / profile.accumulate_bytes_per_s / per_update)
    last = layers.stop == len(profile.layers)
    dispatch_s = profile.dispatch_s * (1 + (layers.start > 0) + (not last))
    if layers.stop <= profile.frozen_layers:  # it has forwards alone
        return StageCosts(sum(layer.forward.median for layer in own) + dispatch_s, 0.0, 0.0, step_s=profile.dispatch_s,
                          activation_bytes=0, weight_half_bytes=0, output_bytes=activations.output_bytes(layers.stop))
    return StageCosts(
        forward_s=sum(layer.forward.median for layer in own) + dispatch_s, input_s=input_s + dispatch_s,
        weight_s=weight_s + (profile.dispatch_s if split else 0.0),
        recompute_s=sum(profile.layers[number].recompute.median for number in here) + bool(here) * profile.dispatch_s,
        step_s=sum(layer.step.median for layer in own) / profile.sharers(width) + profile.dispatch_s
        + float(versions_s(profile, sizes.trained, versions)),
        activation_bytes=full - shared, kept_bytes=kept - shared, weight_half_bytes=sizes.halves,
        version_bytes=sizes.version, output_bytes=activations.output_bytes(layers.stop),
        gradient_bytes=activations.gradient_bytes(layers.start), tied_bytes=_lent_bytes(profile, layers),
        reduce_bytes=sizes.trained)


SUM_BYTES = 4 << 20
"""Of gradients, how many lanes send each other in one message, and have besides them while they sum them, or one larger
gradient (:data:`vpipe.runtime.reducer.BUCKET_BYTES`)."""

EXTRAPOLATION_COPIES = 3.2
"""An extrapolation takes as long as so many copies of the weights; measured on a processor with 12 matrices of 1024 x
1024: 8.6 ms, a copy of them 2.8 ms, and a fused AdamW 6.4 ms."""


def versions_s(profile: Profile, weights: Any, versions: int) -> Any:
    """Return the seconds that a step takes longer where an older version of so many bytes is in use: to copy it, and to
    extrapolate. Where steps make their version from master weights, neither was measured."""
    if versions == 1 or not profile.copy_bytes_per_s:
        return 0.0 * weights
    return (1 + EXTRAPOLATION_COPIES * profile.extrapolates) * weights / profile.copy_bytes_per_s


def pipeline_costs(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
                   placement: Placement, split: bool = False, versions: Sequence[int] = (),
                   per_update: Sequence[int] = ()) -> Costs:
    """Return the costs of all stages of a plan, and its links; per stage as in :func:`stage_costs`.

    Ranks are assumed to fill one host after the other, with as many on each as when the profile was measured.
    """
    kept = kept_bytes(profile, partition, recomputed, placement)
    stages = [stage_costs(profile, layers, again, split, versions[stage] if versions else 1,
                          per_update[stage] if per_update else None, len(placement[stage]), kept.shared[stage])
              for stage, (layers, again) in enumerate(zip(ranges(partition), recomputed, strict=True))]
    stages = [replace(cost, output_bytes=cost.output_bytes - kept.unsent[stage + 1], waiting_bytes=kept.waiting[stage])
              for stage, cost in enumerate(stages)]
    ranks = len({rank for group in placement for rank in group})
    default = Link(profile.default_link.latency_s, profile.default_link.bytes_per_s)
    links = {ends: Link(link.latency_s, link.bytes_per_s) for ends, link in profile.links.items() if max(ends) < ranks}
    hosts = () if profile.cores is None else tuple(rank // profile.identity.ranks_per_host for rank in range(ranks))
    return Costs(tuple(stages), default, links, cores=profile.cores, hosts=hosts)


class KeptBytes(NamedTuple):
    """Bytes of a microbatch's inputs of a stage that its rank has since an earlier stage of its own."""

    unsent: Counter[int]  # by stage: of inputs that are not sent to it
    shared: Counter[int]  # by stage: of inputs that count as activations of the earlier stage, which holds them longer
    waiting: Counter[int]  # by the earlier stage: of the others, between its forward and that of the later one


def kept_bytes(profile: Profile, partition: Sequence[int], recomputed: Sequence[Collection[int]],
               placement: Placement) -> KeptBytes:
    """Return what ranks keep for their later stages, or hand on to them."""
    specs, activations = stage_specs(profile.names, profile.fields, partition), profile.activations
    unsent, shared, waiting = Counter[int](), Counter[int](), Counter[int]()
    for stage, each in kept_inputs(placement, specs, profile.names, handed_on=True).items():
        layers = specs[each.since].layers
        sizes = {name: size for name, size in activations.tensors[specs[stage].layers.start].before
                 if name in each.names}
        if layers.stop > profile.frozen_layers:  # others hold nothing until a backward
            *_, held = activations.held(layers, recomputed[each.since])
            shared[stage] = sum(size for name, size in sizes.items() if name in held)
        if each.since < stage - 1:  # what the stage right before hands on waits for no other action
            unsent[stage] = sum(sizes.values())
            waiting[each.since] = unsent[stage] - shared[stage]
    return KeptBytes(unsent, shared, waiting)


def _lent_bytes(profile: Profile, layers: range) -> int:
    """Return the bytes of one version of the tied weights of a stage that others borrow."""
    sizes: dict[int, int] = {}
    for number, layer in enumerate(profile.layers):
        for owner, size in layer.tied.items():
            if number not in layers and owner in layers:
                sizes[owner] = max(size, sizes.get(owner, 0))
    return sum(sizes.values())


@dataclass(frozen=True)
class StageMemory:
    """The bytes of one replica of a stage at its peak."""

    weights: int  # the latest version, which is also the optimizer's, and what is never trained
    stashed: int  # older versions that microbatches in flight still use
    gradients: int  # of the weights
    # its state beside the weights, with master weights where the weights are rounded, the last changes of weights where
    # late gradients are corrected, and the average that follows the weights
    optimizer: int
    activations: int  # of all microbatches in flight, with what is held between the halves of backwards
    working: int  # the most that one backward, or one step, needs for a while

    @property
    def peak(self) -> int:
        return self.weights + self.stashed + self.gradients + self.optimizer + self.activations + self.working


def taken_bytes(tensors: float, process_bytes: int, kept_share: float) -> int:
    """Return the bytes that a process with so many bytes of tensors takes; see :class:`Profile`."""
    return process_bytes + math.ceil((1 + kept_share) * tensors)


def combined_memory(stages: Sequence[StageMemory]) -> StageMemory:
    """Return what a rank holds of its stages when each is at its peak; it works on one of them at a time."""
    held = {each.name: sum(getattr(stage, each.name) for stage in stages) for each in fields(StageMemory)}
    return StageMemory(**held | {"working": max(stage.working for stage in stages)})


@dataclass(frozen=True)
class StageBytes:
    """The bytes of consecutive layers as a stage, whatever its schedule, its replicas and what it recomputes."""

    trained: int = 0  # of the layers' own parameters
    frozen: int = 0  # of what is never trained
    optimizer: int = 0
    halves: int = 0  # of a microbatch between the halves of its backward
    working: int = 0  # the most that one backward needs
    largest: int = 0  # of a trained parameter
    largest_state: int = 0  # that the optimizer keeps for one
    # tied weights of earlier stages, by owning layer; and those that are not trained
    borrowed: Mapping[int, int] = field(default_factory=dict, hash=False)
    borrowed_frozen: Mapping[int, int] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, profile: Profile, layers: range) -> StageBytes:
        """Return those of a stage of some layers."""
        return reduce(lambda own, number: own.with_layer(profile.layers[number], layers.start), layers, cls())

    def with_layer(self, layer: LayerProfile, first: int) -> StageBytes:
        """Return those of the stage with one more layer; it begins with layer ``first``."""
        borrowed, borrowed_frozen = (
            {**known, **{owner: max(size, known.get(owner, 0)) for owner, size in tied.items() if owner < first}}
            for known, tied in ((self.borrowed, layer.tied), (self.borrowed_frozen, layer.frozen_tied)))
        # What the optimizer keeps for the largest parameter, if it keeps equally much for every byte.
        state = -(-layer.optimizer_bytes * layer.largest_bytes // layer.parameter_bytes) if layer.parameter_bytes else 0
        return StageBytes(
            self.trained + layer.parameter_bytes, self.frozen + layer.frozen_bytes,
            self.optimizer + layer.optimizer_bytes, self.halves + layer.weight_half_bytes,
            max(self.working, layer.working_bytes), max(self.largest, layer.largest_bytes),
            max(self.largest_state, state), borrowed, borrowed_frozen)

    @property
    def version(self) -> int:
        """Those of one version of the weights."""
        return self.trained + sum(self.borrowed.values())

    def memory(self, profile: Profile, versions: int, width: int = 1, lanes: int = 1,
               activations: int = 0) -> StageMemory:
        """Return what a replica holds with these activations; arguments as for :func:`stage_memory`."""
        stepped = profile.owned_bytes(self.trained, self.largest, width)
        changes = profile.extrapolated_bytes(stepped, versions)
        state = profile.averaged_bytes(stepped) + profile.owned_bytes(self.optimizer, self.largest_state, width)
        held = self.version + self.frozen + sum(self.borrowed_frozen.values())
        summed = min(self.trained, max(SUM_BYTES, self.largest)) if lanes > 1 else 0
        # In a step gradients of rounded weights become as wide as the master weights, twice as wide; and where it is
        # extrapolated, there is another copy of these, as they were before it.
        return StageMemory(
            weights=held if lanes == 1 else held + -(-held // lanes), stashed=(versions - 1) * self.version,
            gradients=self.version, optimizer=-(-state // lanes) + changes, activations=activations,
            working=max(stepped + changes if profile.identity.pure else 0, summed, self.working))


def stage_memory(profile: Profile, layers: range, recomputed: Collection[int], in_flight: int, versions: int,
                 weight_halves: int = 0, remade: int = 1, width: int = 1, lanes: int = 1,
                 waiting: int = 0) -> StageMemory:
    """Return what a replica of a stage of ``layers`` holds at most.

    Of n lanes whose weights ``fully_shard`` divides a rank has 1/n of the weights and of the optimizer's state all the
    time, and between UNSHARD and RESHARD the whole weights and the whole gradients of its stages. With a flush all its
    stages are gathered at once: none has its last backward before the rank's last stage has.

    Args:
        layers: their numbers in the model.
        recomputed: those of them that drop their activations.
        in_flight: microbatches between forward and backward.
        versions: of the weights, the latest among them.
        weight_halves: microbatches between the two halves of their backward.
        remade: microbatches in flight whose dropped activations are recomputed; right before the backward, one is.
        width: replicas, which share the optimizer's state where the profile says so.
        lanes: among which ``fully_shard`` divides the weights. Where their number does not divide the first dimension
            of a parameter, a rank has up to a row of it more.
        waiting: bytes of all microbatches that wait for a later stage of the rank, less those that count elsewhere.
    """
    own, (kept, full, _) = StageBytes.of(profile, layers), profile.activations.held(layers, recomputed)
    remade = min(remade, in_flight)
    return own.memory(profile, versions, width, lanes, remade * full + (in_flight - remade) * kept
                      + weight_halves * own.halves + waiting)
