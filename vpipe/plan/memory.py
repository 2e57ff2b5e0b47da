"""What a stage holds in memory, by kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vpipe.plan.costs import borrowed_bytes
from vpipe.plan.held import Held
from vpipe.plan.profile import Profile


@dataclass(frozen=True)
class StageMemory:
    """The bytes of one replica of a stage, when it holds most.

    Attributes:
        weights: the latest version, which is also the optimizer's, and what is never trained.
        stashed: older versions that microbatches in flight still use.
        gradients: of the weights.
        optimizer: what it keeps beside the weights, master weights among it where these are rounded.
        activations: of all microbatches in flight, with what waits between the halves of backwards.
        working: the most that one backward, or one step, needs for a while.
    """

    weights: int
    stashed: int
    gradients: int
    optimizer: int
    activations: int
    working: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.stashed + self.gradients + self.optimizer + self.activations + self.working


def together(stages: Sequence[StageMemory]) -> StageMemory:
    """What a rank holds of its stages when each holds most; it works on one of them at a time."""
    return StageMemory(sum(each.weights for each in stages), sum(each.stashed for each in stages),
                       sum(each.gradients for each in stages), sum(each.optimizer for each in stages),
                       sum(each.activations for each in stages), max(each.working for each in stages))


def stage_memory(profile: Profile, layers: range, recomputed: Collection[int], in_flight: int, versions: int,
                 weight_halves: int = 0, held: Held | None = None) -> StageMemory:
    """What a stage of ``layers`` holds at most.

    Args:
        layers: their numbers in the model.
        recomputed: those of them that drop their activations. They are recomputed right before the backward, so that
            one microbatch at a time holds all of its own.
        in_flight: microbatches between forward and backward.
        versions: of the weights, the latest among them.
        weight_halves: microbatches between the two halves of their backward.
        held: of the profile, where the caller asks for many stages.
    """
    held = held or Held(profile)
    own = [profile.layers[number] for number in layers]
    weights = sum(layer.parameter_bytes for layer in own) + borrowed_bytes(profile, layers)
    here = set(recomputed).intersection(layers)
    full = held.full(layers, here)
    kept = held.kept(layers, here) if here else full
    activations = full + (in_flight - 1) * kept if in_flight else 0
    waiting = weight_halves * sum(layer.weight_half_bytes for layer in own)
    return StageMemory(
        weights=weights + sum(layer.frozen_bytes for layer in own), stashed=(versions - 1) * weights, gradients=weights,
        optimizer=sum(layer.optimizer_bytes for layer in own), activations=activations + waiting,
        working=max(step_working(profile, sum(layer.parameter_bytes for layer in own)),
                    *(layer.working_bytes for layer in own)))


def step_working(profile: Profile, weights: int) -> int:
    """What a step of so many bytes of weights needs for a while, beside their gradients.

    Gradients of rounded weights become as wide as the master weights then, twice as wide.
    """
    return weights if profile.identity.pure else 0
