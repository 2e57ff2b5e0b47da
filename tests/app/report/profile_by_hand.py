"""A profile made up for the layers of :mod:`made_run`: three equal ones per stage."""

from __future__ import annotations

from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes


def made_profile(layers: int, peak_flops_per_s: float = 0.0) -> Profile:
    identity = Identity("made", "made", layers, 4, "adamw", "cpu", 1, 4, "gloo", "2.13")
    return Profile(identity, tuple(_layer(number, layers) for number in range(layers)), {"ids": 64, "labels": 64},
                   LinkProfile(0.0004, 1e9), peak_flops_per_s=peak_flops_per_s)


def _layer(number: int, layers: int) -> LayerProfile:
    third, last = 1 / 3e3, number == layers - 1
    reads = ("h", "labels") if last else ("h",) if number else ("ids",)
    return LayerProfile(
        f"layer{number}", Seconds(10 * third), Seconds(20 * third), Seconds(10 * third), Seconds(10 * third),
        Seconds(9 * third), Seconds(third), 1_000_000, 2_000_000, reads,
        (TensorBytes("loss" if last else "h", 4 if last else 4096, True),), 500_000, ("in:h",) if number else (),
        100_000, 10_000, {}, 1_000_000, 0)
