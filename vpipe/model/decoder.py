"""The layers of a decoder that learns the next token, half a block each."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vpipe.model.layer import LOSS, Layer, Model


def decoder(blocks: int, first: Callable[[], nn.Module], attention: Callable[[], nn.Module],
            mlp: Callable[[], nn.Module], head: Callable[[], nn.Module], *, tied: bool) -> Model:
    """2n + 1 layers for n blocks, from what builds each.

    Batch fields, int64 [B, S]: ``input_ids``, and ``labels``, of every token the one that follows it; -100 where there
    is none to learn. The only tensor between layers is ``h`` [B, S, H].

    Args:
        first: embeddings and the first block's attention.
        tied: whether the head shares the token embeddings' weight.
    """
    layers = [Layer("block0.attention", first, inputs=("input_ids",))]
    for i in range(blocks):
        if i > 0:
            layers.append(Layer(f"block{i}.attention", attention))
        layers.append(Layer(f"block{i}.mlp", mlp))
    ties = {"decoder.weight": "block0.attention.embeddings.token.weight"} if tied else {}
    layers.append(Layer("head", head, inputs=("h", "labels"), outputs=(LOSS,), ties=ties))
    return Model(layers, batch=("input_ids", "labels"))
