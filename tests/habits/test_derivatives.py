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

tanh = torch.tanh


class Part(nn.Module):
    """A layer by a function of itself and its inputs, with two linear layers, and a weight that may be tied."""

    def __init__(self, function: Callable[..., Any], tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.w = nn.Parameter(torch.randn(4, 4) / 2)
        self.function, self.calls = function, 0

    def forward(self, *inputs: Tensor) -> Any:
        self.calls += 1
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


def rare_forces(m: Part, pos: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """Take a penalty at every eighth forward only, as lazy regularisation does."""
    loss = mse_loss(m.a(h), y)
    return loss + (grad(loss, pos).square().mean() if m.calls % 8 == 0 else 0)


def clipped(m: Part, pos: Tensor, h: Tensor, y: Tensor) -> Tensor:
    pos.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return mse_loss(m.a(h) * m.b(pos), y)


def of_functions(m: Part, pos: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """Derivatives of a function by its own argument, which no other tensor is made from."""
    def energy(pos: Tensor) -> Tensor:
        return (tanh(m.a(h)) * m.b(pos).square()).sum()

    own = pos.detach().requires_grad_()
    return mse_loss(torch.func.grad(energy)(pos) + torch.func.vjp(energy, pos)[1](torch.ones(()))[0]
                    + torch.func.jacrev(energy)(pos) + grad(energy(own), own)
                    + torch.autograd.functional.hvp(energy, pos, torch.ones_like(pos), create_graph=True)[1], y)


def forces(m: Part, pos: Tensor, h: Tensor, y: Tensor) -> Tensor:
    return mse_loss(grad(tanh(m.a(h)) * m.b(pos), pos), y)


def adversarial(m: Part, h: Tensor, y: Tensor) -> Tensor:
    """The loss where the hidden state is moved in the direction in which it grows."""
    g = grad(mse_loss(m.a(h), y), h)
    return mse_loss(m.a(h + 0.1 * g / g.norm()), y)


def penalty(m: Part, loss: Tensor) -> Tensor:
    return loss + grad(loss, m.w).square().sum()


def backwards(m: Part, h: Tensor, y: Tensor) -> Tensor:
    m.a(h).sum().backward(inputs=[h])
    return mse_loss(m.a(h), y)


def marks(m: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    h = tanh(m.a(x.requires_grad_()))
    return grad(h, x), h


KINDS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {  # tensors after the first layer, it, the head
    "forces": ("pos h", start, forces), "rare forces": ("pos h", start, rare_forces),
    "forces of features": ("pos h", start, lambda m, pos, h, y: mse_loss(grad(tanh(m.a(h)), pos), y)),
    "by the other": ("pos h", start, lambda m, pos, h, y: mse_loss(grad(tanh(m.a(h)) * m.b(pos), h), y)),
    "of functions": ("pos h", start, of_functions), "clipped": ("pos h", start, clipped),
    "adversarial": ("h", lambda m, x: tanh(m.a(x)), adversarial),
    "backwards": ("h", lambda m, x: tanh(m.a(x)), backwards),
    "addend": ("h", lambda m, x: tanh(m.a(x)),  # of two matrices, made from one another
               lambda m, h, y: mse_loss(grad(torch.addmm(tanh(h), torch.sin(tanh(h)), m.a.weight).square(), h), y)),
    "tied": ("h", lambda m, x: tanh(x @ m.w), lambda m, h, y: penalty(m, mse_loss(h @ m.w, y))),
    "tied, used before": ("h", lambda m, x: tanh(x @ m.w), lambda m, h, y: penalty(m, mse_loss(h, y))),
    "tied, adversarial": ("h", lambda m, x: tanh(x @ m.w), lambda m, h, y: (
        mse_loss((h + grad(mse_loss(h @ m.w, y), h)) @ m.w, y) + grad(m.w.square(), m.w).mean())),
    "marks": ("pos h", marks, lambda m, pos, h, y: mse_loss(m.a(h) * m.b(pos), y)),
    "marks what others read": ("x h", lambda m, x: marks(m, x)[1], forces),
    "given": ("x h", lambda m, x: tanh(m.a(x)), forces),  # by a field that requires a gradient
    "marks what it received": ("pos h", lambda m, x: (x * 1, tanh(m.a(x))),
                               lambda m, pos, h, y: forces(m, pos.requires_grad_(), h, y))}


def model_of(kind: str) -> Model:
    names, first, head = KINDS[kind]
    tensors, tied = tuple(names.split()), "tied" in kind
    made = tuple(name for name in tensors if name != "x")
    return Model([Layer("first", partial(Part, first, tied), ("x",), made),
                  *(Layer(f"mix{i}", partial(Part, mix, False), made) for i in range(2)),
                  Layer("head", partial(Part, head, tied), (*tensors, "y"), ("loss",),
                        ties={"w": "first.w"} if tied else {})], batch=("x", "y"))


def batches(kind: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(8, 4, generator=generator).requires_grad_(kind == "given" and name == "x")
             for name in "xy"} for _ in range(3)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def plain(kind: str, state: dict[str, Tensor], evaluate: bool) -> list[float]:
    """Plain PyTorch with four microbatches: the loss of every batch."""
    model = model_of(kind)
    parts: dict[str, Any] = {layer.name: layer.build() for layer in model.layers}
    for name, part in parts.items():
        part.load_state_dict({key.removeprefix(f"{name}."): value for key, value in state.items()
                              if key.startswith(f"{name}.")}, strict=False)
    if model.layers[-1].ties:
        parts["head"].w = parts["first"].w
    optimizer, losses = sgd(list({p: None for part in parts.values() for p in part.parameters()})), []
    for batch in batches(kind):
        losses.append(0.0)
        for x, y in zip(batch["x"].chunk(4), batch["y"].chunk(4), strict=True):
            tensors = {"x": x, "y": y}
            for layer in model.layers:
                made = parts[layer.name](*(tensors[name] for name in layer.inputs))
                tensors.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
            losses[-1] += tensors["loss"].item() / 4
            if not evaluate:
                (tensors["loss"] / 4).backward()
        if not evaluate:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def run(kind: str, schedule: str, stages: Sequence[int], recompute: float = 0.0, evaluate: bool = False) -> list[Any]:
    """What a pipeline computes and what plain PyTorch does, loss by loss; or the refusal."""
    pipe = Pipeline(model_of(kind), sgd, Cut(stages, recompute=recompute), schedule, 4)
    expected = plain(kind, pipe.state_dict(), evaluate)
    try:
        return ([[pipe.evaluate(batches(kind))], [sum(expected) / 3]] if evaluate else
                [[step.loss for step in pipe.train(batches(kind))], expected])
    except VpipeError as error:
        return [type(error).__name__, str(error)]


ANY_CUT = ("of functions", "adversarial", "tied, adversarial", "addend")


@pytest.mark.parametrize(("kind", "schedule", "stages", "recompute", "evaluate"), [
    *((kind, "1f1b", [4], 0.0, False) for kind in KINDS if kind != "backwards"),
    *((kind, "zb_h1", [4], 0.0, False) for kind in ("forces", "tied", "addend")),
    *((kind, schedule, stages, recompute, False) for kind in ANY_CUT for schedule, stages, recompute in (
        ("1f1b", [3, 1], 0.0), ("zb_h1", [2, 2], 1.0), ("interleaved", [1, 1, 1, 1], 0.0))),
    *((kind, "1f1b", [2, 2], 0.0, True) for kind in ANY_CUT),
    *((kind, "1f1b", [4], 0.0, True) for kind in ("forces", "rare forces")),
    ("forces", "1f1b", [4], 1.0, False), ("by the other", "zb_h1", [1, 3], 1.0, False),
    ("marks", "1f1b", [1, 3], 0.0, False)])
def test_a_derivative_is_exact_where_all_that_depends_on_the_tensor_is_in_one_stage(
        kind: str, schedule: str, stages: list[int], recompute: float, evaluate: bool) -> None:
    found, expected = run(kind, schedule, stages, recompute, evaluate)
    assert found == pytest.approx(expected, rel=1e-5)  # derivatives of derivatives: sums in other orders


ACROSS = ("error: layer 'head' of stage 1 takes a derivative in its forward by 'pos' or 'h', but more that depends on "
          "it came through the cut before layer 'mix1': the part through the layers before the cut would be missing\n"
          "hint: keep the layers from 'first' to 'head' in one stage: stages=[4]")


@pytest.mark.parametrize(("kind", "schedule", "stages", "recompute", "evaluate", "text"), [
    *((kind, schedule, [2, 2], 0.0, False, ACROSS) for kind in ("forces", "forces of features", "rare forces")
      for schedule in ("1f1b", "zb_h1", "pipedream")),
    ("forces", "interleaved", [1, 1, 1, 1], 0.0, False, "layer 'head' of stage 3 takes a derivative"),
    ("forces", "1f1b", [4], 0.5, False, "and recompute all of them or none: stages=[4]"),
    *((kind, "1f1b", [2, 2], 0.0, True, ACROSS) for kind in ("forces", "forces of features")),
    ("by the other", "1f1b", [3, 1], 0.0, False, "by 'pos' or 'h', but"),
    *((kind, schedule, [2, 2], 0.0, False, "by 'first.w', but") for kind in ("tied", "tied, used before")
      for schedule in ("zb_h1", "pipedream")),
    ("clipped", "1f1b", [2, 2], 0.0, False, "puts a hook on the gradient of 'pos', or retains it"),
    *((kind, schedule, [2, 2], 0.0, schedule == "1f1b", "'x' was made to require a gradient, by a layer of stage 0")
      for kind in ("marks what others read", "given") for schedule in ("1f1b", "zb_h1", "pipedream")),
    ("marks what it received", "1f1b", [3, 1], 0.0, False, "'pos' was made to require a gradient, by a layer of"),
    ("backwards", "1f1b", [3, 1], 0.0, False, "'h' got a gradient in a forward: a layer of stage 1 calls backward()")])
def test_what_a_layer_does_with_a_part_of_a_derivative_is_refused(
        kind: str, schedule: str, stages: list[int], recompute: float, evaluate: bool, text: str) -> None:
    error, found = run(kind, schedule, stages, recompute, evaluate)
    assert error == "UserError"
    assert text in found


def test_two_processes_are_exact_where_one_is_and_refuse_where_it_refuses(two: World) -> None:
    for kind, schedule, evaluate in (("tied, adversarial", "zb_h1", False), ("of functions", "1f1b", True)):
        arguments: dict[str, Any] = {"kind": kind, "schedule": schedule, "stages": [2, 2], "evaluate": evaluate}
        assert two.run(run, **arguments) == [run(**arguments)] * 2
    for kind, evaluate in (("forces of features", True), ("tied", False)):
        arguments = {"kind": kind, "schedule": "1f1b", "stages": [2, 2], "evaluate": evaluate}
        two.begin(run, **arguments)
        assert run(**arguments) in [two.outcome(rank, 30)[1] for rank in (0, 1)]
        two.kill()  # a transfer was under way
