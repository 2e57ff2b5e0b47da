"""Slices of sequences: which one a forward is of, and which models and parts of a pipeline cannot be cut into slices.

Source: Sun et al., Seq1F1B (arXiv:2406.03488), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from vpipe.description import Description
from vpipe.errors import Problem, UserError, counted
from vpipe.model.model import Model

_DRAWING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Torch's own modules that draw: under one seed each slice would drop the same places."""


class SequenceSlice(NamedTuple):
    """Slice ``number``, of so many, of the sequences of a microbatch.

    Attributes:
        start: its first token.
        length: tokens of the whole sequences.
    """

    number: int
    slices: int
    start: int
    length: int


def check_sequences(fields: Mapping[str, Tensor], slices: int) -> None:
    """Refuse fields without sequences that can be cut into slices."""
    shapes = {name: list(t.shape) for name, t in fields.items()}
    if flat := [name for name, shape in shapes.items() if len(shape) < 2]:
        raise UserError(f"the field '{flat[0]}' of a batch has the shape {shapes[flat[0]]}, without sequences to "
                        f"cut into {slices} slices",
                        hint="dimension 1 of every field counts tokens: repeat for each what belongs to a whole "
                             "sequence, or leave the slices out")
    tokens = {name: shape[1] for name, shape in shapes.items()}
    if len(set(tokens.values())) > 1:
        raise UserError(f"the fields of a batch disagree on the number of tokens: {tokens}",
                        hint="with slices dimension 1 of every field counts the tokens")
    if (length := next(iter(tokens.values()))) < slices:
        raise UserError(f"sequences of {counted(length, 'token')} cannot be cut into {slices} slices",
                        hint=f"use at most {counted(length, 'slice')}, or longer sequences")


class SliceAware:
    """The modules of a layer that are told which slice a microbatch is at, so that they draw random numbers by token.

    A module with an attribute ``sequence_slice``, None at first, draws the numbers of the whole sequence and takes
    those of its slice: then it draws what it draws without slices, if its layer starts each slice from the seed of the
    microbatch.

    Attributes:
        by_element: whether all that draws in the layer, as far as it is known, is told.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._modules: list[Any] = [module for module in layer.modules() if hasattr(module, "sequence_slice")]
        self.by_element = bool(self._modules) and not any(
            isinstance(module, _DRAWING) and module.p and not hasattr(module, "sequence_slice")
            for module in layer.modules())

    @contextmanager
    def told(self, start: int, length: int) -> Iterator[None]:
        """While active, the modules know the first token of the slice, and how many the whole sequence has."""
        try:
            for module in self._modules:
                module.sequence_slice = (start, length)
            yield
        finally:
            for module in self._modules:
                module.sequence_slice = None


def check_slices(model: Model, description: Description, slices: int) -> None:
    """Refuse to cut sequences where the sum over slices would be another number than that of the whole.

    Raises:
        UserError: all reasons.
    """
    if slices == 1:
        return
    execution, unknown = description.execution, [layer.name for layer in model.layers if layer.carried is None]
    others = f" and {counted(len(unknown) - 1, 'other layer')} do" if unknown[1:] else " does"
    why, remedy = execution.refused("slices") or ("", "")
    problems = [Problem(f"sequences are cut into {slices} slices, but {what}", f"{hint} or leave the slices out")
                for there, what, hint in (
        (unknown, f"layer '{''.join(unknown[:1])}'{others} not say what goes from a slice to the next", "name it, "
         "Layer(..., carried=('keys', 'values')); carried=() says that every token is computed by itself;"),
        (model.labels is None, "the model does not say which field of a batch has its labels, by which the losses of "
         "slices count", "name it, if the loss is the mean over its entries that are not -100: Model(layers, "
         "batch=..., labels='labels');"),
        (why, why, f"{remedy},"),
        (execution.backend is not None, "layers would be compiled for every length of what comes before a slice",
         "do not compile,"),
        (execution.data is not None, "fully_shard divides the weights of layers that are called for each slice",
         "use replicas in place of fully_shard,"),
        ({*description.transfers.codecs(description.cut.count)} - {"none"}, "their transfers are compressed, for which "
         "there is no oracle with slices", "leave compress out,")) if there]
    if problems:
        raise UserError.all_of(problems)
