"""Define the section ``parallel`` of a config: stages, their ranks, their schedule, and devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from vpipe import Cut, Execution, Plan, Transfers, accelerator
from vpipe.app.config.formats import ADDITIONS
from vpipe.app.config.validation import FilePath, Ints, Mistake, MistakesError, Name, Section, check_entries, is_share
from vpipe.app.config.yaml_tree import describe
from vpipe.app.sizes import parse_size
from vpipe.errors import UserError, nearest
from vpipe.schedules import CsvFile, RegisteredSchedule, Schedule

ORION = "orion"
"""What must be added for ``use_orion_scheduler``, under this name, to :data:`~vpipe.app.config.formats.ADDITIONS`."""

AUTO: Final = "auto"
"""Value of keys that are planned when the run starts."""


def _list_or_auto(value: Any, valid: Callable[[int], bool], expected: str, hint: str) -> Any:
    if value == AUTO:
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise MistakesError(Mistake((), f"must be a list of whole numbers or auto, got {describe(value)}", hint))
    return check_entries(value, lambda entry: type(entry) is int and valid(entry), expected, hint)


def _layers_or_auto(value: Any) -> Any:
    hint = "partition: the number of layers of each stage such as [3, 2, 2, 2], or auto"
    layers = _list_or_auto(value, lambda entry: entry >= 1, "a whole number of at least 1", hint)
    if layers != AUTO and sum(layers) > Cut.MOST_LAYERS:
        raise MistakesError(Mistake((), f"has {sum(layers):,} layers in all, more than {Cut.MOST_LAYERS:,}", hint))
    return layers


def _depths_or_auto(value: Any) -> Any:
    return _list_or_auto(value, lambda entry: 0 <= entry <= Schedule.MOST_MICROBATCHES,
                         f"a whole number from 0 to {Schedule.MOST_MICROBATCHES:,}", "warmup_depth: the forwards of "
                         "each stage before its first backward, such as [5, 3, 1, 0], or auto")


def _recompute(value: Any) -> Any:
    """Validate a share, or for each stage a share or a list of layers."""
    hint = ("recompute: the share of a stage's layers to recompute, counted from its end: 0..1; or a list with a "
            "share, or a list of layers, per stage; or auto")
    if value == AUTO:
        return value
    if not isinstance(value, (list, tuple)):
        return float(check_entries(value, is_share, "a number from 0 to 1", hint))
    wrong = [Mistake((i, j), f"must be the number of a layer, got {describe(layer)}", hint)
             for i, entry in enumerate(value) if isinstance(entry, (list, tuple))
             for j, layer in enumerate(entry) if type(layer) is not int or layer < 0]
    wrong += [Mistake((i,), f"must be a number from 0 to 1, got {describe(entry)}", hint)
              for i, entry in enumerate(value) if not isinstance(entry, (list, tuple)) and not is_share(entry)]
    if wrong:
        raise MistakesError(*wrong)
    return tuple(tuple(entry) if isinstance(entry, (list, tuple)) else float(entry) for entry in value)


def _size(value: Any) -> Any:
    try:
        return None if value is None else parse_size(value, "")
    except UserError as error:
        [problem] = error.problems
        raise MistakesError(Mistake((), problem.what.lstrip(), problem.hint)) from None


def _device(value: Any) -> Any:
    named = re.fullmatch(r"(\w+?)(:\d{1,4})?", value, re.ASCII) if isinstance(value, str) else None
    if value in (None, "cpu") or (named and (named[1] in accelerator.KINDS or named[1] == accelerator.kind())):
        return value
    raise MistakesError(Mistake((), f"must be cpu, cuda or a GPU such as cuda:1, got {describe(value)}",
                                "device: leave it out to compute on GPUs where there are any"))


def _backend(value: Any) -> Any:
    known = ("gloo", *accelerator.DIRECT)
    if value is None or (isinstance(value, str) and value and Transfers(value).group in known):
        return value
    raise MistakesError(Mistake((), f"must be 'gloo', 'nccl', 'xccl' or 'hccl', got {describe(value)}",
                                nearest(str(value), known)))


def _codecs(value: Any) -> Any:
    return check_entries(value, lambda name: name in get_args(Codec), "none, bf16 or int8",
                         "compress: how tensors travel between stages: one word, or a list with one per cut")


def used_codecs(compress: Codec | tuple[Codec, ...]) -> tuple[Codec, ...]:
    """Return the codecs that ``parallel.compress`` names."""
    return compress if isinstance(compress, tuple) else (compress,)


Codec = Literal["none", "bf16", "int8"]
Codecs = Annotated[Codec | tuple[Codec, ...], BeforeValidator(_codecs)]
Recomputed = Annotated[float | tuple[float | tuple[int, ...], ...] | Literal["auto"], BeforeValidator(_recompute)]
Bytes = Annotated[int | None, BeforeValidator(_size)]
Backend = Annotated[Literal["gloo", "nccl", "xccl", "hccl"] | str | None, BeforeValidator(_backend)]
DeviceName = Annotated[str | None, BeforeValidator(_device)]


OF_STAGES = ("model_parallel_size", "partition", "stage_to_rank_map", "warmup_depth")
OF_SCHEDULE = ("update_every", "chunks", "slices", "warmup_depth")
"""Keys that hold for a number of stages, and for a schedule: with another one they say nothing."""


class ParallelSection(Section):
    """The stages, their ranks, their schedule, and the devices."""

    model_parallel_size: int = Field(ge=1, le=Schedule.MOST_STAGES, description=(
        "number of stages; optional where partition or stage_to_rank_map gives the number"))
    data_parallel_size: int = Field(1, ge=1, le=Schedule.MOST_RANKS, description=(
        "replicas of the whole pipeline, where stage_to_rank_map does not give the ranks of each stage"))
    tensor: int = Field(1, ge=1, le=Schedule.MOST_RANKS, description=(
        "neighbouring processes of one host that split every layer: each rank of the pipeline is so many"))
    schedule: str = Field(RegisteredSchedule.DEFAULT, min_length=1, description=(
        "order of forwards, backwards and updates, such as gpipe, 1f1b or pipedream; auto takes the fastest with a "
        "flush; or a CSV file of actions, relative to the current folder"))
    chunks: int | None = Field(None, ge=1, le=Schedule.MOST_STAGES, description=(
        "stages per rank, for schedules with a variable number (interleaved, interleaved_zb, looped_bfs, hanayo); null "
        "takes the schedule's default"))
    slices: int = Field(1, ge=1, le=Schedule.MOST_MICROBATCHES, description=(
        "equal parts into which the sequences of every microbatch are cut, for seq1f1b, gpipe and files, whose actions "
        "are then of a slice"))
    use_orion_scheduler: bool = Field(False, description=(
        "share a GPU between microbatches by priority, with the executor async_threaded: kernels of the first go at "
        "once, others wait meanwhile; also USE_ORION_SCHEDULER=1"))
    orion_strict: bool = Field(False, description=(
        "refuse to train where use_orion_scheduler has no effect, instead of a warning"))
    executor: str = Field("overlapped", min_length=1, description=(
        "how a rank runs its actions, with the same results: overlapped sends and receives during compute; naive ends "
        "each action before the next; extras and packages add others"))
    partition: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_layers_or_auto)] = Field(
        "auto", description=(
        "layers per stage; auto measures the layers when the run starts and takes the fastest partition; under a "
        "schedule from a file, auto balances the parameters"))
    recompute: Recomputed = Field(0.0, description=(
        "share of a stage's layers, counted from its end, whose activations are recomputed in the backward; one "
        "number, or per stage a share or a list of layers; auto recomputes what the memory requires"))
    memory: Bytes = Field(None, description=(
        "bytes that a rank's process may take where something is auto, also as 8GiB or 500MB; null takes the device's "
        "memory, on a CPU the host's divided by its ranks"))
    plan: FilePath | None = Field(None, description=(
        "plan file of vpipe plan, relative to the current folder; the plan gives partition, recompute, "
        "stage_to_rank_map, schedule, update_every, warmup_depth, tensor, zero1 and training.num_microbatches"))
    update_every: int | None = Field(None, ge=1, le=Schedule.MOST_MICROBATCHES, description=(
        "microbatches per update of an asynchronous schedule, and per rank of a stage; null takes all of a batch where "
        "training.num_microbatches is null, else the smallest possible number"))
    stage_to_rank_map: dict[str, Ints] | None = Field(None, description=(
        'ranks of each stage, such as {"0": [0, 1], "1": [2]}: with several, microbatch i goes to replica i mod their '
        "number; null takes the schedule's placement"))
    zero1: bool = Field(False, description=(
        "each replica of a stage steps a part of its parameters, and keeps the optimizer's state of these alone; same "
        "numbers, and as many bytes between replicas; without replicas nothing changes"))
    backend: Backend = Field(None, description=(
        "communication between ranks; null takes nccl where every rank has a GPU of its own, else gloo"))
    device: DeviceName = Field(None, description=(
        "device of a rank: cpu; cuda, or the kind that torch is built for, such as xpu: the GPU with the rank's "
        "number on its host, shared where ranks outnumber GPUs; cuda:1, that GPU; null takes a GPU where there is one, "
        "else cpu"))
    master_port: int | None = Field(None, ge=1, le=65535, description=(
        "TCP port of the rendezvous; null takes a free one"))
    master_address: Name | None = Field(None, description=(
        "name or address of rank 0's host, as the others reach the host; null finds the address"))
    interface: Name | None = Field(None, description=(
        "network interface between ranks, such as eth0; null takes the one on the route to rank 0's host"))
    compress: Codecs = Field("none", description=(
        "encoding of activations and gradients between stages on different ranks: none changes nothing, bf16 "
        "takes half the bytes of fp32, int8 a quarter; one word, or a list with one per cut"))
    compress_rounding: Literal["nearest", "stochastic"] = Field("nearest", description="rounding of int8")
    shared_memory: bool = Field(True, description=(
        "whether ranks of one host that compute on CPUs pass tensors through shared memory; false, or where there is "
        "none: gloo"))
    timeout_s: float = Field(60.0, gt=0, le=10**6, description=(
        "seconds that a rank waits for another before the run fails"))
    warmup_depth: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_depths_or_auto)] | None = Field(
        None, description=(
        "forwards of each stage before its first backward; null takes (ranks of this and later stages - 1) // ranks "
        "of this stage; without a flush more of them hide transfers, at the price of memory and delay; auto takes as "
        "few more as the measured transfers need"))

    @property
    def joining(self) -> dict[str, Any]:
        """Return the arguments of :func:`vpipe.distributed.join_world`."""
        return {"backend": Transfers(self.backend).group, "timeout_s": self.timeout_s, "device": self.device}

    @property
    def to_plan(self) -> tuple[str, ...]:
        """Return the keys that are planned when the run starts; nothing is planned for a schedule from a file."""
        cut = self.model_parallel_size > 1 and not CsvFile.is_path(self.schedule)
        return tuple(key for key in ("partition", "recompute", "schedule", "warmup_depth")
                     if getattr(self, key) == AUTO and (key not in ("partition", "warmup_depth") or cut))

    @property
    def standing_in(self) -> ParallelSection:
        """Return this section with stand-ins for keys to be planned: the default schedule, no recomputation."""
        stand_ins = {"schedule": RegisteredSchedule.DEFAULT, "recompute": 0.0, "warmup_depth": None}
        changes = {key: value for key, value in stand_ins.items() if getattr(self, key) == AUTO}
        return self.model_copy(update=changes | ({"slices": 1} if "schedule" in changes else {}))

    def following(self, plan: Plan, placement: tuple[tuple[int, ...], ...]) -> ParallelSection:
        """Return this section with the cut and the schedule of a plan; ``placement`` is today's."""
        changes: dict[str, Any] = {
            "partition": plan.partition, "model_parallel_size": len(plan.partition), "plan": None,
            "recompute": tuple(tuple(sorted(own)) for own in plan.recomputed) if any(plan.recomputed) else 0.0,
            "schedule": plan.schedule or self.standing_in.schedule, "update_every": plan.update_every,
            "warmup_depth": plan.warmup, "slices": plan.order.slices or 1,
            "zero1": self.zero1 if plan.zero1 is None else plan.zero1}
        if plan.groups != placement:
            changes |= {"stage_to_rank_map": {str(stage): ranks for stage, ranks in enumerate(plan.groups)},
                        "data_parallel_size": 1, "chunks": None}
        return self.model_copy(update=changes).resolved()

    def cut_anew(self, stages: int, replicas: int = 1, *, ahead: bool = False) -> ParallelSection:
        """Return this section for other stages, whose layers are to be planned.

        Args:
            ahead: forwards before the first backward that are listed become auto; 1F1B's are taken else.
        """
        return self.model_copy(update={
            "model_parallel_size": stages, "data_parallel_size": replicas, "partition": AUTO, "plan": None,
            "stage_to_rank_map": None, "warmup_depth": AUTO if ahead and self.depths else None})

    def resolved(self) -> Self:
        """Return this section without a list of forwards that are 1F1B's."""
        says_nothing = self.depths is not None and self.depths == Schedule.default_warmup(self.widths)
        return self.model_copy(update={"warmup_depth": None}) if says_nothing else self

    @property
    def warmup(self) -> tuple[int, ...] | Literal["auto"] | None:
        """Return the forwards of each stage before its first backward, auto where they are planned."""
        return self.warmup_depth if "warmup_depth" in self.to_plan else self.depths

    @property
    def depths(self) -> tuple[int, ...] | None:
        """Return the forwards of each stage before its first backward where they are listed, and not 1F1B's."""
        return None if isinstance(self.warmup_depth, str) else self.warmup_depth

    @property
    def asks_for_gpus(self) -> bool:
        """Return whether the config requires GPUs; otherwise they are used if there are any."""
        return self.backend in accelerator.DIRECT or self.device not in (None, "cpu")

    @property
    def devices(self) -> str:
        """Describe device and backend as far as the config gives them."""
        where = self.device or next(
            (kind for kind, own in accelerator.COLLECTIVES.items() if own == self.backend),
            "GPUs where there are any, else cpu")
        between = self.backend or ("gloo" if self.device == "cpu" else "nccl where each has a GPU, else gloo")
        return f"ranks compute on {where}; {between} between them"

    @property
    def asynchronous(self) -> bool:
        """Return whether the schedule, a name or a file, has no flush: the pipeline stays full at optimizer steps."""
        if CsvFile.is_path(self.schedule):
            return not CsvFile.read(self.schedule).schedule.flush
        return not RegisteredSchedule.named(self.schedule).flush

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of replicas of every stage; a stage without one in a wrong map counts as if not named."""
        named = self.stage_to_rank_map or {}
        return tuple(len(named.get(str(stage), ())) or self.data_parallel_size
                     for stage in range(self.model_parallel_size))

    @property
    def in_flight(self) -> int:
        """Return the most microbatches that a replica of a stage has in flight: as many as stages, without replicas."""
        return 1 + max(self.depths or Schedule.default_warmup(self.widths))

    @property
    def placement(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the ranks per stage; None if the schedule places them."""
        ranks = self.stage_to_rank_map
        return None if ranks is None else tuple(ranks[str(stage)] for stage in range(len(ranks)))

    @property
    def cut(self) -> Cut:
        """How the model is cut; a partition to be planned is the number of stages."""
        assert not isinstance(self.recompute, str), "see standing_in"
        return Cut(self.model_parallel_size if isinstance(self.partition, str) else self.partition, self.recompute,
                   self.placement or self.data_parallel_size)

    @property
    def transfers(self) -> Transfers:
        """The transfers between stages. The ranks are joined already, whatever the backend."""
        codecs = [f"{name}_stochastic" if name == "int8" and self.compress_rounding == "stochastic" else name
                  for name in used_codecs(self.compress)]
        return Transfers(None if self.backend in accelerator.DIRECT else self.backend, self.timeout_s,
                         self.shared_memory, codecs if isinstance(self.compress, tuple) else codecs[0])

    @property
    def order_text(self) -> str:
        """Name the schedule, its slices, and the executor if it is not the default one."""
        return (self.schedule + f" in {self.slices} slices" * (self.slices > 1)
                + ("" if self.executor == "overlapped" else f", executor {self.executor}"))

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Count the stages where another key gives them."""
        if not isinstance(data, dict) or data.get("model_parallel_size") is not None:
            return data
        given = {key: value for key, value in data.items() if key != "model_parallel_size"}
        counts = [len(stages) for key in ("partition", "stage_to_rank_map")
                  if isinstance(stages := given.get(key), (list, tuple, dict)) and stages]
        return {**given, "model_parallel_size": counts[0]} if counts else given

    def mistakes(self) -> Iterator[Mistake]:
        stages = self.model_parallel_size
        for key, entries in (("partition", self.partition), ("recompute", self.recompute),
                             ("warmup_depth", self.warmup_depth)):
            if isinstance(entries, tuple) and len(entries) != stages:
                yield Mistake((key,), f"has {_count(entries)} for {stages} stages", "give one entry per stage")
        if self.backend in accelerator.DIRECT and self.device == "cpu":
            yield Mistake(("device",), f"is cpu, but {self.backend} carries tensors of GPUs only", "write "
                          "backend: gloo, or leave device out")
        yield from self._recomputed()
        if isinstance(self.compress, tuple) and len(self.compress) != stages - 1:
            yield Mistake(("compress",), f"has {_count(self.compress)} for the {stages - 1} cuts between {stages} "
                          "stages", "give one word, or one entry per cut")
        if self.stage_to_rank_map is not None:
            yield from rank_map_mistakes(self.stage_to_rank_map, stages, self.schedule)
            if self.data_parallel_size > 1 and any(len(own) != self.data_parallel_size
                                                   for own in self.stage_to_rank_map.values()):
                yield Mistake(("data_parallel_size",), f"is {self.data_parallel_size}, but stage_to_rank_map gives the "
                              f"stages {', '.join(str(len(own)) for own in self.stage_to_rank_map.values())} ranks",
                              "leave it out: the map says it")
        yield from self._schedule()
        if self.tensor > 1 and (codecs := sorted({*used_codecs(self.compress)} - {"none"})):
            yield Mistake(("compress",), f"is {', '.join(codecs)}, but tensor is {self.tensor}: its ranks would round "
                          "apart what they hold in common", "leave it out, or set tensor: 1")
        yield from self._executor()
        if self.use_orion_scheduler and ORION not in ADDITIONS.names:
            yield Mistake(("use_orion_scheduler",), "is true, but no package here adds Orion", "install vpipe with "
                          "vpipe/extras/orion, or leave it out")
        elif self.use_orion_scheduler:
            [orion] = ADDITIONS.added(ORION)
            yield from orion().mistakes(self)

    def _executor(self) -> Iterator[Mistake]:
        """Yield what does not go with the executor."""
        try:
            execution = Execution(executor=self.executor)
        except UserError as error:
            [problem] = error.problems
            yield Mistake(("executor",), f"is {self.executor}, but {problem.what}", problem.hint)
            return
        if execution.threaded and (refused := RegisteredSchedule.threads_refused(self.schedule)):
            yield Mistake(("executor",), f"is {self.executor}, {refused[0]}", refused[1])
        if self.tensor > 1 and (why := execution.refused("mesh")) is not None:
            yield Mistake(("executor",), f"is {self.executor}, but tensor is {self.tensor}: {why[0]}", why[1])

    def _recomputed(self) -> Iterator[Mistake]:
        named = {stage: entry for stage, entry in enumerate(self.recompute) if isinstance(entry, tuple)} if isinstance(
            self.recompute, tuple) else {}
        if named and isinstance(self.partition, str):
            yield Mistake(("recompute",), "names layers, but the partition, which decides whose they are, is auto",
                          "write the partition, or recompute: auto")
        elif named and not isinstance(self.partition, str) and len(self.partition) == self.model_parallel_size:
            for stage, own in enumerate(Cut(self.partition).layers):
                yield from (Mistake(("recompute", stage), f"names layer {layer}, but stage {stage} has the layers "
                                    f"{own.start} to {own.stop - 1}", "layers are those of the model, counted from 0")
                            for layer in named.get(stage, ()) if layer not in own)

    def _schedule(self) -> Iterator[Mistake]:
        """Yield what does not go with the schedule: a file, auto, or a name."""
        if self.schedule == AUTO and self.chunks is not None:
            yield Mistake(("chunks",), f"is {self.chunks}, but the schedule is auto",
                          "leave it out, or name a schedule")
        registered = RegisteredSchedule.find(self.schedule)
        if self.slices > 1 and self.schedule != AUTO and registered is not None:
            try:
                registered.check_slices(self.slices)
            except UserError as error:
                [problem] = error.problems
                yield Mistake(("slices",), problem.what.removeprefix("slices "), problem.hint)
        if CsvFile.is_path(self.schedule) and self.recompute == AUTO:
            yield Mistake(("recompute",), f"is auto, but the schedule is a file, '{self.schedule}', under which "
                          "nothing is planned", "write what is recomputed, or name a schedule")
        if not CsvFile.is_path(self.schedule) and self.schedule not in RegisteredSchedule.names():
            yield Mistake(("schedule",), f"is '{self.schedule}', which is no schedule of this version",
                          nearest(self.schedule, RegisteredSchedule.names(), open_list=True))
            return
        try:
            _ = self.asynchronous
        except UserError as error:  # of a file
            [problem] = error.problems
            place = f" ({problem.where})" if problem.where else ""
            yield Mistake(("schedule",), f"names no schedule: {problem.what}{place}", problem.hint)
            return
        depths = self.warmup_depth
        if depths is None or (len(depths) != self.model_parallel_size and depths != AUTO):
            return
        shown = depths if isinstance(depths, str) else list(depths)
        if CsvFile.is_path(self.schedule):
            yield Mistake(("warmup_depth",), f"is {shown}, but the schedule is a file, '{self.schedule}', which says "
                          "the order of its actions", "leave it out, or name a schedule")
        elif self.schedule == AUTO:
            yield Mistake(("warmup_depth",), f"is {shown}, but the schedule is auto, which takes one with a flush",
                          "leave it out, or choose a schedule without a flush, such as "
                          + RegisteredSchedule.DEFAULT_ASYNCHRONOUS)
        else:
            try:
                RegisteredSchedule.named(self.schedule).check_warmup(self.widths, depths)
            except UserError as error:
                [problem] = error.problems
                yield Mistake(("warmup_depth",), problem.what.removeprefix("warmup_depth "), problem.hint)


def _count(entries: tuple[object, ...]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def rank_map_mistakes(ranks: Mapping[str, tuple[int, ...]], stages: int, schedule: str) -> Iterator[Mistake]:
    """Yield the mistakes in ``stage_to_rank_map``; the schedule is a name, a file, or auto."""
    key = "stage_to_rank_map"
    expected = [str(stage) for stage in range(stages)]
    if set(ranks) != set(expected):
        yield Mistake((key,), f"names the stages {', '.join(sorted(ranks)) or 'none'}; there are {stages}: "
                              f"{', '.join(expected)}",
                              "name each stage once, as \"0\", \"1\", ..., or correct model_parallel_size")
        return
    registered = RegisteredSchedule.find(schedule)  # None of a file, or a name that is refused anyway
    copies = registered is not None and registered.places_copies(stages)
    one_per_rank = schedule == AUTO or (registered is not None and registered.chunks == 1 and not registered.any_chunks
                                        and not copies)
    used = [rank for stage in expected for rank in ranks[stage]]
    hint = f"give each stage ranks of its own: {len(used)} of them are numbered 0 to {len(used) - 1}"
    stage_of: dict[int, str] = {}
    for stage in expected:
        if not ranks[stage]:
            yield Mistake((key, stage), f"puts stage {stage} on no rank", "give the stage a rank, or several")
        for rank, times in Counter(ranks[stage]).items():
            other = stage_of.setdefault(rank, stage)
            if rank < 0:
                yield Mistake((key, stage), f"puts stage {stage} on rank {rank}", hint)
            elif times > 1:
                yield Mistake((key, stage), f"names rank {rank} twice for stage {stage}", hint)
                return
            elif other != stage and one_per_rank:
                yield Mistake((key, stage), f"puts stage {stage} on rank {rank}, where stage {other} is already; "
                              f"{schedule} holds one stage on each rank",
                              f"{hint}, or choose a schedule with several stages per rank, such as interleaved")
            elif other != stage and ranks[other] != ranks[stage] and not copies:
                yield Mistake((key, stage), f"puts stage {stage} on rank {rank}, where stage {other} is already; stage "
                              f"{other} has ranks {list(ranks[other])}, stage {stage} {list(ranks[stage])}",
                              "let the two share all of their ranks, in the same order, or none")
    missing = min({*range(len(used) + 1)} - {*used})
    if missing < max(used, default=0):
        yield Mistake((key,), f"names ranks up to {max(used)}, but never rank {missing}",
                      "number the ranks from 0 without a gap")
