"""Bugs of others that compose pipelines with sharding, planted one by one: a comparison finds each, and says where.

The rest of the table of docs/open-problems.md, section 21, cannot be planted: a wrapper that reduces by itself is
refused (``test_wrappers.py``), and so are weights gathered twice or not at all (:func:`test_what_a_schedule_forgets`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dtensor_jobs
import nccl_jobs
import pytest
import test_sharded_state
import torch.distributed as dist
from test_fully_sharded import in_lanes, with_replicas
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from world import World

from vpipe.errors import CheckError, RunError, UserError
from vpipe.runtime.fully_sharded import FullyShardedStages
from vpipe.runtime.sharded_tensors import local, wrapped
from vpipe.runtime.step_results import StepResults
from vpipe.runtime.worker import Worker
from vpipe.schedules.builder import build
from vpipe.schedules.checker import check
from vpipe.schedules.lowering import lower

pytestmark = pytest.mark.jobs


@contextmanager
def around_backwards(*, before: Callable[[Any], None] = lambda weights: None,
                     after: Callable[[Any], None] = lambda weights: None) -> Iterator[None]:
    """Do something to the gradients of a stage around every backward."""
    real = Worker.backward

    def planted(worker: Worker, stage: int, microbatch: int) -> None:
        before(worker.stages[stage].weights)
        real(worker, stage, microbatch)
        after(worker.stages[stage].weights)

    with patch.object(Worker, "backward", planted):
        yield


@contextmanager
def other_lanes_lost() -> Iterator[None]:
    real = dist.all_to_all_single

    def planted(arrived: Tensor, *words: Any, **more: Any) -> None:
        real(arrived, *words, **more)
        arrived[arrived.numel() // 2:] = 0

    with patch.object(dist, "all_to_all_single", planted):
        yield


@contextmanager
def loss_off() -> Iterator[None]:
    real = StepResults._receive_results

    def planted(results: StepResults, *words: Any) -> Any:
        loss, *rest = real(results, *words)
        return (1.5 * loss, *rest)

    with patch.object(StepResults, "_receive_results", planted):
        yield


PLANTED: dict[str, Callable[[], Any]] = {
    "doubled at every microbatch": lambda: around_backwards(after=lambda weights: weights.scale_gradients(2.0)),
    "only the last microbatch": lambda: around_backwards(before=lambda weights: weights.pop_gradients()),
    "a moving average": lambda: around_backwards(after=lambda weights: weights.scale_gradients(0.5)),
    "copied, not added": other_lanes_lost,
    "mean loss off": loss_off}


def in_lanes_with(*, bug: str) -> dict[str, Any]:
    with PLANTED[bug]():
        return in_lanes(shape=[2, 2], schedule="1f1b", partition=[4, 4])


@pytest.mark.parametrize(("bug", "first"), [
    ("doubled at every microbatch", "state"),  # Megatron-LM #6660: AdamW hides a factor, but not one of each microbatch
    ("only the last microbatch", "state"),  # Megatron-LM PR #7186, NeMo Automodel PR #3530
    ("a moving average", "state"),  # torchtitan #1733
    ("copied, not added", "state"),  # Fast-LLM #550
    ("mean loss off", "losses")])  # Megatron-LM PR #4891
def test_lanes_beside_replicas_find(world: World, bug: str, first: str) -> None:
    """``test_fully_sharded.py::test_lanes_have_the_bits_of_replicas``, by the losses or the weights."""
    expected = with_replicas(lanes=2, schedule="1f1b", partition=[4, 4])
    for result in world.run(in_lanes_with, bug=bug):
        differing = [name for name in ("losses", "state") if result[name] != expected[name]]
        assert first in differing
        assert ("losses" in differing) or bug != "mean loss off"


def gathered_in_forwards() -> str:
    """What is said where nobody gathers before a forward, so that hooks of fully_shard do."""
    with patch.object(FullyShardedStages, "unshard", lambda *_: None), pytest.raises((RunError, UserError)) as caught:
        in_lanes(shape=[1, 4], schedule="1f1b", partition=[4, 4])
    return str(caught.value)


@pytest.fixture
def once(tmp_path: Path) -> Iterator[World]:
    """Ranks for one job, after which they know of its failure."""
    some = World(4, tmp_path)
    yield some
    some.kill()


def test_gathering_inside_forwards_is_seen(once: World) -> None:
    """pytorch #164756: a container of sharded modules was not found. The first forwards look at their parameters."""
    for text in once.run(gathered_in_forwards):
        assert "was replaced by another parameter in a forward" in text


def partial_called_replicated() -> str:
    def planted(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], names: Sequence[str]) -> list[Any]:
        return [None if gradient is None else wrapped(local(gradient), parameter)
                for gradient, parameter in zip(gradients, parameters, strict=True)]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with patch("vpipe.runtime.weight_versions.completed", planted), pytest.raises(RunError) as caught:
        dtensor_jobs.exactly_trained(dtensor_jobs.sequence_parallel(mesh["tp"]), mesh=mesh, schedule="1f1b")
    return str(caught.value)


def test_a_partial_gradient_called_replicated_is_found(once: World) -> None:
    """torchtitan PR #3412, Megatron-LM #7452: gradients of a norm that were not summed over the tensor ranks."""
    for text in once.run(partial_called_replicated):
        assert "stage 0: the first update made another 'b0.scale.weight' in lane 1 than in lane 0" in text


def test_a_receive_posted_early_is_found(once: World) -> None:
    """pytorch #172668: it blocks what layers gather, under nccl's rules. In their one order all comes through
    (``test_nccl_rules.py::test_layers_of_dtensors_and_replicas_of_them``)."""
    once.begin(nccl_jobs.receives_posted_early)
    texts = [once.outcome(rank, 60)[1]["text"] for rank in range(4)]
    behind = r"(SUM|all_gather) behind the receive from rank (0 \(rank 2|1 \(rank 3), stage 1, microbatch 0, action 1B0"
    assert any(re.search(behind, text) for text in texts), texts


def test_state_that_only_making_it_has_advanced_is_found() -> None:
    """Megatron-LM #5974: a fresh optimizer's state, loaded as if it had made a step."""
    first, second = test_sharded_state.pipeline(), test_sharded_state.pipeline()
    state = first.state_dict(sharded=True)
    del state["vpipe"]  # which says that no step was made
    second.load_state_dict(state)
    batches = test_sharded_state.batches(0, 2)
    assert test_sharded_state.losses(first, batches)[1] != test_sharded_state.losses(second, batches)[1]


def test_names_that_count_from_the_stage_are_refused_under_another_cut() -> None:
    """Megatron-LM #7452: another cut loaded wrong layers and said nothing."""
    state = test_sharded_state.pipeline().state_dict(sharded=True)
    state["model"] = {name.replace("b2.", "b0."): value for name, value in state["model"].items()}
    with pytest.raises(UserError, match=r"4 tensors of the model missing in the checkpoint: b2\.up\.weight"):
        test_sharded_state.pipeline(partition=[1, 1, 2]).load_state_dict(state)


@pytest.mark.parametrize(("left_out", "what"), [
    ("UNSHARD", "0F0 on rank 0 needs 0UNSHARD0 before it"), ("RESHARD", "0STEP0 on rank 0 needs 0RESHARD0 before it"),
    ("REDUCE_GRAD", "0REDUCE_GRAD0 is missing on rank 0")])
def test_what_a_schedule_forgets(left_out: str, what: str) -> None:
    """One action of a stage; the others have theirs. pytorch PR #165467: a stage that is gathered twice is stale."""
    schedule = lower(build("1f1b", ((0,), (1,)), 4), sharded=True)
    check(schedule)
    programs = [[action for action in program if (action.op, action.stage) != (left_out, 0)]
                for program in schedule.programs]
    with pytest.raises(CheckError, match=what):
        check(schedule.with_programs(programs))


def test_weights_that_were_given_back_are_not_used() -> None:
    schedule = lower(build("gpipe", ((0,), (1,)), 2), sharded=True)
    program = list(schedule.programs[1])
    early = next(action for action in program if action.op == "RESHARD")
    program.remove(early)
    program.insert(next(i for i, action in enumerate(program) if action.op == "B"), early)
    with pytest.raises(CheckError, match="must stand between the last weight gradient of its update and 1RESHARD0"):
        check(schedule.with_programs([schedule.programs[0], program]))
