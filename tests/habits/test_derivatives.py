"""Layers that take derivatives in their forward (forces, gradient penalties), with cuts and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from world import World

from vpipe import Cut, Layer, Model, Pipeline
from vpipe.errors import VpipeError
from vpipe.testing.reference import evaluate_oracle, flush_oracle
from vpipe.testing.reference_optimizer import TrainingRecipe

tanh = torch.tanh


class Part(nn.Module):
    """A layer by a function of itself and its inputs, with two linear layers, and a weight that may be tied."""

    def __init__(self, function: Callable[..., Any], tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.w = nn.Parameter(torch.randn(4, 4) / 2)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        with torch.enable_grad():  # in an evaluation, too
            return self.function(self, *inputs)


def start(m: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    pos = x.detach().requires_grad_()
    return pos, tanh(m.a(pos))


def mix(m: Part, *tensors: Tensor) -> Tensor:
    *_, h = tensors
    return h + tanh(m.a(h) * m.b(tensors[0]))


def grad(output: Tensor, by: Tensor) -> Tensor:
    found, = torch.autograd.grad(output.sum(), by, create_graph=True, allow_unused=True)
    return torch.zeros_like(by) if found is None else found


def of_functions(m: Part, pos: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """Derivatives of a function by its own argument, which no other tensor is made from."""
    def energy(pos: Tensor) -> Tensor:
        return (tanh(m.a(h)) * m.b(pos).square()).sum()

    own = pos.detach().requires_grad_()
    return mse_loss(torch.func.grad(energy)(pos) + torch.func.jacrev(energy)(pos) + grad(energy(own), own), y)


def forces(m: Part, pos: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return mse_loss(grad(tanh(m.a(h)) * m.b(pos), pos), y)


def adversarial(m: Part, h: Tensor, y: Tensor) -> Tensor:
    """The loss where the hidden state is moved in the direction in which it grows."""
    g = grad(mse_loss(m.a(h), y), h)
    return mse_loss(m.a(h + 0.1 * g / g.norm()), y)


def implicit(m: Part, h: Tensor, y: Tensor) -> Tensor:
    """The gradient of an equilibrium, which a hook takes within the backward (Bai et al., arXiv:1909.01377)."""
    z = tanh(0.3 * m.a(h) + h)
    if z.requires_grad:
        at = z.detach().requires_grad_()
        again = tanh(0.3 * m.a(at) + h)
        z.register_hook(lambda g: g + torch.autograd.grad(again, at, g, retain_graph=True)[0])
    return mse_loss(m.b(z), y)


def marks(m: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    h = tanh(m.a(x.requires_grad_()))
    return grad(h, x), h


KINDS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {  # tensors after the first layer, it, the head
    "forces": ("pos h", start, forces), "of functions": ("pos h", start, of_functions),
    "of features": ("pos h", start, lambda m, pos, h, y: mse_loss(grad(tanh(m.a(h)), pos), y)),
    "adversarial": ("h", lambda m, x: tanh(m.a(x)), adversarial),
    "addend": ("h", lambda m, x: tanh(m.a(x)),  # of two matrices, made from one another
               lambda m, h, y: mse_loss(grad(torch.addmm(tanh(h), torch.sin(tanh(h)), m.a.weight).square(), h), y)),
    "tied": ("h", lambda m, x: tanh(x @ m.w), lambda m, h, y: grad(mse_loss(h @ m.w, y), m.w).square().sum()),
    "tied, adversarial": ("h", lambda m, x: tanh(x @ m.w), lambda m, h, y: (
        mse_loss((h + grad(mse_loss(h @ m.w, y), h)) @ m.w, y) + grad(m.w.square(), m.w).mean())),
    "implicit": ("h", lambda m, x: tanh(m.a(x)), implicit),
    "marks": ("pos h", marks, lambda m, pos, h, y: mse_loss(m.a(h) * m.b(pos), y)),
    "given": ("x h", lambda m, x: tanh(m.a(x)), forces),  # by a field that requires a gradient
    "marks what it received": ("pos h", lambda m, x: (x * 1, tanh(m.a(x))),
                               lambda m, pos, h, y: forces(m, pos.requires_grad_(), h, y))}


def run(kind: str, schedule: str, stages: Sequence[int], recompute: float = 0.0, evaluate: bool = False) -> Any:
    """What a pipeline computes and what plain PyTorch does, loss by loss; or the refusal."""
    names, first, head = KINDS[kind]
    tensors, tied = tuple(names.split()), "tied" in kind
    made, generator = tuple(name for name in tensors if name != "x"), torch.Generator().manual_seed(1)
    model = Model([Layer("first", partial(Part, first, tied), ("x",), made),
                   *(Layer(f"mix{i}", partial(Part, mix, False), made) for i in range(2)),
                   Layer("head", partial(Part, head, tied), (*tensors, "y"), ("loss",),
                         ties={"w": "first.w"} if tied else {})], batch=("x", "y"))
    batches = [{name: torch.randn(8, 4, generator=generator).requires_grad_(kind == "given" and name == "x")
                for name in "xy"} for _ in range(3)]
    pipe = Pipeline(model, partial(torch.optim.SGD, lr=0.05), Cut(stages, recompute=recompute), schedule, 4)
    recipe = TrainingRecipe(lambda named: torch.optim.SGD(named.values(), lr=0.05), 4)
    try:
        if evaluate:
            return [[pipe.evaluate(batches)], [evaluate_oracle(model, pipe.state_dict(), batches, 4)]]
        return [[step.loss for step in pipe.train(batches)], flush_oracle(model, batches, recipe).losses]
    except VpipeError as error:
        return str(error)


ACROSS = ("error: layer 'head' of stage 1 takes a derivative in its forward by 'pos' or 'h', but more that depends on "
          "it came through the cut before layer 'mix1': the part through the layers before the cut would be missing\n"
          "hint: keep the layers from 'first' to 'head' in one stage: stages=[4]")
MARKED = "' was made to require a gradient, by a layer of stage"


@pytest.mark.parametrize(("kind", "schedule", "stages", "recompute", "evaluate", "refusal"), [
    *((kind, "1f1b", [4], 0.0, False, "") for kind in KINDS),
    *((kind, "zb_h1", [4], 0.0, False, "") for kind in ("forces", "tied", "addend", "implicit")),
    *((kind, schedule, [2, 2], recompute, evaluate, "") for kind in ("of functions", "adversarial", "tied, adversarial",
                                                                   "addend")
      for schedule, recompute, evaluate in (("1f1b", 0.0, True), ("zb_h1", 1.0, False))),
    ("forces", "1f1b", [4], 0.0, True, ""), ("forces", "1f1b", [4], 1.0, False, ""),
    ("marks", "1f1b", [1, 3], 0.0, False, ""),
    *(("forces", schedule, [2, 2], 0.0, False, ACROSS) for schedule in ("1f1b", "zb_h1", "pipedream")),
    *(("of features", "1f1b", [2, 2], 0.0, evaluate, ACROSS) for evaluate in (False, True)),
    ("forces", "1f1b", [4], 0.5, False, "and recompute all of them or none: stages=[4]"),
    ("tied", "1f1b", [2, 2], 0.0, False, "by 'first.w', but"), ("given", "1f1b", [2, 2], 0.0, True, "'x" + MARKED),
    ("marks what it received", "1f1b", [3, 1], 0.0, False, "'pos" + MARKED)])
def test_a_derivative_is_exact_where_all_that_depends_on_the_tensor_is_in_one_stage_and_refused_elsewhere(
        kind: str, schedule: str, stages: list[int], recompute: float, evaluate: bool, refusal: str) -> None:
    found = run(kind, schedule, stages, recompute, evaluate)
    if refusal:
        assert refusal in found
    else:
        assert found[0] == pytest.approx(found[1], rel=1e-5)  # derivatives of derivatives: sums in other orders


def test_two_processes_are_exact_where_one_is_and_refuse_where_it_refuses(two: World) -> None:
    arguments: dict[str, Any] = {"kind": "tied, adversarial", "schedule": "zb_h1", "stages": [2, 2]}
    assert two.run(run, **arguments) == [run(**arguments)] * 2
    arguments |= {"kind": "of features", "evaluate": True}
    two.begin(run, **arguments)
    assert run(**arguments) in [two.outcome(rank, 30)[1] for rank in (0, 1)]
    two.kill()  # a transfer was under way
