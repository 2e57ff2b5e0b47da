"""Which layers are taken for equal, and what is measured in their place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import cast

import pytest
import torch
from measured import ADAMW, measured
from models import (
    WIDTH,
    dtype_model,
    frozen_front,
    norm_model,
    plain_sequential,
    recurrent_model,
    rich_batches,
    sequential_batches,
    thrice_tied_model,
)
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline, Transfers
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.errors import RunError, UserError
from vpipe.model.structure import structure
from vpipe.plan.profile import Identity, Profile
from vpipe.profiling.layer_runner import LayerRunner
from vpipe.profiling.layer_timer import LayerTimer, summary
from vpipe.profiling.links import _rounds
from vpipe.profiling.measurement import Survey, _Measurement, measure, survey
from vpipe.profiling.rank_group import RankGroup, shared_bytes

CPU = torch.device("cpu")


def surveyed(model: Model, batch: dict[str, Tensor]) -> Survey:
    return survey(model, [structure(layer) for layer in model.layers], batch,
                  lambda number: LayerRunner(model, number, CPU, 0), CPU, ADAMW)


def test_equal_layers_are_measured_once(rich: list[Profile]) -> None:
    layers = rich[0].layers
    assert [layer.like for layer in layers] == [0, 1, 2, 1, 2, 1, 2, 7]
    assert [layer.name for layer in layers] == ["embed", "raw0", "mix0", "raw1", "mix1", "raw2", "mix2", "head"]
    assert replace(layers[5], name="raw0") == layers[1]
    assert layers[2].reads == ("h", "skip", "mask")
    assert [(tensor.name, tensor.wants_gradient) for tensor in layers[0].writes] == [
        ("h", True), ("skip", True), ("mask", False)]
    assert layers[7].tied == {0: layers[0].parameter_bytes}


def test_every_figure_is_there(rich: list[Profile]) -> None:
    profile = rich[0]
    for layer in profile.layers:
        for figure in (layer.forward, layer.backward, layer.input_half, layer.weight_half, layer.recompute):
            assert figure.median >= 0 <= figure.spread
        assert layer.forward.median > 0 < layer.backward.median
    assert profile.fields == {"ids": 4 * 6 * 8, "labels": 4 * 6 * 8}
    assert profile.cores is not None
    assert min(profile.cores, profile.device_bytes, profile.dispatch_s, profile.copy_bytes_per_s, profile.took_s,
               profile.accumulate_bytes_per_s, profile.peak_flops_per_s, profile.default_link.bytes_per_s) > 0


def test_a_second_size_shares_what_does_not_depend_on_it(rich: list[Profile]) -> None:
    four, two = rich
    assert (four.identity.microbatch_size, two.identity.microbatch_size) == (4, 2)
    assert [layer.step for layer in two.layers] == [layer.step for layer in four.layers]
    assert two.default_link == four.default_link
    assert two.fields["ids"] * 2 == four.fields["ids"]
    assert two.layers[1].saved_bytes * 2 == four.layers[1].saved_bytes
    assert two.layers[1].forward_flops * 2 == four.layers[1].forward_flops


def test_all_kinds_of_tensors_are_measured() -> None:
    [profile] = measured(dtype_model(), rich_batches(1, 4)[0])
    assert [layer.like for layer in profile.layers] == [0, 1, 2, 1, 4]


@pytest.mark.parametrize(("model", "like"), [
    (recurrent_model(), [0, 1, 1, 1, 4]), (norm_model(), [0, 1, 1, 1, 1, 5]), (frozen_front(), [0, 1, 2, 3]),
    (thrice_tied_model(), [0, 1, 2, 1, 2, 5])], ids=["lstm", "buffers", "frozen", "ties"])
def test_equal_layers_of_any_model_are_found(model: Model, like: list[int]) -> None:
    seen = surveyed(model, rich_batches(1, 4)[0])
    assert seen.like == like
    walk = LayerTimer([LayerRunner(model, number, CPU, 0) for number in seen.sampled],
                [seen.given[number] for number in seen.sampled], perf_counter, shifted=True)
    walk.warm_up()
    walk.round()
    walk.steps(ADAMW, times=1)
    assert [sorted(samples) for samples in walk.samples] == [
        ["backward", "forward", "input_half", "recompute", "step", "weight_half"]] * len(seen.sampled)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_first_step_makes_the_state_and_does_not_count(name: str) -> None:
    model = plain_sequential()
    seen = surveyed(model, next(sequential_batches(1, 4)))
    ticks = count()
    timer = LayerTimer([LayerRunner(model, number, CPU, 0) for number in seen.sampled],
                       [seen.given[number] for number in seen.sampled], lambda: float(next(ticks)), shifted=False)
    timer.warm_up()
    timer.steps(OptimizerSettings(name, 1e-3, matrices=hidden_matrices(model)).from_named)
    assert [own["step"] for own in timer.samples] == [[1.0] * 5] * len(seen.sampled)


class Scaled(nn.Module):
    """What it computes is said by a setting that its repr does not show."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, h: Tensor) -> Tensor:
        return h * self.factor


def test_layers_with_other_settings_are_not_equal() -> None:
    assert structure(Layer("a", lambda: Scaled(2.0))) == structure(Layer("b", lambda: Scaled(2.0)))
    assert structure(Layer("a", lambda: Scaled(2.0))) != structure(Layer("b", lambda: Scaled(3.0)))
    assert structure(Layer("a", lambda: nn.Dropout(0.1))) != structure(Layer("b", lambda: nn.Dropout(0.2)))
    frozen = structure(Layer("b", lambda: nn.Linear(2, 2).requires_grad_(False)))
    assert structure(Layer("a", lambda: nn.Linear(2, 2))) != frozen


def test_a_set_among_the_settings_is_in_order() -> None:
    """As it is not in a process: strings have other hashes in the next one, which reads the plan of this one."""

    @dataclass(frozen=True)
    class Keys:
        names: frozenset[str]

    letters = "abcdefghijklmnop"
    made = [Scaled(cast(float, setting)) for setting in (Keys(frozenset(letters)), [(set(letters),)], {1: {*letters}})]
    for scaled in made:
        assert ", ".join(map(repr, letters)) in structure(Layer("a", lambda scaled=scaled: scaled))  # type: ignore[misc]


def test_a_layer_that_fails_is_named() -> None:
    model = Model([Layer("fine", lambda: nn.Linear(WIDTH, WIDTH), ("x",)), Layer("bad", lambda: nn.Linear(3, 3)),
                   Layer("end", nn.Identity, outputs=("loss",))], batch=("x",))
    with pytest.raises(RunError, match=r"layer 1 'bad' on h float32\[2, 12\] raised RuntimeError"):
        surveyed(model, {"x": torch.ones(2, WIDTH)})


def test_the_median_and_the_spread() -> None:
    found = summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.spread) == (3.0, (4.0 - 2.0) / 2 / 3.0)
    assert summary([0.0, 0.0]).median == 0.0


@pytest.mark.parametrize("hosts", [["a"] * 4, ["a", "a", "b", "b"], [0, 1, 2, 3], [0, 1]])
def test_no_two_transfers_at_a_time_need_the_same(hosts: list[object]) -> None:
    rounds = _rounds(len(hosts), hosts)
    for pairs in rounds:
        needed = [needed for pair in pairs for needed in {hosts[rank] for rank in pair}]
        assert len(needed) == len(set(needed))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == sorted({(0, 1), (1, 2), (2, 3), (0, 3)} if len(hosts) == 4 else {(0, 1)})


def test_ranks_take_turns_where_there_are_too_few_cores() -> None:
    world = RankGroup(CPU)
    assert (world.rank, world.ranks, world.ranks_per_host, world.turn(2)) == (0, 1, 1, (0, 1))
    world.hosts = ["a", "b", "a", "a", "b", "a", "a"]
    turns = []
    for world.rank in range(7):
        turns.append(world.turn(2))
    assert turns == [(0, 3), (0, 3), (0, 3), (1, 3), (0, 3), (1, 3), (2, 3)]
    assert world.turn(None) == (0, 1)
    world.hosts, world.tensor, world.ranks = ["a", "a", "b"], 2, 6
    turns = []
    for world.rank in range(6):
        turns.append(world.turn(1))
    assert turns == [(0, 2), (0, 2), (1, 2), (1, 2), (0, 2), (0, 2)], "those that split a layer at the same time"


def world_of(monkeypatch: pytest.MonkeyPatch, hosts: list[str], *others: object) -> RankGroup:
    """The first rank of several, of whom the others give ``others`` whenever something is shared."""
    world = RankGroup(CPU)
    world.ranks, world.hosts = len(hosts), hosts
    monkeypatch.setattr(world, "all_gather", lambda value: [value, *others])
    return world


def test_ranks_that_are_bound_to_cores_of_their_own_have_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.profiling.rank_group.usable_cores", lambda: [0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert world_of(monkeypatch, ["a", "a", "a"], [None, [1], 1], [None, [1, 5], 1]).cores() == 3
    three = [None, [0, 1, 2], 2]
    assert world_of(monkeypatch, ["a", "b", "b"], three, three).cores() == 1, "two threads on three"
    split = world_of(monkeypatch, ["a", "a"], *([None, [core], 1] for core in (1, 2, 3)))
    split.tensor, split.ranks = 2, 4
    assert (split.at_once(), split.cores(), split.turn(split.cores())) == (4, 2, (0, 1))
    split = world_of(monkeypatch, ["a", "a"], *([None, [core], 1] for core in (0, 1, 1)))
    split.tensor, split.ranks = 2, 4
    assert (split.at_once(), split.cores(), split.turn(split.cores())) == (2, 2, (0, 1)), "all at once, slower"


@pytest.mark.parametrize(("gpus", "at_once"), [("xyz", None), ("xyx", 2), ("xxx", 1)])
def test_ranks_that_share_gpus_can_compute_at_once_as_many_as_these(gpus: str, at_once: int | None,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.accelerator.uuid_of", lambda device: gpus[0])
    world = world_of(monkeypatch, ["a", "a", "a"], *([gpu, [0], 1] for gpu in gpus[1:]))
    world.device = torch.device("cuda:0")
    assert world.cores() == at_once
    monkeypatch.setattr("vpipe.accelerator.total_bytes", lambda device: 80)
    assert shared_bytes(world.device, at_once) == 80 * (at_once or 1)
    assert shared_bytes(CPU, 4) == 80

def test_all_ranks_cut_their_windows_for_the_one_with_least_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def world(device: torch.device, tensor: int) -> RankGroup:
        return world_of(monkeypatch, ["a", "a"], 4 << 20)

    monkeypatch.setattr("vpipe.profiling.measurement.RankGroup", world)
    monkeypatch.setattr(RankGroup, "cores", lambda self: 1)
    monkeypatch.setattr("vpipe.accelerator.free_bytes", lambda device: 8 << 30)
    identity = Identity("", "", 1, 1, "adamw", "", 1, 1, "gloo", "")
    assert _Measurement(frozen_front(), ADAMW, [identity], CPU, 0, Transfers(), 0.0, print)._room_bytes == 1 << 20


def test_a_script_plans_its_own_model_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.profiling.measure", partial(measure, budget_s=0.0))
    model = Model.sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.MSELoss())
    batch, sgd = dict.fromkeys(model.batch, torch.ones(32, 8)), partial(torch.optim.SGD, lr=0.1)
    plan = Pipeline.plan(model, sgd, batch, ranks=2, stages=2)
    assert (sum(plan.partition), len(plan.partition)) == (4, 2)
    assert plan.microbatches in (2, 4, 8)
    assert len(list(Pipeline(model, sgd, stages=plan).train([batch]))) == 1
    for wrong, message in (({"microbatches": 5}, "5 equal microb"), ({"ranks": 5}, "only 4 layers"),
                           ({"stages": 0}, "stages is 0"), ({"memory_bytes": 2 ** 20}, "is Python, torch")):
        with pytest.raises(UserError, match=message):
            Pipeline.plan(model, sgd, batch, **{"ranks": 2, **wrong})
