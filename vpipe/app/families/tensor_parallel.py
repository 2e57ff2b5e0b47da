"""Tensor parallelism: a layer is built whole, and then split over the ranks of one dimension of a mesh.

A module of a family says in ``tensor_plan`` what becomes of each of its submodules; the words are the functions below.
They are PyTorch's own styles (:mod:`torch.distributed.tensor.parallel`) where it has one. All parameters are DTensors
then, of the shapes and names that they have in one process, and begin with the same values: each rank builds the layer
under the same seed, and takes its part. So a stage needs the memory of one whole layer while it is built.

Shoeybi et al. 2019 (arXiv:1909.08053) split attention by heads and the MLP by columns, then rows. Between layers, and
for norms and dropout, activations are whole on every rank, or shards of the sequence, [B, S / t, H] (Korthikanti et al.
2022, arXiv:2205.05198), which makes as many bytes of collectives, and saves memory and bytes between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard  # without a public name

from vpipe import Model
from vpipe.app.families.dropout import Dropout
from vpipe.errors import Problem, UserError


@dataclass(frozen=True)
class TensorMesh:
    """The ranks that split a layer.

    Attributes:
        mesh: of one dimension.
        between: placement of the activations between layers: shards of the sequence, or whole.
    """

    mesh: DeviceMesh
    between: Placement

    def whole(self, tensor: Tensor) -> DTensor:
        """Return, as one tensor that every rank has, what is between layers here."""
        return _placed(tensor, self.mesh, self.between).redistribute(placements=[Replicate()])


Split = Callable[[Any, TensorMesh], nn.Module]
"""Takes a submodule, and returns what stands in its place."""

Plan = Mapping[str, Split]
"""What becomes of the submodules of a module, by their names."""


def parallel(model: Model, at: TensorMesh) -> Model:
    """Return the model with layers that are split when they are built."""
    return Model([replace(layer, build=partial(_split, layer.build, at)) for layer in model.layers], model.batch,
                 model.labels, model.label_weights)


def _split(build: Callable[[], nn.Module], at: TensorMesh) -> nn.Module:
    layer = build()
    for path, module in list(layer.named_modules()):
        plan: Plan = getattr(type(module), "tensor_plan", {})
        for name, split in plan.items():
            place = f"{path}.{name}" if path else name
            layer.set_submodule(place, split(layer.get_submodule(place), at))
    for name, parameter in layer.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UserError(f"{type(layer).__name__} has no plan for tensor parallelism that names '{name}'",
                            hint="give its class a tensor_plan, as those of vpipe/app/families have, or train without "
                                 "tensor parallelism")
    return layer


def problems(parts: int, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Yield what ``parts`` ranks cannot split, of sizes by the names of their settings."""
    fewer = [str(each) for each in range(1, parts) if not any(size % each for size in sizes.values())]
    for name, size in sizes.items():
        if size % parts:
            # Widths and heads depend on each other.
            more = (f"; or model.{name} to {-(-size // parts) * parts:,}, the next that they can share"
                    if name in ("vocab_size", "sequence_length") else "")
            yield Problem(f"{name} is {size:,}, which {parts} ranks of tensor parallelism cannot share evenly",
                          f"set parallel.tensor to {' or '.join(fewer)}{more}")


# The words of the plans.

def column(module: nn.Linear, at: TensorMesh) -> nn.Module:
    """Split a matrix by its outputs, such as the first of an MLP: each rank computes some of them for all tokens."""
    return _styled(module, at, ColwiseParallel(input_layouts=at.between))


def row(module: nn.Linear, at: TensorMesh) -> nn.Module:
    """Split a matrix by its inputs, which each rank has some of; the sum over the ranks is between layers."""
    return _styled(module, at, RowwiseParallel(output_layouts=at.between))


def scores(module: nn.Linear, at: TensorMesh) -> nn.Module:
    """Split a head by its vocabulary; the scores stay split, for :func:`cross_entropy`."""
    return _styled(module, at, ColwiseParallel(input_layouts=Replicate(), use_local_output=False))


def fused(parts: int) -> Split:
    """Split ``parts`` matrices whose outputs are one after the other in one, such as queries, keys and values."""
    return lambda module, at: _FusedColumns(module, at, _StridedShard(0, split_factor=parts))


def plain_columns(module: nn.Linear, at: TensorMesh) -> nn.Module:
    """Split a matrix by its outputs, for a layer that computes with plain tensors and adds ranks' parts itself."""
    return _PlainLinear(module, at, Shard(0))


def plain_rows(module: nn.Linear, at: TensorMesh) -> nn.Module:
    """Split a matrix by its inputs as :func:`plain_columns` does; what comes out is a part of a sum."""
    return _PlainLinear(module, at, Shard(1))


def plain_whole(module: nn.Linear, at: TensorMesh) -> nn.Module:
    """Give every rank all of a matrix, such as a router; what each adds to its gradient is a part of a sum."""
    return _PlainLinear(module, at, Replicate())


def vocabulary(module: nn.Embedding, at: TensorMesh) -> nn.Module:
    """Split a table of embeddings by its rows."""
    return _VocabularyRows(module, at)


def norm(module: nn.Module, at: TensorMesh) -> nn.Module:
    """Give every rank all parameters of a module that computes each token by itself."""
    return _replicated(module, at, at.between)


def norm_along(dim: int) -> Split:
    """Give every rank all parameters of a norm, of a tensor of which it has a part along ``dim``, such as heads."""
    return lambda module, at: _replicated(module, at, Shard(dim)) if list(module.parameters()) else module


def gathered(module: nn.Module, at: TensorMesh) -> nn.Module:
    """Do as :func:`norm`, and gather what comes out, once for all that read it; also of an ``nn.Identity``."""
    return _replicated(module, at, at.between, at.whole)


def plain_gathered(module: nn.Module, at: TensorMesh) -> nn.Module:
    """Do as :func:`gathered`, for a layer that computes with plain tensors and adds ranks' parts itself."""
    return _replicated(module, at, at.between, partial(_to_plain, at))


def added(module: nn.Identity, at: TensorMesh) -> nn.Module:
    """Add the parts that ranks have of a sum; it is between layers then."""
    return _Function(partial(_moved, mesh=at.mesh, placement=Partial(), to=at.between))


def once(module: nn.Identity, at: TensorMesh) -> nn.Module:
    """Let one rank alone pass a gradient back, which is the same on every rank, to where ranks have parts of a sum."""
    return _Function(partial(_once, at))


def whole(module: nn.Identity, at: TensorMesh) -> nn.Module:
    """Gather what is between layers, for modules of which each rank computes all."""
    return _Function(partial(_moved, mesh=at.mesh, placement=at.between, to=Replicate()))


def replicated(module: nn.Module, at: TensorMesh) -> nn.Module:
    """Give every rank all parameters of a module, which computes the same on each."""
    return _replicated(module, at, Replicate())


def table(module: nn.Embedding, at: TensorMesh) -> nn.Module:
    """Give every rank all rows of a table whose ``weight`` is read in place of calling it."""
    distribute_module(module, at.mesh, _replicate)
    return module


def part(module: nn.Identity, at: TensorMesh) -> nn.Module:
    """Take, of what every rank has for all tokens, [1 or B, S, ...], that for the tokens between layers here."""
    return _Function(partial(_moved, mesh=at.mesh, placement=Replicate(), to=at.between))


def dropout(module: nn.Module, at: TensorMesh) -> nn.Module:
    """Drop of the activations between layers what one process drops of them: nothing in place of an Identity."""
    return (_shared(module, at, at.between.dim) if isinstance(module, nn.Dropout) and isinstance(at.between, Shard)
            else module)


def dropout_along(dim: int) -> Split:
    """Drop what one process drops, of a tensor of which every rank has a part along ``dim``."""
    return lambda module, at: _shared(module, at, dim)


def _shared(module: nn.Dropout, at: TensorMesh, dim: int) -> Dropout:
    if isinstance(module, Dropout):
        return Dropout(module.p, module.along, module.seen, share=(at.mesh, dim))
    return Dropout(module.p, share=(at.mesh, dim))


def _styled(module: nn.Module, at: TensorMesh, style: ParallelStyle) -> nn.Module:
    # Without a rank of the source, each takes its part of what it has built: nothing is sent.
    parallelize_module(module, at.mesh, style, src_data_rank=None)
    return module


def _replicated(module: nn.Module, at: TensorMesh, placement: Placement,
                made: Callable[[DTensor], Tensor] = DTensor.to_local) -> nn.Module:
    """Give every rank all parameters of a module that reads what is placed so, and return ``made`` of what it writes.
    """
    distribute_module(module, at.mesh, _replicate, lambda module, inputs, mesh: _placed(inputs[0], mesh, placement),
                      lambda module, output, mesh: made(output))
    return module


def _replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for own, parameter in list(module.named_parameters(recurse=False)):
        _distribute(module, own, parameter, mesh, Replicate())


def _distribute(module: nn.Module, name: str, parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> None:
    module.register_parameter(name, nn.Parameter(
        distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)))


def _placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return what every rank has a tensor of as one DTensor, if it is none."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _moved(tensor: Tensor, mesh: DeviceMesh, placement: Placement, to: Placement) -> Tensor:
    """Return what this rank has of a tensor when it is placed in another way."""
    moved: Tensor = _placed(tensor, mesh, placement).redistribute(placements=[to]).to_local()
    return moved


def _to_plain(at: TensorMesh, x: Tensor) -> Tensor:
    """Return what is between layers, whole; the gradients of all ranks are added."""
    found: Tensor = at.whole(x).to_local(grad_placements=[Partial()])
    return found


def _own(parameter: DTensor) -> Tensor:
    """Return what this rank has of a parameter; of one that all ranks have, their gradients are parts of a sum."""
    [placement] = parameter.placements
    own: Tensor = parameter.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])
    return own


def _once(at: TensorMesh, x: Tensor) -> Tensor:
    first = torch.full((), at.mesh.get_local_rank() == 0, dtype=torch.bool, device=x.device)
    return x.where(first, x.detach())  # with a gradient on every rank, zeros or not, for stages that expect one


class _Function(nn.Module):
    """A function that stands in the place of an ``nn.Identity``, of equal layers the same one."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _PlainLinear(nn.Module):
    """A linear layer whose parameters are DTensors, computed with what this rank has of them, plain tensors in and out.

    Split by inputs, it makes a part of a sum, in which one rank has the bias.
    """

    weight: DTensor
    bias: DTensor | None

    def __init__(self, linear: nn.Linear, at: TensorMesh, placement: Placement) -> None:
        super().__init__()
        self.at, self.by_inputs = at, placement == Shard(1)
        self.register_parameter("bias", None)
        for name, parameter in linear.named_parameters():
            _distribute(self, name, parameter, at.mesh, Replicate() if self.by_inputs and name == "bias" else placement)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else _own(self.bias)
        if bias is not None and self.by_inputs and self.at.mesh.get_local_rank() > 0:
            bias = 0 * bias
        return F.linear(x, _own(self.weight), bias)


class _FusedColumns(_PlainLinear):
    """A linear layer, split so that each rank has the same share of every part of its outputs.

    The rows of a rank do not lie one after the other. DTensor has a placement for it, which its own ``flatten`` makes
    from torch 2.13 on; so the parameter keeps the shape [3H, H] that optimizers and checkpoints know. DTensor's matrix
    product would gather it, so that the product here is that of what the rank has.
    """

    def forward(self, h_bsh: Tensor) -> Tensor:
        return super().forward(_to_plain(self.at, h_bsh))


class _VocabularyRows(nn.Module):
    """Embeddings of which each rank has some rows: int64 [B, S] -> [B, S or S / t, H].

    In place of ``RowwiseParallel``, which in torch 2.13 makes of the gradient a table of all rows on every rank.
    """

    weight: DTensor

    def __init__(self, embedding: nn.Embedding, at: TensorMesh) -> None:
        super().__init__()
        self.at, self.padding_idx = at, embedding.padding_idx
        _distribute(self, "weight", embedding.weight, at.mesh, Shard(0))

    def forward(self, ids_bs: Tensor) -> Tensor:
        parts, length = self.at.mesh.size(), ids_bs.shape[1]
        if isinstance(self.at.between, Shard) and length % parts:
            raise UserError.all_of(list(problems(parts, {"sequence_length": length})))
        rows = self.weight.to_local()
        first = self.at.mesh.get_local_rank() * len(rows)
        index_bs = ids_bs - first
        here_bs = (index_bs >= 0) & (index_bs < len(rows))
        padding = None if self.padding_idx is None or not 0 <= self.padding_idx - first < len(rows) else (
            self.padding_idx - first)
        h_bsh = F.embedding(index_bs.where(here_bs, 0), rows, padding).masked_fill(~here_bs[..., None], 0)
        return _moved(h_bsh, self.at.mesh, Partial(), self.at.between)


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor that all ranks have, as one that every rank of ``other`` has."""
    return _placed(tensor, other.device_mesh, Replicate()) if isinstance(other, DTensor) else tensor


def cut_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor that all ranks have, cut as ``other`` is."""
    if not isinstance(other, DTensor):
        return tensor
    cut: Tensor = distribute_tensor(tensor, other.device_mesh, [Shard(tensor.dim() - 1)], src_data_rank=None)
    return cut


def cross_entropy(scores: Tensor, labels: Tensor, ignored: int, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the cross entropy, in fp32 at least, of scores [..., V] that may be split by vocabulary.

    In half precision a sum over V exponentials loses too much. ``loss_parallel`` of torch, which splits it too, would
    have to be entered around the backward, which is the pipeline's, and fails for smoothed labels (torch 2.13).
    """
    precision = torch.promote_types(scores.dtype, torch.float32)
    if not isinstance(scores, DTensor):
        return F.cross_entropy(scores.to(precision).flatten(0, -2), labels.flatten(), ignore_index=ignored,
                               reduction="sum", label_smoothing=smoothing)
    mesh, scores_nv, labels_n = scores.device_mesh, scores.to_local().to(precision).flatten(0, -2), labels.flatten()
    index_n = labels_n - mesh.get_local_rank() * scores_nv.shape[1]
    here_n = (index_n >= 0) & (index_n < scores_nv.shape[1])
    shifted_nv = scores_nv - _over_ranks(scores_nv.detach().amax(1), mesh, "max")[:, None]
    own_n = shifted_nv.gather(1, index_n.where(here_n, 0)[:, None])[:, 0].where(here_n, 0)
    exponentials_n, label_n, all_n = _over_ranks(
        torch.stack((shifted_nv.exp().sum(1), own_n, shifted_nv.sum(1))), mesh, "sum")
    mean_n = all_n / (scores_nv.shape[1] * mesh.size())
    loss_n = exponentials_n.log() - (1 - smoothing) * label_n - smoothing * mean_n
    total: Tensor = loss_n.where(labels_n != ignored, 0).sum()
    return total


def _over_ranks(tensor: Tensor, mesh: DeviceMesh, operation: str) -> Tensor:
    """Return the sum or maximum over the ranks on each of them; the gradient of a term is that of the sum, unsummed."""
    return _moved(tensor, mesh, Partial(operation), Replicate())
