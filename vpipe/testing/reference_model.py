"""Run a model on one device for the oracle, with separate buffers of replicas and separate copies of tied weights.

A plain PyTorch program that shares nothing with the engine but the settings of a precision. In ``bf16`` and ``fp16``
every layer runs under a ``torch.autocast`` of its own. There and in ``bf16_pure`` a float32 tensor is rounded when a
layer returns it, except for the loss, which is float32, and trained parameters are float32, or have masters that are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from vpipe.description.precision import Precision
from vpipe.model.layer import LOSS, Layer, moved, set_parameter, split_target
from vpipe.model.model import Model
from vpipe.model.sequential import rounded_module
from vpipe.runtime.compiled import compile_layers
from vpipe.runtime.sharded_tensors import DrawnAsOnOneDevice, is_sharded, set_data
from vpipe.schedules.assignment import Assignment


@dataclass(frozen=True)
class ReferencePrecision(Precision):
    """The precision that a reference computes in; see :class:`~vpipe.description.precision.Precision`."""

    name: str = "fp32"

    @property
    def description(self) -> str:
        """Describe a plain program in this precision, to stand after "plain PyTorch"."""
        if self.dtype is None:
            return ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (f" with {dtype} layers and float32 master weights" if self.pure else
                f" under torch.autocast({dtype})" + " with loss scaling" * self.scaled)

    def round(self, modules: Iterable[nn.Module]) -> None:
        """Give parameters the dtype in which layers compute: trained ones fp32 under autocast; with bf16 layers all
        bf16. Running statistics and the parameters beside them are fp32; other buffers stay."""
        for part in (part for module in map(rounded_module, modules) for part in module.modules()):
            running = part._buffers.get("running_mean") is not None
            for tensor in (*part.parameters(recurse=False), *(part.buffers(recurse=False) if running else ())):
                if self.dtype is None or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                    continue
                if running or (self.autocasts and tensor.requires_grad):
                    set_data(tensor, tensor.data.float())
                elif self.pure:
                    set_data(tensor, tensor.data.to(self.dtype))

    def fields(self, batch: Mapping[str, Tensor], exact: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the fields of a batch as layers read them, with bf16 layers rounded but for those named."""
        return {name: self._rounded(value) if self.pure and name not in exact else value
                for name, value in batch.items()}

    def outputs(self, names: Sequence[str], call: Callable[[], object], device: str = "cpu",
                carried: Sequence[str] = ()) -> dict[str, Tensor]:
        """Run a layer by ``call`` on a type of device and return its outputs by name.

        Args:
            carried: names of what it returns behind them for the next slice, in the precision that it has there.
        """
        with torch.autocast(device, dtype=self.dtype) if self.autocasts else nullcontext():
            result = call()
        outputs = zip((*names, *carried), result if isinstance(result, tuple) else (result,), strict=True)
        return {name: (tensor.float() if tensor.dtype == self.dtype else tensor) if name == LOSS
                else tensor if name in carried else self._rounded(tensor) for name, tensor in outputs}

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None or tensor.dtype != torch.float32 else tensor.to(self.dtype)


FP32 = ReferencePrecision()


class ReferenceModel:
    """All layers of a model, with separate buffers per replica and separate copies of weights tied across stages.

    Args:
        seed: of the initial weights.
        partition: layers per stage.
        widths: replicas per stage.
        precision: decides whether layers are rounded.
        device: of the layers.

    Attributes:
        layers: modules, in order.
        parameters: trainable ones by ``"<layer>.<parameter>"``, tied ones once, under the first name.
        masters: the parameters that an optimizer steps: ``parameters``, or copies in float32 where those are rounded.
        owners: copy of a tied weight -> its parameter, in the order of the stages. A stage that borrows a weight has
            one copy of it, called ``"<parameter>@<stage>"``.
        stage_of: parameter or copy -> its stage.
        names: per layer, its own name of a parameter -> the name of the parameter or copy in it.
    """

    def __init__(self, model: Model, seed: int, partition: Sequence[int], widths: Sequence[int],
                 precision: ReferencePrecision = FP32, device: torch.device | str = "cpu") -> None:
        self._model, self._modules, self.widths = model, model.materialize(seed), tuple(widths)
        moved(self._modules, device)
        self.layers = [self._modules[layer.name] for layer in model.layers]
        self._sharded = any(is_sharded(parameter) for module in self.layers for parameter in module.parameters())
        specs = model.split(partition)
        assert len(specs) == len(widths), "one width per stage"
        self._stage = [spec.index for spec in specs for _ in spec.layers]
        self.parameters = self._trainable()
        self.masters = self.parameters if not precision.pure else {
            name: nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True))
            for name, p in self.parameters.items()}
        self._frozen = {name: value.dtype for name, value in self._module_tensors().items()
                        if isinstance(value, nn.Parameter) and not value.requires_grad}
        precision.round(self.layers)
        copies = {own: f"{target}@{spec.index}" for spec in specs for own, (_, target) in spec.borrowed.items()
                  if target in self.parameters}
        self.owners = {copy: copy.rpartition("@")[0] for copy in copies.values()}
        self.stage_of = {name: self._stage[model.index(split_target(name, model.layers)[0])]
                         for name in self.parameters}
        self.stage_of |= {copy: int(copy.rpartition("@")[2]) for copy in self.owners}
        self.names = self._names(copies)
        # Replica 0's buffers rest in the modules, those of the other replicas here.
        apart = cache(lambda buffer, replica: buffer.clone())  # once, of a module that several layers share
        self._buffers = [[[apart(buffer, replica) for buffer in layer.buffers()] for replica in range(1, widths[stage])]
                         for layer, stage in zip(self.layers, self._stage, strict=True)]

    def load(self, tensors: Mapping[str, Tensor], factors: Mapping[str, float] = MappingProxyType({})) -> None:
        """Load weights and buffers of a checkpoint, if there are any; a replica that it lacks gets replica 0's buffers.

        Args:
            factors: by parameter, by which the weights look ahead from here on; 0 for those that are not there.
        """
        if not tensors:
            return
        tensors = {**tensors, **dict(self._looking_ahead(tensors, factors))}
        if self.masters is not self.parameters:
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(tensors[f"model.{name}"])
        for layer, module, others in zip(self._model.layers, self.layers, self._buffers, strict=True):
            prefix = f"model.{layer.name}."
            module.load_state_dict({name.removeprefix(prefix): value for name, value in tensors.items()
                                    if name.startswith(prefix)}, strict=False)
            for replica, buffers in enumerate(others, start=1):
                for (name, first), buffer in zip(module.named_buffers(), buffers, strict=True):
                    buffer.copy_(tensors.get(f"buffers.{replica}.{layer.name}.{name}", first))

    def _looking_ahead(self, tensors: Mapping[str, Tensor],
                       factors: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a checkpoint that have another factor now; those without a known one stay."""
        canonical = {id(p): name for name, p in self.parameters.items()}
        for layer, module in zip(self._model.layers, self.layers, strict=True):
            for own, p in module.named_parameters(layer.name, remove_duplicate=False):
                change, before = (tensors.get(f"delay_correction.{own}.{kind}") for kind in ("last_change", "factor"))
                factor = factors.get(canonical.get(id(p), own), 0.0)
                if change is not None and before is not None and float(before) != factor:
                    yield f"model.{own}", torch.add(tensors[f"model.{own}"], change, alpha=factor - float(before))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return copies of weights and buffers by their names in a checkpoint."""
        tensors = {f"model.{name}": value for name, value in self.state().items()}
        for layer, module, others in zip(self._model.layers, self.layers, self._buffers, strict=True):
            for replica, buffers in enumerate(others, start=1):
                tensors |= {f"buffers.{replica}.{layer.name}.{name}": buffer.clone() for (name, _), buffer in
                            zip(module.named_buffers(), buffers, strict=True)}
        return tensors

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Copy the masters into the parameters, rounded where the layers are."""
        if self.masters is not self.parameters:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])

    def separate_tied_weights(self) -> dict[str, nn.Parameter]:
        """Give each stage that borrows a weight a parameter of its own, which gets a gradient of its own."""
        copies = {copy: nn.Parameter(self.parameters[owner].detach().clone()) for copy, owner in self.owners.items()}
        for layer, names in zip(self.layers, self.names, strict=True):
            for own, name in names.items():
                if name in copies:
                    set_parameter(layer, own, copies[name])
        return copies

    @contextmanager
    def replica(self, microbatch: int) -> Iterator[None]:
        """Hold in the layers the buffers of the replicas that process a microbatch, forward and backward."""
        self._swap_buffers(microbatch)
        with DrawnAsOnOneDevice() if self._sharded else nullcontext():  # type: ignore[no-untyped-call]
            yield
        self._swap_buffers(microbatch)

    def state(self) -> dict[str, Tensor]:
        """Return copies of unrounded parameters and replica 0's buffers, named as in ``Pipeline.state_dict``, frozen
        ones in the dtypes that they had before rounding."""
        canonical = {id(p): name for name, p in self.parameters.items()}
        unrounded = {name: self.masters.get(canonical.get(id(value), ""), value).detach()
                     for name, value in self._module_tensors().items()}
        return {name: value.to(self._frozen.get(name, value.dtype), copy=True) for name, value in unrounded.items()}

    def _module_tensors(self) -> dict[str, Tensor]:
        return {f"{layer.name}.{name}": value for layer in self._model.layers for name, value in
                self._modules[layer.name].state_dict(keep_vars=True).items() if name not in layer.ties}

    @torch.no_grad()
    def _swap_buffers(self, microbatch: int) -> None:
        """Exchange the buffers in the layers with those of the replicas that process a microbatch."""
        pairs = {buffer: other for layer, stage, others in zip(self.layers, self._stage, self._buffers, strict=True)
                 if (replica := Assignment.replica_of(microbatch, self.widths[stage])) > 0
                 for buffer, other in zip(layer.buffers(), others[replica - 1], strict=True)}
        for buffer, other in pairs.items():
            before = buffer.clone()
            buffer.copy_(other)
            other.copy_(before)

    def _trainable(self) -> dict[str, nn.Parameter]:
        named: dict[nn.Parameter, str] = {}
        for layer in self._model.layers:
            for name, parameter in self._modules[layer.name].named_parameters():
                if parameter.requires_grad:
                    named.setdefault(parameter, f"{layer.name}.{name}")
        return {name: parameter for parameter, name in named.items()}

    def _names(self, copies: Mapping[str, str]) -> list[dict[str, str]]:
        canonical, seen = {id(p): name for name, p in self.parameters.items()}, dict[tuple[int, str], object]()

        def first(layer: Layer, name: str) -> bool:  # functional_call takes what an attribute has for its former value
            place, _, own = name.rpartition(".")
            table = id(self._modules[layer.name].get_submodule(place)._parameters)
            return seen.setdefault((table, own), (layer.name, name)) == (layer.name, name)

        return [{name: copies.get(f"{layer.name}.{name}", canonical[id(p)])
                 for name, p in self._modules[layer.name].named_parameters(remove_duplicate=False)
                 if id(p) in canonical and first(layer, name)} for layer in self._model.layers]


def compiled_model(model: Model, backend: str) -> Model:
    """Return a model whose layers are compiled as they are built."""
    def build(layer: Layer) -> nn.Module:
        module = layer.build()
        compile_layers([module], backend)
        return module

    made = copy(model)
    made.layers = tuple(replace(layer, build=partial(build, layer)) for layer in model.layers)
    return made
