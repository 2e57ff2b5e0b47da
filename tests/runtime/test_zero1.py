"""ZeRO-1: each replica of a stage steps whole parameters of its own, and every number is what it is without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import rich_batches, rich_model
from oracles import Momentum, assert_same, assert_same_state, oracle_of, pipeline_of, saved
from test_replicas import arranged, sent_beside_backwards
from torch import Tensor, nn

from vpipe import Cut, Model, Pipeline, Update
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.distributed.init import join_world
from vpipe.errors import UserError
from vpipe.runtime.reducer import owners_of
from vpipe.runtime.state_dict import state_parts
from vpipe.runtime.transport.transport import TransferKind

MUON = OptimizerSettings("muon", 0.02, weight_decay=0.1, matrices=hidden_matrices(rich_model()))
FLUSH, STREAM, BUFFERED = {"schedule": "1f1b"}, {"schedule": "pipedream", "update_every": 1}, {
    "schedule": "2bw", "update_every": 4}


def words(widths: Sequence[int], schedule: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return arranged(8, widths, **{"microbatches": 4, **schedule, "zero1": True, **more})


# -- the numbers: test_every_pair.py


def test_shares_leave_before_the_last_backward_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bucket per parameter, each to its owner; and weights in the same buckets, each from it."""
    kinds = {kind: f"{kind} from {{}}" for kind in (TransferKind.SHARES, TransferKind.WEIGHTS, TransferKind.SUMS)}
    # Replica 0 owns the matrices of layers 0 and 2, replica 1 that of layer 1, and the biases.
    weights = [*["U from 0"] * 2, *["U from 1"] * 4]  # when a batch begins, and what a script sees behind it
    assert sent_beside_backwards(monkeypatch, kinds, Update(Momentum(), zero1=True), Cut(1, ranks=2)) == [
        [*weights, "D from 0", "half", *["D from 0"] * 3, "D from 1", "half", "D from 1", *weights]] * 2


# -- few parameters, and none


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


@pytest.mark.parametrize("schedule", [FLUSH, STREAM], ids=lambda schedule: schedule["schedule"])
def test_a_stage_with_fewer_parameters_than_replicas(schedule: Mapping[str, Any]) -> None:
    """An embedding alone, with which DeepSpeed's issue 1522 waited for ever; and a stage that trains nothing."""
    torch.manual_seed(0)
    layers = nn.Sequential(Front(), nn.Tanh(), nn.Linear(4, 3)).double()  # in which norms are added up, then, by all
    model = Model.sequential(layers, nn.CrossEntropyLoss())
    batches = [{"input": torch.randint(5, (4,)), "target": torch.randint(3, (4,))} for _ in range(3)]
    pipe = pipeline_of(model, **{**words((3, 2, 1), schedule, grad_clip=0.1), "partition": [1, 1, 1]})
    assert_same(pipe, list(pipe.train(batches)), oracle_of(pipe, batches))


# -- memory and bytes


@given(sizes=st.lists(st.integers(0, 50), max_size=12), width=st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_no_owner_has_more_than_the_largest_and_its_part_of_the_others(sizes: list[int], width: int) -> None:
    loads = [0] * width
    for size, owner in zip(sizes, owners_of(sizes, width), strict=True):
        loads[owner] += size
    largest = max(sizes, default=0)
    assert max(loads) <= largest + (sum(sizes) - largest) / width


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_state_is_divided_and_the_bytes_between_replicas_stay(width: int, precision: str) -> None:
    state, sent = {}, {}
    for zero1 in (False, True):
        pipe = pipeline_of(rich_model, **words((width,), FLUSH, precision=precision, zero1=zero1))
        list(pipe.train(rich_batches(1, 4)))
        state[zero1] = [usage.state_bytes for usage in pipe.engine.collectives.usage()]
        sent[zero1] = sum(worker.transport.bytes_sent for worker in pipe.engine.workers.values())
    [stage] = pipe.engine.workers[0].stages.values()
    sizes = [4 * leaf.numel() for leaf in stage.weights.leaves()]  # moments and masters are fp32
    of_each = 3 if precision == "bf16_pure" else 2
    steps = 4 * len(sizes)  # AdamW counts its steps in a tensor per parameter
    assert sum(len(group["params"]) for worker in pipe.engine.workers.values()
               for group in worker.optimizer_steps.optimizers[0].groups) == len(sizes), "each has one owner"
    assert state[False] == [of_each * sum(sizes) + steps] * width
    assert sum(state[True]) == of_each * sum(sizes) + steps
    assert max(state[True]) <= of_each * (sum(sizes) / width + max(sizes)) + steps
    # Beside the gradients a share has a number for each of them, and a row is filled up: weights need neither.
    per_number = 2 if precision == "bf16_pure" else 4
    spare = 2 * (width - 1) * per_number * (len(sizes) + width)
    assert sent[False] - spare <= sent[True] <= sent[False]


def test_making_the_optimizers_steps_nothing() -> None:
    """Megatron-LM's issue 5974: state that was made early, by a step, made every update too small."""
    pipe = pipeline_of(rich_model, **words((2,), FLUSH))
    assert not any(optimizer.state_tensors() for worker in pipe.engine.workers.values()
                   for optimizer in worker.optimizer_steps.optimizers.values())
    list(pipe.train(rich_batches(3, 4)))
    counts = {float(value) for name, value in saved(pipe)[1].items() if name.endswith(".step")}
    assert counts == {3.0}


# -- checkpoints


@pytest.mark.parametrize(("schedule", "more"), [
    (FLUSH, {"precision": "bf16_pure"}), (STREAM, {"precision": "bf16_pure", "delay_correction": 0.5}),
    (STREAM, {"optimizer": MUON})], ids=["flush", "corrected", "muon"])
def test_a_checkpoint_does_not_depend_on_who_owns(schedule: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Saved with, gone on without; saved without, gone on with other widths, and other owners."""
    batches = rich_batches(4, 4)

    def run(widths: Sequence[int], zero1: bool, place: Any = None) -> tuple[Pipeline, Any]:
        pipe = pipeline_of(rich_model, **words(widths, schedule, grad_clip=0.5, zero1=zero1, **more))
        if place is not None:
            pipe.engine.restore(*place)
        list(pipe.train(batches[:2] if place is None else batches[2:]))
        return pipe, saved(pipe)

    with_owners, without = run((2, 3), True)[1], run((2, 3), False)[1]
    assert with_owners[0] == without[0]
    assert_same_state(dict(sorted(with_owners[1].items())), dict(sorted(without[1].items())))
    plain, expected = run((2, 3), False, without)
    pipe, place = run((2, 3), True, without)
    assert_same_state(dict(sorted(place[1].items())), dict(sorted(expected[1].items())))
    assert_same_state(pipe.state_dict(), plain.state_dict())
    assert_same_state(pipe.engine.state("uncorrected"), plain.engine.state("uncorrected"))
    if schedule is FLUSH:  # without one, what is late depends on the widths
        other, ours = run((4, 1), False, with_owners), run((4, 1), True, without)
        assert_same_state(dict(sorted(ours[1][1].items())), dict(sorted(other[1][1].items())))


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_weights_look_ahead_by_another_factor_after_a_checkpoint(precision: str) -> None:
    """Each owner takes the look-ahead out of unrounded weights, and the others get what it rounds them to."""
    batches, runs = rich_batches(4, 4), []
    for zero1 in (False, True):
        place, said = None, None
        for strength, part in ((0.5, batches[:2]), (1.0, batches[2:])):
            pipe = pipeline_of(rich_model, **words((3, 1), STREAM, zero1=zero1, delay_correction=strength,
                                                   precision=precision))
            if place is not None:
                said = pipe.engine.restore(*place)
            list(pipe.train(part))
            place = saved(pipe)
        runs.append((said, dict(sorted(place[1].items()))))
    assert runs[0][0] == runs[1][0] is not None
    assert_same_state(runs[0][1], runs[1][1])


def test_learning_rates_that_were_changed_are_kept() -> None:
    """Of all parameter groups on every replica, also of those of which it owns no parameter."""
    batches, states = rich_batches(2, 4), []
    for zero1 in (False, True):
        pipe = pipeline_of(rich_model, **words((1, 3), FLUSH, optimizer=MUON, zero1=zero1))
        groups = [group for worker in pipe.engine.workers.values()
                  for optimizer in worker.optimizer_steps.optimizers.values() for group in optimizer.groups]
        for group in groups:
            group["lr"] = 0.5 * group["lr"]
        list(pipe.train(batches))
        place = saved(pipe)
        states.append(dict(sorted(place[1].items())))
    assert_same_state(*states)
    assert any(name.endswith(".group.lr#float") for name in states[0])
    other = pipeline_of(rich_model, **words((3, 1), FLUSH, optimizer=MUON))
    for rank, worker in other.engine.workers.items():  # each reads what it wants, as in a process of its own
        _, part, *_ = state_parts({rank: worker}, other.placement)
        part.load({name: tensor for name, tensor in place[1].items() if part.wants(name)})
    assert {group["lr"] for worker in other.engine.workers.values()
            for optimizer in worker.optimizer_steps.optimizers.values() for group in optimizer.groups} == {
        group["lr"] for group in groups}


# -- what is refused


class Counting(torch.optim.SGD):
    """Keeps a number of all its parameters, as Prodigy and D-Adaptation do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["seen"] = sum(p.numel() for p in self.param_groups[0]["params"])
        return super().step(closure)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(("optimizer", "text"), [
    (lambda parameters: Counting(parameters, lr=0.1),
     "'seen' of the parameter groups of Counting is 14 on stage 0, rank 0 and 12 on stage 0, rank 1"),
    (hooked, "SGD has hooks around its step, which would see the parameters of one replica only")])
def test_an_optimizer_that_wants_all_parameters_is_refused(optimizer: Any, text: str) -> None:
    batches = [{"input": torch.ones(4, 3), "target": torch.zeros(4, dtype=torch.int64)}]
    for ranks in (1, 2):
        torch.manual_seed(0)
        pipe = Pipeline(Model.sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.CrossEntropyLoss()),
                        Update(optimizer, zero1=True), stages=Cut(1, ranks=ranks), microbatches=2)
        if ranks == 1:  # without replicas it changes nothing
            list(pipe.train(batches))
        else:
            with pytest.raises(UserError, match=text):
                list(pipe.train(batches))


@pytest.mark.parametrize(("lowered", "described", "words_of_error"), [
    (Update(Momentum()), Update(Momentum(), zero1=True), "without zero1, but the description is with it"),
    (Update(Momentum(), zero1=True), Update(Momentum()), "with zero1, but the description is without it"),
    (Update(Momentum()), Update(Momentum(), grad_clip=1.0), "without needs_norms, but the description is with it")])
def test_a_schedule_lowered_for_another_update_is_refused(lowered: Update, described: Update,
                                                          words_of_error: str) -> None:
    pipe, world = Pipeline(rich_model(), lowered, Cut(2, ranks=4), "1f1b", 4), join_world(device="cpu")
    with pytest.raises(UserError, match=words_of_error):
        Pipeline.prepared(pipe.model, replace(pipe.description, update=described), pipe.lowered, world)
