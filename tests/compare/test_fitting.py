"""Plans and microbatches of the systems, from a profile of ten equal layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from vpipe.compare.enter import crowded, limit, of_systems
from vpipe.compare.fitting import Fitted, fit, microbatch_counts
from vpipe.compare.systems import systems_named
from vpipe.errors import UserError
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes
from vpipe.sizes import size_text

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
def fitted(name: str, memory_bytes: int | None) -> Fitted:
    [system] = systems_named(name)
    return fit(system, PROFILES, RANKS, memory_bytes)


def peak(found: Fitted) -> int:
    return max(stage.memory.peak for stage in found.prediction.stages)


def test_microbatches_are_divisors_and_the_smallest_of_many() -> None:
    assert microbatch_counts(16) == [1, 2, 4, 8, 16]
    assert microbatch_counts(512) == [4, 8, 16, 32, 64, 128, 256, 512]
    assert microbatch_counts(7) == [1, 7]


def test_an_update_has_as_many_samples_in_every_system() -> None:
    for name in ("gpipe", "pipedream", "vpipe"):
        found = fitted(name, None)
        assert found.prediction.samples_per_step == BATCH
        assert found.plan.microbatches == BATCH // found.microbatch_size
        if name != "gpipe":
            assert found.plan.update_every == found.plan.microbatches
        assert found.plan.stage_to_rank_map in ((), ((0,), (1,)))


def test_each_recomputes_what_its_users_did() -> None:
    gpipe = fitted("gpipe", None).plan
    assert [len(layers) for layers in gpipe.recomputed] == list(gpipe.partition)
    assert not any(fitted("pipedream", None).plan.recomputed)
    assert not any(fitted("vpipe", None).plan.recomputed)  # nothing is short


def test_without_a_flush_the_largest_microbatch_is_best_and_with_one_it_is_not() -> None:
    assert fitted("pipedream", None).microbatch_size == fitted("pipedream", None).largest_size == 16
    gpipe = fitted("gpipe", None)
    assert gpipe.largest_size == 16 > gpipe.microbatch_size


def test_all_stay_within_the_memory_and_recomputing_fits_a_larger_microbatch() -> None:
    limit = 600 * MB
    pipedream, vpipe = fitted("pipedream", limit), fitted("vpipe", limit)
    assert max(peak(pipedream), peak(vpipe), peak(fitted("gpipe", limit))) <= limit
    assert vpipe.largest_size > pipedream.largest_size
    assert pipedream.seconds_per_sample[16] is None
    assert vpipe.prediction.seconds_per_sample <= pipedream.prediction.seconds_per_sample * 1.001


def test_where_pipedream_must_cut_unevenly_vpipe_recomputes() -> None:
    pipedream, vpipe = fitted("pipedream", 400 * MB), fitted("vpipe", 400 * MB)
    assert pipedream.plan.partition != vpipe.plan.partition
    assert any(vpipe.plan.recomputed)
    assert vpipe.prediction.seconds_per_sample < pipedream.prediction.seconds_per_sample


def test_what_fits_in_no_size_is_said_with_numbers_and_the_others_go_on() -> None:
    said: list[str] = []
    field = of_systems(("pipedream", "gpipe"), PROFILES, RANKS, 260 * MB, said.append)
    assert [entry.name for entry in field.entries] == ["gpipe"]
    assert "no plan fits into 248 MiB per rank" in field.refused["pipedream"].what
    assert said[0].startswith("pipedream: does not fit: no plan fits")
    assert "microbatches of 1, " in said[1]
    assert "2 does not fit" in said[1]
    [system] = systems_named("pipedream")
    with pytest.raises(UserError):
        fit(system, PROFILES, RANKS, 260 * MB)


def test_what_the_device_has_is_shared_by_the_contenders_but_not_what_was_given() -> None:
    assert limit(None, 900 * MB, 3) == 300 * MB
    assert limit(800 * MB, 900 * MB, 3) == 800 * MB
    assert limit(None, None, 3) is None


def test_contenders_that_need_more_together_than_there_is_are_warned_of() -> None:
    field = of_systems(("pipedream", "gpipe"), PROFILES, RANKS, 600 * MB, lambda line: None)
    plans = [entry.plan.predictions for entry in field.entries]
    most = max(sum(plan.stages[rank].memory.peak for plan in plans if plan) for rank in range(RANKS))
    assert crowded(field, most) is None
    warning = crowded(field, most - 1)
    assert warning is not None
    assert "all 2 contenders" in warning
    assert f"may need {size_text(most)}" in warning
    twin = replace(field.entries[0], name="vpipe")  # the same program, which runs once
    assert crowded(replace(field, entries=(*field.entries, twin)), most - 1) == warning


def test_the_largest_microbatch_that_fits_is_known_of_each() -> None:
    [gpipe] = of_systems(("gpipe",), PROFILES, RANKS, None, lambda line: None).entries
    assert gpipe.largest_size == 16
