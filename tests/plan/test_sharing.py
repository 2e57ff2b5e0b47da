"""How ranks share the optimizer's state and the layers: what the planner chooses, and where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import KIB, any_profile, layer, profile, transformer
from test_solve import by_formula, compositions, seconds

from vpipe.errors import UserError
from vpipe.plan.prediction import predict
from vpipe.plan.profile import Profile, Seconds
from vpipe.plan.solver.choice import Choice
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.search_space import SearchSpace
from vpipe.plan.solver.solve import GAINED, Solution, solve


def both(request: PlanRequest) -> Solution:
    """Without and with ZeRO-1."""
    return solve(request, request.with_zero1)


def rows(solution: Solution) -> dict[str, str]:
    return {other.what: other.why for other in solution.alternatives}


@settings(max_examples=6)
@given(st.integers(1, 10**6), st.floats(0, 1))
def test_there_is_a_plan_exactly_where_some_partition_fits_with_or_without_zero1(seed: int, room: float) -> None:
    made = replace(any_profile(seed, 3), zero1=False)
    made = replace(made, layers=tuple(replace(each, optimizer_bytes=8 * each.parameter_bytes) for each in made.layers))
    choice = Choice("1f1b", 12, None, 4, None)
    most, least = (SearchSpace(PlanRequest({12: one}, 4, None, ("1f1b",))).of_least_memory(choice)
                   for one in (made, replace(made, zero1=True)))
    assert most is not None
    assert least is not None
    limit = int(0.9 * least[0] + room * (1.1 * most[0] - 0.9 * least[0]))
    fits = [zero1 for zero1 in (False, True) if any(
        by_formula(replace(made, zero1=zero1), choice, partition, widths, limit) < float("inf")
        for stages in range(1, 4) for partition in compositions(3, stages) for widths in compositions(4, stages))]
    request = PlanRequest({12: made}, 4, limit, ("1f1b",))
    if not fits:
        with pytest.raises(UserError, match="no plan fits"):
            both(request)
        return
    found = both(request)
    assert found.plan.zero1 in fits
    assert found.plan.predicted == predict(replace(made, zero1=found.plan.zero1), found.plan).prediction
    assert found.plan.predicted.fullest_rank[1] <= limit
    if found.plan.zero1 and False in fits:
        assert seconds(found) < (1 - GAINED) * seconds(solve(request))
    if found.plan.zero1 is False and True in fits:
        assert seconds(found) <= seconds(solve(request.with_zero1)) / (1 - GAINED)


def heavy(optimizer: int, step_s: float = 0.0) -> Profile:
    """Two layers, of which one has most of the parameters, in many small matrices, and of the state."""
    first = layer("heavy", 0.02, parameters=64 * KIB, optimizer=optimizer, saved=256 * KIB, step_s=step_s)
    return profile([replace(first, largest_bytes=KIB), layer("light", 0.02, writes="loss", out=4, saved=64 * KIB)],
                   bytes_per_s=1e12)


def test_memory_that_only_shared_state_leaves_switches_it_on() -> None:
    request = PlanRequest({8: heavy(2048 * KIB)}, 4, 1600 * KIB, ("1f1b",))
    with pytest.raises(UserError, match="too many"):
        solve(request)
    found = both(request)
    assert found.plan.zero1
    assert rows(found)["no zero1"] == "does not fit"
    assert found.request.profiles[8].zero1, "the profile that explains it"


def test_less_recomputation_switches_it_on() -> None:
    request = PlanRequest({8: heavy(512 * KIB)}, 4, 900 * KIB, ("1f1b",))
    plain, found = solve(request), both(request)
    assert any(plain.plan.recomputed)
    assert found.plan.zero1
    assert not any(found.plan.recomputed)
    assert seconds(found) < 0.99 * seconds(plain)
    assert next(other.plan for other in found.alternatives if other.what == "no zero1") == plain.plan
    assert found.considered == plain.considered + solve(request.with_zero1).considered


@pytest.mark.parametrize("step_s", [0.0, 1e-4])
def test_where_it_gains_nothing_to_speak_of_it_stays_off(step_s: float) -> None:
    request = PlanRequest({8: heavy(512 * KIB, step_s)}, 4, None, ("1f1b",))
    found = both(request)
    assert found.plan == solve(request).plan
    assert found.plan.zero1 is False
    assert "with zero1" in rows(found)


def test_shorter_steps_switch_it_on() -> None:
    assert both(PlanRequest({8: heavy(512 * KIB, 0.05)}, 4, None, ("1f1b",))).plan.zero1


def test_without_replicas_nothing_is_said_of_it() -> None:
    found = both(PlanRequest({8: transformer(4)}, 2, None, ("zb_h1",), placement=((0,), (1,))))
    assert found.plan.zero1 is False
    assert not {"with zero1", "no zero1"} & set(rows(found))


def split(made: Profile, tensor: int, slower: float) -> Profile:
    """The layers of a profile as each of ``tensor`` ranks has its part, ``slower`` than with an even share of the time.
    """
    layers = tuple(replace(each, **{name: Seconds(slower / tensor * getattr(each, name).median) for name in (
        "forward", "backward", "input_half", "weight_half", "recompute", "step")}, **{
            name: getattr(each, name) // tensor for name in (
                "parameter_bytes", "optimizer_bytes", "saved_bytes", "weight_half_bytes")}) for each in made.layers)
    return replace(made, layers=layers, identity=replace(made.identity, tensor=tensor))


def over(ranks: int, memory_bytes: int | None, **slower: float) -> Solution:
    """The answer for a model on so many ranks, whose layers may be split as ``t2=1.1`` says."""
    whole = transformer(2)
    return solve(*(PlanRequest({4: split(whole, tensor, times)}, ranks // tensor, memory_bytes)
                       for name, times in {"t1": 1.0, **slower}.items() for tensor in [int(name[1:])]))


def test_layers_are_split_where_that_is_faster_and_the_others_are_named() -> None:
    found = over(4, None, t2=1.01, t4=1.2)
    assert (found.plan.tensor, found.plan.ranks) == (2, 2)
    assert {"tensor 1", "tensor 4"} <= set(rows(found))
    whole = solve(PlanRequest({4: transformer(2)}, 4))
    assert next(other.seconds_per_sample for other in found.alternatives if other.what == "tensor 1") == seconds(whole)
    assert seconds(found) < (1 - GAINED) * seconds(whole)
    assert found.considered > whole.considered


def test_as_fast_as_whole_ones_is_no_reason() -> None:
    whole = solve(PlanRequest({4: transformer(2)}, 4))
    even = split(transformer(2), 2, 1.0)
    fast = seconds(solve(PlanRequest({4: even}, 2)))
    assert over(4, None, t2=0.995 * seconds(whole) / fast).plan == whole.plan


def test_little_memory_splits_layers_and_none_names_what_each_would_need() -> None:
    assert over(4, None, t2=3.0).plan.tensor == 1
    with pytest.raises(UserError) as error:
        over(4, 10 * KIB, t2=3.0)
    assert [problem.what.partition(" per rank")[0] for problem in error.value.problems] == [
        f"tensor {tensor}: no plan fits into 10 KiB" for tensor in (1, 2)]
    whole, halves = (float(problem.hint.split()[1]) for problem in error.value.problems)
    assert halves < whole
    tight = over(4, int(halves * KIB) + KIB, t2=3.0)
    assert tight.plan.tensor == 2
    assert rows(tight)["tensor 1"].startswith("no plan fits into ")
