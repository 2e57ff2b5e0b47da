"""Late gradients corrected by extrapolation: bit for bit what the oracle computes, and what the property says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from models import WIDTH, rich_batches, rich_model
from oracles import DECAY_AND_CLIP, Momentum, assert_same, equals_its_oracle, oracle_of, pipeline_of, saved
from pipelines import parts
from test_exact_in_every_precision import pushed, pushed_model
from test_resume import same_bits
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.app.train.optimizers import OptimizerSettings
from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.runtime import companions
from vpipe.runtime.companions import Extrapolation
from vpipe.testing import InitialState

EXTRAPOLATE: dict[str, Any] = {"delay_correction": 1.0}
CUT: dict[str, Any] = {"schedule": "pipedream", "partition": [3, 3, 2]}
CORRECTED = {**DECAY_AND_CLIP, **CUT, **EXTRAPOLATE}


class FrozenHead:
    """AdamW in two groups; the head's bias and the first matrix are of no optimizer."""

    def from_named(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        own = [p for name, p in named.items() if name not in ("head.decoder.bias", "raw0.w")]
        return torch.optim.AdamW([{"params": own[:1], "lr": 1e-2}, {"params": own[1:]}], lr=3e-3) if own else None


def extrapolations(pipe: Pipeline) -> dict[int, Extrapolation]:
    return {s: each for worker in pipe.engine.workers.values()
            for s, companions in worker.optimizer_steps.companions.items() for each in companions.values()
            if isinstance(each, Extrapolation)}


def factors(pipe: Pipeline) -> list[float]:
    """Per stage; 0 where nothing is kept."""
    return [extrapolations(pipe)[s].factor if s in extrapolations(pipe) else 0.0 for s in range(len(pipe.placement))]


@pytest.mark.parametrize(("arguments", "expected"), [
    ({"partition": [2, 2, 2, 2]}, [3, 2, 1, 0]),
    ({"partition": [2, 2, 2, 2], "update_every": 4, "recompute": 0.5}, [.75, .5, .25, 0]),
    ({"partition": [2, 2, 2, 2], "update_every": 8, "microbatches": 8}, [3 / 8, 2 / 8, 1 / 8, 0]),
    ({"update_every": 2, "optimizer": jobs.MuonAndAdamW()}, [1, .5, 0]),
    ({"update_every": 2, "executor": "naive", "optimizer": FrozenHead(), "delay_correction": .7},
     [.7, .35, 0]),
    ({"schedule": "2bw", "update_every": 4}, [1, 1, 1]),
    ({"schedule": "2bw", "update_every": 4, "precision": "bf16_pure", "optimizer": Momentum()}, [1, 1, 1]),
    ({"schedule": "pipedream_vertical_sync"}, [2, 2, 2]),
    ({"schedule": "pipedream_vertical_sync", "update_every": 4, "recompute": 1.0}, [.5, .5, .5]),
    ({"schedule": "pipedream_vertical_sync", "partition": [4, 4], "placement": [[0, 1], [2, 3]]}, [1, 1]),
    ({"partition": [2, 4, 2], "placement": [[0, 1], [2], [3, 4, 5]], "precision": "fp16", "loss_scale": 1024},
     [2, 3, 0]),
    ({"partition": [5, 3], "placement": [[0, 1], [2]], "update_every": 2, "compress": "bf16"}, [.5, 0]),
    ({"precision": "bf16_pure", "optimizer": OptimizerSettings("lamb", 0.02, weight_decay=0.1)}, [2, 1, 0]),
    ({"precision": "bf16", "recompute": 0.5}, [2, 1, 0]),
    ({"warmup_depth": [5, 2, 0], "update_every": 2}, [2.5, 1, 0]),
    ({"schedule": "pipedream_vertical_sync", "warmup_depth": [4, 2, 0], "update_every": 4}, [1, 1, 1]),
    ({"schedule": "2bw", "warmup_depth": [3, 2, 0], "update_every": 4}, [1, 1, 1])])
def test_every_schedule_equals_its_oracle(arguments: dict[str, Any], expected: list[float]) -> None:
    """Losses, norms, weights, optimizer state and last changes; ties, clipping, an incomplete update at the end."""
    pipe, _ = equals_its_oracle(rich_model, rich_batches(3, 24), **CORRECTED | arguments)
    assert factors(pipe) == pytest.approx(expected, rel=1e-15)


def test_weights_are_the_sum_of_plain_changes_and_the_look_ahead() -> None:
    """p = Z + strength * delay * previous, up to 3 roundings per update; Z is what state_dict gives uncorrected."""
    pipe = pipeline_of(rich_model, **CORRECTED | {"grad_clip": None, "delay_correction": 0.5})
    begins, sums = pipe.state_dict(), {name: each.double() for name, each in pipe.state_dict().items()}
    for count, _ in enumerate(pipe.train(rich_batches(3, 8), pauses=1), 1):  # the pipeline is empty after every update
        for each in extrapolations(pipe).values():
            for name, change in each.values.items():
                sums[name] += change.double()
        plain, state = pipe.state_dict(corrected=False), pipe.state_dict()
        for each in extrapolations(pipe).values():
            for name, change in each.values.items():
                bound = 3 * count * torch.finfo(torch.float32).eps * float(state[name].abs().max())
                assert (plain[name] - sums[name]).abs().max() <= bound
                assert (state[name] - sums[name] - each.factor * change).abs().max() <= bound
                assert not torch.equal(state[name], plain[name])
    kept = {name for each in extrapolations(pipe).values() for name in each.values}
    assert kept == {name for name in begins if name.split(".")[0] not in ("mix2", "head")}
    assert all(torch.equal(plain[name], state[name]) for name in begins if name not in kept)


def test_without_a_delay_nothing_is_done_and_nothing_kept() -> None:
    runs = []
    for how in ({}, EXTRAPOLATE):
        pipe = pipeline_of(rich_model, schedule="pipedream", partition=[8], **DECAY_AND_CLIP, **how)
        runs.append(([step.loss for step in pipe.train(rich_batches(2, 8))], saved(pipe)[1]))
    assert runs[0][0] == runs[1][0]
    same_bits(runs[0][1], runs[1][1])


def test_updates_are_left_out_with_their_last_change() -> None:
    """Of fp16, in which the gradients of some microbatches overflow."""
    _, steps = equals_its_oracle(pushed_model, pushed([1.0, 4000.0, 1.0]), **CORRECTED | {
        "precision": "fp16", "loss_scale": 4096, "partition": [2, 2, 2], "optimizer": Momentum()})
    assert {step.skipped for step in steps} == {True, False}


class Either(nn.Module):
    """One of two matrices, by the length of the sequence: the other one has no gradient in that update."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden @ (self.short if hidden.shape[1] == 6 else self.long))


def test_a_parameter_without_a_gradient_has_changed_by_nothing() -> None:
    layers = list(rich_model().layers)
    layers[1] = Layer("raw0", Either)
    model, batches = Model(layers, ("ids", "labels")), rich_batches(5, 8, lengths=(6, 9))
    pipe = pipeline_of(model, **CORRECTED, update_every=4)
    steps = []
    for step in pipe.train(batches, pauses=1):
        steps.append(step)
        changes = extrapolations(pipe)[0].values
        assert [bool(changes[f"raw0.{name}"].any()) for name in ("short", "long")] == [
            step.index % 2 == 0, step.index % 2 == 1]
    assert_same(pipe, steps, oracle_of(pipe, batches, drained_at=range(4, 20, 4)))


def test_draining_changes_no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do groups of a few numbers, into which large tensors are cut."""
    monkeypatch.setitem(companions._GROUP, "cpu", 100)
    batches = rich_batches(6, 8)
    pipe = pipeline_of(rich_model, **CORRECTED, update_every=2)
    steps = []
    for step in pipe.train(batches, pauses=5):
        steps.append(step)
        if step.index == 4:
            pipe.evaluate(rich_batches(1, 8, seed=9))
    assert factors(pipe) == [1, .5, 0]
    assert_same(pipe, steps, oracle_of(pipe, batches, drained_at=(10, 20)))


def test_a_hook_of_an_optimizer_sees_the_plain_step() -> None:
    """Schedulers of torch's change rates between two calls of train: test_stage_optimizer.py."""
    seen: list[list[float]] = []

    def hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda made, *_: seen.append(
            [float(p.detach().sum()) for group in made.param_groups for p in group["params"]]))
        return optimizer

    pipe = pipeline_of(rich_model, **CUT, **EXTRAPOLATE, optimizer=hooked)
    list(pipe.train(rich_batches(3, 8)))
    assert len(seen) == 3 * 12
    last = {each: [float(p.detach().sum()) for p in pipe.engine.local_stages[each].weights.masters.values()]
            for each in (0, 2)}
    assert last[2] in seen  # no delay: what the optimizer made
    assert last[0] not in seen


class Alias(nn.Module):
    """One matrix under two names, one that is not contiguous, one that is empty, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)
        self.turned, self.empty = nn.Parameter(torch.randn(4, 4).t()), nn.Parameter(torch.empty(0, 3))
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.lstm(self.second(self.first(h).tanh()) @ self.turned)[0]
        return out


def test_a_parameter_of_any_kind_is_uncorrected_under_all_of_its_names(tmp_path: Path) -> None:
    model = Model.sequential(nn.Sequential(Alias(), Alias(), nn.Linear(4, 2)), nn.MSELoss())
    batch = {"input": torch.randn(6, 3, 4), "target": torch.randn(6, 3, 2)}
    pipe = Pipeline(model,
                    **parts(partition=[1, 1, 1], schedule="2bw", microbatches=3, **EXTRAPOLATE,
                            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False)))
    list(pipe.train([batch] * 3))
    plain, state = pipe.state_dict(corrected=False), pipe.state_dict()
    assert {name for name in state if torch.equal(plain[name], state[name])} == {"0.empty", "1.empty"}
    assert torch.equal(plain["0.first.weight"], plain["0.second.weight"])
    pipe.save(tmp_path / "saved")
    same_bits(Checkpoint(tmp_path / "saved", Manifest.load(tmp_path / "saved")).weights(corrected=False), plain)


def plain_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Z = p - factor * last change, of a checkpoint's tensors."""
    found = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    return {name: value if f"delay_correction.{name}.factor" not in tensors else torch.sub(
        value, tensors[f"delay_correction.{name}.last_change"], alpha=float(tensors[f"delay_correction.{name}.factor"]))
        for name, value in found.items()}


FACTORS: dict[str, tuple[dict[str, Any], str | None]] = {
    "same": ({**CUT, **EXTRAPOLATE}, None),
    "cut": ({"schedule": "pipedream", "partition": [1, 2, 4, 1], **EXTRAPOLATE},
            "2 -> 3 in 1 parameter, 0 -> 1 in 4 parameters"),
    "2bw": ({"schedule": "2bw", "partition": [4, 4], "update_every": 2, **EXTRAPOLATE},
            "2 -> 1 in 6 parameters, 0 -> 1 in 5 parameters"),
    "k": ({**CUT, "update_every": 4, **EXTRAPOLATE}, "2 -> 0.5 in 6 parameters, 1 -> 0.25 in 6 parameters"),
    "strength": ({**CUT, "delay_correction": 0.5},
                 "2 -> 1 in 6 parameters, 1 -> 0.5 in 6 parameters"),
    "uncorrected": ({"schedule": "pipedream", "partition": [3, 3, 2]}, "2 -> 0 in 6 parameters, 1 -> 0 in 6"),
    "flush": ({"schedule": "1f1b", "partition": [3, 5]}, "2 -> 0 in 6 parameters, 1 -> 0 in 6 parameters"),
    "frozen": ({**CUT, **EXTRAPOLATE, "optimizer": FrozenHead()}, "2 -> 0 in 1 parameter"),
    "from none": ({**CUT, **EXTRAPOLATE}, "0 -> 2 in 6 parameters, 0 -> 1 in 6 parameters")}


@pytest.mark.parametrize(("now", "precision"), [*((name, "fp32") for name in FACTORS), ("cut", "bf16_pure"),
                                                ("flush", "bf16_pure"), ("2bw", "fp16")])
def test_loaded_under_another_delay_the_weights_without_the_look_ahead_stay(tmp_path: Path, now: str,
                                                                            precision: str) -> None:
    """p = Z + new factor * last change, and from there what the oracle computes; saved again, Z is exported so.

    From a run without a correction the look-ahead begins with the next update.
    """
    then, text = FACTORS[now]
    batches = rich_batches(4, 8)
    computed = {"precision": precision, "loss_scale": 1024 if precision == "fp16" else None}
    then = {**computed, **DECAY_AND_CLIP, **then}
    first = pipeline_of(rich_model, **computed, **CORRECTED | (
        {"schedule": "1f1b", "partition": [3, 5], "delay_correction": 0.0} if now == "from none" else {}))
    list(first.train(batches[:2]))
    position, tensors = saved(first)
    first.save(tmp_path / "first")
    second = pipeline_of(rich_model, **then)
    with nullcontext() if text is None else pytest.warns(UserWarning, match=text):
        assert second.load(tmp_path / "first") == position
    plain, before, factors = second.state_dict(corrected=False), first.state_dict(corrected=False), factors_of(second)
    for name, value in second.state_dict().items():
        old, new = factors_of(first).get(name, 0.0), factors.get(name, 0.0)
        assert torch.equal(value, first.state_dict()[name]) == (old in (0, new))
        # The look-ahead taken from one, changed, taken from the other: three roundings.
        bound = 3 * torch.finfo(torch.float32).eps * float(value.abs().max()) if new not in (0, old) else 0
        assert (plain[name] - before[name]).abs().max() <= bound
    steps = list(second.train(batches[2:]))
    run = oracle_of(second, batches[2:], start=InitialState(position.steps, position.microbatches, 0, tensors))
    assert_same(second, steps, run)
    same_bits(second.state_dict(corrected=False), plain_weights(run.tensors))
    second.save(tmp_path / "second")
    if "delay_correction" in then:
        same_bits(Checkpoint(tmp_path / "second", Manifest.load(tmp_path / "second")).weights(corrected=False),
                  plain_weights(run.tensors))


def factors_of(pipe: Pipeline) -> dict[str, float]:
    """By parameter."""
    return {name: each.factor for each in extrapolations(pipe).values() for name in each.values}


@pytest.mark.parametrize("then", [CUT | EXTRAPOLATE, {"schedule": "1f1b", "partition": [3, 5]}])
def test_a_checkpoint_that_does_not_state_its_factors_says_so(tmp_path: Path, then: dict[str, Any]) -> None:
    batches = rich_batches(4, 8)
    first = pipeline_of(rich_model, **CORRECTED)
    list(first.train(batches[:2]))
    first.save(tmp_path / "old")
    manifest = Manifest.load(tmp_path / "old")
    replace(manifest, tensors={name: entry for name, entry in manifest.tensors.items()
                               if not name.endswith(".factor")}).save(tmp_path / "old")
    second = pipeline_of(rich_model, **DECAY_AND_CLIP, **then)
    with pytest.warns(UserWarning, match="does not say by which factor 12 parameters look ahead, so they stay as they"):
        position = second.load(tmp_path / "old")
    same_bits(second.state_dict(), first.state_dict())
    tensors = {name: tensor for name, tensor in saved(first)[1].items() if not name.endswith(".factor")}
    steps = list(second.train(batches[2:]))
    begin = InitialState(position.steps, position.microbatches, 0, tensors)
    assert_same(second, steps, oracle_of(second, batches[2:], start=begin))
    with pytest.raises(UserError, match=r"not say by which factor 12 parameters, such as 'embed\.word\.weight', look"):
        Checkpoint(tmp_path / "old", Manifest.load(tmp_path / "old")).weights(corrected=False)
