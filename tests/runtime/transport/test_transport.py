"""Transfers: within one process, and what the one between processes writes on its envelopes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from golden import refusal

from vpipe.errors import RunError, UserError
from vpipe.runtime.transport.process_group import _tag
from vpipe.runtime.transport.transport import (
    MOST_TENSORS,
    SPECS_SPEC,
    InProcessTransport,
    Mailbox,
    TensorSpec,
    TransferKey,
    TransferKind,
    decode_specs,
    specs_as_tensor,
)

ONE = TensorSpec((1,), torch.float32, wants_gradient=False)


def test_tensors_change_hands_without_a_copy() -> None:
    room: Mailbox = {}
    left, right = InProcessTransport(0, room), InProcessTransport(1, room)
    key, tensor = TransferKey(TransferKind.ACTIVATIONS, 1, 3), torch.arange(3.0)
    right.post(0, key, [])
    left.send(1, key, [tensor, tensor.int()])
    assert list(room) == [(0, 1, key)]
    first, second = right.receive(0, key)
    assert first is tensor
    assert second.dtype == torch.int32
    assert not room
    assert (left.bytes_sent, right.bytes_sent) == (24, 0)
    left.finish()
    right.finish()


def test_messages_never_received_are_named() -> None:
    room: Mailbox = {}
    left, right = InProcessTransport(0, room), InProcessTransport(1, room)
    left.send(1, TransferKey(TransferKind.ACTIVATIONS, 1, 0), [torch.zeros(1)])
    left.send(1, TransferKey(TransferKind.TIED_GRADIENTS, 0, 5), [torch.zeros(1)])
    left.finish()
    assert refusal(right.finish, kind=RunError) == (
        "error: 2 transfer(s) were never taken: the activations of microbatch 0 for stage 1, "
        "the tied gradient of update 5 of tie 0 (rank 1)\n"
        "hint: this is a defect of the schedule or of vpipe: please report it")


def test_taking_what_did_not_arrive_is_an_error() -> None:
    with pytest.raises(KeyError):
        InProcessTransport(0, {}).receive(1, TransferKey(TransferKind.ACTIVATIONS, 1, 0))


@pytest.mark.parametrize(("kind", "text"), [
    ("F", "the activations of microbatch 7 for stage 2"), ("B", "the gradients of microbatch 7 for stage 2"),
    ("W", "tied weights, version 7 of tie 2"), ("G", "the tied gradient of update 7 of tie 2"),
    ("N", "the gradient norms of update 7 from stage 2"), ("L", "the loss of step 7 from stage 2")])
def test_transfers_have_names_in_words(kind: str, text: str) -> None:
    assert str(TransferKey(TransferKind(kind), 2, 7)) == text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool,
                                   torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,)])
def test_specs_arrive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    specs = [TensorSpec(shape, dtype, dtype.is_floating_point or dtype.is_complex), ONE]
    told = specs_as_tensor(specs)
    assert TensorSpec.from_tensor(told) == SPECS_SPEC
    assert decode_specs(told.numpy().tobytes()) == specs


def test_too_many_tensors_and_too_long_shapes_are_refused() -> None:
    assert len(decode_specs(specs_as_tensor([ONE] * MOST_TENSORS).numpy().tobytes())) == 62
    assert refusal(specs_as_tensor, [ONE] * 63) == "error: 63 tensors cross a cut between stages\nhint: at most 62 can"
    with pytest.raises(UserError, match=r"shapes of 40 tensors between stages take [0-9]+ bytes\nhint: at most 4096"):
        specs_as_tensor([TensorSpec((1,) * 60, torch.float32, wants_gradient=False)] * 40)


def test_tensors_under_way_at_one_time_have_tags_of_their_own() -> None:
    keys = [TransferKey(*key) for key in product("FBWGLN", (0, 1, 1023), (0, 1, 4095))]
    tags = [_tag(key, number, 64, pipeline) for key in keys for number in (0, 1, MOST_TENSORS)
            for pipeline in (0, 1, 15)]
    assert len(set(tags)) == len(tags)
    assert min(tags) >= 0
    assert max(tags) < 2**31
    first, later = TransferKey(TransferKind.ACTIVATIONS, 1, 0), TransferKey(TransferKind.ACTIVATIONS, 1, 256)
    assert _tag(later, 0, 4, 3) == _tag(first, 0, 4, 3), "numbers come round long after"
