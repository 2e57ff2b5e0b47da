"""From layers to stages: seconds and bytes add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from profiles import KIB, layer, profile

from vpipe.plan.profile import LinkProfile, Profile
from vpipe.plan.stage_costs import pipeline_costs, stage_costs, stage_memory
from vpipe.schedules.assignment import Placement
from vpipe.schedules.costs import Link


@pytest.fixture
def four() -> Profile:
    """Forwards of 1, 2, 4 and 8 seconds; backwards, as in all these profiles, of twice, 1.1 and 1 of that."""
    made = [layer(f"layer{n}", 2.0**n, reads=("h" if n else "ids",), step_s=0.5, parameters=KIB,
                  tied={0: 100} if n == 3 else None) for n in range(4)]
    return replace(profile(made), dispatch_s=0.01)


def seconds(made: Profile, layers: range, **options: object) -> tuple[float, ...]:
    cost = stage_costs(made, layers, **options)  # type: ignore[arg-type]
    return tuple(round(float(time), 9) for time in (cost.forward_s, cost.input_s + cost.weight_s, cost.weight_s,
                                                    cost.recompute_s, cost.step_s))


def test_layers_add_up_and_every_action_and_transfer_is_carried_out_once(four: Profile) -> None:
    assert seconds(four, range(1, 3)) == (6.03, 12.03, round(12 / 2.1, 9), 0, 1.01)  # a receive and a send
    assert seconds(four, range(0, 2)) == (3.02, 6.02, round(6 / 2.1, 9), 0, 1.01)
    assert seconds(four, range(0, 4)) == (15.01, 30.01, round(30 / 2.1, 9), 0, 2.01)


def test_halves_are_those_measured_where_the_schedule_halves(four: Profile) -> None:
    assert seconds(four, range(1, 3), split=True) == (6.03, round(6.6 + 6 + 0.04, 9), 6.01, 0, 1.01)


def test_only_what_is_dropped_is_recomputed(four: Profile) -> None:
    assert seconds(four, range(1, 3), recomputed=(2,))[3] == 4.01
    whole, dropped = stage_costs(four, range(1, 3)), stage_costs(four, range(1, 3), (2,))
    assert dropped.kept_bytes < whole.kept_bytes == whole.activation_bytes == dropped.activation_bytes


def test_a_step_copies_weights_that_are_still_in_use(four: Profile) -> None:
    fast = replace(four, copy_bytes_per_s=float(KIB))
    assert seconds(fast, range(1, 3), versions=2)[4] == 3.01  # two layers of 1 KiB
    assert seconds(fast, range(1, 3), versions=1)[4] == 1.01


def test_the_first_backward_of_an_update_has_nothing_to_add_to(four: Profile) -> None:
    adding = replace(four, accumulate_bytes_per_s=float(KIB))
    assert seconds(adding, range(1, 3))[1] == 12.03
    assert seconds(adding, range(1, 3), per_update=1)[1] == 10.03
    assert seconds(adding, range(1, 3), per_update=4)[1] == 11.53


def test_tied_weights_count_where_they_are_borrowed_and_cross_where_they_are_lent(four: Profile) -> None:
    first, last, whole = (stage_costs(four, layers) for layers in (range(0, 2), range(2, 4), range(0, 4)))
    assert (first.tied_bytes, last.tied_bytes, whole.tied_bytes) == (100, 0, 0)
    assert (first.version_bytes, last.version_bytes, whole.version_bytes) == (2 * KIB, 2 * KIB + 100, 4 * KIB)
    assert last.reduce_bytes == 2 * KIB


def test_links_and_hosts_come_from_the_profile(four: Profile) -> None:
    placement = ((0,), (1,))
    linked = replace(four, links={(0, 1): LinkProfile(0.5, 10.0), (6, 7): LinkProfile(1.0, 1.0)}, cores=2)
    costs = pipeline_costs(linked, (2, 2), [(), ()], placement)
    assert costs.links == {(0, 1): Link(0.5, 10.0)}
    assert (costs.default_link, costs.cores, costs.hosts) == (Link(0.0, 1e9), 2, (0, 0))
    spread = replace(linked, identity=replace(linked.identity, ranks_per_host=1))
    assert pipeline_costs(spread, (2, 2), [(), ()], placement).hosts == (0, 1)
    assert pipeline_costs(four, (2, 2), [(), ()], placement).cores is None


@pytest.mark.parametrize(("placement", "sent", "waiting", "shared"), [
    (((0,), (1,), (0,), (1,)), [10, 20, 30], [10, 0, 0, 0], [0, 0, 0, 10]),
    (((0,), (1,), (1,), (0,)), [10, 30, 30], [10, 0, 0, 0], [0, 0, 10, 0]),
    (((0,), (1,), (2,), (3,)), [10, 30, 40], [0, 0, 0, 0], [0, 0, 0, 0]),
    (((0, 1), (2, 3), (0, 1), (2, 3)), [10, 20, 30], [10, 0, 0, 0], [0, 0, 0, 10]),
    (((0,), (1,), (0, 2), (1,)), [10, 30, 30], [0, 0, 0, 0], [0, 0, 0, 10])])
def test_what_a_rank_has_had_is_not_sent_to_it_and_counts_once(placement: Placement, sent: list[int],
                                                               waiting: list[int], shared: list[int]) -> None:
    """``a`` is read by all later layers; ``h`` is another tensor behind each. Gradients cross every cut. The first
    layer's graph does not keep ``a``: where its rank has a later stage, ``a`` waits for that."""
    made = profile([layer("first", reads=("ids",), writes="a", out=10),
                    layer("second", reads=("a",), writes="h", out=20),
                    layer("third", reads=("h", "a"), writes="h", out=30),
                    layer("last", reads=("h", "a"), writes="loss", out=4)])
    costs = pipeline_costs(made, (1,) * 4, [()] * 4, placement).stages
    assert [cost.output_bytes for cost in costs[:3]] == sent
    assert [cost.gradient_bytes for cost in costs[1:]] == [10, 30, 40]
    assert [cost.waiting_bytes for cost in costs] == waiting
    assert [stage_costs(made, range(stage, stage + 1)).activation_bytes - cost.activation_bytes
            for stage, cost in enumerate(costs)] == shared


def test_memory_by_kind(four: Profile) -> None:
    frozen = replace(four, layers=(*four.layers[:3], replace(four.layers[3], frozen_bytes=7,
                                                                 frozen_tied={0: 20, 2: 30})))
    memory = stage_memory(frozen, range(2, 4), (3,), in_flight=3, versions=2, weight_halves=2)
    cost = stage_costs(frozen, range(2, 4), (3,))
    assert (memory.weights, memory.stashed, memory.gradients, memory.optimizer) == (
        2 * KIB + 127, 2 * KIB + 100, 2 * KIB + 100, 4 * KIB), "of what is tied and not trained that of another stage"
    assert memory.activations == 2 * cost.kept_bytes + cost.activation_bytes + 2 * cost.weight_half_bytes
    assert memory.peak == sum((memory.weights, memory.stashed, memory.gradients, memory.optimizer,
                               memory.activations, memory.working))
