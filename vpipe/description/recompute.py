"""Read which layers are recomputed: a share of a stage's layers, or their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate

from vpipe.arguments import as_number, shown
from vpipe.errors import Problem, UserError, counted

MOST_LAYERS = 100_000
"""The most layers of a model, in a partition, from which sets of layers are made."""

Recompute = float | Sequence[float | Collection[int]]
"""One share for all stages, or per stage a share or the numbers, in the model, of the layers to recompute.

A share counts from the stage's end: the last ``int(share * layers)``.
"""


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
