"""Where an oracle begins, and what it keeps at its end: as a checkpoint names it, whoever made that.

Like the rest of an oracle it shares no code with the engine: modules and optimizers are filled and read by torch's own
``load_state_dict`` and ``state_dict``. What coding gradients lost is its :class:`~vpipe.verify.compression.Crossing`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

NUMBERS = {int: ("int", torch.int64), float: ("float", torch.float64)}
"""How a number in an optimizer's state is called and held."""


@dataclass(frozen=True)
class Start:
    """What was done before: nothing, unless told.

    Attributes:
        steps, microbatches: that are done, in all.
        begun: how many of these microbatches are of the first batch that is given.
        tensors: of a checkpoint, by name.
    """

    steps: int = 0
    microbatches: int = 0
    begun: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def fill(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Put in the state of an optimizer that was just made of some of these parameters."""
        content = optimizer.state_dict()
        for index, name in _numbered(optimizer, parameters).items():
            prefix = f"optim.{name}."
            for full, tensor in self.tensors.items():
                if full.startswith(prefix):
                    key, _, kind = full.removeprefix(prefix).partition("#")
                    content["state"].setdefault(index, {})[key] = tensor.item() if kind else tensor.clone()
        optimizer.load_state_dict(content)


def kept(optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state of optimizers of these parameters, by the names that a checkpoint has for it; copies."""
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        names = _numbered(optimizer, parameters)
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                full = f"optim.{names[index]}.{key}"
                if isinstance(value, Tensor):
                    tensors[full] = value.clone()
                else:
                    kind, dtype = NUMBERS[type(value)]
                    tensors[f"{full}#{kind}"] = torch.tensor(value, dtype=dtype)
    return tensors


def _numbered(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """The numbers that torch gives parameters in the order of their groups -> their names."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(in_order)}
