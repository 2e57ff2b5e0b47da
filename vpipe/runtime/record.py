"""What a stage keeps of a microbatch between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from vpipe.model.layer import Layer
from vpipe.runtime.halves import WeightHalf
from vpipe.runtime.side_effects import NOTHING, Before, SideEffects

DropoutKey = tuple[int, int]
"""(update, microbatch within the update): with the layer's index it fixes the random numbers of a layer."""


@dataclass(frozen=True)
class Span:
    """Consecutive layers of a stage that are kept, or dropped and recomputed, together, and what they change."""

    layers: tuple[tuple[int, Layer, nn.Module], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    recomputed: bool
    effects: SideEffects


@dataclass(slots=True)
class Graph:
    """The edges of a span's outputs, and where its weight gradients go that can wait, if it was run for that."""

    edges: dict[str, GradientEdge]
    half: WeightHalf | None


@dataclass(slots=True)
class Held:
    """What the backward of one span needs: its inputs as leaves, and its graph if kept or already recomputed; else what
    its modules kept before the forward, which has changed it, and the versions of the inputs."""

    inputs: dict[str, Tensor]
    graph: Graph | None
    before: Before = NOTHING
    versions: Sequence[int] = ()


@dataclass(slots=True)
class Record:
    """What the backward of one microbatch needs; dropped as soon as it is used."""

    held: list[Held]
    fields: Mapping[str, Tensor]
    key: DropoutKey
    pins: dict[int, int]  # weight version per owner of weights: the stage itself, and those it borrows from
    split: bool  # whether the backward comes in two halves
    halves: list[WeightHalf] = field(default_factory=list)  # between them: of the spans, in the order of backward
