"""Layers to stages: what crosses a cut, who owns a tied weight, and how to cut evenly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from golden import refusal
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vpipe import Layer, Model
from vpipe.description.cut import StageSpec, balanced, ties_between
from vpipe.errors import UserError


def linear() -> nn.Module:
    return nn.Linear(3, 4)


def layer(name: str, inputs: str, outputs: str, **ties: str) -> Layer:
    return Layer(name, linear, tuple(inputs.split()), tuple(outputs.split()), ties)


SKIPPING = Model([layer("a", "ids", "h skip mask"), layer("b", "h", "h"), layer("c", "h mask", "h"),
                  layer("d", "h skip", "h g"), layer("e", "g", "unread"), layer("f", "h labels", "loss")],
                 ("ids", "labels"))


def test_tensors_live_from_where_they_are_written_to_where_they_are_last_read() -> None:
    assert [SKIPPING.crossing(cut) for cut in range(7)] == [
        (), ("h", "mask", "skip"), ("h", "mask", "skip"), ("h", "skip"), ("g", "h"), ("h",), ()]


def test_a_name_written_again_is_another_tensor() -> None:
    model = Model([layer("a", "x", "h old"), layer("b", "h old", "h"), layer("c", "h", "old"),
                   layer("d", "old", "loss")], ("x",))
    assert [model.crossing(cut) for cut in (1, 2, 3)] == [("h", "old"), ("h",), ("old",)]


def test_a_layer_that_reads_and_rewrites_a_name_keeps_it_alive() -> None:
    model = Model([layer("a", "x", "h k"), layer("b", "h", "h"), layer("c", "h k", "h k"), layer("d", "k", "loss")],
                  ("x",))
    assert [model.crossing(cut) for cut in (1, 2, 3)] == [("h", "k"), ("h", "k"), ("k",)]


def test_a_stage_knows_its_layers_tensors_and_fields() -> None:
    assert SKIPPING.split([2, 1, 2, 1]) == (
        StageSpec(0, range(0, 2), (), ("h", "mask", "skip"), ("ids",), {}),
        StageSpec(1, range(2, 3), ("h", "mask", "skip"), ("h", "skip"), (), {}),
        StageSpec(2, range(3, 5), ("h", "skip"), ("h",), (), {}),
        StageSpec(3, range(5, 6), ("h",), ("loss",), ("labels",), {}))


def test_fields_go_to_every_stage_that_reads_them_in_the_order_of_the_batch() -> None:
    model = Model([layer("a", "y x", "h"), layer("b", "h x", "h"), layer("c", "h y", "loss")], ("x", "y"))
    assert [spec.fields for spec in model.split([1, 1, 1])] == [("x", "y"), ("x",), ("y",)]


# -- ties ----------------------------------------------------------------------------------------------

TIED = Model([layer("a", "x", "h"), layer("b", "h", "h"), layer("c", "h", "h", weight="a.weight"),
              layer("d", "h", "h", weight="c.weight", bias="b.bias"),
              layer("e", "h", "loss", weight="a.weight")], ("x",))


def test_a_tie_of_a_tie_leads_to_the_owner() -> None:
    assert TIED.ties == {"c.weight": "a.weight", "d.weight": "a.weight", "d.bias": "b.bias", "e.weight": "a.weight"}


@pytest.mark.parametrize(("partition", "borrowed", "ties"), [
    ([5], [{}], {}),
    ([3, 2], [{}, {"d.weight": (0, "a.weight"), "d.bias": (0, "b.bias"), "e.weight": (0, "a.weight")}],
     {0: {1: ("a.weight", "b.bias")}}),
    ([1, 3, 1], [{}, {"c.weight": (0, "a.weight"), "d.weight": (0, "a.weight")}, {"e.weight": (0, "a.weight")}],
     {0: {1: ("a.weight",), 2: ("a.weight",)}}),
    ([1, 2, 2], [{}, {"c.weight": (0, "a.weight")},
                 {"d.weight": (0, "a.weight"), "d.bias": (1, "b.bias"), "e.weight": (0, "a.weight")}],
     {0: {1: ("a.weight",), 2: ("a.weight",)}, 1: {2: ("b.bias",)}})])
def test_a_weight_tied_across_stages_is_borrowed_from_the_first_that_uses_it(
        partition: list[int], borrowed: list[dict[str, tuple[int, str]]],
        ties: dict[int, dict[int, tuple[str, ...]]]) -> None:
    specs = TIED.split(partition)
    assert [spec.borrowed for spec in specs] == borrowed
    assert ties_between(specs) == ties


# -- partitions that cannot be -------------------------------------------------------------------------


@pytest.mark.parametrize(("partition", "text"), [
    ([3, 0, 3], "error: partition [3, 0, 3] has an empty stage\nhint: give every stage at least one layer"),
    ([4, 4], "error: partition [4, 4] adds up to 8 layers, but the model has 6\n"
             "hint: change an entry by -2, so that they add up to 6"),
    ([], "error: partition [] adds up to 0 layers, but the model has 6\n"
         "hint: change an entry by +6, so that they add up to 6")])
def test_a_partition_that_does_not_fit_says_both_numbers(partition: list[int], text: str) -> None:
    assert refusal(SKIPPING.split, partition) == text


def test_one_layer_is_no_layers() -> None:
    with pytest.raises(UserError, match="2 stages, but the model has only 1 layer\nhint: use at most 1 stage"):
        Model([Layer("only", nn.Identity, ("x",), ("loss",))], ("x",)).split([1, 1])
    with pytest.raises(UserError, match="2 stages, but the model has only 1 layer\nhint: use 1 stage"):
        balanced([1], 2)


# -- balance -------------------------------------------------------------------------------------------


def test_parameters_are_counted_where_they_are_owned_and_without_memory() -> None:
    def huge() -> nn.Module:
        return nn.Linear(10**6, 10**6)  # 4 TB

    model = Model([Layer("a", huge, ("x",)), Layer("b", huge, ("h",), ("loss",), ties={"weight": "a.weight"})], ("x",))
    assert model.parameter_counts() == [10**12 + 10**6, 10**6]
    assert TIED.parameter_counts() == [16, 16, 4, 0, 4]
    assert torch.empty(0).device.type == "cpu"


def test_frozen_layers_weigh_as_many_passes_as_they_need() -> None:
    def still() -> nn.Module:
        return nn.Linear(4, 4).requires_grad_(False)

    def cut(frozen: range) -> tuple[int, ...]:
        return Model([Layer(f"l{i}", still if i in frozen else (lambda: nn.Linear(4, 4)), ("h",) if i else ("x",),
                            ("h",) if i < 7 else ("loss",)) for i in range(8)], ("x",)).balanced(2)

    assert (cut(range(0)), cut(range(4)), cut(range(4, 8))) == ((4, 4), (5, 3), (3, 5))


def compositions(items: int, parts: int | None = None) -> list[list[int]]:
    """Every way to cut items into consecutive parts, none empty; the earliest cuts first."""
    found = []
    for count in range(1, items + 1) if parts is None else (parts,):
        for cuts in combinations(range(1, items), count - 1):
            edges = [0, *cuts, items]
            found.append([b - a for a, b in pairwise(edges)])
    return found


def heaviest(weights: Sequence[float], sizes: Sequence[int]) -> float:
    left, worst = list(weights), 0.0
    for size in sizes:
        worst, left = max(worst, sum(left[:size])), left[size:]
    return worst


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balanced_is_as_good_as_the_best_of_all_cuts(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    sizes = balanced(weights, parts)
    assert len(sizes) == parts
    assert sum(sizes) == len(weights)
    assert min(sizes) >= 1
    assert heaviest(weights, sizes) == min(heaviest(weights, cut) for cut in compositions(len(weights), parts))


@pytest.mark.parametrize(("weights", "parts", "sizes"), [
    ([1, 1, 1, 1], 2, [2, 2]), ([9, 1, 1, 1], 2, [1, 3]), ([1, 1, 1, 9], 2, [3, 1]), ([0, 0, 0], 3, [1, 1, 1]),
    ([5], 1, [1]), ([1.5, 0.5, 2.0], 2, [2, 1]), ([0, 0, 0, 0], 2, [1, 3])])
def test_balanced_in_examples(weights: list[float], parts: int, sizes: list[int]) -> None:
    assert balanced(weights, parts) == sizes


