"""What the solver says beside its plan: other plans, limits, and why there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

import pytest
from profiles import KIB, any_profile, transformer
from test_solve import seconds

from vpipe.app.sizes import parse_size
from vpipe.errors import UserError
from vpipe.plan.solver.choice import equal_widths
from vpipe.plan.solver.request import PlanRequest
from vpipe.plan.solver.solve import solve
from vpipe.plan.stage_costs import StageMemory, combined_memory
from vpipe.schedules.registry import RegisteredSchedule


def test_nothing_that_was_simulated_and_fits_is_faster_than_the_plan() -> None:
    made = replace(any_profile(929316374, 7, latency_s=1e-3, bytes_per_s=1e6, cores=2), dispatch_s=5e-4,
                   accumulate_bytes_per_s=1e7)
    solution = solve(PlanRequest({4: made}, 4, 378662, RegisteredSchedule.for_plans(flush=False)))
    assert solution.alternatives
    assert all(other.seconds_per_sample >= seconds(solution) * (1 - 1e-6) for other in solution.alternatives
               if other.simulated and other.seconds_per_sample is not None)


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_several_stages_on_a_rank_over_the_limit_are_said_to_be(schedule: str) -> None:
    made = transformer(6)
    request = PlanRequest({8: made}, 2, 200 * KIB, (schedule,), placement=equal_widths(schedule, 2, 1))
    with pytest.raises(UserError) as error:
        solve(request)
    problem = error.value.problems[0]
    assert re.match(rf"no plan fits into 200 KiB per rank: with {schedule} and 8 microbatches, with everything "
                    r"recomputed, rank \d \(stages \d: layers \d+ to \d+, \d: layers \d+ to \d+\) holds [\d.]+ KiB, "
                    r"[\d.]+ KiB too many; most of it, [\d.]+ KiB, is ", problem.what)
    allowed = re.match(r"allow ([\d.]+ [KM]iB) or more per rank \(parallel.memory, --memory, memory_bytes in Python\)",
                       problem.hint)
    assert allowed is not None
    assert solve(replace(request, memory_bytes=parse_size(allowed[1], "it"))).plan.schedule == schedule


@pytest.mark.parametrize(("seed", "layers", "ranks", "solver"), [
    (387717185, 8, 4, "exact"), (405840948, 7, 3, "vpipe"), (520684370, 9, 4, "vpipe")])
def test_a_remedy_that_is_named_fits(seed: int, layers: int, ranks: int, solver: Literal["exact", "vpipe"]) -> None:
    request = PlanRequest({2: any_profile(seed, layers)}, ranks, 120 * KIB, RegisteredSchedule.for_plans(flush=False),
                          recompute=0.5, solver=solver)
    with pytest.raises(UserError) as error:
        solve(request)
    assert "into 120 KiB per rank" in error.value.problems[0].what
    allowed = re.search(r"allow ([\d.]+ KiB) or more", error.value.problems[0].hint)
    assert allowed is not None
    assert solve(replace(request, memory_bytes=parse_size(allowed[1], "it"))).plan.predictions is not None


def test_the_limit_without_recomputing_is_one() -> None:
    made = replace(any_profile(855676121, 9, latency_s=1e-3, bytes_per_s=1e6, cores=1), accumulate_bytes_per_s=1e7)
    request = PlanRequest({4: made}, 8, 312390, ("gpipe",), placement=equal_widths("gpipe", 8, 2))
    tight = solve(request)
    assert any(tight.plan.recomputed)
    found = tight.without_recompute()
    assert found is not None
    assert not any(found[1].recomputed)
    assert solve(replace(request, memory_bytes=found[0])).plan == found[1]


def test_a_choice_that_cannot_be_had_is_not_said_not_to_fit() -> None:
    found = {other.what: other.why for other in solve(
        PlanRequest({3: transformer(6), 1: transformer(6)}, 4, 10**9, ("1f1b", "interleaved"))).alternatives}
    assert "microbatches" in found["schedule interleaved"]
    assert "fit" not in found["schedule interleaved"]


def test_a_rank_works_on_one_stage_at_a_time() -> None:
    one = StageMemory(1, 2, 3, 4, 5, 6)
    assert combined_memory([one, replace(one, working=10)]) == StageMemory(2, 4, 6, 8, 10, 10)
    made = transformer(6)
    plan = solve(PlanRequest({8: made}, 2, None, ("interleaved",), placement=equal_widths("interleaved", 2, 1))).plan
    assert plan.predictions is not None
    stages = [stage.memory for stage in plan.predictions.stages]
    assert plan.predictions.fullest_rank[1] == max(combined_memory(stages[:3:2]).peak,
                                                    combined_memory(stages[1::2]).peak)


def test_a_plan_that_is_known_is_not_lost_to() -> None:
    made = transformer(4)
    fast = solve(PlanRequest({4: made}, 2, None, ("zb_h1",), placement=((0,), (1,))))
    slow = PlanRequest({4: made}, 2, None, ("gpipe",), placement=((0,), (1,)), partition=(8, 1))
    assert seconds(solve(slow)) > seconds(fast)
    assert solve(replace(slow, known=(fast.plan,))).plan.partition == fast.plan.partition
    assert seconds(solve(replace(slow, known=(fast.plan,)))) == seconds(fast)
