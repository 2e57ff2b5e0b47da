"""Keep what an evaluation returns beside the loss: tensors of the model's last layer, or what a function makes of them.

Every output has a row per sample, so that those of microbatches, replicas and lanes are put one after the other in the
order of the samples. A metric is then computed from the whole, by the operations of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from vpipe.arguments import shown
from vpipe.errors import UserError
from vpipe.model.layer import LOSS
from vpipe.model.model import Model

Wanted = str | Sequence[str] | Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Names of tensors that the last layer reads or writes, or a function from all of these, by name, to others."""

_Shapes = dict[str, tuple[str, list[int]]]
"""Dtypes and shapes of outputs, by name, without dimension 0."""

ROWS = "dimension 0 of every output counts samples: give a row for each, and add them up when evaluate returns them all"


class Outputs:
    """What is wanted of every microbatch of an evaluation.

    Attributes:
        names: of the tensors that are needed, as they are after the last layer.

    Raises:
        UserError: a name is of no tensor of the last layer.
    """

    def __init__(self, wanted: Wanted, model: Model) -> None:
        last = model.layers[-1]
        self.names: tuple[str, ...] = tuple(dict.fromkeys((*last.inputs, *last.outputs)))
        self._function = wanted if callable(wanted) else None
        self._first: _Shapes | None = None
        self._remedy = (f"name one of {', '.join(name for name in self.names if name != LOSS)}, or let the layer write "
                        "more: Layer(..., outputs=('loss', 'logits'))")
        if callable(wanted):
            return
        if not isinstance(wanted, Sequence):
            raise UserError(f"outputs is {shown(wanted)}",
                            hint="give names of tensors of the last layer, or a function")
        names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        if unknown := [name for name in names if name not in self.names]:
            raise UserError(f"outputs names {shown(unknown[0])}, which the last layer '{last.name}' neither reads nor "
                            "writes", hint=self._remedy)
        self.names = names

    def __str__(self) -> str:
        return "of a function" if self._function is not None else ", ".join(self.names)

    def of(self, tensors: Sequence[Tensor], samples: int) -> dict[str, Tensor]:
        """Return copies of the outputs of a microbatch in host memory, which must fit those of the first one.

        Args:
            tensors: those of :attr:`names`.
        """
        found: object = dict(zip(self.names, tensors, strict=True))
        if self._function is not None:
            try:
                found = self._function(found)  # type: ignore[arg-type]
            except KeyError as error:
                if error.args and error.args[0] in self.names:  # of another table than this
                    raise
                raise UserError(f"the function outputs raised KeyError: {error}", hint="of the tensors that the last "
                                f"layer reads or writes {self._remedy}") from error
        if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
            raise UserError(f"the function outputs returned {shown(found)}",
                            hint='let it return tensors by name: {"right": logits.argmax(-1) == labels}')
        for name, value in found.items():
            if not value.dim() or value.shape[0] != samples:
                raise UserError(f"the output '{name}' of a microbatch of {samples} samples has the shape "
                                f"{list(value.shape)}", hint=ROWS)
        shapes = _shapes(found)
        self._first = self._first or shapes
        _check_alike([self._first, shapes])
        return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Put outputs one after the other. Raises UserError where they do not fit."""
    _check_alike(list(map(_shapes, parts)))
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def interleaved(replicas: Sequence[Mapping[str, Tensor]], samples: Sequence[int]) -> dict[str, Tensor]:
    """Put the outputs of replicas, which take microbatches in turn, in the order of these.

    Args:
        samples: of every microbatch.
    """
    apart = [[dict(zip(own, rows, strict=True)) for rows in zip(*(
        torch.split(value, list(samples[place::len(replicas)])) for value in own.values()), strict=True)]
        for place, own in enumerate(replicas)]
    return joined([part for turn in zip_longest(*apart) for part in turn if part is not None])


def _shapes(outputs: Mapping[str, Tensor]) -> _Shapes:
    return {name: (str(value.dtype), list(value.shape[1:])) for name, value in outputs.items()}


def _check_alike(parts: Sequence[_Shapes]) -> None:
    if other := next((part for part in parts if part != parts[0]), None):
        raise UserError(f"outputs of one microbatch have dtypes and shapes, without the samples, of {parts[0]}, those "
                        f"of another of {other}", hint="give rows of one shape, such as a number per sample, or "
                        "evaluate batches of one shape at a time")
