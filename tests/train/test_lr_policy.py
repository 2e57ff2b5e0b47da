"""Learning-rate policies: closed forms at the borders, and what holds for all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.errors import UserError
from vpipe.train.optimizers import POLICIES, LearningRatePolicy


@st.composite
def policies(draw: st.DrawFn) -> LearningRatePolicy:
    total = draw(st.integers(1, 10_000))
    return LearningRatePolicy(draw(st.sampled_from(POLICIES)), total, draw(st.integers(0, total)),
                  power=draw(st.floats(0.1, 4.0)), step_every=draw(st.none() | st.integers(1, total)),
                  gamma=draw(st.floats(0.01, 1.0)))


@pytest.mark.parametrize("name", POLICIES)
def test_warm_up_is_a_line_to_the_full_rate(name: str) -> None:
    policy = LearningRatePolicy(name, 100, warmup_steps=10)
    assert [policy(step) for step in (0, 4, 8, 9, 10)] == [0.1, 0.5, 0.9, 1.0, 1.0]


@pytest.mark.parametrize("name", POLICIES)
def test_without_warm_up_the_first_step_has_the_full_rate(name: str) -> None:
    assert LearningRatePolicy(name, 100)(0) == 1.0


def test_constant() -> None:
    policy = LearningRatePolicy("constant", 100, warmup_steps=10)
    assert [policy(step) for step in (10, 50, 100, 1000)] == [1.0] * 4


def test_step_decays_every_third_by_default() -> None:
    policy = LearningRatePolicy("step", 100, warmup_steps=10)
    assert [policy(step) for step in (39, 40, 69, 70, 99)] == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])
    assert [policy(step) for step in (100, 130)] == pytest.approx([0.001, 0.0001])


def test_step_every() -> None:
    policy = LearningRatePolicy("step", 100, step_every=7, gamma=0.5)
    assert [policy(step) for step in (0, 6, 7, 13, 14, 99)] == [1, 1, 0.5, 0.5, 0.25, 0.5**14]


def test_polynomial() -> None:
    policy = LearningRatePolicy("polynomial", 110, warmup_steps=10)
    assert [policy(step) for step in (35, 60, 109, 110, 500)] == pytest.approx([0.75, 0.5, 0.01, 0, 0])
    assert LearningRatePolicy("polynomial", 100, power=0.5)(75) == 0.5
    assert LearningRatePolicy("polynomial", 100, power=2.0)(75) == 0.0625


def test_cosine() -> None:
    policy = LearningRatePolicy("cosine", 110, warmup_steps=10)
    expected = [(1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]
    assert [policy(step) for step in (35, 60, 85, 110, 500)] == pytest.approx(expected)


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


@pytest.mark.parametrize(("wrong", "text"), [
    ({"name": "polinomial"}, "error: there is no learning-rate policy 'polinomial'\nhint: did you mean 'polynomial'?"),
    ({"total_steps": 0}, "error: the learning-rate policy has 0 steps in all\nhint: give it at least 1"),
    ({"warmup_steps": -1}, "error: the learning rate warms up over -1 steps\nhint: give it 0 or more"),
    ({"warmup_steps": 11}, "error: the learning rate warms up over 11 steps of a run of 10\n"
                           "hint: warm up over at most 10 steps, or train longer"),
    ({"power": 0.0}, "error: the power of the polynomial policy is 0.0\nhint: it must be greater than 0"),
    ({"step_every": 0}, "error: the learning rate decays every 0 steps\nhint: give it at least 1"),
    ({"gamma": 2.0}, "error: the learning rate is multiplied by 2.0 at each decay\n"
                     "hint: it must be greater than 0 and at most 1")])
def test_mistakes(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(UserError) as error:
        LearningRatePolicy(**{"name": "constant", "total_steps": 10, **wrong})
    assert str(error.value) == text
