"""A plan: how a model is cut and run, with its prediction. VPipe's files (``{"partition": ..., ...}``) are plans."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from types import NoneType
from typing import Any, ClassVar

from vpipe.arguments import Arguments, check_path
from vpipe.description.cut import MOST_LAYERS, Cut, Placement, layers_outside, ranges
from vpipe.description.order import Order
from vpipe.errors import Problem, UserError, counted, nearest
from vpipe.files import number_of, read_json, read_record, replace_text
from vpipe.plan.stage_costs import StageMemory, combined_memory, taken_bytes
from vpipe.schedules.assignment import passes
from vpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class StagePrediction:
    """The prediction for one stage; its times but idle_s are those of a rank with a core to itself."""

    first_layer: int  # its number in the model
    layers: int  # how many
    ranks: tuple[int, ...]  # of its replicas
    forward_s: float  # of one microbatch
    backward_s: float  # of one microbatch, both halves, recomputation not counted
    recompute_s: float  # of one microbatch; 0 where nothing is recomputed
    step_s: float  # one optimizer step
    communication_s: float  # of the transfers of one of its ranks per step, sums over replicas included
    idle_s: float  # of one of its ranks per step
    memory: StageMemory  # of each of its ranks, at the peak

    @property
    def microbatch_s(self) -> float:
        """The seconds that a rank works for a microbatch."""
        return self.forward_s + self.backward_s + self.recompute_s


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a plan."""

    # of one step of training. Without a flush a step is, in the steady state, the fewest updates that are complete on
    # every stage.
    step_s: float
    samples_per_step: int  # in it
    bubble: float  # see Plan.bubble_of
    stages: tuple[StagePrediction, ...]  # in order
    process_bytes: int = 0  # that a rank takes besides, see Profile; 0: unknown
    kept_share: float = 0.0  # of the bytes of tensors, what their allocator keeps besides

    @property
    def seconds_per_sample(self) -> float:
        """The figure by which plans are compared."""
        return self.step_s / self.samples_per_step

    @property
    def bottleneck(self) -> int:
        """The slowest stage: on the ranks with the least idle time, the one with the most work."""
        return min(range(len(self.stages)),
                   key=lambda number: (self.stages[number].idle_s, -self.stages[number].microbatch_s))

    def held_by(self, stages: Sequence[int]) -> StageMemory:
        """Return what a rank with these stages holds when each is at its peak; it works on one of them at a time."""
        return combined_memory([self.stages[stage].memory for stage in stages])

    def taken_bytes(self, tensors: int) -> int:
        """Return the bytes that a process with so many bytes of tensors takes."""
        return taken_bytes(tensors, self.process_bytes, self.kept_share)

    @property
    def fullest_rank(self) -> tuple[int, int]:
        """The rank that holds most, and the bytes of its process."""
        memory: dict[int, list[StageMemory]] = {}
        for stage in self.stages:
            for rank in stage.ranks:
                memory.setdefault(rank, []).append(stage.memory)
        return max(((rank, self.taken_bytes(combined_memory(stages).peak)) for rank, stages in memory.items()),
                   key=lambda item: item[1])

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        measured_since = "process_bytes", "kept_share"
        return {key: value for key, value in asdict(self).items() if key not in measured_since or value}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Prediction:
        """Read what :meth:`as_json` returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else.
        """
        times = dict.fromkeys((each.name for each in fields(StagePrediction) if each.name.endswith("_s")), _finite)
        found = read_record(cls, content, bubble=_finite, stages=lambda stages: tuple(read_record(
            StagePrediction, stage, **times) for stage in stages))
        if not found.samples_per_step:
            raise ValueError("a step has 0 samples")
        return found


def _finite(value: Any) -> float:
    """Return a time; a difference of two may be below 0 by a rounding."""
    return -number_of(-value) if type(value) in (int, float) and value < 0 else number_of(value)


@dataclass(frozen=True)
class Plan:
    """A cut with placement and schedule, and what was predicted of it.

    Attributes:
        cut: the layers of every stage, recomputation, and the ranks of every stage; stage s on rank s where they are
            not listed.
        order: the schedule; the caller's choice of what it leaves open.
        microbatches: parts of a batch; the caller's choice when None.
        predictions: of time and memory.
        profile: the digest of the profile that it was made from (:class:`~vpipe.plan.profile.Identity`).
        profiled: the fields of that Identity.
        tensor: processes of every rank of the pipeline, which split its layers; the caller's choice when None.
        zero1: replicas of a stage share the optimizer's state; the caller's choice when None.

    Raises:
        UserError: a value is of another kind, or has no place in a plan's file.
    """

    KEYS: ClassVar[tuple[str, ...]] = (
        "partition", "recompute_ratio", "recompute_layers", "stage_to_rank_map", "schedule", "microbatches",
        *Order.COUNTS, "warmup_depth", "predictions", "profile", "profiled", "tensor", "zero1")
    MOST_BYTES: ClassVar[int] = 4 << 20  # of a file: one for 1,024 stages, with what they are expected to take, has one
    MOST_VALUES: ClassVar[int] = 250_000

    cut: Cut
    order: Order = Order()  # noqa: RUF009  frozen
    microbatches: int | None = None
    predictions: Prediction | None = None
    profile: str | None = None
    profiled: Mapping[str, Any] | None = None
    tensor: int | None = None
    zero1: bool | None = None

    def __str__(self) -> str:
        text = f"{self.schedule or 'any schedule'}, {counted(len(self.partition), 'stage')} {list(self.partition)}"
        if self.microbatches is not None:
            text += f", {counted(self.microbatches, 'microbatch')}"
        if (found := self.predictions) is not None:
            text += f", {1000 * found.step_s:.4g} ms per step, {1 / found.seconds_per_sample:.4g} samples/s predicted"
        return text

    def __post_init__(self) -> None:
        given = Arguments()
        given.instance("cut", self.cut, Cut)
        given.instance("order", self.order, Order)
        given.check()
        if not isinstance(self.cut.stages, tuple) or self.cut.replicas > 1:
            given.refuse(f"the cut of a plan is {self.cut}", "list the layers of every stage, and the ranks of every "
                         "stage or none: Cut([2, 2], ranks=[[0, 1], [2, 3]])")
        if self.order.chunks is not None or self.order.late.delay_correction:
            given.refuse(f"the order of a plan is {self.order}", "leave chunks and delay_correction out: the ranks say "
                         "the one, and the other is no part of a plan")
        given.check()
        if problems := _problems(self._choices(), None):
            raise UserError.all_of(problems)

    @property
    def partition(self) -> tuple[int, ...]:
        """The layers of every stage."""
        return self.cut.partition

    @property
    def recomputed(self) -> tuple[frozenset[int], ...]:
        """Per stage the layers that are recomputed, by their numbers in the model."""
        return self.cut.recomputed

    @property
    def schedule(self) -> str | None:
        """Its name; None where the plan leaves it open."""
        return self.order.schedule or None

    @property
    def update_every(self) -> int | None:
        """Of a schedule without a flush, microbatches per update and replica; None where the plan leaves it open."""
        return self.order.update_every

    @property
    def warmup(self) -> tuple[int, ...] | None:
        """Of a schedule without a flush, forwards per stage before its first backward; those of 1F1B when None."""
        return self.order.warmup

    @property
    def groups(self) -> Placement:
        """The ranks of every stage; stage s on rank s where the plan does not list them."""
        return self.cut.placement or tuple((rank,) for rank in range(self.cut.count))

    @property
    def predicted(self) -> Prediction:
        """The predictions of a plan that has them."""
        assert self.predictions is not None
        return self.predictions

    @property
    def ranks(self) -> int:
        """The number of ranks of all stages."""
        return len({rank for own in self.groups for rank in own})

    @property
    def copies(self) -> int:
        """The copies of every stage that the schedule itself places, besides replicas."""
        return sum(map(len, self.groups)) // (self.ranks * passes(self.groups, self.groups[0][0]))

    def check_fits(self, layers: int, ranks: int | None = None, where: str | None = None, structure: str = "") -> None:
        """Refuse to be used for another model, or for another number of ranks.

        Args:
            layers: of the model.
            ranks: how many there are, where that is fixed.
            where: the plan was read.
            structure: a digest of the model's layers (:class:`~vpipe.plan.profile.Identity`), where it is known.
        """
        problems, made_for = [], self.profiled or {}
        if sum(self.partition) != layers:
            problems.append(Problem(f"the plan is for a model of {counted(sum(self.partition), 'layer')}, but this one "
                                    f"has {layers}", "make a plan for this model: vpipe plan CONFIG, or Pipeline.plan",
                                    where))
        elif structure and made_for.get("structure") and made_for["structure"] != structure:
            problems.append(Problem(f"the plan is for another model: {made_for.get('model_name')} (layers of digest "
                                    f"{made_for['structure']}) there, layers of digest {structure} here",
                                    "make a plan for this model, or keep what it was made for", where))
        if ranks is not None and self.ranks != ranks:
            problems.append(Problem(f"the plan is for {counted(self.ranks, 'rank')}, but there are {ranks}",
                                    f"vpipe plan CONFIG --ranks {ranks} makes a plan for as many", where))
        if problems:
            raise UserError.all_of(problems)

    @staticmethod
    def bubble_of(ranks: Iterable[tuple[float, float]]) -> float:
        """Return the share of the ranks' time in which they wait for others, the mean over ranks; NaN where a time is.

        Args:
            ranks: of each rank the seconds in which it waited for others (the order of the schedule, unequal stages and
                transfers alike) and those in which it worked: computed, updated, handed over.
        """
        shares = [waited / (waited + worked) if waited else 0.0 for waited, worked in ranks]
        return sum(shares) / len(shares)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            UserError: the file is missing, is not JSON, or a value is of the wrong kind; all problems at once.
        """
        check_path("the path of a plan", path, "plan.json")
        return cls.of_json(read_json(path, cls.MOST_BYTES, "the plan", _LOOKS), str(path))

    @classmethod
    def of_json(cls, content: Any, where: str | None = None) -> Plan:
        """Make a plan of JSON values.

        Args:
            where: they were read, for messages.

        Raises:
            UserError: a value is of the wrong kind; all problems at once.
        """
        if problems := _problems(content, where):
            raise UserError.all_of(problems)
        said = {key: value for key, value in content.items() if value}
        ranks = said.get("stage_to_rank_map", {})
        recompute = said.get("recompute_layers") or tuple(map(float, said.get("recompute_ratio", ())))
        predictions = said.get("predictions")
        return cls(Cut(said["partition"], recompute or 0.0, [ranks[str(stage)] for stage in range(len(ranks))] or 1),
                   Order.of(said.get("schedule", ""), warmup=said.get("warmup_depth"),
                            **{name: said.get(name) for name in Order.COUNTS}),
                   said.get("microbatches"), None if predictions is None else Prediction.of_json(predictions),
                   said.get("profile"), said.get("profiled"), content.get("tensor"), content.get("zero1"))

    def as_json(self) -> dict[str, Any]:
        """Return JSON values under VPipe's names, without what is None or empty."""
        return self._choices() | ({} if self.predictions is None else {"predictions": self.predictions.as_json()})

    def _choices(self) -> dict[str, Any]:
        cut, recompute = self.cut, self.cut.recompute
        ratios = [recompute] * cut.count if recompute and isinstance(recompute, float) else recompute or []
        layers = None
        if not isinstance(ratios, Sequence) or not all(isinstance(entry, (int, float)) for entry in ratios):
            layers = [sorted(own) for own in self.recomputed]
            ratios = [ratio_of(len(own), size) for own, size in zip(layers, cut.partition, strict=True)]
        content = {
            "partition": list(cut.partition), "recompute_ratio": list(ratios),
            "recompute_layers": layers if layers and any(layers) else None,
            "stage_to_rank_map": {str(stage): list(own) for stage, own in enumerate(cut.placement or ())} or None,
            "warmup_depth": self.warmup and list(self.warmup), "schedule": self.schedule,
            "microbatches": self.microbatches, **{name: getattr(self.order.late, name) for name in Order.COUNTS},
            "profile": self.profile, "profiled": self.profiled, "tensor": self.tensor, "zero1": self.zero1}
        return {key: value for key, value in content.items() if value is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, at once or not at all.

        Raises:
            UserError: it cannot be written there.
        """
        check_path("the path of a plan", path, "plan.json")
        try:
            replace_text(path, json.dumps(self.as_json(), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"cannot write the plan: {error.strerror}", where=str(path),
                            hint="give the path of a file in a folder that can be written") from None


def ratio_of(recomputed: int, layers: int) -> float:
    """Return a share of few digits that means so many layers: ``int(share * layers) == recomputed``."""
    for digits in count(2):
        scale = int(10**digits)
        up = -(-recomputed * scale // layers)
        for share in (up / scale, (up + 1) / scale):  # 0.29 * 100 is below 29
            if int(share * layers) == recomputed:
                return share
    raise AssertionError("count() does not end")


_LOOKS = 'a plan looks like {"partition": [3, 3, 3], "recompute_ratio": [0, 0, 0]}'


def _problems(content: Any, where: str | None) -> list[Problem]:
    if not isinstance(content, dict) or "partition" not in content:
        return [Problem("the plan has no partition", 'write {"partition": [3, 3, 3]}: layers per stage', where)]
    problems = [Problem(f"unknown key '{key}' in the plan", nearest(key, Plan.KEYS), where)
                for key in content if key not in Plan.KEYS]

    def refuse(what: str, remedy: str) -> None:
        problems.append(Problem(what, remedy, where))

    partition = content["partition"]
    if not isinstance(partition, list) or not all(type(n) is int and n > 0 for n in partition) or not partition:
        refuse(f"partition is {partition!r}", "write a list of positive integers: layers per stage")
        return problems
    if sum(partition) > MOST_LAYERS:
        refuse(f"partition has {sum(partition):,} layers in all", f"use {MOST_LAYERS:,} at most")
        return problems
    stages = len(partition)
    problems += _recompute_problems(content, partition, where)
    ranks = content.get("stage_to_rank_map", {})
    every = f'give the ranks of every stage: {{"0": [0], ..., "{stages - 1}": [{stages - 1}]}}'
    if not isinstance(ranks, dict) or not all(isinstance(own, list) and all(type(r) is int and r >= 0 for r in own)
                                              for own in ranks.values()):
        refuse(f"stage_to_rank_map is {ranks!r}", every)
    elif ranks and sorted(ranks) != sorted(map(str, range(stages))):
        refuse(f"stage_to_rank_map names {sorted(ranks)} for {stages} stages", every)
    for key, kind, remedy in (("schedule", str, "give its name, such as 1f1b"),
                              ("profile", str, "leave it out: it is the profile's that vpipe plan took"),
                              ("profiled", dict, "leave it out: it is what vpipe plan measured"),
                              ("zero1", bool, "give true or false")):
        if not isinstance(content.get(key), (kind, NoneType)):
            refuse(f"{key} is {content[key]!r}", remedy)
    depths = content.get("warmup_depth")
    if depths and (not isinstance(depths, list) or len(depths) != stages
                   or not all(type(depth) is int and 0 <= depth <= Schedule.MOST_MICROBATCHES for depth in depths)):
        refuse(f"warmup_depth is {depths!r} for {stages} stages", "give the forwards of each stage before its first "
               f"backward, such as {list(range(stages - 1, -1, -1))}")
    for key, most in (*((key, Schedule.MOST_MICROBATCHES) for key in ("microbatches", *Order.COUNTS)),
                      ("tensor", Schedule.MOST_RANKS)):
        value = content.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            refuse(f"{key} is {value!r}", f"give a whole number, 1 to {most:,}")
    if content.get("predictions") is not None:
        remedy = "leave predictions out, or let vpipe plan write the file again"
        try:
            predicted = len(Prediction.of_json(content["predictions"]).stages)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            refuse(f"predictions is damaged: {type(error).__name__}: {error}", remedy)
        else:
            if predicted != stages:
                refuse(f"predictions has {predicted} stages, but the partition has {stages}", remedy)
    return problems


def _recompute_problems(content: Mapping[str, Any], partition: list[int], where: str | None) -> Iterator[Problem]:
    stages, ratios, layers = len(partition), content.get("recompute_ratio", []), content.get("recompute_layers", [])
    are_ratios = isinstance(ratios, list) and all(type(r) in (int, float) and 0 <= r <= 1 for r in ratios)
    if not are_ratios:
        yield Problem(f"recompute_ratio is {ratios!r}", "write a list of numbers from 0 to 1", where)
    elif ratios and len(ratios) != stages:
        yield Problem(f"recompute_ratio has {len(ratios)} entries for {stages} stages", "give one ratio per stage",
                      where)
    if not isinstance(layers, list) or not all(isinstance(own, list) and all(type(i) is int for i in own)
                                               for own in layers):
        yield Problem(f"recompute_layers is {layers!r}",
                      "write a list per stage of layers of the model, such as [[0, 2], []]", where)
    elif layers and len(layers) != stages:
        yield Problem(f"recompute_layers has {len(layers)} entries for {stages} stages",
                      "give one list per stage, [] where nothing is recomputed", where)
    elif layers:
        for stage, (own, here) in enumerate(zip(layers, ranges(partition), strict=True)):
            yield from layers_outside(own, stage, here, where)
        for stage, (ratio, own, size) in enumerate(zip(ratios, layers, partition, strict=True)
                                                   if are_ratios and len(ratios) == stages else ()):
            if int(ratio * size) != len(set(own)):
                yield Problem(f"recompute_ratio {ratio} of stage {stage} means {int(ratio * size)} of its {size} "
                              f"layers, but recompute_layers names {len(set(own))}",
                              "leave recompute_ratio out: recompute_layers says it", where)
