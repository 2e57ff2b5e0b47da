"""Split layers into stages: the tensors at their borders, and the weights that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vpipe.description.cut import crossings
from vpipe.description.recompute import ranges
from vpipe.errors import UserError, counted
from vpipe.model.layer import LOSS, Layer, split_target


@dataclass(frozen=True)
class StageSpec:
    """The layers of a stage and the tensors at its borders, before anything is built.

    ``inputs`` arrive from the previous stage: those that a later layer, here or beyond, still reads; ``outputs`` leave
    for the next one, ``("loss",)`` on the last. ``fields`` of the batch are those that its layers read. ``borrowed``
    are parameters tied to another stage's: own name -> (owning stage, owner's name), each ``"<layer>.<parameter>"``.
    """

    index: int
    layers: range
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fields: tuple[str, ...]
    borrowed: Mapping[str, tuple[int, str]]


def owner_of(layers: Sequence[Layer], target: str) -> str:
    """Follow ties of ties, and return the parameter at the end."""
    ties = {f"{layer.name}.{own}": further for layer in layers for own, further in layer.ties.items()}
    while target in ties:
        target = ties[target]
    split_target(target, layers)
    return target


def divide(layers: Sequence[Layer], fields: Sequence[str], partition: Sequence[int]) -> tuple[StageSpec, ...]:
    """Return the stages of layers, which read these fields of a batch; see :meth:`vpipe.Model.split`."""
    if len(partition) > len(layers):
        raise UserError(f"{len(partition)} stages, but the model has only {counted(len(layers), 'layer')}",
                        hint=f"use at most {counted(len(layers), 'stage')}")
    if any(n < 1 for n in partition):
        raise UserError(f"partition {list(partition)} has an empty stage", hint="give every stage at least one layer")
    if (left := len(layers) - sum(partition)) != 0:
        raise UserError(f"partition {list(partition)} adds up to {counted(sum(partition), 'layer')}, but the model has "
                        f"{len(layers)}", hint=f"change an entry by {left:+d}, so that they add up to {len(layers)}")
    spans, crossing = ranges(partition), crossings([(layer.inputs, layer.outputs) for layer in layers])
    stage_of = {layers[i].name: stage for stage, span in enumerate(spans) for i in span}
    specs = []
    for stage, span in enumerate(spans):
        here = layers[span.start:span.stop]
        borrowed = {}
        for layer in here:
            _check_shared(layer, stage, stage_of)
            for own, target in layer.ties.items():
                target = owner_of(layers, target)
                owner = stage_of[split_target(target, layers)[0]]
                if owner != stage:
                    borrowed[f"{layer.name}.{own}"] = (owner, target)
        outputs = crossing[span.stop] if span.stop < len(layers) else (LOSS,)
        specs.append(StageSpec(stage, span, crossing[span.start], outputs,
                               tuple(f for f in fields if any(f in layer.inputs for layer in here)), borrowed))
    return tuple(specs)


def _check_shared(layer: Layer, stage: int, stage_of: Mapping[str, int]) -> None:
    for path, target in layer.shared.items():
        owner = next(name for name in stage_of if f"{target}.".startswith(f"{name}."))
        if stage_of[owner] != stage:
            mine = f"'{layer.name}.{path}'" if path else f"layer '{layer.name}'"
            raise UserError(f"{mine} (stage {stage}) is the same module as '{target}' (stage {stage_of[owner]}) and "
                            "has buffers, which two stages cannot share",
                            hint=f"choose a partition that has the layers from '{owner}' to '{layer.name}' in one "
                                 "stage, or give each place a module of its own")


Ties = Mapping[int, Mapping[int, tuple[str, ...]]]
"""Owning stage -> borrowing stage -> names of the owner's parameters, ``"<layer>.<parameter>"``."""


def ties_between(specs: Sequence[StageSpec], counts: Callable[[str], bool] = lambda name: True) -> Ties:
    """Return the tied weights that lie on two stages and whose owner's name ``counts``."""
    ties: dict[int, dict[int, tuple[str, ...]]] = {}
    for spec in specs:
        for owner, target in spec.borrowed.values():
            if not counts(target):
                continue
            names = ties.setdefault(owner, {}).setdefault(spec.index, ())
            if target not in names:
                ties[owner][spec.index] = (*names, target)
    return ties
