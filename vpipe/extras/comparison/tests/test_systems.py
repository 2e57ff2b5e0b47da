"""Check what may be asked for, and the plans of the systems for a profile of ten equal layers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from small_run import job_of

from vpipe.errors import Problem, UserError
from vpipe.extras.comparison.planning import Contender, memory_warning, plan_contenders, system_contender
from vpipe.extras.comparison.systems import SYSTEMS, ComparisonRequest, SystemPlan, microbatch_counts, plan_system
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes
from vpipe.profiling.rank_group import RankGroup
from vpipe.units import size_text

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
def fitted(name: str, memory_bytes: int | None) -> SystemPlan:
    return plan_system(SYSTEMS[name], PROFILES, RANKS, memory_bytes)


def contenders(*names: str, memory_bytes: int | None, lines: list[str] | None = None) -> list[Contender]:
    log = [].append if lines is None else lines.append
    return [system_contender(name, "", name, PROFILES, RANKS, memory_bytes, log) for name in names]


def peak(found: SystemPlan) -> int:
    return max(stage.memory.peak for stage in found.plan.predicted.stages)


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
        found = fitted(name, None)
        assert found.plan.predicted.samples_per_step == BATCH
        assert found.plan.microbatches == BATCH // found.microbatch_size
        if name != "gpipe":
            assert found.plan.update_every == found.plan.microbatches
        assert found.plan.groups == ((0,), (1,))


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
    assert vpipe.plan.predicted.seconds_per_sample <= pipedream.plan.predicted.seconds_per_sample * 1.001


def test_where_pipedream_must_cut_unevenly_vpipe_recomputes() -> None:
    pipedream, vpipe = fitted("pipedream", 400 * MB), fitted("vpipe", 400 * MB)
    assert pipedream.plan.partition != vpipe.plan.partition
    assert any(vpipe.plan.recomputed)
    assert vpipe.plan.predicted.seconds_per_sample < pipedream.plan.predicted.seconds_per_sample


def test_a_system_that_fits_in_no_size_is_refused_with_numbers() -> None:
    lines: list[str] = []
    with pytest.raises(UserError, match="no plan fits into 248 MiB per rank"):
        contenders("pipedream", memory_bytes=260 * MB)
    contenders("gpipe", memory_bytes=260 * MB, lines=lines)
    assert "gpipe: microbatches of 1, " in lines[0]
    assert "2 does not fit" in lines[0]


@pytest.mark.parametrize(("given", "device_bytes", "limit"), [
    (None, 1800 * MB, 900 * MB), (800 * MB, 1800 * MB, 800 * MB), (None, 0, None)])
def test_contenders_share_what_the_device_has_but_not_what_was_given(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, device_bytes: int, limit: int | None
) -> None:
    profiles = {count: replace(own, device_bytes=device_bytes) for count, own in PROFILES.items()}
    monkeypatch.setattr("vpipe.extras.comparison.planning._measure", lambda *args: profiles)
    found = plan_contenders({"": job_of(tmp_path)}, ComparisonRequest(("gpipe", "vpipe"), (), given),
                            RankGroup(torch.device("cpu")), [].append)
    assert [one.memory_bytes for one in found] == [limit] * 2


def test_contenders_that_need_more_together_than_there_is_are_warned_of() -> None:
    both = contenders("pipedream", "gpipe", memory_bytes=600 * MB)
    plans = [one.plan.predictions for one in both if one.plan]
    most = max(sum(plan.stages[rank].memory.peak for plan in plans if plan) for rank in range(RANKS))
    assert memory_warning(both, most) is None
    warning = memory_warning(both, most - 1)
    assert warning is not None
    assert "all 2 contenders" in warning
    assert f"may need {size_text(most)}" in warning
    twin = replace(both[0], name="vpipe")  # the same program, which runs once
    assert memory_warning([*both, twin], most - 1) == warning
    another = memory_warning([*both, replace(twin, model="another")], most)
    assert another is not None
    assert "all 3 contenders" in another


def test_a_contender_reads_back_from_json() -> None:
    [gpipe] = contenders("gpipe", memory_bytes=None)
    assert gpipe.largest_size == 16
    read = Contender.from_json(json.loads(json.dumps(gpipe.as_json())))
    assert read.plan is not None
    assert gpipe.plan is not None
    assert (read.name, read.plan.partition, read.problem) == ("gpipe", gpipe.plan.partition, None)
    refused = Contender("vpipe", "", problem=Problem("too large", "buy more"))
    assert Contender.from_json(refused.as_json()) == refused
