"""Measure a model on the ranks that will train it, and make its profile."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vpipe import accelerator
from vpipe.description.precision import FP32, Precision
from vpipe.description.transfers import Transfers
from vpipe.errors import RunError, VpipeError, counted
from vpipe.model.model import Model
from vpipe.model.structure import structure
from vpipe.plan.profile import Identity, LayerProfile, Profile, Seconds
from vpipe.profiling.layer_runner import LayerCounts, LayerInputs, LayerRunner, count_layer, gradients_for, live_bytes
from vpipe.profiling.layer_timer import LayerTimer, Samples, measure_overhead, run_rounds, summary
from vpipe.profiling.links import added_bytes_per_s, copied_bytes_per_s, matrix_flops_per_s, measure_links
from vpipe.profiling.rank_group import RankGroup, shared_bytes
from vpipe.runtime.stage_layers import Rounding
from vpipe.runtime.stage_optimizer import MakeOptimizer

INSTANCES = 2
"""Layers of a kind that are timed: one, and another to see whether equal layers are equal."""


@dataclass(frozen=True)
class Survey:
    """One microbatch's way through the layers."""

    like: Sequence[int]  # per layer the number of the first that is equal to it
    sampled: Sequence[int]  # the layers to be timed, in order; of every kind at most INSTANCES
    given: Mapping[int, LayerInputs]  # inputs by sampled layer
    counts: Mapping[int, LayerCounts]  # by the first layer of a kind
    fields: Mapping[str, int]  # bytes of the batch fields


def survey(model: Model, structures: Sequence[str], microbatch: Mapping[str, Tensor],
           runner_of: Callable[[int], LayerRunner], device: torch.device, make_optimizer: MakeOptimizer,
           precision: Precision = FP32) -> Survey:
    """Send a microbatch through the model, running one layer of each kind; the others pass on that one's outputs.

    Args:
        structures: of the layers.
        runner_of: builds a layer.
        precision: in which layers compute.

    Raises:
        RunError: a layer fails on the microbatch.
    """
    fields = {name: microbatch[name].to(device) for name in model.batch}
    if precision.pure and precision.dtype is not None:
        fields |= {name: Rounding(precision.dtype).rounded(fields[name]) for name in fields.keys() - model.exact}
    tokens = max((tensor.shape[1] for tensor in fields.values() if tensor.dim() > 1), default=0)
    tensors: dict[str, Tensor] = {}
    firsts: dict[tuple[object, ...], int] = {}
    made: dict[int, list[Tensor]] = {}
    like, given, counts = [], {}, {}
    for number, layer in enumerate(model.layers):
        later = [name for name in layer.outputs if name in model.layer_specs[number].outputs]
        key = (structures[number], tuple(_kind((fields | tensors)[name]) for name in layer.inputs),
               tuple(layer.inputs.index(name) for name in layer.inputs), len(layer.outputs),
               tuple(name in later for name in layer.outputs))
        first = firsts.setdefault(key, number)
        like.append(first)
        inputs = {name: tensors[name] for name in layer.inputs if name not in fields}
        read = {name: fields[name] for name in layer.inputs if name in fields}
        if first == number:
            try:
                runner = runner_of(number)
                outputs, _ = runner.forward(LayerInputs(inputs, read, {}))
                here = LayerInputs(inputs, read, gradients_for(outputs, later))
                counts[number] = count_layer(runner, here, make_optimizer, tokens)
            except VpipeError:
                raise
            except Exception as error:
                shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in fields.items())
                what = f"layer '{layer.name}' fails on a microbatch of {shapes}: {type(error).__name__}: {error}"
                raise RunError(what, hint="a layer that does not fit into memory needs smaller microbatches") from error
            made[number] = [outputs[name] for name in layer.outputs]
        tensors.update(zip(layer.outputs, made[first], strict=True))
        if like.count(first) <= INSTANCES:
            given[number] = LayerInputs(inputs, read, gradients_for(tensors, later))
    return Survey(like, sorted(given), given, counts, {name: tensor.nbytes for name, tensor in fields.items()})


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.requires_grad


BUDGET_S = 8.0
"""Time for the layers at one size of microbatch; every figure is measured a few times even if that takes longer."""

_TIMES = ("forward", "backward", "input_half", "weight_half", "recompute", "step")

Tell = Callable[[str], None]


def measure(model: Model, microbatches: Sequence[Mapping[str, Tensor]], make_optimizer: MakeOptimizer, *,
            identities: Sequence[Identity], device: torch.device | str = "cpu", seed: int = 0, timeout_s: float = 60.0,
            budget_s: float = BUDGET_S, tell: Tell = lambda line: None, shared_memory: bool = True,
            backend: str | None = None) -> list[Profile]:
    """Return profiles of a model, one for each of the microbatches, which differ in the number of samples.

    Every rank of the process group calls this at the same time, or a process alone. Figures that do not depend on the
    microbatch are measured once. Neighbours that split layers, as many as the identities' ``tensor`` says, run the same
    layers at the same time, for these have collectives.

    Args:
        make_optimizer: named parameters -> their optimizer, or None.
        identities: of the profiles, in the order of the microbatches; all in one precision, and of layers split over
            as many processes. Those of rank 0 count.
        seed: of initialisation and dropout.
        timeout_s: of a transfer.
        budget_s: for the times at one size.
        tell: shows progress.
        shared_memory, backend: of the run's transfers (:class:`~vpipe.description.transfers.Transfers`).

    Returns:
        The same on every rank.

    Raises:
        UserError, RunError: a layer cannot be run.
    """
    transfers = Transfers(backend, timeout_s, shared_memory)
    return list(_Measurement(model, make_optimizer, identities, device, seed, transfers, budget_s,
                             tell).profiles(microbatches))


class _Measurement:

    def __init__(self, model: Model, make_optimizer: MakeOptimizer, identities: Sequence[Identity],
                 device: torch.device | str, seed: int, transfers: Transfers, budget_s: float, tell: Tell) -> None:
        (precision, tensor), = {(identity.precision, identity.tensor) for identity in identities}
        self._group, self._identities, self._precision = RankGroup(device, tensor), identities, Precision(precision)
        self._model, self._make_optimizer, self._device, self._seed = model, make_optimizer, self._group.device, seed
        self._transfers, self._budget_s, self._tell = transfers, budget_s, tell
        self._clock = accelerator.clock_of(self._device)
        if tensor > 1 and self._device.type == "cpu":
            self._clock = perf_counter  # the time of the thread would not have what it waits in collectives
        ranks = self._group.ranks_per_host
        self._sharing = 1 if self._device.type == "cpu" else ranks // (self._group.at_once() or ranks) or 1
        self._process: dict[str, Any] = {}
        self._structures = [structure(layer) for layer in model.layers]
        self._cores = self._group.cores()
        sharing = 1 if self._cores is None else self._group.ranks_per_host * tensor
        free = self._group.all_gather(accelerator.free_bytes(self._device))
        self._room_bytes = min(free) // (2 * sharing)  # all ranks cut equal windows
        self._runners: dict[int, LayerRunner] = {}
        self._steps: list[dict[int, list[float]]] = []  # per rank, by kind: they do not depend on the microbatch

    def profiles(self, microbatches: Sequence[Mapping[str, Tensor]]) -> Iterator[Profile]:
        started = perf_counter()
        overhead, shared = self._measured_once()
        of_first = self._group.all_gather([asdict(identity) for identity in self._identities])[0]
        for microbatch, identity in zip(microbatches, [Identity(**fields) for fields in of_first], strict=True):
            self._tell(f"counting what {len(self._model)} layers keep of "
                       f"{counted(identity.microbatch_size, 'sample')}")
            seen = survey(self._model, self._structures, microbatch, self._runner, self._device, self._make_optimizer,
                          self._precision)
            layers, checked = self._layers(seen, self._times(seen, identity.microbatch_size), overhead)
            yield Profile(identity, layers, seen.fields, cores=self._cores, checked=checked,
                          **self._process,
                          took_s=max(self._group.all_gather(perf_counter() - started)), **shared)
            started = perf_counter()

    def _runner(self, number: int) -> LayerRunner:
        """Return a layer's runner, built once, unless there is no room for all of them."""
        if number in self._runners:
            return self._runners[number]
        runner = LayerRunner(self._model, number, self._device, self._seed, self._precision)
        kept = sum(map(_weight_bytes, (*self._runners.values(), runner)))
        if kept // self._group.tensor <= self._room_bytes // 2:
            self._runners[number] = runner
        return runner

    def _measured_once(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the overhead of calls, and the fields of a profile that do not depend on the microbatch."""
        self._tell("measuring transfers between ranks" if self._group.ranks > 1 else "measuring the device")
        device, pure, dtype = self._device, self._precision.pure, self._precision.dtype or torch.float32
        link, links = measure_links(self._group, device, self._transfers)
        overheads, copied, added, flops = zip(*self._group.all_gather([
            measure_overhead(device, self._clock, self._make_optimizer, self._precision),
            0.0 if pure else copied_bytes_per_s(device), added_bytes_per_s(device, dtype if pure else torch.float32),
            matrix_flops_per_s(device, dtype)]), strict=True)
        overhead = {figure: median(theirs[figure] for theirs in overheads) for figure in _TIMES}
        return overhead, {
            "default_link": link, "links": links, "dispatch_s": (overhead["forward"] + overhead["backward"]) / 2,
            "copy_bytes_per_s": median(copied), "accumulate_bytes_per_s": median(added), "peak_flops_per_s": max(flops),
            "device_bytes": min(self._group.all_gather(shared_bytes(device, self._group.at_once())))}

    def _times(self, seen: Survey, size: int) -> list[dict[int, Samples]]:
        """Return the samples of every rank, by rank and sampled layer."""
        mine: dict[int, Samples] = {}
        # Those of rank 0: shards may differ in their bytes.
        windows: list[list[int]] = self._group.all_gather(list(self._windows(seen)))[0]
        for place, window in enumerate(windows, 1):
            timer = LayerTimer([self._runner(number) for number in window], [seen.given[number] for number in window],
                        self._clock, shifted=self._group.place % 2 == 1)
            what = f"timing {len(window)} of {len(self._model)} layers at {counted(size, 'sample')}" + (
                f", part {place} of {len(windows)}" if len(windows) > 1 else "")
            self._tell(what)
            run_rounds(timer, self._budget_s / len(windows), self._group, self._cores,
                       lambda rounds, what=what: self._tell(f"{what}: round {rounds}"))  # type: ignore[misc]
            if not self._steps:
                timer.steps(self._make_optimizer)
            mine |= dict(zip(window, timer.samples, strict=True))
        shared = [{int(number): samples for number, samples in theirs.items()}
                  for theirs in self._group.all_gather(mine)]
        if not self._steps:
            self._steps = [_by_kind(seen, theirs, "step") for theirs in shared]
            self._process = self._measured_process()
        return shared

    def _measured_process(self) -> dict[str, Any]:
        """Return what a process takes besides tensors, once it has run every layer."""
        gc.collect()
        tensors = max(1, live_bytes(self._device))
        kept = accelerator.taken_bytes(self._device)
        accelerator.give_back_unused(self._device)
        taken = accelerator.taken_bytes(self._device)
        of_all = self._group.all_gather((taken // self._sharing - tensors, (kept - taken) / self._sharing / tensors))
        return {"process_bytes": max(0, *(taken for taken, _ in of_all)),
                "kept_share": max(0.0, *(share for _, share in of_all))}

    def _windows(self, seen: Survey) -> Iterator[list[int]]:
        """Yield the sampled layers, as many at a time as there is room for with the microbatches that a timer holds."""
        window: list[int] = []
        used = 0
        for number in seen.sampled:
            counts, given = seen.counts[seen.like[number]], seen.given[number]
            activations = counts.saved_bytes + counts.working_bytes + sum(t.nbytes for t in given.inputs.values())
            needed = (2 * counts.parameter_bytes + counts.optimizer_bytes + counts.frozen_bytes
                      + 4 * (activations + sum(tensor.bytes for tensor in counts.writes)))
            if window and used + needed > self._room_bytes:
                yield window
                window, used = [], 0
            window.append(number)
            used += needed
        yield window

    def _layers(self, seen: Survey, shared: Sequence[Mapping[int, Samples]],
                overhead: Mapping[str, float]) -> tuple[tuple[LayerProfile, ...], float]:
        """Return the layers of a profile, and the largest difference between equal ones."""
        times: dict[int, dict[str, Seconds]] = defaultdict(dict)
        for figure in _TIMES:
            pooled: dict[int, list[float]] = defaultdict(list)
            for of_rank in self._steps if figure == "step" else [_by_kind(seen, theirs, figure) for theirs in shared]:
                for kind, seconds in of_rank.items():
                    pooled[kind] += seconds
            for kind in set(seen.like):  # less what a stage takes once, however many layers it has
                times[kind][figure] = summary([max(0.0, one - overhead[figure]) for one in pooled[kind]])
        return tuple(self._layer(number, kind, seen.counts[kind], times[kind])
                     for number, kind in enumerate(seen.like)), _checked(seen, shared)

    def _layer(self, number: int, kind: int, counts: LayerCounts, times: Mapping[str, Seconds]) -> LayerProfile:
        layer = self._model.layers[number]
        reads = tuple(dict.fromkeys(layer.inputs))
        outputs = list(dict.fromkeys(layer.outputs))
        writes = tuple(replace(tensor, name=name) for tensor, name in zip(counts.writes, outputs, strict=True))
        # The places of what is kept are those of a runner: tensors first, then batch fields.
        places = {"in": sorted(reads, key=lambda name: name in self._model.batch), "out": outputs}
        borrowed = self._model.layer_specs[number].borrowed
        tied, frozen_tied = (_by_owner({borrowed[f"{layer.name}.{own}"]: size for own, size in sizes.items()})
                             for sizes in (counts.tied_bytes, counts.frozen_tied_bytes))
        return LayerProfile(
            name=layer.name, **times, parameter_bytes=counts.parameter_bytes, optimizer_bytes=counts.optimizer_bytes,
            reads=reads, writes=writes, saved_bytes=counts.saved_bytes,
            saves=tuple(f"{way}:{places[way][place]}" for way, place in counts.saves),
            weight_half_bytes=counts.weight_half_bytes, working_bytes=counts.working_bytes, tied=tied,
            forward_flops=counts.forward_flops, like=kind, frozen_bytes=counts.frozen_bytes, frozen_tied=frozen_tied,
            largest_bytes=counts.largest_bytes, carried_bytes=counts.carried_bytes, past_bytes=0)


def _by_owner(sizes: Mapping[tuple[int, str], int]) -> dict[int, int]:
    """Return the bytes of borrowed parameters by the layer that owns them."""
    found: dict[int, int] = defaultdict(int)
    for (owner, _), size in sizes.items():
        found[owner] += size
    return dict(found)


def _by_kind(seen: Survey, samples: Mapping[int, Samples], figure: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for number, theirs in samples.items():
        found[seen.like[number]] += theirs.get(figure, [])
    return found


def _checked(seen: Survey, shared: Sequence[Mapping[int, Samples]]) -> float:
    """Return the largest difference between equal layers in the time of a microbatch, forward and backward."""
    totals: dict[int, list[float]] = defaultdict(list)
    for number in seen.sampled:
        totals[seen.like[number]].append(sum(
            median([second for theirs in shared for second in theirs[number][figure]])
            for figure in ("forward", "backward")))
    return max((max(times) / min(times) - 1 for times in totals.values() if min(times) > 0), default=0.0)


def _weight_bytes(runner: LayerRunner) -> int:
    """Return the bytes of a layer's weights, with gradients and an optimizer's state; all shards, equal on every rank.
    """
    return 4 * sum(p.nbytes for module in runner.stage.modules.values() for p in module.parameters())
