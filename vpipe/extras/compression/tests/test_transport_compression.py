"""Compression between stages: the codecs, and runs that equal their oracles to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import rich_batches, rich_model
from oracles import DECAY_AND_CLIP, AdamW, equals_its_oracle
from torch import Tensor

from vpipe import Pipeline, Transfers
from vpipe.extras.compression.transport import LEAST_SCALE, Bf16, CompressedTransport, Int8, _parts
from vpipe.runtime.transport.transport import TensorSpec, TransferKey, TransferKind

NEAREST, STOCHASTIC = Int8(stochastic=False), Int8(stochastic=True)
CODECS: dict[str, Bf16 | Int8] = {"bf16": Bf16(), "int8": NEAREST, "int8 stochastic": STOCHASTIC}


def carried(codec: Bf16 | Int8, tensor: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode(tensor, seed), TensorSpec.from_tensor(tensor))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Carried:
    """What a transport is given to carry."""

    rank, ordered = 0, False

    def __init__(self) -> None:
        self.sent: list[list[Tensor]] = []

    def send(self, peer: int, key: TransferKey, tensors: list[Tensor]) -> None:
        self.sent.append(tensors)


def coded(key: TransferKey, tensors: list[Tensor], codecs: str = "int8", seed: int = 2) -> list[Tensor]:
    inner = Carried()
    CompressedTransport(inner, [codecs] * 3, seed).send(1, key, tensors)
    return inner.sent[0]


# -- codecs --------------------------------------------------------------------------------------------


@given(shape=st.lists(st.integers(0, 6), max_size=4), name=st.sampled_from(sorted(CODECS)),
       dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64,
                              torch.bool]))
@settings(deadline=None, max_examples=60)
def test_compressed_tensors_match_their_spec_and_are_smaller(shape: list[int], name: str, dtype: torch.dtype) -> None:
    codec, tensor = CODECS[name], torch.ones(shape, dtype=dtype)
    wire = codec.wire(TensorSpec.from_tensor(tensor))
    if wire is None:
        row = shape[-1] if shape else 1
        coded = tensor.numel() * 2 if name == "bf16" else tensor.numel() // max(row, 1) * (row + 4)
        assert not dtype.is_floating_point or not shape or coded >= tensor.nbytes
        return
    encoded = codec.encode(tensor, 0)
    assert TensorSpec.from_tensor(encoded) == wire
    assert encoded.nbytes < tensor.nbytes
    assert encoded.is_contiguous()
    assert torch.equal(codec.decode(encoded, TensorSpec.from_tensor(tensor)), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9,), (5, 12), (3, 7, 40), (40, 9000)])
def test_an_int8_number_is_off_by_half_a_scale_at_most(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (randn(*shape) * 10).to(dtype)
    scale = tensor.float().abs().amax(-1, keepdim=True) / 127
    rounded = torch.finfo(dtype).eps * tensor.float().abs().amax()
    for codec, most in ((NEAREST, 0.5), (STOCHASTIC, 1.0)):
        decoded = carried(codec, tensor)
        assert decoded.dtype == dtype
        assert (decoded.float() - tensor.float()).abs().le((most + 1e-2) * scale + rounded).all()


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_so_and_change_no_other_row(name: str, wrong: float) -> None:
    tensor = randn(3, 2, 300)
    tensor[1, 0, 200] = wrong
    decoded = carried(CODECS[name], tensor)
    if name == "bf16":
        assert torch.equal(decoded, tensor.bfloat16().float()) or decoded[1, 0, 200].isnan()
    else:
        assert decoded[1, 0].isnan().all()
        scales, _ = _parts(CODECS[name].encode(tensor, 0))
        assert scales[2].isnan(), "whatever the processor makes of a NaN as a code"
    decoded[1, 0] = 0.0
    assert decoded.isfinite().all()


@pytest.mark.parametrize("codec", [NEAREST, STOCHASTIC])
def test_rows_of_zeros_and_of_denormals(codec: Bf16 | Int8) -> None:
    tensor = torch.zeros(4, 16)
    tensor[1], tensor[2, 3], tensor[3] = 1e-40, 1e-44, 1e-30
    decoded = carried(codec, tensor)
    assert _parts(codec.encode(tensor, 0))[0].ge(LEAST_SCALE).all(), "each has an inverse"
    assert decoded.isfinite().all()
    assert torch.equal(decoded[0], tensor[0])
    assert (decoded - tensor)[1:3].abs().le(LEAST_SCALE).all()
    assert torch.allclose(decoded[3], tensor[3], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("codec", [NEAREST, STOCHASTIC])
def test_the_largest_numbers_keep_their_sign(codec: Bf16 | Int8) -> None:
    most = torch.finfo(torch.float32).max
    for seed in range(20):
        decoded = carried(codec, torch.tensor([[most, -most, 1.0, 0.0], [1.0, -1.0, 1.0, -1.0]]), seed)
        assert torch.allclose(decoded, torch.tensor([[most, -most, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]]), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_layout_does_not_matter(name: str) -> None:
    tensor = randn(6, 4, 10)
    for view in (tensor.transpose(0, 1), tensor[::2, 1:], tensor[:1].expand(5, 4, 10)):
        assert not view.is_contiguous()
        assert torch.equal(CODECS[name].encode(view, 3), CODECS[name].encode(view.contiguous(), 3))


def test_a_decoded_tensor_is_a_leaf_that_wants_what_its_spec_wants() -> None:
    tensor = randn(2, 8).requires_grad_() * 1.0
    for codec in CODECS.values():
        wire = codec.encode(tensor, 0)
        assert not wire.requires_grad
        decoded = codec.decode(wire, TensorSpec.from_tensor(tensor))
        assert decoded.is_leaf
        assert decoded.requires_grad
        assert not codec.decode(wire, TensorSpec((2, 8), torch.float32, wants_gradient=False)).requires_grad


def test_stochastic_rounding_is_right_on_average_and_follows_its_seed() -> None:
    tensor = randn(2, 200)
    scale = tensor.abs().amax(-1, keepdim=True) / 127
    mean = torch.stack([carried(STOCHASTIC, tensor, seed) for seed in range(2000)]).mean(0)
    # Standard deviation of the mean: at most half a scale over sqrt(2000); rounding to 1/256 adds 1/512.
    assert (mean - tensor).abs().le(scale * (5 * 0.5 / 2000**0.5 + 1 / 512)).all()
    assert torch.equal(STOCHASTIC.encode(tensor, 5), STOCHASTIC.encode(tensor, 5))
    assert not torch.equal(STOCHASTIC.encode(tensor, 5), STOCHASTIC.encode(tensor, 6))
    assert torch.equal(NEAREST.encode(tensor, 5), NEAREST.encode(tensor, 6))


def test_every_tensor_is_rounded_by_a_chance_of_its_own() -> None:
    def of(key: TransferKey, number: int, seed: int = 2) -> bytes:
        return coded(key, [randn(2, 64)] * 2, "int8_stochastic", seed)[number].numpy().tobytes()

    cases = [(TransferKey(*key), tensor) for key, tensor in (
        (("F", 2, 5), 0), (("F", 2, 6), 0), (("F", 1, 5), 0), (("B", 1, 5), 0), (("F", 2, 5), 1))]
    assert len({of(*case) for case in cases} | {of(*cases[0], seed=3)}) == 6
    assert of(*cases[0]) == of(*cases[0])


def test_sending_does_not_change_the_tensor() -> None:
    gradient = randn(3, 16)
    before = gradient.clone()
    for number in range(3):
        coded(TransferKey(TransferKind.GRADIENTS, 0, number), [gradient])
    assert torch.equal(gradient, before)


# -- runs ----------------------------------------------------------------------------------------------


def run(schedule: str, partition: list[int], codecs: str | list[str], **arguments: Any) -> Pipeline:
    """A run that equals its oracle."""
    return equals_its_oracle(rich_model, rich_batches(3, 8, lengths=(6, 9)), schedule=schedule, partition=partition,
                             compress=codecs, **DECAY_AND_CLIP, **arguments)[0]


@pytest.mark.parametrize(("schedule", "partition"), [("zb_v", [2, 2, 2, 2]), ("interleaved", [2, 2, 2, 2]),
                                                     ("zb_v", [4, 4])])
def test_stages_on_one_rank_pass_their_tensors_as_they_are(schedule: str, partition: list[int]) -> None:
    pipe = run(schedule, partition, "int8")
    if len(partition) == 2:
        assert pipe.placement == ((0,), (0,))
        assert all(worker.transport.bytes_sent == 0 for worker in pipe.engine.workers.values())


def test_the_codec_is_seen_in_the_numbers_and_in_the_bytes() -> None:
    sent, losses = {}, {}
    for codecs in ("none", "bf16", "int8"):
        pipe = Pipeline(rich_model(tied=False), AdamW(), stages=[3, 5], schedule="1f1b", microbatches=2,
                        transfers=Transfers(compress=codecs), seed=2)
        losses[codecs] = [step.loss for step in pipe.train(rich_batches(2, 4))]
        workers = pipe.engine.workers.values()
        sent[codecs] = sum(worker.transport.bytes_sent for worker in workers)
    assert len(set(map(tuple, losses.values()))) == 3
    # Per microbatch of 2 x 6 rows of 12: the states, the skip and a mask of a byte each, and two gradients.
    assert sent == {"none": 4 * 12 * (4 * 48 + 1), "bf16": 4 * 12 * (4 * 24 + 1), "int8": 4 * 12 * (4 * 16 + 1)}
