"""Read the first VPipe's and PipeDream's checkpoints: one file ``checkpoint.<stage>.pth.tar`` per stage.

Each is a dict that ``torch.save`` wrote, with the stage's weights under ``state_dict``, ``module0``. Their names, such
as ``layer7.query.weight``, come from generated code: they name a weight within its module, but not the module. So the
weights of all stages are matched one by one with the model's, in the order of that code where the model's family has
it, or in the model's own; shapes, and weight or bias, must agree all the way. Where the names are those of the model
here, or Hugging Face's, they decide instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vpipe import Model
from vpipe.app.families.registry import Family, ModelSettings
from vpipe.app.weights.formats import CheckpointFormat, ImportedWeights
from vpipe.app.weights.import_weights import load_torch, tensors_of
from vpipe.errors import UserError, counted

STATE = "state_dict"

_NAME = re.compile(r"checkpoint\.(\d+)\.pth\.tar", re.ASCII)
_MODULE = re.compile(r"^(module\d*\.)+")


@dataclass(frozen=True)
class StageWeight:
    """A tensor of a stage's file."""

    file: Path
    name: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"'{self.name}' {list(self.tensor.shape)} of {self.file.name}"


@dataclass(frozen=True)
class MatchedWeights:
    """The tensor of the files for each weight of the model.

    ``by``: how they were matched, in words. ``weights``: ours, ``<layer>.<parameter>`` -> theirs, in the order of the
    files, tied ones once. ``absent``: weights of the model that the files have not.
    """

    by: str
    weights: Mapping[str, StageWeight]
    absent: tuple[str, ...]


class StageFiles(CheckpointFormat):
    """A folder with one file per stage."""

    sign, origin = "checkpoint.0.pth.tar", "stages' files"
    described = "with checkpoint.<stage>.pth.tar of VPipe's stages"

    def find(self, folder: Path) -> list[Path]:
        """Return the stage files of a folder, by stage, or none. Raises UserError when one in between is missing."""
        found = {int(name[1]): path for path in folder.iterdir() if (name := _NAME.fullmatch(path.name))}
        lacking = [stage for stage in range(len(found)) if stage not in found]
        if lacking:
            raise UserError(f"there is no 'checkpoint.{lacking[0]}.pth.tar' in '{folder}', but one of stage "
                            f"{max(found)}", hint="bring the files of all stages into one folder")
        return [found[stage] for stage in sorted(found)]

    def read(self, files: Sequence[Path], model: Model, family: Family, settings: ModelSettings) -> ImportedWeights:
        """Return the weights in stage files, and which tensors were taken for which; see :func:`match_weights`."""
        found = match_weights(read_stage_files(files), model, family, settings)
        lines = [f"matched by {found.by}:"]
        for path in files:
            own = [(name, weight) for name, weight in found.weights.items() if weight.file == path]
            lines.append(f"  {path.name}: {counted(len(own), 'tensor')}" + (
                f", {own[0][1].name} = {own[0][0]} to {own[-1][1].name} = {own[-1][0]}" if own else ""))
        return ImportedWeights({name: weight.tensor for name, weight in found.weights.items()}, found.absent, lines)


def read_stage_files(files: Sequence[Path]) -> list[StageWeight]:
    """Return all weights in the order of the files. Raises UserError for a file without a ``state_dict``."""
    weights = []
    for path in files:
        content = load_torch(path)
        if not isinstance(content, Mapping) or not isinstance(content.get(STATE), Mapping):
            has = f"it holds {', '.join(map(str, content))}" if isinstance(content, Mapping) else (
                f"it holds a {type(content).__name__}")
            raise UserError(f"'{path}' has no '{STATE}': {has}", hint="PipeDream's and VPipe's files have one")
        state = content[STATE]
        if "master_parameters" in state:
            raise UserError(f"'{path}' holds 16-bit weights beside their 32-bit originals, which have no names",
                            hint="save the originals under the names of the weights, without 'master_parameters'")
        weights += [StageWeight(path, name, tensor) for name, tensor in tensors_of(state, path, STATE).items()]
    return weights


def match_weights(found: Sequence[StageWeight], model: Model, family: Family,
                  settings: ModelSettings) -> MatchedWeights:
    """Find the weight of the model that each tensor is. Raises UserError unless exactly one way agrees."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.outline().items()}
    ties = dict(model.ties)
    by_name = _by_name(found, {name: name for name in shapes} | ties, family, settings)
    if by_name is not None:
        return _checked("their names", by_name, shapes)
    fitting, differences = {}, []
    for what, order in _orders(model, ties, family, settings):
        difference = _difference(found, [(name, shapes[ties.get(name, name)]) for name in order])
        if difference is None:
            fitting[tuple(ties.get(name, name) for name in order)] = what
        else:
            differences.append((difference[0], what, difference[1]))
    if not fitting:
        _, what, why = max(differences, key=lambda difference: difference[0])
        raise UserError(f"the files' {counted(len(found), 'tensor')} are not this model's weights in {what}: {why}",
                        hint="give the config of the model they are of, with its sizes as they were")
    if len(fitting) > 1:
        raise UserError(f"the files' {counted(len(found), 'tensor')} could be this model's weights in "
                        f"{' and in '.join(fitting.values())}: their shapes do not tell which",
                        hint="rename the tensors as the model's state_dict has them")
    [(targets, what)] = fitting.items()
    return _checked(what, list(zip(targets, found, strict=True)), shapes)


def _by_name(found: Sequence[StageWeight], own: Mapping[str, str], family: Family,
             settings: ModelSettings) -> list[tuple[str, StageWeight]] | None:
    """Match the weights by their names here or at Hugging Face; None where the files have others."""
    known, spelled = dict(own), {}
    names = [_MODULE.sub("", weight.name) for weight in found]
    if family.huggingface is not None:
        config = family.huggingface.config(settings)
        known |= family.huggingface.names(config) | family.huggingface.copies(config)
        spelled = {name: family.huggingface.spelled(name) or "" for name in names}
    targets = [known.get(name, known.get(spelled.get(name, ""))) for name in names]
    if not targets or None in targets:
        return None
    return [(target, weight) for target, weight in zip(targets, found, strict=True) if target is not None]


def _orders(model: Model, ties: Mapping[str, str], family: Family,
            settings: ModelSettings) -> list[tuple[str, list[str]]]:
    """Return the orders in which files may hold the weights, with tied ones or without."""
    untied = Model([replace(layer, ties={}) for layer in model.layers], model.batch)
    orders = [("the model's order", list(untied.outline()))]
    if family.stage_order is not None:
        orders.insert(0, ("the first VPipe's order", family.stage_order(settings)))
    return [(what, list(order)) for what, every in orders
            for order in dict.fromkeys((tuple(every), tuple(name for name in every if name not in ties)))]


def _difference(found: Sequence[StageWeight], wanted: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, str] | None:
    """Return the number of tensors up to the first difference, and the difference; None without one."""
    for place, (weight, (name, shape)) in enumerate(zip(found, wanted, strict=False)):
        leaf, own = weight.name.rpartition(".")[2], name.rpartition(".")[2]
        if tuple(weight.tensor.shape) != shape or leaf != own:
            return place, f"tensor {place} is {weight}, where '{name}' {list(shape)} should be"
    if len(found) == len(wanted):
        return None
    shorter = min(len(found), len(wanted))
    extra = f"{found[shorter]} is beyond" if len(found) > len(wanted) else f"'{wanted[shorter][0]}' is missing"
    return shorter, f"there are {len(wanted)} of them, and {extra}"


def _checked(by: str, pairs: Sequence[tuple[str, StageWeight]],
             shapes: Mapping[str, tuple[int, ...]]) -> MatchedWeights:
    weights: dict[str, StageWeight] = {}
    for name, weight in pairs:
        if tuple(weight.tensor.shape) != shapes[name]:
            raise UserError(f"{weight} has another shape than '{name}' of the model, {list(shapes[name])}",
                            hint="give the config of the model that the files are of")
        other = weights.setdefault(name, weight)
        if not torch.equal(other.tensor, weight.tensor):
            raise UserError(f"{weight} and {other} differ, but the model ties them",
                            hint="set model.tie_weights to false: --set model.tie_weights=false")
    return MatchedWeights(by, weights, tuple(name for name in shapes if name not in weights))
