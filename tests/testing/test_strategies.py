"""What the strategies draw is what they promise, and each of our schedules can be drawn."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vpipe.testing
from vpipe import Model, Pipeline, Plan
from vpipe.errors import UserError
from vpipe.schedules.assignment import Placement
from vpipe.schedules.checker import check
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule
from vpipe.testing import assert_equals_oracle, orders, partitions, placements, plans, schedules, ties

pytestmark = pytest.mark.jobs


@given(placements(most_stages=3, most_replicas=2))
def test_a_placement_has_each_rank_once(placement: Placement) -> None:
    ranks = [rank for held_by in placement for rank in held_by]
    assert sorted(ranks) == list(range(len(ranks)))
    assert 1 <= len(placement) <= 3
    assert {len(held_by) for held_by in placement} <= {1, 2}


@given(st.integers(1, 9), st.data())
def test_a_partition_gives_each_stage_a_layer(layers: int, data: st.DataObject) -> None:
    partition = data.draw(partitions(layers))
    assert sum(partition) == layers
    assert min(partition) > 0
    stages = data.draw(st.integers(1, layers))
    assert len(data.draw(partitions(layers, stages))) == stages


@given(st.integers(1, 5), st.data())
def test_those_who_borrow_a_weight_come_after_its_owner(stages: int, data: st.DataObject) -> None:
    for owner, borrowers in data.draw(ties(stages)).items():
        assert list(borrowers) == sorted(set(borrowers))
        assert owner < borrowers[0] <= borrowers[-1] < stages


@pytest.mark.parametrize("name", RegisteredSchedule.names())
def test_every_schedule_can_be_drawn(name: str) -> None:
    @settings(deadline=None, max_examples=3)
    @given(schedules([name], most_ranks=4, most_microbatches=8))
    def drawn(schedule: Schedule) -> None:
        assert schedule.name == name
        check(schedule)

    drawn()


@settings(deadline=None, max_examples=20)
@given(orders())
def test_an_order_can_be_computed(schedule: Schedule) -> None:
    check(schedule)


@settings(deadline=None, max_examples=8)
@given(plans(layers=7))
def test_any_plan_trains_as_its_oracle(plan: Plan) -> None:
    """Any partition, replicas on any ranks, any layers recomputed."""
    assert plan.microbatches is not None
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.1), nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()]
    model = Model.sequential(nn.Sequential(*layers), loss=nn.MSELoss())
    pipe = Pipeline(model, lambda parameters: torch.optim.AdamW(parameters, lr=0.1), plan)
    batches = [{"input": torch.randn(plan.microbatches, 4), "target": torch.randn(plan.microbatches, 4)}
               for _ in range(2)]
    assert assert_equals_oracle(pipe, batches)


def test_strategies_of_schedules_need_no_torch_and_oracles_no_hypothesis() -> None:
    code = ("import sys\nfrom vpipe.testing import schedules\nassert 'torch' not in sys.modules\n"
            "del sys.modules['vpipe.testing.strategies']\nsys.modules['hypothesis'] = None\n"
            "from vpipe.testing import flush_oracle, assert_equals_oracle")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_who_has_no_hypothesis_is_told_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "vpipe.testing.strategies")
    with pytest.raises(UserError, match=r"the strategies of vpipe\.testing need hypothesis") as refused:
        vpipe.testing.__getattr__("schedules")
    assert refused.value.problems[0].hint == "pip install hypothesis"


def test_every_name_of_the_face_is_there_once() -> None:
    names = vpipe.testing.__all__
    assert names == sorted(set(names))
    assert all(hasattr(vpipe.testing, name) for name in names)
    with pytest.raises(AttributeError, match=r"vpipe\.testing' has no attribute 'nothing'"):
        _ = vpipe.testing.nothing
