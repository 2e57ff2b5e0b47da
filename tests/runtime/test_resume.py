"""A run that was saved and goes on computes what it would have, bit for bit, however it is then cut and carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from golden import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from models import norm_model, rich_batches, rich_model, untied_model
from oracles import DECAY_AND_CLIP, assert_same, oracle_of, pipeline_of, saved
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.checkpoint.manifest import Position
from vpipe.errors import UserError
from vpipe.testing import InitialState

MICROBATCHES = 4
MUON = OptimizerSettings("muon", 0.02, weight_decay=0.1, matrices=hidden_matrices(rich_model()))
EXTRAPOLATED = {"delay_correction": 1.0}


def every(count: int) -> Callable[[int], int]:
    """An empty pipeline after each so many steps."""
    return lambda steps: (steps // count + 1) * count


def pipeline(model: Model, **arguments: Any) -> Pipeline:
    return pipeline_of(model, **DECAY_AND_CLIP, **{"partition": [2, 2, 2, 2], **arguments})


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """As sets of bits: NaN is itself."""
    assert sorted(ours) == sorted(theirs)
    assert not [name for name in ours if ours[name].dtype != theirs[name].dtype
                or not torch.equal(ours[name].nan_to_num(9e9), theirs[name].nan_to_num(9e9))]


OTHER_CUTS: list[dict[str, Any]] = [
    {"schedule": "gpipe", "partition": [8]}, {"schedule": "1f1b", "partition": [1, 6, 1], "recompute": 1.0},
    {"schedule": "zb_h1", "partition": [3, 3, 2]}, {"schedule": "interleaved"},
    {"schedule": "hanayo", "partition": [2, 2, 2, 2]}]


@pytest.mark.parametrize("words", [{}, {"optimizer": MUON}, {"precision": "bf16"}, {"precision": "bf16_pure"},
                                   {"precision": "fp16"}])
def test_with_a_flush_any_cut_and_schedule_goes_on_alike(words: dict[str, Any]) -> None:
    """From each to the next, one batch each; untied weights, so that all orders of sums are those of plain PyTorch."""
    batches, place, losses = rich_batches(6, 8), None, []
    for arguments, batch in zip([*OTHER_CUTS, OTHER_CUTS[0]], batches, strict=True):
        pipe = pipeline(untied_model(), **words, **arguments)
        if place is not None:
            pipe.engine.restore(*place)
        losses += [step.loss for step in pipe.train([batch])]
        place = saved(pipe)
    plain = oracle_of(pipe, batches)
    assert losses == plain.losses
    same_bits(place[1], plain.tensors)


@pytest.mark.parametrize("model", [rich_model, norm_model])
@pytest.mark.parametrize("widths", [[[0, 1], [2]], [[0], [1, 2, 3]], [[0, 1], [2, 3]]])
def test_with_a_flush_ties_and_other_widths_go_on_as_the_oracle_from_there(model: Callable[[], Model],
                                                                           widths: list[list[int]]) -> None:
    batches = rich_batches(4, 8)
    first = pipeline(model(), schedule="1f1b", partition=[2, 4 if model is norm_model else 6], placement=[[0, 1], [2]])
    list(first.train(batches[:2]))
    position, tensors = saved(first)
    second = pipeline(model(), schedule="1f1b", partition=[4, len(model()) - 4], placement=widths)
    second.engine.restore(position, tensors)
    steps = list(second.train(batches[2:]))
    assert steps[0].index == 2
    assert_same(second, steps, oracle_of(second, batches[2:], start=InitialState(2, 8, 0, tensors)))


ASYNCHRONOUS: list[dict[str, Any]] = [
    {"schedule": "pipedream", "partition": [2, 2, 2, 2], "warmup_depth": [6, 4, 2, 0]},
    {"schedule": "pipedream", "partition": [2, 2, 2, 2]}, {"schedule": "pipedream", "partition": [1, 6, 1]},
    {"schedule": "pipedream", "partition": [3, 5], "update_every": 2}, {"schedule": "2bw", "partition": [3, 3, 2]},
    {"schedule": "pipedream_vertical_sync", "partition": [2, 3, 3]}, {"schedule": "pipedream", "partition": [8]},
    {"schedule": "pipedream", "partition": [4, 4], "placement": [[0, 1], [2]]},
    {"schedule": "pipedream", "partition": [2, 4, 2], "placement": [[0], [1, 2, 3], [4, 5]]}]


@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_without_a_flush_any_cut_goes_on_as_its_oracle_from_there(data: st.DataObject) -> None:
    """Two arrangements after each other, the second from anywhere in a batch; both run empty on the way."""
    batches, start = rich_batches(8, 8), InitialState()
    alone = [{name: part[i] for name, part in parts.items()} for batch in batches
             for parts in [{name: tensor.chunk(MICROBATCHES) for name, tensor in batch.items()}]
             for i in range(MICROBATCHES)]
    for _ in range(2):
        arguments = data.draw(st.sampled_from(ASYNCHRONOUS))
        cadence, pauses = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        pipe = pipeline(rich_model(), **arguments, **EXTRAPOLATED if data.draw(st.booleans()) else {})
        span = cadence * pipe.lowered.assignment.per_step
        if start.tensors:
            pipe.engine.restore(Position(start.steps, start.microbatches), start.tensors)
        losses, left = [], pauses * cadence
        for step in pipe.engine.training.train(batches[start.microbatches // MICROBATCHES:],
                                      pauses=lambda done, more=cadence: done + more):
            losses.append(step.loss)
            left -= 1
            if not left:
                break
        position, tensors = saved(pipe)
        assert position.microbatches == min(start.microbatches + pauses * span, len(alone))
        oracle = oracle_of(pipe, alone[start.microbatches:position.microbatches], start=start, microbatches=1,
                           drained_at=range(start.microbatches, position.microbatches, span))
        assert losses == oracle.losses
        same_bits(tensors, oracle.tensors)
        start = InitialState(position.steps, position.microbatches, 0, tensors)


def test_leaving_off_before_a_pause_drains_no_further_than_that() -> None:
    pipe = pipeline(rich_model(), schedule="pipedream")
    for step in pipe.engine.training.train(rich_batches(6, 8), pauses=every(7)):
        if step.index == 4:
            break
    assert [step.index for step in pipe.engine.training.drain()] == [5, 6]
    assert pipe.engine.training.position == Position(7, 7, 3, 14)


def test_a_pause_may_be_named_while_the_pipeline_is_full_where_no_rank_can_have_begun_what_follows() -> None:
    def trained(pauses: list[int], later: Mapping[int, int]) -> Mapping[str, Tensor]:
        def next_pause(done: int) -> int | None:
            return min((one for one in named if one > done), default=None)

        pipe, named = pipeline(rich_model(), schedule="pipedream"), [*pauses]
        assert pipe.lowered.steps_begun == 4
        for step in pipe.train(rich_batches(3, 8), pauses=next_pause):
            named += [later[step.index]] if step.index in later else []
        found: Mapping[str, Tensor] = pipe.state_dict()
        return found

    same_bits(trained([9], {0: 3, 2: 7}), trained([7, 9], {}))
    same_bits(trained([9], {3: 7}), trained([9], {}))  # update 7 is under way
    with pytest.raises(AssertionError):
        same_bits(trained([7, 9], {}), trained([9], {}))


def test_another_number_of_microbatches_goes_on_where_it_falls_between_two() -> None:
    numbers = Position(6, 6, samples=12).as_numbers(4)
    assert numbers == {"microbatches": 6, "begun": 2, "batch": 4}
    assert Position.from_numbers(6, 12, numbers, 2) == Position(6, 3, 1, 12)
    assert Position.from_numbers(6, 12, numbers, 8) == Position(6, 12, 4, 12)
    assert Position.from_numbers(0, 0, {}, 8) == Position(0, 0)
    with pytest.raises(UserError, match="the checkpoint of step 6 does not say how many microbatches are done"):
        Position.from_numbers(6, 12, {}, 8)
    for key, value in {"batch": 0, "microbatches": None, "begun": 4, "batch ": "x"}.items():
        with pytest.raises(UserError, match=f"does not say how many microbatches are done: it has .*{value!r}"):
            Position.from_numbers(6, 12, {**numbers, key.strip(): value}, 4)
    assert refusal(Position.from_numbers, 6, 12, numbers, 1) == (
        "error: the checkpoint is of a run with 4 microbatches per batch, and was made after 2 of them: with 1 that is "
        "within one\nhint: go on with 4 microbatches per batch, or from another checkpoint")


# -- what is refused -----------------------------------------------------------------------------------


class Keeps(torch.optim.SGD):
    """Puts things into its state."""

    def __init__(self, parameters: list[nn.Parameter], value: object) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in parameters:
            self.state[parameter]["odd"] = value


class Counts(torch.optim.SGD):
    """Keeps a number in its parameter groups."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["dampening"] = self.param_groups[0]["dampening"] + 0.5


@pytest.mark.parametrize(("value", "name", "dtype"), [(3, "odd#int", torch.int64), (0.1, "odd#float", torch.float64)])
def test_numbers_of_an_optimizer_come_back_as_they_were(value: float, name: str, dtype: torch.dtype) -> None:
    pipe = pipeline(rich_model(), schedule="1f1b", optimizer=partial(Keeps, value=value))
    place = saved(pipe)
    held = place[1][f"optim.raw0.w.{name}"]
    assert (held.dtype, held.dim(), held.item()) == (dtype, 0, value)
    fresh = pipeline(rich_model(), schedule="1f1b", optimizer=partial(Keeps, value=0))
    fresh.engine.restore(*place)
    states = [state for worker in fresh.engine.workers.values()
              for optimizer in worker.optimizer_steps.optimizers.values()
              for state in optimizer.optimizers[0].state.values()]
    assert [(state["odd"], type(state["odd"])) for state in states] == [(value, type(value))] * len(states)


class Extra(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self) -> object:
        return "seen"

    def set_extra_state(self, state: object) -> None:
        """Not in this test."""


@pytest.mark.parametrize(("arguments", "text"), [
    ({"optimizer": partial(Keeps, value=None)}, "the optimizer keeps NoneType None as 'optim.embed.word.weight.odd'"),
    ({"optimizer": partial(Keeps, value=True)}, "the optimizer keeps bool True as 'optim.embed.word.weight.odd'"),
    ({"optimizer": partial(Counts, lr=0.1)}, "'dampening' of the parameter groups of Counts has changed"),
    ({"model": Model([Layer("odd", lambda: Extra(3, 3), ("x",)), Layer("loss", nn.Flatten, ("h",), ("loss",))], ("x",)),
      "partition": [1, 1]}, "'odd._extra_state' in the state of its layer is str, not a tensor")])
def test_state_that_no_checkpoint_can_hold_is_named(arguments: dict[str, Any], text: str) -> None:
    model = arguments.pop("model", None)
    pipe = pipeline(model or rich_model(), **{"schedule": "1f1b", **arguments})
    if model is None:
        list(pipe.train(rich_batches(1, 8)))
    assert text in refusal(pipe.engine.checkpoint_state)


def test_places_from_which_a_pipeline_cannot_go_on() -> None:
    pipe = pipeline(rich_model(), schedule="1f1b")
    position, tensors = saved(pipe)
    lacking = {name: tensor for name, tensor in tensors.items() if "raw" not in name}
    with pytest.raises(UserError, match=r"2 tensors of the model missing in the checkpoint: raw0\.w, raw1\.w"):
        pipe.engine.restore(position, {**lacking, "model.raw2.w": tensors["model.raw2.w"]})
    list(pipe.train(rich_batches(1, 8)))
    with pytest.raises(UserError, match="training has begun: 1 step done\nhint: load a checkpoint into a new"):
        pipe.engine.restore(position, tensors)
