"""Check what may be asked for, and the plans of the systems for a profile of ten equal layers."""

from __future__ import annotations

from functools import cache

import pytest

from vpipe.errors import UserError
from vpipe.extras.comparison.systems import SYSTEMS, ComparisonRequest, microbatch_counts, plan_system
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes

LAYERS, RANKS, BATCH, MB = 10, 2, 16, 1_000_000
WEIGHTS, ADAM, ACTIVATIONS, HIDDEN = 10 * MB, 20 * MB, 8 * MB, 1 * MB
"""Of a layer; activations and hidden state of one sample."""


def profile(count: int) -> Profile:
    """A microbatch costs a millisecond and one more per sample and layer."""
    size = BATCH // count
    forward = 1e-3 * (1 + size)
    layer = [LayerProfile(
        f"layer{i}", Seconds(forward), Seconds(2 * forward), Seconds(forward), Seconds(forward), Seconds(forward),
        Seconds(1e-4), WEIGHTS, ADAM, ("h" if i else "input",),
        (TensorBytes("h" if i < LAYERS - 1 else "loss", HIDDEN * size, True),), ACTIVATIONS * size, (), 0, 0, {}, 10, i)
        for i in range(LAYERS)]
    identity = Identity("ten", "ten layers", LAYERS, size, "adam", "a device", 1, RANKS, "gloo", "none")
    return Profile(identity, tuple(layer), {"input": 8 * size}, LinkProfile(1e-6, 1e10))


PROFILES = {count: profile(count) for count in microbatch_counts(BATCH)}


@cache
def fitted(name: str, memory_bytes: int | None) -> Plan:
    return plan_system(SYSTEMS[name], PROFILES, RANKS, memory_bytes)


def peak(plan: Plan) -> int:
    return plan.predicted.fullest_rank[1]


def test_the_systems_are_as_their_users_ran_them() -> None:
    assert {name: (system.schedule, system.recompute) for name, system in SYSTEMS.items()} == {
        "gpipe": ("gpipe", 1.0), "pipedream": ("pipedream", 0.0), "vpipe": ("pipedream", None)}


def test_the_order_and_the_memory_are_the_users() -> None:
    assert ComparisonRequest.parse("vpipe,gpipe", None, "1.5GiB") == ComparisonRequest(("vpipe", "gpipe"), (), 3 << 29)
    assert ComparisonRequest.parse(None, "1f1b, auto", None) == ComparisonRequest((), ("1f1b", "auto"))


@pytest.mark.parametrize(("systems", "schedules", "memory", "what", "hint"), [
    ("gpipe", "1f1b", None, "not both", "--schedules"),
    ("gpip,vpipe", None, None, "--systems names 'gpip', which is no system", "did you mean 'gpipe'?"),
    ("gpipe,gpipe", None, None, "--systems names 'gpipe' 2 times", "once"),
    ("gpipe,", None, None, "names ''", "known names: gpipe, pipedream, vpipe"),
    (None, "1f1c", None, "--schedules names '1f1c'", "did you mean '1f1b'?"),
    (None, "1f1b", "8GiB", "--memory decides what systems recompute", "leave it out"),
    ("gpipe", None, "8G", "--memory is '8G'", "8GiB"),
])
def test_other_words_are_refused(systems: str | None, schedules: str | None, memory: str | None, what: str,
                                 hint: str) -> None:
    with pytest.raises(UserError) as refused:
        ComparisonRequest.parse(systems, schedules, memory)
    assert what in refused.value.problems[0].what
    assert hint in refused.value.problems[0].hint


def test_all_unknown_names_are_refused_at_once() -> None:
    with pytest.raises(UserError) as refused:
        ComparisonRequest.parse("gpip,vpip", None, None)
    assert len(refused.value.problems) == 2


def test_microbatches_are_divisors_and_the_smallest_of_many() -> None:
    assert microbatch_counts(16) == [1, 2, 4, 8, 16]
    assert microbatch_counts(512) == [4, 8, 16, 32, 64, 128, 256, 512]
    assert microbatch_counts(7) == [1, 7]


def test_an_update_has_as_many_samples_in_every_system() -> None:
    for name in ("gpipe", "pipedream", "vpipe"):
        plan = fitted(name, None)
        assert plan.predicted.samples_per_step == BATCH
        assert plan.update_every == (None if name == "gpipe" else plan.microbatches)
        assert plan.groups == ((0,), (1,))


def test_each_recomputes_what_its_users_did() -> None:
    gpipe = fitted("gpipe", None)
    assert [len(layers) for layers in gpipe.recomputed] == list(gpipe.partition)
    assert not any(fitted("pipedream", None).recomputed)
    assert not any(fitted("vpipe", None).recomputed)  # nothing is short


def test_without_a_flush_the_largest_microbatch_is_best_and_with_one_it_is_not() -> None:
    assert fitted("pipedream", None).microbatches == 1
    gpipe = fitted("gpipe", None).microbatches
    assert gpipe is not None
    assert gpipe > 1


def test_all_stay_within_the_memory_and_recomputing_costs_vpipe_no_speed() -> None:
    limit = 600 * MB
    pipedream, vpipe = fitted("pipedream", limit), fitted("vpipe", limit)
    assert max(map(peak, (pipedream, vpipe, fitted("gpipe", limit)))) <= limit
    assert vpipe.predicted.seconds_per_sample <= pipedream.predicted.seconds_per_sample * 1.001


def test_where_pipedream_must_cut_unevenly_vpipe_recomputes() -> None:
    pipedream, vpipe = fitted("pipedream", 400 * MB), fitted("vpipe", 400 * MB)
    assert pipedream.partition != vpipe.partition
    assert any(vpipe.recomputed)
    assert vpipe.predicted.seconds_per_sample < pipedream.predicted.seconds_per_sample


def test_a_system_that_fits_in_no_size_is_refused_with_numbers() -> None:
    with pytest.raises(UserError, match="no plan fits into 248 MiB per rank"):
        fitted("pipedream", 260 * MB)
    assert fitted("gpipe", 260 * MB).microbatches == BATCH
