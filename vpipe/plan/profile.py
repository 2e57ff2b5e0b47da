"""A profile: the measured costs of a model's layers on a device, at one microbatch size, and the bytes that follow.

Seconds are medians, each with its spread. Bytes are exact: counted, not estimated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from vpipe.description.cut import LayerNames, crossings
from vpipe.errors import UserError
from vpipe.files import count_of, read_json, read_record, replace_text

FORMAT = 1

MOST_BYTES = 16 << 20
"""Of a profile's file: a model of 1,024 blocks takes three."""


@dataclass(frozen=True)
class Seconds:
    """A measured time."""

    median: float  # in seconds
    spread: float = 0.0  # half the distance between the quartiles, relative to the median


@dataclass(frozen=True)
class TensorBytes:
    """A named tensor that a layer writes, or a field of the batch, for one microbatch."""

    name: str  # as layers call it
    bytes: int  # of its storage
    wants_gradient: bool  # whether a gradient of the same size comes back


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one microbatch in one layer."""

    name: str
    forward: Seconds  # one forward that keeps a graph
    backward: Seconds  # one whole backward
    input_half: Seconds  # the half of a split backward that makes the gradients of the inputs
    weight_half: Seconds  # the half that makes the gradients of the weights
    recompute: Seconds  # a dropped forward again
    step: Seconds  # one optimizer step of the layer's own parameters
    parameter_bytes: int  # of its own parameters that are trained; a tied one counts where it is owned
    optimizer_bytes: int  # of what the optimizer keeps for them, master weights among it where the layers' are rounded
    reads: tuple[str, ...]  # the names of the tensors and batch fields that it reads
    writes: tuple[TensorBytes, ...]  # the tensors that it writes
    # kept for backward by this layer's graph, each storage once, without weights and without what it reads or writes
    saved_bytes: int
    saves: tuple[str, ...]  # which of the tensors that it reads or writes its graph keeps: "in:h", "out:h"
    weight_half_bytes: int  # kept between the two halves of a backward, each storage once, without weights
    working_bytes: int  # the most that a backward holds for a while on top of what was kept and of gradients of weights
    tied: Mapping[int, int]  # borrowed parameters, in bytes by the number of the layer that owns them
    forward_flops: int  # floating-point operations of a forward; a backward takes twice as many
    like: int  # the number of the equal layer that was measured in its place; its own where it was measured
    # of its parameters that are not trained, and of its buffers: held once, whatever the versions
    frozen_bytes: int = 0
    frozen_tied: Mapping[int, int] = field(default_factory=dict)  # of borrowed ones among the former, as ``tied``
    largest_bytes: int = 0  # of its largest parameter that is trained; where each replica steps whole ones, see zero1
    carried_bytes: int = 0  # of what its slices hand on to one another, such as keys and values, of all tokens
    past_bytes: int = 0  # what a slice keeps of that from those before it, recomputed or not; see Profile.sliced


@dataclass(frozen=True)
class LinkProfile:
    """A measured link in one direction: seconds before the first byte arrives, then bytes per second."""

    latency_s: float
    bytes_per_s: float
    spread: float = 0.0


@dataclass(frozen=True)
class Identity:
    """The model, device and settings of a profile. If any of these differs, another profile is needed."""

    model: str  # a digest of the layers: names, classes, shapes of parameters and tensors
    model_name: str  # family and size, for people
    layers: int  # how many
    microbatch_size: int  # samples
    optimizer: str  # its name, and the settings that change what it keeps and does
    device: str  # name of the processor or GPU
    threads: int  # of the processor, per rank
    ranks_per_host: int  # how many ranks of a pipeline were busy on a host
    backend: str  # gloo or nccl; gloo and shared memory
    torch: str  # its version
    ranks: int = 0  # how many processes measured together
    hosts: int = 1  # on how many hosts they were
    cores: int | None = None  # how many ranks of a host can compute at once; None where each has a device of its own
    device_bytes: int = 0  # memory of a device
    vpipe: str = ""  # its version
    # a digest of the source of the layers' classes; None where it cannot be read, or where a layer has an object
    # among its settings that does not say what is in it. Such a profile is not kept for other processes.
    code: str | None = ""
    precision: str = "fp32"  # of its numbers, as training.precision says
    # how many processes split every layer: each rank of a pipeline is so many. Bytes and operations are those of one,
    # times those of all of them together, which wait for one another.
    tensor: int = 1
    structure: str = ""  # a digest of the layers alone; of an older version it is empty

    @property
    def pure(self) -> bool:
        """The layers' weights are rounded, so that there are master weights beside them."""
        return self.precision == "bf16_pure"

    @property
    def digest(self) -> str:
        """Twelve characters that identify all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def kept_as(self) -> str | None:
        """The digest; None where the layers' source and settings cannot be read, so that no later process knows an
        equal model."""
        return None if self.code is None else self.digest


@dataclass(frozen=True)
class Profile:
    """The measured costs of a model, see the top of the file."""

    identity: Identity  # what was measured, on what
    layers: tuple[LayerProfile, ...]
    fields: Mapping[str, int]  # batch fields: bytes of one microbatch
    default_link: LinkProfile  # between two ranks of one host
    # between certain ranks, where they were measured; by (source, target)
    links: Mapping[tuple[int, int], LinkProfile] = field(default_factory=dict)
    # how many ranks of a host can compute at once without slowing each other; None where each has a device of its own
    cores: int | None = None
    dispatch_s: float = 0.0  # what carrying out one action takes beside what is computed
    # of weights, when an update needs a further version of them: bytes of the version per second; 0 where a step
    # makes its version from master weights, so that a further one takes no longer
    copy_bytes_per_s: float = 0.0
    # of gradients of weights that are added to what was accumulated before. backward and weight_half hold it;
    # the first microbatch after an update does not need it.
    accumulate_bytes_per_s: float = 0.0
    device_bytes: int = 0  # memory of a device; that of the host, where its ranks share cores or GPUs
    # the most that the device reached in a large product of matrices in the run's precision, one rank alone on its
    # core or device
    peak_flops_per_s: float = 0.0
    # the largest difference found between a layer and the equal one measured in its place, relative
    checked: float = 0.0
    took_s: float = 0.0  # how long measuring took
    extrapolates: bool = False  # training.delay_correction extrapolates the steps of stages with several versions
    zero1: bool = False  # parallel.zero1: each replica of a stage steps a part of its parameters
    averages: bool = False  # training.average: an average follows the weights that a replica steps
    process_bytes: int = 0  # that Python, torch, its kernels and the data take in a rank; 0: unknown
    kept_share: float = 0.0  # of the bytes of tensors, what their allocator keeps besides

    @cached_property
    def frozen_layers(self) -> int:
        """How many layers from the first on train nothing, and so have no backward; never all."""
        return next((number for number, layer in enumerate(self.layers[:-1]) if layer.parameter_bytes or layer.tied
                     or any(tensor.wants_gradient for tensor in layer.writes)), len(self.layers) - 1)

    def sharers(self, width: int) -> int:
        """Return how many of a stage's ``width`` replicas share one step and one state of its optimizer."""
        return width if self.zero1 else 1

    def owned_bytes(self, total: int, largest: int, width: int) -> int:
        """Return the most that one of so many replicas has of what there is for parameters, ``largest`` for one
        (:func:`vpipe.runtime.reducer.owners_of`)."""
        sharers = self.sharers(width)
        return -(-(total + (sharers - 1) * largest) // sharers)

    def averaged_bytes(self, weights: int) -> int:
        """Return the bytes of the average of so many bytes of trained weights, which is as wide as master weights."""
        return weights * (1 + self.identity.pure) * self.averages

    def extrapolated_bytes(self, weights: int, versions: int) -> int:
        """Return the bytes of the last changes that a stage keeps, which are as wide as master weights.

        Args:
            weights: bytes of the stage's trained weights.
            versions: of them that it holds. With one, no gradient is late.
        """
        return (weights * (2 if self.identity.pure else 1)) if self.extrapolates and versions > 1 else 0

    def sliced(self, slices: int) -> Profile:
        """Return the costs of a slice in place of a microbatch, where each is cut into so many.

        Times and bytes are equal shares: a slice's mean, which attention to all tokens before makes the less even the
        longer sequences are. What one action takes beside its work, and adding to gradients of weights, is not shared.

        Slice i of n keeps what all slices before it have carried, i / n of it, even where it drops the rest. On average
        that is (n - 1) / 2n of it; those in flight are the first ones of their microbatches, which keep no more on
        average. A slice that is recomputed has it twice, for it puts its own behind a copy. That leaves room for the
        gradient of what was carried, which is there between two backwards, but for (n - 1) / 2n of it at most.

        A layer may have one memory for what all slices carry, as vpipe's families do, all of it from the first slice to
        the last: no more than that, but for two slices, of two microbatches, where it is 1 / n for each slice.
        """
        def share(time: Seconds, each_s: float = 0.0) -> Seconds:
            return replace(time, median=(time.median - min(each_s, time.median)) / slices + min(each_s, time.median))

        def part(size: int) -> int:
            return -(-size // slices)

        layers, rate = [], self.accumulate_bytes_per_s or math.inf
        for layer in self.layers if slices > 1 else ():
            added_s = layer.parameter_bytes / rate  # to gradients of weights, in each slice alike
            layers.append(replace(
                layer, forward=share(layer.forward), backward=share(layer.backward, added_s),
                input_half=share(layer.input_half), weight_half=share(layer.weight_half, added_s),
                recompute=share(layer.recompute),
                writes=tuple(replace(one, bytes=part(one.bytes)) for one in layer.writes),
                saved_bytes=part(layer.saved_bytes), working_bytes=part(layer.working_bytes),
                past_bytes=-(-layer.carried_bytes * max(slices - 1, 2) // (2 * slices)),
                weight_half_bytes=part(layer.weight_half_bytes), forward_flops=part(layer.forward_flops)))
        return self if slices == 1 else replace(
            self, layers=tuple(layers), fields={name: part(size) for name, size in self.fields.items()})

    @cached_property
    def names(self) -> tuple[LayerNames, ...]:
        """What every layer reads, writes and borrows; the name of a borrowed weight is the number of its owner."""
        return tuple(LayerNames(layer.reads, [tensor.name for tensor in layer.writes], {
            f"{number}.{owner}": (owner, str(owner)) for owner in layer.tied})
            for number, layer in enumerate(self.layers))

    @cached_property
    def activations(self) -> ActivationMemory:
        return ActivationMemory(self)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        content = asdict(self)
        content["links"] = [[source, target, asdict(link)] for (source, target), link in self.links.items()]
        for layer in content["layers"]:
            for key in ("tied", "frozen_tied"):
                layer[key] = {str(owner): size for owner, size in layer[key].items()}
        return {"format": FORMAT, **content}

    @classmethod
    def of_json(cls, content: Any, where: str | None = None) -> Profile:
        """Read the values of :meth:`as_json`.

        Args:
            where: they were read, for messages.

        Raises:
            UserError: it is no profile.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise UserError(f"the profile has format {found!r}, this version reads {FORMAT}", where=where, hint=_MAKE)
        try:
            return _profile(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the profile is damaged: {type(error).__name__}: {error}", where=where,
                            hint=_MAKE) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, atomically."""
        replace_text(path, json.dumps(self.as_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            UserError: the file is missing, or no profile.
        """
        return cls.of_json(read_json(path, MOST_BYTES, "the profile", _MAKE), str(path))


@dataclass(frozen=True)
class LayerTensors:
    """The tensors around a layer, as far as the bytes of a stage depend on them; equal ones stand for each other."""

    before: tuple[tuple[str, int], ...]  # names of the tensors that are alive before the layer, with their bytes
    after: frozenset[str]  # names alive after it
    saved: int  # bytes that its graph keeps besides named tensors
    saves_in: tuple[str, ...]  # tensors alive before it that its graph keeps
    saves_out: tuple[tuple[str, int], ...]  # tensors that it writes and its graph keeps, with their bytes
    writes: frozenset[str]  # names
    recompute_s: float  # its forward again
    past: int = 0  # bytes of what slices before have carried to this one


class PrefixState(NamedTuple):
    """The state in which a set over the first layers of a stage ends, as far as later layers depend on it."""

    recomputed: bool | None  # its last layer is recomputed; None before the first layer
    held: frozenset[str]  # tensors alive here that are held already
    remade: frozenset[str]  # tensors that the recomputation of the last run of layers makes and keeps


START = PrefixState(None, frozenset(), frozenset())


@lru_cache(maxsize=1 << 14)
def add_layer(state: PrefixState, layer: LayerTensors, recompute: bool) -> tuple[PrefixState, int, int]:
    """Add one layer, kept or recomputed, to a set.

    Returns:
        The next state; the bytes that the layer adds to a microbatch while dropped activations are gone, and once they
        are recomputed.
    """
    sizes, held, remade, added = dict(layer.before), state.held, state.remade, 0
    if state.recomputed is not recompute:  # another run begins, and holds its inputs
        added = sum(size for name, size in layer.before if name not in held)
        held, remade = held.union(sizes), frozenset()
    counted = held | remade if recompute else held
    saved = layer.saved + sum(sizes[name] for name in layer.saves_in if name not in counted)
    saved += sum(size for _, size in layer.saves_out)
    made = (counted.union(layer.saves_in) - layer.writes).union(name for name, _ in layer.saves_out)
    added += layer.past
    if recompute:
        held = held - layer.writes
        following = PrefixState(True, held & layer.after, (made - held) & layer.after)
        return following, added, added + saved + 2 * layer.past
    return PrefixState(False, made & layer.after, frozenset()), added + saved, added + saved


class ActivationMemory:
    """The bytes that a microbatch holds between its forward and its backward, and sends through cuts.

    The counterpart, without torch, of the runtime's record of a microbatch. ``tensors`` are those around every layer,
    ``crossing`` those that cross the cut before it.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile, self.crossing = profile, list[list[TensorBytes]]()
        self.tensors: list[LayerTensors] = []
        written: dict[str, TensorBytes] = {}
        alive = crossings(profile.names)
        for layer, before, after in zip(profile.layers, alive, alive[1:], strict=False):
            sizes = {tensor.name: tensor.bytes for tensor in layer.writes}
            marks = [mark.partition(":")[::2] for mark in dict.fromkeys(layer.saves)]
            self.crossing.append([written[name] for name in sorted(before)])
            self.tensors.append(LayerTensors(
                tuple((tensor.name, tensor.bytes) for tensor in self.crossing[-1]), frozenset(after),
                layer.saved_bytes, tuple(name for way, name in marks if way == "in" and name in before),
                tuple((name, sizes[name]) for way, name in marks if way == "out"), frozenset(sizes),
                layer.recompute.median, layer.past_bytes))
            written |= {tensor.name: tensor for tensor in layer.writes}
        self.crossing.append([])

    def output_bytes(self, cut: int) -> int:
        """Return the bytes that a microbatch sends forward through a cut."""
        return sum(tensor.bytes for tensor in self.crossing[cut])

    def gradient_bytes(self, cut: int) -> int:
        """Return the bytes that a microbatch sends back through a cut."""
        return sum(tensor.bytes for tensor in self.crossing[cut] if tensor.wants_gradient)

    def held(self, layers: range, recomputed: Collection[int] = ()) -> tuple[int, int, frozenset[str]]:
        """Return the bytes that a stage keeps when the ``recomputed`` layers drop what they would save, those that it
        holds once dropped activations are recomputed, and the tensors alive after it that it holds in both cases."""
        read = {name for number in layers for name in self._profile.layers[number].reads}
        kept = full = sum(size for name, size in self._profile.fields.items() if name in read)
        state = START
        for number in layers:
            state, more_kept, more_full = add_layer(state, self.tensors[number], number in recomputed)
            kept, full = kept + more_kept, full + more_full
        return kept, full, state.held


_MAKE = "vpipe profile CONFIG measures one"


def _profile(content: Mapping[str, Any]) -> Profile:
    _check_complete(Profile, content)
    for values in content["layers"]:
        _check_complete(LayerProfile, values)
    profile = read_record(
        Profile, {key: value for key, value in content.items() if key != "format"}, links=lambda links: {
            (count_of(source), count_of(target)): read_record(LinkProfile, link) for source, target, link in links})
    identity, known = profile.identity, set(profile.fields)
    for key in ("microbatch_size", "threads", "ranks_per_host", "hosts", "tensor"):
        if getattr(identity, key) < 1:
            raise ValueError(f"{key} is {getattr(identity, key)}")
    if not profile.layers or len(profile.layers) != identity.layers:
        raise ValueError(f"it has {len(profile.layers)} layers and says {identity.layers}")
    if profile.cores == 0:
        raise ValueError("its ranks share 0 cores")
    for number, layer in enumerate(profile.layers):
        lenders = [*layer.tied, *layer.frozen_tied]
        if not all(0 <= lender < number for lender in lenders) or not 0 <= layer.like <= number:
            raise ValueError(f"layer {number} is like layer {layer.like} and borrows from {lenders}")
        around = {f"in:{name}" for name in layer.reads} | {f"out:{tensor.name}" for tensor in layer.writes}
        if unknown := set(layer.saves) - around:
            raise ValueError(f"layer {number} keeps {sorted(unknown)}, which it neither reads nor writes")
        if unknown := set(layer.reads) - known:
            raise ValueError(f"layer '{layer.name}' reads {sorted(unknown)}, which nothing before it writes")
        known.update(tensor.name for tensor in layer.writes)
    for link in (profile.default_link, *profile.links.values()):
        if not link.bytes_per_s > 0:
            raise ValueError(f"a link carries {link.bytes_per_s} bytes per second")
    return profile


def _check_complete(kind: type[Any], content: Mapping[str, Any]) -> None:
    """Raise a KeyError for a field that is missing, also for one with a default."""
    for each in fields(kind):
        if each.name not in ("process_bytes", "kept_share"):  # which older versions did not measure
            content[each.name]
