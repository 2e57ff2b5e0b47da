"""Optimizers: the division by names, fused against plain kernels, LAMB against its formulas, moved parameters."""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import pytest
import torch
from golden import refusal
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vpipe import Layer, Model
from vpipe.app.config.config import TrainingSection
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.train.optimizers import OPTIMIZERS, Lamb, LearningRatePolicy, OptimizerSettings, decays, hidden_matrices
from vpipe.errors import UserError

ONE_FOR_ALL = ("sgd", "adam", "adamw", "nadam", "lamb")
POLICIES = ("constant", "step", "polynomial", "cosine")


def named_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "a.norm.weight": (4,), "b.LayerNorm.weight": (3,), "b.word": (5, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in shapes.items()}


def set_gradients(named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def built(settings: OptimizerSettings, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = settings.from_named(named)
    assert optimizer is not None
    return optimizer


@pytest.mark.parametrize(("name", "expected"), [
    ("block0.mlp.expand.weight", True), ("block0.mlp.expand.bias", False), ("block0.mlp.norm.weight", False),
    ("encoder.LayerNorm.weight", False), ("final_NORM.scale", False), ("embeddings.word.weight", True),
    ("bias_projection.weight", True)])
def test_decay_by_name(name: str, expected: bool) -> None:
    assert decays(name) is expected


@pytest.mark.parametrize("name", ONE_FOR_ALL)
def test_two_groups_in_order(name: str) -> None:
    named = named_parameters()
    optimizer = built(OptimizerSettings(name, 0.1, weight_decay=0.01), named)
    decayed, plain = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(named[n]) for n in ("a.weight", "b.word")]
    assert [id(p) for p in plain["params"]] == [id(named[n]) for n in ("a.bias", "a.norm.weight", "b.LayerNorm.weight")]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert decayed["lr"] == plain["lr"] == 0.1


def test_empty_groups_and_empty_stages_are_left_out() -> None:
    settings = OptimizerSettings("adamw", 0.1, weight_decay=0.01)
    assert settings.from_named({}) is None
    for only in ("a.weight", "a.bias"):
        optimizer = built(settings, {only: named_parameters()[only]})
        assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_a_tied_parameter_counts_once() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = built(OptimizerSettings("sgd", 0.1), {"word.weight": parameter, "head.norm.weight": parameter})
    assert [group["params"] for group in optimizer.param_groups] == [[parameter]]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_equals_plain(name: str, dtype: torch.dtype) -> None:
    fused, plain = named_parameters(dtype), named_parameters(dtype)
    optimizer = built(OptimizerSettings(name, 0.1, weight_decay=0.01), fused)
    assert all(group["fused"] for group in optimizer.param_groups)
    groups = [{"params": [plain[n] for n in ("a.weight", "b.word")], "weight_decay": 0.01},
              {"params": [plain[n] for n in ("a.bias", "a.norm.weight", "b.LayerNorm.weight")], "weight_decay": 0.0}]
    options = {"lr": 0.1, "foreach": False, "fused": False}
    reference = {"sgd": lambda: torch.optim.SGD(groups, momentum=0.9, **options),
                 "adam": lambda: torch.optim.Adam(groups, **options),
                 "adamw": lambda: torch.optim.AdamW(groups, **options)}[name]()
    for seed in range(3):
        for parameters, stepped in ((fused, optimizer), (plain, reference)):
            set_gradients(parameters, seed)
            stepped.step()
        for key, parameter in fused.items():
            # The kernels multiply and add in another order: a few roundings of numbers around 1 per step.
            torch.testing.assert_close(parameter, plain[key], rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_no_fused_kernel_off_cpu_and_cuda() -> None:
    optimizer = built(OptimizerSettings("adamw", 0.1), {"w": nn.Parameter(torch.ones(2, device="meta"))})
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("name", ONE_FOR_ALL)
def test_parameters_may_move_to_other_storage_between_steps(name: str) -> None:
    moving, still = named_parameters(), named_parameters()
    settings = OptimizerSettings(name, 0.1, weight_decay=0.01)
    optimizers = [(moving, built(settings, moving)), (still, built(settings, still))]
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(4):
        for named, optimizer in optimizers:
            set_gradients(named, seed)
            optimizer.step()
        for parameter in moving.values():
            kept.append((parameter.data, parameter.data.clone()))
            flat = torch.empty(parameter.numel() + 1)  # at an odd offset, as in a flat copy of a stage
            parameter.data = flat[1:].view(parameter.shape).copy_(parameter.data)
        assert all(torch.equal(moving[key], still[key]) for key in moving)
    assert all(torch.equal(old, copy) for old, copy in kept), "a step wrote to storage the parameter had left"


@pytest.mark.parametrize("name", ONE_FOR_ALL)
def test_a_first_gradient_may_come_late(name: str) -> None:
    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = built(OptimizerSettings(name, 0.1), {"early": early, "late": late})
    early.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(late, torch.ones(3))
    after_one = early.detach().clone()
    late.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(late, after_one), "its first step is like the other's first"


# -- hidden matrices


def sizes(family: str, **changes: Any) -> Model:
    return family_named(family).factory(ModelSettings(50, hidden_size=32, num_layers=2, num_heads=2, **changes))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "attention", "mlp"), [
    ("bert", ("query", "key", "value", "output"), ("expand", "contract")),
    ("gpt", ("qkv", "output"), ("expand", "contract")),
    ("llama", ("query", "key", "value", "output"), ("gate", "up", "down"))])
def test_hidden_matrices_of_the_families(family: str, attention: tuple[str, ...], mlp: tuple[str, ...],
                                         tied: bool) -> None:
    assert hidden_matrices(sizes(family, tie_weights=tied)) == {
        f"block{block}.{layer}{'.attention' * (layer == 'attention' and block == 0)}.{name}.weight" for block in (0, 1)
        for layer, names in (("attention", attention), ("mlp", mlp)) for name in names}


class Raw(nn.Module):
    def __init__(self, read: bool = False, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))
            assert not read or getattr(self, name).sum().item() > 0


def test_hidden_matrices_of_other_models() -> None:
    repeated = nn.Linear(8, 8)
    net = nn.Sequential(nn.Linear(4, 8), repeated, nn.LSTM(8, 8), nn.Conv1d(8, 8, 3), nn.LayerNorm((8, 8)), repeated,
                        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 1),
                        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), nn.Flatten(0))
    assert hidden_matrices(Model.sequential(net, nn.functional.mse_loss)) == {
        "0.weight", "1.weight", "2.weight_ih_l0", "2.weight_hh_l0", "6.parametrizations.weight.original1"}
    model = Model([
        Layer("tokens", lambda: nn.EmbeddingBag(4, 8), ("x",)),
        Layer("positions", lambda: Raw(weight=(4, 8))),
        Layer("raw", lambda: Raw(read=True, weight=(4, 8), norm=(4, 8), tall=(4,))),
        Layer("reads", lambda: Raw(x=(4, 8)), ties={"x": "tokens.weight"}),
        Layer("shared", lambda: nn.Linear(8, 4, bias=False)),
        Layer("head", lambda: Raw(decoder=(4, 8)), ties={"decoder": "shared.weight"}),
        Layer("loss", nn.MSELoss, ("h", "y"), ("loss",))], batch=("x", "y"))
    assert hidden_matrices(model) == {"raw.weight"}


def test_muon_has_the_hidden_matrices_and_adamw_the_others() -> None:
    named = named_parameters()
    settings = OptimizerSettings("muon", 0.1, weight_decay=0.01, matrices={"a.weight", "elsewhere.weight"})
    made = settings.from_named(named)
    assert isinstance(made, list)
    muon, adamw = made
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [[id(p) for p in group["params"]] for each in made for group in each.param_groups] == [
        [id(named[name]) for name in names] for names in (("a.weight",), ("b.word",), (
            "a.bias", "a.norm.weight", "b.LayerNorm.weight"))]
    assert [(group["weight_decay"], group["lr"]) for each in made for group in each.param_groups] == [
        (0.01, 0.1), (0.01, 0.1), (0.0, 0.1)]
    assert [type(each) for each in settings.from_named({"a.weight": named["a.weight"]})] == [torch.optim.Muon]
    assert [type(each) for each in settings.from_named({"a.bias": named["a.bias"]})] == [torch.optim.AdamW]
    assert settings.from_named({}) == []


def test_muon_is_its_formula() -> None:
    """Momentum, Nesterov, 5 Newton-Schulz steps in bf16, the size of AdamW's updates, decay apart: arXiv:2502.16982."""
    parameter = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    x, m = parameter.detach().clone(), torch.zeros(6, 4)
    [optimizer] = OptimizerSettings("muon", 0.1, weight_decay=0.2, matrices={"w"}).from_named({"w": parameter})
    for seed in range(3):
        set_gradients({"w": parameter}, seed)
        m = 0.95 * m + 0.05 * parameter.grad
        u = (0.05 * parameter.grad + 0.95 * m).T.bfloat16()
        u /= u.norm()
        for _ in range(5):
            gram = u @ u.T
            u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
        x = x * (1 - 0.1 * 0.2) - 0.1 * 0.2 * 6**0.5 * u.T
        optimizer.step()
        # bf16: a few roundings of 2^-8 of numbers below 1, times 0.1 * 0.2 * 6^0.5, in three steps.
        torch.testing.assert_close(parameter.detach(), x, rtol=0, atol=3 * 0.05 * 8 * 2**-8)


def test_nadam_is_its_formula() -> None:
    """Dozat's momentum schedule, with beta1 = 0.99 and the decay apart from the gradient."""
    parameter = nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    x, m, v, product = parameter.detach().clone(), torch.zeros(5), torch.zeros(5), 1.0
    optimizer = built(OptimizerSettings("nadam", 0.1, weight_decay=0.2), {"w": parameter})
    for t in range(1, 5):
        set_gradients({"w": parameter}, t)
        g = parameter.grad
        now, later = (0.99 * (1 - 0.5 * 0.96 ** (step * 0.004)) for step in (t, t + 1))
        product *= now
        m, v = 0.99 * m + 0.01 * g, 0.999 * v + 0.001 * g * g
        mean = (1 - now) * g / (1 - product) + later * m / (1 - product * later)
        x = x * (1 - 0.1 * 0.2) - 0.1 * mean / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        optimizer.step()
        # fp64, but torch keeps the product of the factors in fp32.
        torch.testing.assert_close(parameter.detach(), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("matrices", "message"), [
    (None, "error: muon is not told which parameters are hidden matrices\n"
           "hint: give it matrices=hidden_matrices(model)"),
    ((), "error: muon is an optimizer of hidden matrices, but the model has none: its parameters with two dimensions "
         "are embeddings, or in the head\nhint: choose adamw")])
def test_muon_without_matrices(matrices: tuple[str, ...] | None, message: str) -> None:
    assert refusal(OptimizerSettings, "muon", 0.1, matrices=matrices) == message


def test_a_name_that_no_optimizer_has_is_refused() -> None:
    assert get_args(TrainingSection.model_fields["optimizer"].annotation) == OPTIMIZERS
    with pytest.raises(UserError, match="no optimizer is called 'muno'\nhint: did you mean 'muon'"):
        OptimizerSettings("muno", 0.1)


# -- LAMB


def naive_lamb(x: list[float], gradients: list[list[float]], rate: float, decay: float, eps: float,
               trust: bool) -> list[float]:
    """Algorithm 2 of arXiv:1904.00962 for one tensor, number by number."""
    beta1, beta2 = 0.9, 0.999
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, gradient in enumerate(gradients, start=1):
        update = []
        for i, g in enumerate(gradient):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            ratio = (m[i] / (1 - beta1**t)) / (math.sqrt(v[i] / (1 - beta2**t)) + eps)
            update.append(ratio + decay * x[i])
        weight_norm, update_norm = math.hypot(*x), math.hypot(*update)
        scale = weight_norm / update_norm if trust and weight_norm and update_norm else 1.0
        x = [x[i] - rate * scale * update[i] for i in range(len(x))]
    return x


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("trust", [True, False])
def test_lamb_is_algorithm_2(decay: float, trust: bool) -> None:
    named = named_parameters(torch.float64)
    named["zero"] = nn.Parameter(torch.zeros(3, dtype=torch.float64))  # |x| = 0: the ratio is 1
    starts = {name: parameter.flatten().tolist() for name, parameter in named.items()}
    gradients: dict[str, list[list[float]]] = {name: [] for name in named}
    optimizer = Lamb(named.values(), lr=0.05, weight_decay=decay, trust_ratio=trust)
    for seed in range(5):
        set_gradients(named, seed)
        for name, parameter in named.items():
            assert parameter.grad is not None
            gradients[name].append(parameter.grad.flatten().tolist())
        optimizer.step()
    for name, parameter in named.items():
        expected = naive_lamb(starts[name], gradients[name], 0.05, decay, 1e-6, trust)
        # fp64; 5 steps of about 10 roundings each on numbers around 1.
        assert parameter.flatten().tolist() == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_lamb_without_gradient_stands_still_and_resumes() -> None:
    named = named_parameters()
    settings = OptimizerSettings("lamb", 0.05, weight_decay=0.01)
    optimizer = built(settings, named)
    optimizer.step()  # nobody has a gradient
    assert not optimizer.state
    set_gradients(named, 0)
    assert optimizer.step(lambda: 3.0) == 3.0
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in named.items()}
    resumed = built(settings, copies)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    for parameters, stepped in ((named, optimizer), (copies, resumed)):
        set_gradients(parameters, 1)
        stepped.step()
    assert all(torch.equal(named[name], copies[name]) for name in named)


def test_lamb_settings_follow_its_authors() -> None:
    decayed, plain = built(OptimizerSettings("lamb", 0.05, weight_decay=0.01), named_parameters()).param_groups
    assert (decayed["trust_ratio"], plain["trust_ratio"]) == (True, False)
    assert decayed["eps"] == 1e-6
    assert built(OptimizerSettings("adam", 0.05), named_parameters()).param_groups[0]["eps"] == 1e-8


@st.composite
def policies(draw: st.DrawFn) -> LearningRatePolicy:
    total = draw(st.integers(1, 10_000))
    return LearningRatePolicy(draw(st.sampled_from(POLICIES)), total, draw(st.integers(0, total)))


@pytest.mark.parametrize(("name", "total", "factors"), [
    ("constant", 100, {10: 1, 50: 1, 100: 1, 1000: 1}),
    ("step", 100, {39: 1, 40: 0.1, 69: 0.1, 70: 0.01, 99: 0.01, 100: 0.001, 130: 0.0001}),
    ("polynomial", 110, {35: 0.75, 60: 0.5, 109: 0.01, 110: 0, 500: 0}),
    ("cosine", 110, {35: (1 + math.sqrt(0.5)) / 2, 60: 0.5, 85: (1 - math.sqrt(0.5)) / 2, 110: 0, 500: 0})])
def test_factors_by_hand(name: str, total: int, factors: dict[int, float]) -> None:
    """Ten steps of warm-up are a line to the full rate; a third of the others later ``step`` decays."""
    policy = LearningRatePolicy(name, total, warmup_steps=10)
    assert [policy(step) for step in (0, 4, 8, 9)] == [0.1, 0.5, 0.9, 1.0]
    assert {step: policy(step) for step in factors} == pytest.approx(factors)
    assert LearningRatePolicy(name, total)(0) == 1.0


@given(policies(), st.integers(0, 20_000))
def test_factor_lies_between_0_and_1(policy: LearningRatePolicy, step: int) -> None:
    assert 0 <= policy(step) <= 1


@given(policies())
def test_warm_up_meets_the_decay_at_1(policy: LearningRatePolicy) -> None:
    if policy.warmup_steps:
        assert policy(policy.warmup_steps - 1) == 1
        assert policy(0) == 1 / policy.warmup_steps
    if policy.warmup_steps < policy.total_steps:
        assert policy(policy.warmup_steps) == 1


@given(policies(), st.integers(0, 20_000))
def test_rises_in_the_warm_up_and_never_after(policy: LearningRatePolicy, step: int) -> None:
    if step + 1 < policy.warmup_steps:
        assert policy(step) < policy(step + 1)
    elif step >= policy.warmup_steps:
        assert policy(step) >= policy(step + 1)


def test_a_warm_up_longer_than_the_run() -> None:
    assert refusal(LearningRatePolicy, "constant", 10, 11) == (
        "error: the learning rate warms up over 11 steps of a run of 10\n"
        "hint: warm up over at most 10 steps, or train longer")
