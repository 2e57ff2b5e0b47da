"""Describe how a model is cut: the layers of every stage, what is recomputed of them, and the ranks of every stage.

What follows from a cut is computed here from the names of layers alone: the stages, the tensors that cross the cut or
stay on a rank, and the weights that stages share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from vpipe.arguments import Arguments, as_integer, as_number, shown
from vpipe.errors import Problem, UserError, counted

Placement = tuple[tuple[int, ...], ...]
"""The ranks of every stage: ``((0,), (1,))`` is stage 0 on rank 0 and stage 1 on rank 1. Several of one stage hold
copies of it, of which microbatch m takes number m modulo their count."""

MOST_LAYERS = 100_000
"""The most layers of a model, in a partition, from which sets of layers are made."""

Recompute = float | Sequence[float | Collection[int]]
"""One share for all stages, or per stage a share or the numbers, in the model, of the layers to recompute.

A share counts from the stage's end: the last ``int(share * layers)``.
"""


@dataclass(frozen=True)
class Cut:
    """How a model is cut.

    Attributes:
        stages: how many, with equally many parameters as far as layers allow (docs/concepts.md, for frozen
            ones); or the layers of each, such as ``[3, 2, 2, 2]``. As many as ``ranks`` lists when None.
        recompute: layers that are recomputed: a share of each stage's, from its end, as one number or one per stage;
            for a stage also a list of layers by their numbers in the model.
        ranks: of every stage: how many, on consecutive ranks in the schedule's own order; or which, such as
            ``[[0, 1], [2]]``. Several are replicas: microbatch i goes to replica i mod their number.

    Raises:
        UserError: a value is of another kind, or the three do not fit each other.
    """

    MOST_LAYERS = MOST_LAYERS
    """The most layers of all stages, where they are listed."""

    stages: int | Sequence[int] | None = None
    recompute: Recompute = 0.0
    ranks: int | Sequence[Sequence[int]] = 1

    def __post_init__(self) -> None:
        given = Arguments()
        stages, ranks = _stages(given, self.stages), _ranks(given, self.ranks)
        if self.recompute is None:
            given.refuse("recompute is None", "give a number from 0 to 1, or a list with one per stage")
        given.check()
        if stages is None and isinstance(ranks, tuple):
            stages = len(ranks)
        if stages == ():
            raise UserError("the partition is empty", hint="give the layers of at least one stage, such as [3, 2]")
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "ranks", ranks)
        if isinstance(self.recompute, Sequence) and not isinstance(self.recompute, str):
            object.__setattr__(self, "recompute", tuple(
                tuple(sorted(entry)) if isinstance(entry, (list, tuple, frozenset)) and all(
                    type(layer) is int for layer in entry) else entry for entry in self.recompute))
        if isinstance(stages, tuple):
            _ = self.recomputed  # refuses what does not fit

    @property
    def count(self) -> int:
        """The number of stages."""
        assert self.stages is not None, "a pipeline has asked for it"
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def partition(self) -> tuple[int, ...]:
        """The layers of every stage, where they are known."""
        assert isinstance(self.stages, tuple), "the layers are counted"
        return self.stages

    @property
    def layers(self) -> list[range]:
        """The numbers, in the model, of the layers of every stage, where they are known."""
        return ranges(self.partition)

    @property
    def placement(self) -> Placement | None:
        """The ranks of every stage, where they are listed."""
        return self.ranks if isinstance(self.ranks, tuple) else None

    @property
    def replicas(self) -> int:
        """The ranks of every stage, where they are counted; 1 where they are listed."""
        return self.ranks if isinstance(self.ranks, int) else 1

    @cached_property
    def recomputed(self) -> tuple[frozenset[int], ...]:
        """Per stage the numbers, in the model, of the layers that are recomputed.

        Raises:
            UserError: ``recompute`` does not fit the stages.
        """
        return recomputed_layers(self.recompute, self.partition) if self.recompute else (frozenset[int](),) * self.count

    @property
    def recomputing(self) -> list[int]:
        """The stages of which layers are recomputed."""
        return [stage for stage, layers in enumerate(self.recomputed) if layers]


def _stages(given: Arguments, stages: Any) -> Any:
    if stages is None or as_integer(stages) is not None or isinstance(stages, (str, float, bool)):
        return given.integer("stages", stages, or_none=True)
    found = given.integers("stages", stages, "[3, 2, 2, 2]")
    if found is not None and None not in found and sum(found) > MOST_LAYERS:
        given.refuse(f"the partition has {sum(found):,} layers in all", f"use {MOST_LAYERS:,} at most")
    return None if found is None else tuple(found)


def _ranks(given: Arguments, ranks: Any) -> Any:
    if as_integer(ranks) is not None or isinstance(ranks, (str, bool, float)):
        return given.integer("ranks", ranks, least=1)
    if not isinstance(ranks, (list, tuple)) or not all(
            isinstance(own, (list, tuple)) and all(type(rank) is int for rank in own) for own in ranks):
        given.refuse(f"ranks is {shown(ranks)}, which does not list the ranks of every stage",
                     "write how many every stage has, or a list of lists of whole numbers, such as [[0, 1], [2]]")
        return 1
    return tuple(map(tuple, ranks)) or 1


def recomputed_layers(recompute: Recompute, partition: Sequence[int]) -> tuple[frozenset[int], ...]:
    """Return per stage the numbers, in the model, of the layers that are recomputed.

    Raises:
        UserError: there are not as many entries as stages, a share is outside 0..1, a layer is not of its stage.
    """
    stages = len(partition)
    if (number := as_number(recompute)) is not None:
        entries: Sequence[float | Collection[int]] = [number] * stages
    elif isinstance(recompute, Sequence) and not isinstance(recompute, (str, bytes)):
        entries = recompute
    else:
        raise UserError(f"recompute is {shown(recompute)}",
                        hint="give a number from 0 to 1, or a list with one per stage")
    if len(entries) != stages:
        raise UserError(f"{counted(len(entries), 'recompute ratio')} for {counted(stages, 'stage')}",
                        hint="give one number, or one per stage")
    problems: list[Problem] = []
    layers: list[frozenset[int]] = []
    for stage, (entry, here) in enumerate(zip(entries, ranges(partition), strict=True)):
        if isinstance(entry, Collection) and all(type(i) is int for i in entry):
            problems += layers_outside(entry, stage, here)
            layers.append(frozenset(entry))
        elif (share := as_number(entry)) is None:
            problems.append(Problem(f"{shown(entry)} of stage {stage} is neither a share nor a list of layers",
                                    "give a number from 0 to 1, or a list such as [3, 4]: layers of the model, "
                                    "counted from 0"))
        elif 0 <= share <= 1:
            layers.append(frozenset(range(here.stop - int(share * len(here)), here.stop)))
        else:
            problems.append(Problem(f"recompute ratio {share} of stage {stage} is outside 0..1",
                                    "it is the share of the stage's layers to recompute, counted from its end"))
    if problems:
        raise UserError.all_of(problems)
    return tuple(layers)


def ranges(partition: Sequence[int]) -> list[range]:
    """Return the layers of each stage."""
    return [range(end - size, end) for end, size in zip(accumulate(partition), partition, strict=True)]


def layers_outside(layers: Iterable[int], stage: int, here: range, where: str | None = None) -> Iterator[Problem]:
    """Yield a problem for each layer to recompute that is not in its stage."""
    for layer in sorted(set(layers)):
        if layer not in here:
            yield Problem(f"layer {layer} is to be recomputed in stage {stage}, which has the layers {here.start} to "
                          f"{here.stop - 1}", "a list names layers of the model, counted from 0; a number is a share "
                          "of the stage's layers", where)


LOSS = "loss"
"""Name of the tensor that the last layer writes, and training minimises."""


class LayerNames(NamedTuple):
    """The names by which a layer goes into the stages of a cut, whether it is a model's or a profile's.

    Attributes:
        reads: tensors and batch fields, in order.
        writes: tensors. A name that is written again is another tensor.
        borrows: parameters tied to an earlier layer's: own name -> (the number of the layer that owns it, the owner's
            name).
    """

    reads: Sequence[str]
    writes: Collection[str]
    borrows: Mapping[str, tuple[int, str]]


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


def stage_specs(layers: Sequence[LayerNames], fields: Iterable[str], partition: Sequence[int]) -> tuple[StageSpec, ...]:
    """Return the stages of layers, which read these fields of a batch."""
    spans, crossing = ranges(partition), crossings(layers)
    stage_of = [stage for stage, span in enumerate(spans) for _ in span]
    specs = []
    for stage, span in enumerate(spans):
        here = layers[span.start:span.stop]
        borrowed = {own: (stage_of[owner], name) for layer in here for own, (owner, name) in layer.borrows.items()
                    if stage_of[owner] != stage}
        outputs = crossing[span.stop] if span.stop < len(layers) else (LOSS,)
        specs.append(StageSpec(stage, span, crossing[span.start], outputs,
                               tuple(f for f in fields if any(f in layer.reads for layer in here)), borrowed))
    return tuple(specs)


def crossings(layers: Sequence[LayerNames]) -> list[tuple[str, ...]]:
    """Return what crosses the cut before every layer, and after the last: tensors in the order in which they are read.
    """
    written: set[str] = set()
    known = []
    for layer in layers:
        known.append([name for name in layer.reads if name in written])
        written.update(layer.writes)
    found: list[tuple[str, ...]] = [()]
    for layer, own in zip(reversed(layers), reversed(known), strict=True):
        found.append(tuple(dict.fromkeys([*own, *(name for name in found[-1] if name not in layer.writes)])))
    return found[::-1]


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


class KeptInputs(NamedTuple):
    """The inputs of a stage that its rank has since an earlier stage of its own, so that they are not sent.

    Attributes:
        since: that stage.
        inputs: all inputs of the stage, in order.
        names: those of them that the rank has.
    """

    since: int
    inputs: tuple[str, ...]
    names: Set[str]


def kept_inputs(placement: Placement, specs: Sequence[StageSpec], layers: Sequence[LayerNames],
                handed_on: bool = False) -> dict[int, KeptInputs]:
    """Return by stage what its rank keeps for it: what no layer between the two stages of the rank writes anew.

    Gradients of it go through all stages nevertheless: each adds its own, in the order of one graph.

    Args:
        handed_on: also what the stage right before hands on to a stage of the same rank: all, and without a transfer.
    """
    def written(numbers: range) -> set[str]:
        return {name for number in numbers for name in layers[number].writes}

    found = {}
    for stage, ranks in enumerate(placement):
        since = max((earlier for earlier in range(stage) if placement[earlier] == ranks), default=stage)
        between, inputs = range(specs[since].layers.stop, specs[stage].layers.start), specs[stage].inputs
        if since < stage - (not handed_on) and (names := set(inputs) - written(between)):
            found[stage] = KeptInputs(since, inputs, names)
    return found


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Cut items into consecutive parts with the smallest possible heaviest part; return the number of items in each.

    Dynamic programming over (parts, items); every part gets at least one item; of equally good cuts the earliest. Every
    item that a cut moves makes the last part lighter and those before it heavier. The best cut is where the two meet,
    which only moves forward as items are added: O(parts * items). Raises UserError for fewer items than parts.
    """
    items = len(weights)
    if not 1 <= parts <= items:
        raise UserError(f"{counted(parts, 'stage')}, but the model has only {counted(items, 'layer')}",
                        hint="use 1 stage" if items == 1 else f"use between 1 and {items} stages")
    total = [0.0, *accumulate(weights)]
    heaviest = list(total)  # of the best split of the first n items into the parts so far
    cuts: list[list[int]] = []
    for part in range(2, parts + 1):
        best, cut = [float("inf")] * (items + 1), [0] * (items + 1)
        meet = part - 1
        for n in range(part, items + 1):
            while meet < n - 1 and heaviest[meet] < total[n] - total[meet]:
                meet += 1
            k = meet
            if k > part - 1 and total[n] - total[k - 1] <= max(heaviest[k], total[n] - total[k]):
                k -= 1
                while k > part - 1 and total[k - 1] == total[k]:  # items that weigh nothing
                    k -= 1
            best[n], cut[n] = max(heaviest[k], total[n] - total[k]), k
        heaviest = best
        cuts.append(cut)
    sizes, end = [], items
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return [end, *reversed(sizes)]
