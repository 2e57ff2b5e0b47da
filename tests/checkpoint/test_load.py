"""The checkpoint of another model is refused before anything is loaded, with what differs first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vpipe.checkpoint.manifest import Manifest, TensorEntry, TensorKind
from vpipe.errors import UserError
from vpipe.model.layer import Layer
from vpipe.model.model import Model


class Block(nn.Module):
    """A parameter, a saved buffer and one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h)


class Head(nn.Module):
    """Its weight is that of the first layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decoder = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return self.decoder(h).mean()


def model(width: int = 4, blocks: int = 2) -> Model:
    return Model([*(Layer(f"block.{i}", lambda: Block(width), ("x",) if i == 0 else ("h",)) for i in range(blocks)),
                  Layer("head", lambda: Head(width), ("h",), ("loss",), {"decoder.weight": "block.0.linear.weight"})],
                 batch=("x",))


def kinds_of(model: Model) -> dict[str, TensorKind]:
    return {name: TensorKind.of(tensor) for name, tensor in model.outline().items()}


def manifest_of(kinds: dict[str, TensorKind]) -> Manifest:
    file = "rank0.safetensors"
    entries = {f"model.{name}": TensorEntry(kind.shape, kind.dtype, file) for name, kind in kinds.items()}
    return Manifest(40, 0, 0, tensors={**entries, "optim.x.y.exp_avg": TensorEntry((9,), "float32", file)})


def test_it_wants_what_a_state_dict_has_with_tied_weights_where_they_are_owned() -> None:
    assert list(map(str, kinds_of(model()).items())) == list(map(str, {
        "block.0.seen": TensorKind((), "int64"), "block.0.linear.weight": TensorKind((4, 4), "float32"),
        "block.0.linear.bias": TensorKind((4,), "float32"), "block.1.seen": TensorKind((), "int64"),
        "block.1.linear.weight": TensorKind((4, 4), "float32"), "block.1.linear.bias": TensorKind((4,), "float32"),
        "head.decoder.bias": TensorKind((4,), "float32")}.items()))


@pytest.mark.parametrize(("other", "kinds", "text"), [
    (model(width=6), {}, r"the checkpoint of step 40 is of another model: 'block\.0\.linear\.weight' is \[6, 6\] "
                         r"float32 in the model and \[4, 4\] float32 in the checkpoint; .*; and 2 more\n"
                         "hint: resume with the model section"),
    (model(blocks=3), {}, r"'block\.2\.seen' \[\] int64 is not in the checkpoint; 'block\.2\.linear\.w"),
    (model(blocks=1), {}, r"'block\.1\.seen' \[\] int64 of the checkpoint is not in the model; '"),
    (model(), {"head.decoder.bias": TensorKind((4,), "float64")},
     r"'head\.decoder\.bias' is \[4\] float32 in the model and \[4\] float64")])
def test_what_differs_is_named_with_both(other: Model, kinds: dict[str, TensorKind], text: str) -> None:
    with pytest.raises(UserError, match=text):
        manifest_of(kinds_of(model()) | kinds).check_compatible(other)


def test_no_weights_are_made_and_the_generator_is_left_alone() -> None:
    state, devices = torch.get_rng_state(), []

    def build() -> nn.Module:
        module = Head(5)
        devices.append(module.decoder.weight.device.type)
        return module

    Model([Layer("head", build, ("x",), ("loss",))], batch=("x",)).outline()
    assert devices == ["meta"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_that_reads_its_weights_while_it_is_made_is_made_in_full() -> None:
    def build() -> nn.Module:
        module = Head(5)
        assert module.decoder.weight.sum().item() != 0.0
        return module

    found = kinds_of(Model([Layer("head", build, ("x",), ("loss",))], batch=("x",)))
    assert found["head.decoder.weight"] == TensorKind((5, 5), "float32")
