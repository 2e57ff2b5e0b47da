"""What a plan is expected to take: seconds and bytes per stage, and of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vpipe.files import count_of, number_of
from vpipe.plan.memory import StageMemory


@dataclass(frozen=True)
class StagePrediction:
    """One stage of a plan. Where ranks share cores, times are those of a rank with a core to itself, but for idle_s.

    Attributes:
        first_layer: its number in the model.
        layers: how many.
        ranks: that hold it.
        forward_s: of one microbatch.
        backward_s: of one microbatch, both halves, recomputation not counted.
        recompute_s: of one microbatch; 0 where nothing is recomputed.
        step_s: one optimizer step.
        communication_s: that its transfers take of one of its ranks per step, sums over replicas included.
        idle_s: that one of its ranks has nothing to do per step.
        memory: of each of its ranks, when that holds most.
    """

    first_layer: int
    layers: int
    ranks: tuple[int, ...]
    forward_s: float
    backward_s: float
    recompute_s: float
    step_s: float
    communication_s: float
    idle_s: float
    memory: StageMemory


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to take.

    Attributes:
        step_s: of one step of training. Without a flush that is, in the steady state, the fewest updates that are
            whole on every stage.
        samples_per_step: in it.
        bubble: see :func:`~vpipe.measures.bubble`.
        stages: in order.
    """

    step_s: float
    samples_per_step: int
    bubble: float
    stages: tuple[StagePrediction, ...]

    @property
    def seconds_per_sample(self) -> float:
        """What plans are compared by."""
        return self.step_s / self.samples_per_step

    @property
    def bottleneck(self) -> int:
        """The stage that holds the others up: on the ranks with the least idle time, the one with the most work."""
        return min(range(len(self.stages)), key=lambda stage: (self.stages[stage].idle_s, -_work_s(self.stages[stage])))

    def as_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return asdict(self)

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Prediction:
        """What :meth:`as_json` gave, perhaps through a file.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else.
        """
        def stage_of(stage: Mapping[str, Any]) -> StagePrediction:
            numbers: dict[str, Any] = {key: _finite(value) if key.endswith("_s") else count_of(value)
                                       for key, value in stage.items() if key not in ("ranks", "memory")}
            return StagePrediction(**numbers, ranks=tuple(map(count_of, stage["ranks"])), memory=StageMemory(
                **{key: count_of(value) for key, value in stage["memory"].items()}))

        stages = tuple(map(stage_of, content["stages"]))
        found = cls(**{**content, "step_s": number_of(content["step_s"]), "bubble": _finite(content["bubble"]),
                       "samples_per_step": count_of(content["samples_per_step"]), "stages": stages})
        if not found.samples_per_step:
            raise ValueError("a step has 0 samples")
        return found


def _finite(value: Any) -> float:
    """Return a time: a difference of two may be below 0, by a rounding."""
    return -number_of(-value) if type(value) in (int, float) and value < 0 else number_of(value)


def _work_s(stage: StagePrediction) -> float:
    return stage.forward_s + stage.backward_s + stage.recompute_s
