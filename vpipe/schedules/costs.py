"""The costs of a schedule's actions: seconds and bytes per stage, and the links between ranks.

Every number may be an ``int``, a ``Fraction`` or a ``float``. The simulator counts exactly as long as none is a
``float``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from vpipe.schedules.assignment import Placement, Size, passes

Number = int | float | Fraction


@dataclass(frozen=True)
class StageCosts:
    """The costs of one microbatch on one stage.

    Attributes:
        forward_s: F.
        input_s: I, the input half of a backward; a whole backward takes ``input_s + weight_s``.
        weight_s: W, the weight half.
        recompute_s: R, the recomputation of a forward; 0 if the stage recomputes nothing. A backward without an R
            action before it recomputes by itself, and takes that much longer.
        step_s: one optimizer step.
        activation_bytes: M_B, held from the start of F until the end of B or I. A microbatch that is recomputed
            holds them from the start of the recomputation.
        weight_half_bytes: M_W, what W still needs, held from the end of I until the end of W.
        kept_bytes: what a microbatch that is recomputed holds from the start of F until then.
        waiting_bytes: what waits for the next stage of the rank besides, from the start of F until that of its F.
        version_bytes: one version of the weights; with the latest alone a stage holds one.
        output_bytes: what F sends to the next stage.
        gradient_bytes: what B or I sends to the previous stage.
        tied_bytes: the tied weights that this stage owns; their gradients are as large.
        reduce_bytes: the gradients of its weights, which its replicas sum. At every update each of w sends every other
            its w-th part of these, and then the sum of its own part. With 0 bytes the
            exchange still costs two latencies.
    """

    forward_s: Number
    input_s: Number
    weight_s: Number
    recompute_s: Number = 0
    step_s: Number = 0
    activation_bytes: Number = 1
    weight_half_bytes: Number = 1
    kept_bytes: Number = 0
    waiting_bytes: Number = 0
    version_bytes: Number = 0
    output_bytes: Number = 0
    gradient_bytes: Number = 0
    tied_bytes: Number = 0
    reduce_bytes: Number = 0


@dataclass(frozen=True)
class Link:
    """One direction between two ranks; transfers take it one after the other."""

    latency_s: Number = 0
    bytes_per_s: Number = math.inf

    def transfer_s(self, size_bytes: Number) -> Number:
        """Return the seconds that ``size_bytes`` take once the link is free."""
        if self.bytes_per_s == math.inf:  # not through a division: that would make an exact number a float
            return self.latency_s
        return self.latency_s + ratio(size_bytes, self.bytes_per_s)


@dataclass(frozen=True)
class Costs:
    """The costs of all stages, and the hardware.

    Attributes:
        default_link: between any two ranks that ``links`` does not name.
        links: by (source rank, target rank).
        overlap: ranks compute while they transfer. If not, both ranks are busy for the whole of a transfer:
            the sender starts nothing else until it is through, the receiver takes it between two actions. A
            transfer of zero duration blocks neither rank.
        cores: of every host. When more of its ranks compute, step or copy what they transfer than it has cores, all of
            these slow down alike; with None every rank has a device of its own.
        hosts: per rank, a number that those on the same host have in common; one host for all when empty.
        seconds: by kind and stage, those of packages' kinds and of copies, in place of what their rows say.
        host_link: between a rank's device and the memory of its host, for offloaded activations; the rank is busy
            meanwhile, as its copies are in the stream that computes.
    """

    stages: tuple[StageCosts, ...]
    default_link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    overlap: bool = True
    cores: int | None = None
    hosts: tuple[int, ...] = ()
    host_link: Link = Link()
    seconds: Mapping[tuple[str, int], Number] = field(default_factory=dict)

    def link(self, source: int, target: int) -> Link:
        """Return the link from rank ``source`` to rank ``target``."""
        return self.links.get((source, target), self.default_link)

    @classmethod
    def uniform(cls, size: Size, forward: Number = 1, input: Number = 1,  # noqa: A002 (the half's name everywhere)
                weight: Number = 1, transfer: Number = 0, step: Number = 0) -> Costs:
        """Return the costs of equal stages. The times are those of a whole rank; each of its chunks takes its share.

        Args:
            transfer: seconds from rank to rank, whatever the size.
        """
        stage = StageCosts(ratio(forward, size.chunks), ratio(input, size.chunks), ratio(weight, size.chunks),
                           step_s=ratio(step, size.chunks))
        return cls((stage,) * size.stages).with_transfers(transfer)

    @classmethod
    def of_ranks(cls, placement: Placement, recomputing: Collection[int] = (), *, forward_s: Number = 1,
                 input_s: Number = 1, weight_s: Number = 1, transfer_s: Number = 0, step_s: Number = 0,
                 activation_bytes: Number = 1, version_bytes: Number = 0, slices: int = 1) -> Costs:
        """Return the costs of stages of which each takes an equal share of its rank's.

        Args:
            placement: the ranks of every stage.
            recomputing: stages that repeat their forward.
            forward_s: of a whole rank, as all that follow.
            input_s: of the input half of a backward.
            weight_s: of its weight half.
            transfer_s: of any transfer between ranks.
            step_s: of an optimizer step.
            activation_bytes: held from F until B or I; as much again from I until W.
            version_bytes: of a weight version.
            slices: of every microbatch, which share its times, transfers and activations equally.
        """
        stages = []
        for stage, (rank, *_) in enumerate(placement):
            share = passes(placement, rank)
            forward, input_half, weight, held = (ratio(number, share * slices) for number in (
                forward_s, input_s, weight_s, activation_bytes))
            step, version = ratio(step_s, share), ratio(version_bytes, share)
            stages.append(StageCosts(forward, input_half, weight, step_s=step, activation_bytes=held,
                                     weight_half_bytes=held, version_bytes=version,
                                     recompute_s=forward if stage in recomputing else 0))
        return cls(tuple(stages)).with_transfers(ratio(transfer_s, slices))

    @classmethod
    def of_stages(cls, stages: Iterable[Mapping[str, Number]],
                  seconds: Mapping[tuple[str, int], Number] | None = None) -> Costs:
        """Return the costs of stages, each by the names of :class:`StageCosts`; ``seconds``: of packages' kinds."""
        return cls(tuple(StageCosts(**stage) for stage in stages), seconds=seconds or {})

    def with_transfers(self, seconds: Number) -> Costs:
        """Return the same with transfers that take so long, whatever their size, where no link is given."""
        return replace(self, default_link=Link(seconds))


def ratio(number: Number, divisor: Number) -> Number:
    """Return ``number / divisor``, exact unless one of them is a ``float``."""
    if isinstance(number, float) or isinstance(divisor, float):
        return float(number) / float(divisor)
    exact = Fraction(number) / Fraction(divisor)
    return exact.numerator if exact.denominator == 1 else exact
