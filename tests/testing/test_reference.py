"""The oracles beside plain PyTorch, beside replicas that carry out programs of their own, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vpipe import Layer, Model
from vpipe.model.layer import seed_of
from vpipe.testing import TrainingRecipe, Trajectory, asynchronous_oracle, flush_oracle, version_rule

EPS = torch.finfo(torch.float32).eps


# -- with a flush: six microbatches a batch ----------------------------------------------------------------------------


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.2)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.norm(h + self.linear(h))))


class Loss(Mixing):
    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h).square().mean()


def mixing(tied: bool) -> Model:
    return Model([Layer("l0", Mixing, ("x",)), Layer("l1", Mixing), Layer("l2", Mixing), Layer(
        "l3", Loss, ("h",), ("loss",), {"linear.weight": "l0.linear.weight"} if tied else {})], batch=("x",))


BATCHES = [{"x": x} for x in torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(1))]
ONE_LAYER_EACH = [1, 1, 1, 1]


def adam(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(named.values(), lr=0.01)


def plain_pytorch(model: Model, sum_up: Callable[[str, list[Tensor]], Tensor] | None = None
                  ) -> tuple[list[float], dict[str, Tensor]]:
    """What everybody writes. ``sum_up`` is handed each parameter's gradients of the microbatches apart."""
    layers = model.materialize(5)
    named = dict(layers.named_parameters())
    optimizer, losses = adam(named), []
    for update, batch in enumerate(BATCHES):
        apart: dict[str, list[Tensor]] = {name: [] for name in named}
        total = 0.0
        for m, h in enumerate(batch["x"].chunk(6)):
            for i, layer in enumerate(layers.values()):
                torch.manual_seed(seed_of(5, update, m, i))
                h = layer(h)
            (h / 6).backward()
            total += float(h.detach())
            if sum_up is not None:
                for name, p in named.items():
                    apart[name].append(p.grad)
                    p.grad = None
        if sum_up is not None:
            for name, p in named.items():
                p.grad = sum_up(name, apart[name])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / 6)
    return losses, {name: p.detach() for name, p in named.items()}


def assert_same(run: Any, losses: Sequence[float], weights: Mapping[str, Tensor]) -> None:
    """Weights to the bit; a loss is a mean in double precision, whose own order of summing is not the point."""
    assert run.losses == pytest.approx(losses, rel=1e-15)
    assert not [name for name, value in weights.items() if not torch.equal(run.state[name], value)]


@pytest.mark.parametrize("tied", [False, True])
def test_the_flush_oracle_is_what_everybody_writes(tied: bool) -> None:
    model = mixing(tied)
    assert_same(flush_oracle(model, BATCHES, TrainingRecipe(adam, 6, 5)), *plain_pytorch(model))


@pytest.mark.parametrize("widths", [[1, 1, 1, 1], [2, 1, 3, 1], [4, 5, 6, 2]])
def test_replicas_sum_apart_and_then_in_order(widths: list[int]) -> None:
    model, exact = mixing(tied=False), []

    def by_replica(name: str, gradients: list[Tensor]) -> Tensor:
        width = widths[int(name[1])]
        sums = [sum(gradients[replica + width::width], gradients[replica]) for replica in range(width)]
        exact.append((sum(sums[1:], sums[0]), gradients))
        return exact[-1][0]

    recipe = TrainingRecipe(adam, 6, 5)
    run = flush_oracle(model, BATCHES, recipe, ONE_LAYER_EACH, widths)
    assert_same(run, *plain_pytorch(model, by_replica))
    plain = flush_oracle(model, BATCHES, recipe)
    assert (run.state["l0.linear.weight"] != plain.state["l0.linear.weight"]).any() == (max(widths) > 1)
    # The bound: as many roundings as there are numbers in the sum.
    for gradient, gradients in exact:
        size = sum(g.abs() for g in gradients)
        assert ((gradient - sum(gradients[1:], gradients[0])).abs() <= 6 * EPS * size).all()
    assert run.losses == pytest.approx(plain.losses, rel=6 * len(BATCHES) * EPS)


def test_a_tied_weight_is_summed_by_side_and_there_by_replica() -> None:
    model = mixing(tied=True)
    recipe = TrainingRecipe(adam, 6, 5)
    alone = flush_oracle(model, BATCHES, recipe, ONE_LAYER_EACH)
    run = flush_oracle(model, BATCHES, recipe, ONE_LAYER_EACH, [2, 1, 1, 3])
    plain = flush_oracle(model, BATCHES, recipe)
    assert len({tuple(r.state["l0.linear.weight"].flatten().tolist()) for r in (alone, run, plain)}) == 3
    for other in (alone, run):
        assert other.losses == pytest.approx(plain.losses, rel=12 * len(BATCHES) * EPS)
        assert list(other.state) == list(plain.state)


# -- without a flush: a chain of numbers -------------------------------------------------------------------------------


class Times(nn.Module):
    """h w, in double precision; the last of a chain returns the mean as the loss. Counts what it saw."""

    def __init__(self, weight: float, last: bool) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(torch.tensor(weight, dtype=torch.float64)), last
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, h: Tensor) -> Tensor:
        self.seen += 1
        return (h * self.w).mean() if self.last else h * self.w


def chain(weights: Sequence[float], tied: bool = False) -> Model:
    """A layer per weight; ``tied``: the last one uses the first one's."""
    def layer(i: int, last: bool) -> Layer:
        return Layer(f"l{i}", lambda: Times(weights[i], last), ("h",) if i else ("x",), ("loss",) if last else ("h",),
                     {"w": "l0.w"} if tied and last else {})

    return Model([layer(i, i == len(weights) - 1) for i in range(len(weights))], batch=("x",))


def descent(rate: float) -> Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer | None]:
    return lambda named: torch.optim.SGD(named.values(), lr=rate) if named else None


def numbers(values: Sequence[float]) -> list[dict[str, Tensor]]:
    """A microbatch of one sample each."""
    return [{"x": torch.tensor([value], dtype=torch.float64)} for value in values]


def test_two_to_one_by_hand() -> None:
    """loss = a b, five times. a has two replicas and half as many updates, each with twice the learning rate of b's.

    Versions of a: 0 0 0 0 1, of b: 0 1 2 3 4. Gradients are b for a and a for b.
    """
    trajectory = Trajectory()
    recipe = TrainingRecipe(descent(0.5), 1, factor=lambda step: (1.0, 1.0, 0.5)[step], trajectory=trajectory)
    run = asynchronous_oracle(chain([1.0, 2.0]), numbers([1.0] * 5), recipe, [1, 1], widths=[2, 1])
    # microbatch    0      1      2      3        4
    # a             1      1      1      1        0.0625
    # b             2      1.75   1.5    1.25     1
    assert run.losses == [(2 + 1.75) / 2, (1.5 + 1.25) / 2, 0.0625]
    made_a = [float(trajectory.values[update]["l0.w"]) for update in range(3)]
    # Means of two, then what is there alone; in the last step half the rate.
    assert made_a == [1 - 0.5 * 1.875, 0.0625 - 0.5 * 1.375, -0.625 - 0.25 * 1.0]
    made_b = [float(trajectory.values[update]["l1.w"]) for update in range(5)]
    assert made_b == [1.75, 1.5, 1.25, 1.0, 1 - 0.5 * 0.5 * 0.5 * 0.0625]
    assert [sorted(step) for step in trajectory.step_updates] == [
        [(0, "l0.w"), (0, "l1.w"), (1, "l1.w")], [(1, "l0.w"), (2, "l1.w"), (3, "l1.w")], [(2, "l0.w"), (4, "l1.w")]]
    assert run.state == {"l0.w": made_a[-1], "l0.seen": 3, "l1.w": made_b[-1], "l1.seen": 5}, "of replica 0"


def test_the_versions_of_one_three_two() -> None:
    """Six ranks stand at stage 0 and behind it, five at stage 1, two at stage 2: warm-ups of 5, 1 and 0 forwards."""
    versions = [[version_rule("pipedream")(i, s, (1, 3, 2), 1) for i in range(12)] for s in range(3)]
    assert versions == [[0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6],
                        [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2],
                        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]]
    assert [version_rule("2bw")(i, 1, (1, 3, 2), 2) for i in range(24)] == [0] * 12 + [1] * 6 + [2] * 6
    assert [version_rule("pipedream_vertical_sync")(i, s, (2, 2, 2), 1) for s in range(3) for i in range(8)] == 3 * [
        0, 0, 0, 0, 0, 0, 1, 1]


def carried_out(widths: Sequence[int], every: int, values: Sequence[float], weights: list[float], rate: float,
                tied: bool) -> tuple[list[float], list[int]]:
    """The chain by its replicas: each has a list of things to do, in 1F1B order, and does the next when it can.

    Changes ``weights``; returns the losses of the microbatches and how many updates each stage made.
    """
    stages, n = range(len(widths)), len(values)
    last, spans = len(widths) - 1, [every * width for width in widths]

    def things(s: int, replica: int) -> Iterator[tuple[str, int]]:
        own = list(range(replica, n, widths[s]))
        warm_up = (sum(widths[s:]) - 1) // widths[s]
        forwards = iter(own)
        yield from (("F", i) for i in islice(forwards, warm_up))
        for done, i in enumerate(own, 1):
            yield from (("F", ahead) for ahead in islice(forwards, 1))
            yield "B", i
            if done % every == 0:
                yield "STEP", done // every - 1
        if len(own) // every < -(-n // spans[s]):
            yield "STEP", len(own) // every

    programs = {(s, r): things(s, r) for s in stages for r in range(widths[s])}
    heads = {replica: next(program, None) for replica, program in programs.items()}
    used: dict[tuple[int, int], float] = {}
    into: dict[tuple[int, int], float] = {(0, i): value for i, value in enumerate(values)}
    back: dict[tuple[int, int], float] = {(last, i): 1.0 for i in range(n)}
    gradients: dict[tuple[int, int], float] = {}
    made = [0] * len(widths)
    while any(heads.values()):
        before = dict(heads)
        for (s, r), head in before.items():
            match head:
                case ("F", i) if (s, i) in into:
                    used[s, i] = used[0, i] if tied and s == last else weights[s]
                    into[s + 1, i] = into[s, i] * used[s, i]
                case ("B", i) if (s, i) in back and (s + 1, i) in into:
                    gradients[s, i], back[s - 1, i] = back[s, i] * into[s, i], back[s, i] * used[s, i]
                case ("STEP", u) if all(before[s, other] == head for other in range(widths[s])):
                    if r == 0:
                        taken = range(u * spans[s], min((u + 1) * spans[s], n))
                        total = sum(gradients[s, i] + (gradients[last, i] if tied and s == 0 else 0) for i in taken)
                        if not (tied and s == last):
                            weights[s] -= rate * widths[s] / widths[0] * total / len(taken)
                        made[s] += 1
                case _:
                    continue
            heads[s, r] = next(programs[s, r], None)
        assert heads != before, "deadlock"
    return [into[last + 1, i] for i in range(n)], made


@settings(deadline=None, max_examples=25)
@given(widths=st.lists(st.integers(1, 4), min_size=1, max_size=4), every=st.integers(1, 3),
       counts=st.lists(st.integers(1, 23), min_size=1, max_size=3), tied=st.booleans())
def test_replicas_that_carry_out_their_programs(widths: list[int], every: int, counts: list[int], tied: bool) -> None:
    """Streams one after the other, each from an empty pipeline to an empty one, with rounds that stay incomplete."""
    tied = tied and len(widths) > 1
    values = [0.5 + (7 * i % 11) / 11 for i in range(sum(counts))]
    start = [1.0 + 0.25 * s for s in range(len(widths))]
    if tied:
        start[-1] = start[0]
    drained_at = [sum(counts[:j]) for j in range(1, len(counts))]
    trajectory = Trajectory()
    run = asynchronous_oracle(chain(start, tied), numbers(values), TrainingRecipe(descent(0.01), 1,
                                                                                  trajectory=trajectory),
                              [1] * len(widths), every, drained_at, widths=widths)
    weights, losses, made = list(start), [], [0] * len(widths)
    step = every * math.lcm(*widths)
    for first, count in zip([0, *drained_at], counts, strict=True):
        seen, updates = carried_out(widths, every, values[first:first + count], weights, 0.01, tied)
        made = [a + b for a, b in zip(made, updates, strict=True)]
        losses += [sum(part) / len(part) for part in (seen[i:i + step] for i in range(0, count, step))]
    assert run.losses == pytest.approx(losses, rel=1e-12)
    for s, weight in enumerate(weights[:-1] if tied else weights):
        assert float(run.state[f"l{s}.w"]) == pytest.approx(weight, rel=1e-12)
        assert len([update for update, name in trajectory.updates() if name == f"l{s}.w"]) == made[s]
