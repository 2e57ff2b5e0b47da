"""The choice of warm-up depths: few, fast enough, within memory and updates."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from made_profile import MIB, made_profile

from vpipe.app.commands.plan import explanation
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import predict
from vpipe.plan.profile import LinkProfile, Profile
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.solve import Solution, solve


def profile(latency_s: float, layers: int = 8) -> Profile:
    """Two layers per stage, F + B = 12 ms and 1 ms for a step."""
    return replace(made_profile(layers), default_link=LinkProfile(latency_s, 1e10))


@cache
def planned(latency_s: float, every: int = 1, memory: int | None = None, schedule: str = "pipedream") -> Solution:
    return solve(request(latency_s, every, memory, schedule))


def request(latency_s: float, every: int = 1, memory: int | None = None, schedule: str = "pipedream") -> PlanRequest:
    return PlanRequest({8: profile(latency_s)}, 4, memory, (schedule,), {8: every}, ((0,), (1,), (2,), (3,)),
                       warmup="auto")


def step_ms(plan: Plan) -> float:
    return 1e3 * plan.predicted.step_s


@pytest.mark.parametrize(("latency_s", "depths"), [(0, (3, 2, 1, 0)), (1e-4, (3, 2, 1, 0)), (2e-3, (6, 4, 2, 0))])
def test_ranks_do_more_forwards_ahead_if_transfers_take_long(latency_s: float, depths: tuple[int, ...]) -> None:
    solution = planned(latency_s)
    assert solution.plan.warmup == depths
    assert step_ms(solution.plan) == pytest.approx(13, rel=0.01)
    assert solution.shallow is not None
    assert solution.shallow.warmup == (3, 2, 1, 0)
    assert step_ms(solution.shallow) == pytest.approx(13 if latency_s < 1e-3 else 15.4, rel=0.01)
    assert Plan.of_json(solution.plan.as_json()).warmup == depths


def test_a_partition_that_long_transfers_made_uneven_is_even_again() -> None:
    assert planned(5e-3).plan.partition == (2, 2, 2, 2)
    assert step_ms(planned(5e-3).plan) == pytest.approx(13, rel=0.01)


def test_as_few_as_are_nearly_as_fast_as_any() -> None:
    chosen = planned(1e-3).plan
    tried = [replace(chosen, order=replace(chosen.order.late, warmup_depth=(3 + a, 2 + b, 1 + c, 0)))
             for a, b, c in product(range(5), range(4), range(3)) if a >= b >= c]
    best = min(predict(profile(1e-3), plan).prediction.step_s for plan in tried)
    assert chosen.predicted.step_s <= 1.01 * best
    assert sum(chosen.warmup) <= 6 + 3 + 2 + 1
    assert chosen.warmup[0] > 3


def test_memory_and_updates_limit_them() -> None:
    free = planned(2e-3, every=8, schedule="2bw").plan
    assert free.warmup == (6, 4, 2, 0)
    assert planned(2e-3, every=4, schedule="2bw").plan.warmup == (3, 2, 1, 0), "k is above the depth of stage 0"
    shallow = planned(2e-3, every=8, schedule="2bw").shallow
    assert shallow is not None
    limit = (shallow.predicted.fullest_rank[1] + free.predicted.fullest_rank[1]) // 2
    limited = planned(2e-3, every=8, schedule="2bw", memory=limit).plan
    assert (3, 2, 1, 0) < limited.warmup < free.warmup
    assert limited.predicted.fullest_rank[1] <= limit
    assert shallow.predicted.step_s > limited.predicted.step_s > free.predicted.step_s


def test_depths_that_are_given_stay_and_count() -> None:
    request = PlanRequest({8: profile(2e-3)}, 4, None, ("pipedream",), {8: 1}, ((0,), (1,), (2,), (3,)),
                          warmup=(7, 4, 2, 0))
    given = solve(request).plan
    assert given.warmup == (7, 4, 2, 0)
    memory, shallow = given.predicted.stages[0].memory, planned(0).plan.predicted.stages[0].memory
    assert memory.stashed == 7 * 8 * MIB
    assert memory.activations * 4 == shallow.activations * 8


def test_the_explanation_has_what_they_gain_and_cost() -> None:
    text = explanation([request(2e-3)], "").text(120)
    assert text.splitlines()[1].endswith("per update; before its first backward stage 0 runs 6 forwards, stage 1 4, "
                                         "stage 2 2, stage 3 none")
    assert [line.split()[-1] for line in text.splitlines()[5:10]] == ["late", "6", "4", "2", "0"]
    [row] = [line for line in text.splitlines() if line.startswith("warm-up 3 2 1 0, as 1F1B")]
    assert " 16 % slower" in row
    assert "as 1F1B" not in explanation([request(0)], "").text(120), "these are the plan's own"
