"""Small models that have what pipelines get wrong: dropout, skips, ties, masks, raw parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vpipe import Layer, Model

WORDS, WIDTH, CLASSES = 23, 12, 5


class Embed(nn.Module):
    """ids [B,S] int64 -> hidden [B,S,H], a skip [B,S,H] read far later, a mask [B,S] bool (no gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.word(ids)
        return hidden, hidden * 0.5, ids > 3


class RawMatmul(nn.Module):
    """x @ self.w on the raw parameter: what breaks when a version is swapped behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(torch.tanh(hidden @ self.w), 0.2, self.training)


class Mixed(nn.Module):
    """Reads the skip and the mask; passes nothing of them on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
        mixed = self.norm(hidden + self.linear(skip * hidden))
        return F.dropout(mixed.masked_fill(~mask[..., None], 0.0), 0.1, self.training)


class Head(nn.Module):
    """Scores over the words, tied to the embedding, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.decoder(hidden).flatten(0, 1), labels.flatten())


def rich_model(tied: bool = True) -> Model:
    """Eight layers: embedding with a skip and a mask, raw matmuls, skip readers, a tied head."""
    return Model([
        Layer("embed", Embed, ("ids",), ("h", "skip", "mask")),
        Layer("raw0", RawMatmul),
        Layer("mix0", Mixed, ("h", "skip", "mask"), ("h",)),
        Layer("raw1", RawMatmul),
        Layer("mix1", Mixed, ("h", "skip", "mask"), ("h",)),
        Layer("raw2", RawMatmul),
        Layer("mix2", Mixed, ("h", "skip", "mask"), ("h",)),
        Layer("head", Head, ("h", "labels"), ("loss",), ties={"decoder.weight": "embed.word.weight"} if tied else {}),
    ], batch=("ids", "labels"))


def untied_model() -> Model:
    """The same without the tie."""
    return rich_model(tied=False)


def rich_batches(batches: int, samples: int, seed: int = 3, lengths: tuple[int, ...] = (6,)) -> list[dict[str, Tensor]]:
    """Random batches; ``lengths`` are taken in turn, so shapes may change from batch to batch."""
    random = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(WORDS, (samples, length), generator=random)

    return [{"ids": ids(lengths[i % len(lengths)]), "labels": ids(lengths[i % len(lengths)])} for i in range(batches)]


def cut(layers: int, stages: int) -> list[int]:
    """Layers per stage; the last stages take what is left."""
    return [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]


def plain_sequential() -> Model:
    """An ``nn.Sequential`` of one's own."""
    torch.manual_seed(5)
    return Model.sequential(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16),
                                          nn.Tanh(), nn.Linear(16, CLASSES)), nn.CrossEntropyLoss())


def sequential_batches(batches: int, samples: int) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(4)
    for _ in range(batches):
        yield {"input": torch.randn(samples, WIDTH, generator=random),
               "target": torch.randint(CLASSES, (samples,), generator=random)}


class Kinds(nn.Module):
    """Many dtypes and layouts at once: with and without a gradient, empty, without dimensions, not contiguous."""

    OUTPUTS = ("h", "f64", "bf16", "c64", "conj", "i32", "i64", "flags", "empty", "no_samples", "scalar", "step",
               "turned", "spread")

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        h = self.word(ids)
        c64 = torch.complex(h, 0.5 * h)
        return (h, h.double() / 3, h.bfloat16(), c64, c64.conj() * self.scale, ids.int(), ids * 2**40, ids > 3,
                h[:, :0], torch.empty(0, 3), self.scale * 1.0, torch.tensor(7), h.transpose(1, 2),
                h[:, :1].expand_as(h))


class Lazy(nn.Module):
    """Hands on a conjugate and a negation that torch has not carried out, and swaps two names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, c64: Tensor, conj: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return conj * self.scale, c64.conj(), c64.conj().imag


class Gathered(nn.Module):
    """Reads all kinds, insists on each dtype and makes one loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, *kinds: Tensor) -> Tensor:
        got = dict(zip((*Kinds.OUTPUTS, "negative", "labels"), kinds, strict=True))
        dtypes = [str(t.dtype).removeprefix("torch.") for t in kinds]
        assert dtypes == ["float32", "float64", "bfloat16", "complex64", "complex64", "int32", "int64", "bool",
                          "float32", "float32", "float32", "int64", "float32", "float32", "float32", "int64"], dtypes
        assert (got["empty"].shape[1], got["no_samples"].numel(), got["step"].dim(), int(got["step"])) == (0, 0, 0, 7)
        assert torch.equal(got["i32"].long() * 2**40, got["i64"])
        assert torch.equal(got["i32"] > 3, got["flags"])
        total = (got["c64"] * got["conj"]).real.mean() + got["f64"].square().mean().float()
        total = total + got["negative"].cos().mean() + got["scalar"] * got["turned"].sin().mean()
        total = total + got["bf16"].float().square().mean() + got["spread"].square().mean() + got["empty"].sum()
        return self.scale * total + F.cross_entropy(got["h"].flatten(0, 1), got["labels"].flatten() % WIDTH)


def dtype_model() -> Model:
    """Five layers: everything of :class:`Kinds` crosses every cut."""
    return Model([Layer("kinds", Kinds, ("ids",), Kinds.OUTPUTS),
                  Layer("raw0", RawMatmul),
                  Layer("lazy", Lazy, ("c64", "conj"), ("c64", "conj", "negative")),
                  Layer("raw1", RawMatmul),
                  Layer("gathered", Gathered, (*Kinds.OUTPUTS, "negative", "labels"), ("loss",))],
                 batch=("ids", "labels"))


class Normed(nn.Module):
    """Batch normalisation: buffers, one of them an integer without dimensions.

    What it hands on is contiguous: a cut hands on contiguous memory, and kernels sum in another order over other
    layouts, so that a transposed output would give the same numbers but for the last bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(hidden).transpose(1, 2)).transpose(1, 2)).contiguous()


class Words(nn.Module):
    """ids [B,S] int64 -> hidden [B,S,H]."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.word(ids)


def between(*layers: Layer) -> Model:
    """Embedding, the layers given, head."""
    return Model([Layer("words", Words, ("ids",), ("h",)), *layers, Layer("head", Head, ("h", "labels"), ("loss",))],
                 batch=("ids", "labels"))


def norm_model() -> Model:
    """Six layers, four of which keep running statistics."""
    return between(*(Layer(f"norm{i}", Normed) for i in range(4)))


class Frozen(Words):
    """Words that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class HalfFrozen(RawMatmul):
    """A parameter that is trained beside one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.fixed


class FrozenDecoder(Head):
    """Trains its bias alone."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder.weight.requires_grad_(False)


def frozen_front() -> Model:
    """The first layer trains nothing, so no gradient goes back to it, nor to its weight that the last one uses, too;
    another layer trains half of what it has."""
    tied = {"decoder.weight": "words.word.weight"}
    return Model([Layer("words", Frozen, ("ids",), ("h",)), Layer("half", HalfFrozen), Layer("raw", RawMatmul),
                  Layer("head", FrozenDecoder, ("h", "labels"), ("loss",), tied)], batch=("ids", "labels"))


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its parameters beside the table that ``named_parameters`` reads.

    What it hands on is contiguous, see :class:`Normed`: its output in fp16 is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lstm(hidden)[0].contiguous()


def recurrent_model() -> Model:
    """Five layers, three of them recurrent."""
    return between(*(Layer(f"lstm{i}", Recurrent) for i in range(3)))


class CarriedRecurrent(Recurrent):
    """An LSTM that goes on from slice to slice of a sequence."""

    def forward(self, hidden: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        output, state = self.lstm(hidden, carried or None)
        return output if carried is None else (output, *state)


class CarriedAttention(nn.Module):
    """Causal attention in fp32 that keeps the keys and values of the slices before."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((), 3.0))  # which autograd saves

    def forward(self, hidden: Tensor, carried: tuple[Tensor, ...] | None = None) -> Any:
        query, key, value = (part.float() / self.scale for part in self.project(hidden).chunk(3, -1))
        if carried:
            key, value = (torch.cat(both, 1) for both in zip(carried, (key, value), strict=True))
        scores = (query @ key.mT).masked_fill(
            torch.ones(query.shape[1], key.shape[1]).tril(key.shape[1] - query.shape[1]) == 0, -torch.inf)
        output = hidden + self.out((scores.softmax(-1) @ value).to(hidden.dtype))
        return output if carried is None else (output, key, value)


def sliced_model() -> Model:
    """Six layers that take slices: two keep keys and values, one a state; dropout and a tie."""
    attention = {"carried": ("keys", "values")}
    return Model([
        Layer("words", Words, ("ids",), ("h",), carried=()), Layer("attention0", CarriedAttention, **attention),
        Layer("lstm", CarriedRecurrent, carried=("hidden", "cell")), Layer("raw", RawMatmul, carried=()),
        Layer("attention1", CarriedAttention, **attention),
        Layer("head", Head, ("h", "labels"), ("loss",), {"decoder.weight": "words.word.weight"}, carried=()),
    ], batch=("ids", "labels"), labels="labels")


class Decoded(nn.Module):
    """Through the words and back: uses a tied weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Parameter(torch.zeros(WORDS, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        words = F.linear(hidden, self.decoder).softmax(-1)
        return torch.tanh(words @ self.decoder + self.linear(hidden))


def thrice_tied_model() -> Model:
    """Six layers, three of which use the weight of the first."""
    tied = {"decoder": "words.word.weight"}
    return Model([Layer("words", Words, ("ids",), ("h",)), Layer("raw0", RawMatmul),
                  Layer("decoded0", Decoded, ties=tied), Layer("raw1", RawMatmul),
                  Layer("decoded1", Decoded, ties=tied),
                  Layer("head", Head, ("h", "labels"), ("loss",), ties={"decoder.weight": "words.word.weight"})],
                 batch=("ids", "labels"))


class Checkpointed(RawMatmul):
    """Drops its own activations and computes them again in backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)


def checkpointed_model() -> Model:
    """Five layers, three of which checkpoint themselves."""
    return between(*(Layer(f"own{i}", Checkpointed) for i in range(3)))


class Shortened(Words):
    """Cuts every sample after the longest of them: a shape that depends on the values."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[:, :int(ids.max())]


class Average(nn.Module):
    """hidden -> the mean of its numbers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean()


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden).mean()


def data_dependent_model() -> Model:
    """Two layers, the first of which writes a tensor as long as its values say."""
    return Model([Layer("short", Shortened, ("ids",), ("h",)), Layer("mean", Mean, ("h",), ("loss",))], batch=("ids",))


class Shorten(nn.Module):
    """ids [B,S] int64 -> hidden [B,S] float32, the ids as int16."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids * self.scale, ids.to(torch.int16)


class Shift(nn.Module):
    """Adds the short ids to what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor, short: Tensor) -> Tensor:
        return hidden * self.scale + short


class MeanSquare(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden ** 2).mean()


def int16_model() -> Model:
    """Tensors of a dtype that nccl does not carry."""
    return Model([Layer("shorten", Shorten, ("ids",), ("h", "short")), Layer("one", Shift, ("h", "short"), ("h",)),
                  Layer("two", Shift, ("h", "short"), ("h",)), Layer("loss", MeanSquare, ("h",), ("loss",))],
                 batch=("ids",))
