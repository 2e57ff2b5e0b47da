"""Parts that the transformer families share: keys of their configs, attention, the layers of a decoder, its loss.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, a attention heads, g heads of keys and
values, d head size, v vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes  # without a public name

from vpipe import Layer, Model
from vpipe.app.families import LARGEST_SIZE, MOST_BLOCKS
from vpipe.app.families import tensor_parallel as tp
from vpipe.app.families.dropout import Dropout
from vpipe.app.families.experts import BALANCE, Mixture
from vpipe.app.families.kv_cache import KeyValueCache
from vpipe.errors import Problem, UserError, nearest

Positive = float
"""Type of a config's field that may be any number above 0."""

Blocks = int
"""Type of a config's field with a model's number of blocks."""

TokenId = int
"""Type of a config's field with the id of a token."""

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: type(value) is int and 1 <= value <= LARGEST_SIZE,
            f"it must be an integer from 1 to {LARGEST_SIZE:,}"),
    "Blocks": (lambda value: type(value) is int and 1 <= value <= MOST_BLOCKS,
               f"it must be an integer from 1 to {MOST_BLOCKS:,}"),
    "TokenId": (lambda value: type(value) is int and value >= 0, "it must be an integer from 0 on"),
    "float": (lambda value: type(value) in (int, float) and 0 <= value < 1,
              "it must be a number from 0 up to, not including, 1"),
    "Positive": (lambda value: type(value) in (int, float) and 0 < value < math.inf, "it must be a number above 0"),
    "bool": (lambda value: type(value) is bool, "it must be true or false")}


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of a family's config. The config itself is a dataclass with the names and defaults of Hugging Face's.

    Attributes:
        family: as messages call it, such as ``GPT``.
        presets: sizes by name.
        fixed: keys that are no setting here, and must agree with what the family computes.
        silent: keys that do not affect training, or that no implementation reads.
        choices: values of the keys that are words.
    """

    family: str
    presets: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, object]
    silent: Set[str]
    choices: Mapping[str, Collection[object]] = field(default_factory=dict)

    def merge(self, config: type[Any], preset: str | None, overrides: Mapping[str, object],
              own: Mapping[str, object]) -> dict[str, Any]:
        """Merge the fields of ``config`` from the preset, a ``config.json`` and the settings; the later wins."""
        if preset is not None and preset not in self.presets:
            raise UserError(f"{self.family} has no preset '{preset}'", hint=nearest(preset, list(self.presets)))
        problems = [Problem(f"'{key}' is {overrides[key]!r}, but this {self.family} computes {fixed!r} only",
                            f"set '{key}' to {fixed!r} or leave it out")
                    for key, fixed in self.fixed.items() if overrides.get(key, fixed) != fixed]
        known = [field.name for field in fields(config)]
        given = {key: value for key, value in overrides.items() if key not in self.silent and key not in self.fixed}
        problems += [Problem(f"a {self.family} config has no '{key}'", nearest(key, known))
                     for key in given if key not in known]
        if problems:
            raise UserError.all_of(problems)
        return {**({} if preset is None else self.presets[preset]), **given,
                **{key: value for key, value in own.items() if value is not None}}

    def check(self, config: Any, heads: str) -> None:
        """Raise UserError for fields of wrong types, and heads without a width of their own that do not divide the
        model's (``n_embd n_head``)."""
        problems = [problem for field in fields(config) for problem in self._wrong(field, getattr(config, field.name))]
        width, number = (getattr(config, name) for name in heads.split())
        if not problems and width % number and getattr(config, "head_dim", None) is None:
            divisors = [n for low in range(1, math.isqrt(width) + 1) if width % low == 0 for n in (low, width // low)]
            closest = min(sorted(divisors), key=lambda n: abs(n - number))
            problems.append(Problem(
                f"{self.family}'s {heads.split()[0]} {width} is not divisible by its {number} attention heads",
                f"set num_heads to a number that divides {width}, such as {closest}"))
        if problems:
            raise UserError.all_of(problems)

    def check_length(self, length: int, positions: int, key: str) -> None:
        """Raise UserError for a sequence of ``length`` tokens that is longer than the model's positions."""
        if length > positions:
            raise UserError(f"the sequence length is {length}, but {self.family} has position embeddings for "
                            f"{positions} tokens", hint=f"shorten the sequences to {positions}, or raise {key} to "
                                                        f"{length}")

    def _wrong(self, field: Field[Any], value: object) -> Iterator[Problem]:
        what, kind = f"{self.family}'s {field.name} is {value!r}", str(field.type)
        if value is None and kind.endswith(" | None"):
            return
        if field.name in self.choices:
            if value not in self.choices[field.name]:
                yield Problem(what, f"choose one of {', '.join(map(str, self.choices[field.name]))}")
        elif (rule := _RULES.get(kind.removesuffix(" | None"))) is not None and not rule[0](value):
            yield Problem(what, rule[1])


Names = Sequence[tuple[str, str]]
"""Submodules as (ours, Hugging Face's)."""

Parameters = Sequence[str]

TOKEN_EMBEDDINGS = "block0.attention.embeddings.token.weight"
"""The weight of a decoder that its head may share."""


def weight_names(theirs: str, ours: str, modules: Names,
                 parameters: Parameters = ("weight", "bias")) -> dict[str, str]:
    """Map Hugging Face's names of the parameters of submodules to ours; both prefixes stand before them."""
    return {f"{theirs}.{their}.{parameter}": f"{ours}.{our}.{parameter}" for our, their in modules
            for parameter in parameters}


def block_weight_names(theirs: str, blocks: object, attention: Names, mlp: Names,
                       parameters: Parameters = ("weight", "bias")) -> dict[str, str]:
    """Map Hugging Face's names of the parameters of all blocks to ours, as :func:`weight_names` does."""
    assert isinstance(blocks, int), "a checked config"
    names: dict[str, str] = {}
    for block in range(blocks):
        ours = f"block{block}.attention" + (".attention" if block == 0 else "")  # the first is with the embeddings
        names |= weight_names(f"{theirs}.{block}", ours, attention, parameters)
        names |= weight_names(f"{theirs}.{block}", f"block{block}.mlp", mlp, parameters)
    return names


def decoder_names(config: Mapping[str, object], blocks: object, theirs: str, block: str, embeddings: Names,
                  attention: Names, mlp: Names, norm: str,
                  parameters: Parameters = ("weight", "bias")) -> dict[str, str]:
    """Map Hugging Face's names of all weights of a decoder to ours.

    ``theirs`` stands before all of them, ``block`` before the number of a block; ``norm`` is that of the head.
    """
    return {**weight_names(theirs, "block0.attention.embeddings", embeddings, ("weight",)),
            **block_weight_names(f"{theirs}.{block}", blocks, attention, mlp, parameters),
            **weight_names(theirs, "head", (("norm", norm),), parameters),
            **({} if config["tie_word_embeddings"] else {"lm_head.weight": "head.decoder.weight"})}


def decoder_copies(config: Mapping[str, object]) -> dict[str, str]:
    """Map the name that some files have for the weight that ``tie_word_embeddings`` shares."""
    return {"lm_head.weight": TOKEN_EMBEDDINGS} if config["tie_word_embeddings"] else {}


def attention(query_basd: Tensor, key_bgsd: Tensor, value_bgsd: Tensor, *, mask: Tensor | None = None,
              causal: bool = False, dropout: nn.Dropout | None = None) -> Tensor:
    """Return scaled dot-product attention, [B, A, S, D] in the dtype of the input.

    On the CPU it computes in fp32 at least: torch's backward in bf16 takes three times as long there (8.7 against 2.7
    ms at A 8, S 128, D 32, batch 4, on a core of a Zen 4).

    Args:
        key_bgsd, value_bgsd: of G heads, which divides A: groups of A / G heads share them.
        mask: bool, broadcast to [B, A, S, S]: True where a token is seen.
        causal: a token sees itself and those before it; the last query is of the last key.
        dropout: of the weights.
    """
    share = dropout.p if dropout is not None and dropout.training else 0.0
    queries, keys = query_basd.shape[2], key_bgsd.shape[2]
    if causal and queries < keys:
        causal = False
        if query_basd.device.type == "cpu":
            mask = _lower_right(queries, keys, torch.promote_types(query_basd.dtype, torch.float32))
        else:  # the kernels of flash attention know this mask, which is not made there, nor while a mode is active
            with _disable_current_modes():
                mask = causal_lower_right(queries, keys)
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": share, "is_causal": causal,
                               "enable_gqa": key_bgsd.shape[1] < query_basd.shape[1]}
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    if isinstance(dropout, Dropout) and dropout.of_parts:
        attend = partial(_attend_to_part, dropout)
    if query_basd.device.type == "cpu" and query_basd.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", enabled=False):
            mixed_basd = attend(query_basd.float(), key_bgsd.float(), value_bgsd.float(), **options)
        return mixed_basd.to(query_basd.dtype)
    return attend(query_basd, key_bgsd, value_bgsd, **options)


@lru_cache(16)
def _lower_right(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores on the CPU, so that the last query sees all keys: one for all layers.

    Of a mask of another dtype every call would keep a copy for its backward.
    """
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(hidden, -math.inf)


def _attend_to_part(dropout: Dropout, query_basd: Tensor, key_bgsd: Tensor, value_bgsd: Tensor, *,
                    attn_mask: Tensor | None, is_causal: bool, **_: object) -> Tensor:
    """Attend with some of the heads or tokens. Torch's own function cannot be told what to drop."""
    key_basd, value_basd = (x.repeat_interleave(query_basd.shape[1] // x.shape[1], 1) for x in (key_bgsd, value_bgsd))
    scores_bass = query_basd @ key_basd.transpose(-1, -2) / math.sqrt(query_basd.shape[-1])
    if is_causal or isinstance(attn_mask, CausalBias):
        queries, keys = scores_bass.shape[-2:]
        attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=scores_bass.device).tril(keys - queries)
    if attn_mask is not None:
        scores_bass = (scores_bass.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else
                       scores_bass + attn_mask)
    return dropout(scores_bass.softmax(-1)) @ value_basd  # type: ignore[no-any-return]


POSITIONS = "positions"
"""The field of a batch with several texts in a sample: the place of every token in its text, from 0; int64 [B, S]."""


CARRIED = ("keys", "values")
"""What attention carries from a slice of a sequence to the next, [B, G, S, D] of all tokens so far."""

TEXTS = "texts"
"""What it carries beside these where a sample has several texts: the number of the text of every token, int64 [B, S].
"""


def start_of(cache: KeyValueCache | None, carried: tuple[Tensor, ...] | None) -> int:
    """Return how many tokens are before those at hand: in the cache, or in earlier slices of the sequence."""
    return cache.length if cache is not None else carried[0].shape[2] if carried else 0


def attend_causally(query_basd: Tensor, key_bgsd: Tensor, value_bgsd: Tensor, positions_bs: Tensor | None,
                    cache: KeyValueCache | None, carried: tuple[Tensor, ...] | None,
                    dropout: Dropout) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what tokens make of themselves and of those before them in their text, [B, A, S, D], and what is carried.

    Args:
        positions_bs: places of the tokens in their texts; None for one text.
        cache: of the tokens before, when a text grows.
        carried: what the slice before carried: :data:`CARRIED`, with positions :data:`TEXTS` too; empty for the first
            slice, None without slices.
    """
    mask, first, after = None, cache is None or cache.length == 0, tuple[Tensor, ...]()
    if cache is not None:
        key_bgsd, value_bgsd = cache.append(key_bgsd, value_bgsd)
    if carried is not None:
        # Told of no slice, as when it is called by hand, it makes room for no more.
        length = dropout.sequence_slice[1] if dropout.sequence_slice else start_of(None, carried) + key_bgsd.shape[2]
        key_bgsd, value_bgsd = (_Appended.apply(past, new, length) for past, new in zip(  # type: ignore[no-untyped-call]
            carried[:2] or (key_bgsd[:, :, :0], value_bgsd[:, :, :0]), (key_bgsd, value_bgsd), strict=True))
        # Else, of one projection for all three, its keys and values stay, too. In the order of its heads, what is made
        # of it would be copied to join them, and be kept twice.
        query_basd = query_basd.transpose(1, 2).contiguous().transpose(1, 2)
    if positions_bs is not None:
        text_bs = (positions_bs == 0).cumsum(1)  # the number of each token's text, from 1
        if carried:
            text_bs = torch.cat((carried[2], carried[2][:, -1:] + text_bs), 1)
        new = positions_bs.shape[1]
        mask = (text_bs[:, None, -new:, None] == text_bs[:, None, None, :]).tril(text_bs.shape[1] - new)
        after = (text_bs,)
    mixed_basd = attention(query_basd, key_bgsd, value_bgsd, mask=mask, causal=first and mask is None, dropout=dropout)
    return mixed_basd, () if carried is None else (key_bgsd, value_bgsd, *after)


class _Appended(torch.autograd.Function):
    """Append keys or values of a slice to those of the slices before, in one memory for the whole sequence.

    Concatenated, the attention of every slice would keep a copy of all that is before it. No tensor that autograd has
    kept is changed, though its memory is: a slice writes behind all that there is.
    """

    @staticmethod
    def forward(ctx: Any, past_bgsd: Tensor, new_bgsd: Tensor, length: int) -> Tensor:
        batch, groups, new, size = new_bgsd.shape
        ctx.start = start = past_bgsd.shape[2]
        shape, strides = (batch, groups, length, size), (groups * length * size, length * size, size, 1)
        if past_bgsd.stride() == strides and past_bgsd.untyped_storage().nbytes() >= math.prod(
                shape) * past_bgsd.itemsize:
            # Not of past_bgsd itself, whose version would say that it was changed.
            all_bgsd = past_bgsd.data.as_strided((batch, groups, start + new, size), strides)
        else:  # the first slice, or what a recomputation or an offload has copied
            all_bgsd = new_bgsd.new_empty(shape)[:, :, :start + new]
            all_bgsd[:, :, :start] = past_bgsd
        all_bgsd[:, :, start:] = new_bgsd
        return all_bgsd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        [all_bgsd] = gradients
        return all_bgsd[:, :, :ctx.start], all_bgsd[:, :, ctx.start:], None


def with_carried(h_bsh: Tensor, after: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Return the output of a layer alone, or with what it carries."""
    return (h_bsh, *after) if after else h_bsh


def next_token_loss(logits_bsv: Tensor, labels_bs: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy, in fp32 at least, over the tokens with a label; without any it is 0, not nan.

    Args:
        logits_bsv: scores [B, S, V].
        labels_bs: int64 [B, S]: the next token, already shifted; :attr:`vpipe.Model.NO_LABEL` where there is none.
        smoothing: share of a label's probability that is spread evenly over all V tokens.
    """
    total = tp.cross_entropy(logits_bsv, labels_bs, Model.NO_LABEL, smoothing)
    return total / is_label(labels_bs).sum().clamp(min=1)


def is_label(labels_bs: Tensor) -> Tensor:
    """Return which tokens have a label."""
    return labels_bs != Model.NO_LABEL


class EmbeddingsAndAttention(nn.Module):
    """The first layer of a decoder: embeddings and the first block's attention, int64 [B, S] -> [B, S, H].

    As of every attention, ``positions`` are the places of tokens in their texts, where a sample has several.
    """

    def __init__(self, embeddings: Callable[[], nn.Module], attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embeddings = embeddings()
        self.attention = attention()

    def forward(self, ids_bs: Tensor, positions_bs: Tensor | None = None,
                carried: tuple[Tensor, ...] | None = None) -> Tensor | tuple[Tensor, ...]:
        h_bsh = self.embeddings(ids_bs, positions_bs, start_of(None, carried))
        return self.attention(h_bsh, positions_bs, carried=carried)  # type: ignore[no-any-return]

    def step(self, ids_bs: Tensor, cache: KeyValueCache) -> Tensor:
        return self.attention.step(self.embeddings.step(ids_bs, cache), cache)  # type: ignore[operator, no-any-return]


class NextTokenHead(nn.Module):
    """The last layer of a decoder: norm, logits and their loss, [B, S, H] and int64 labels [B, S] -> a scalar.

    In training the loss of balance of experts is added; that of an evaluation is of the labels alone.
    """

    tensor_plan: ClassVar = {"norm": tp.gathered, "decoder": tp.scores}

    def __init__(self, norm: nn.Module, decoder: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.decoder = decoder

    def scores(self, h_bsh: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the next token."""
        return self.decoder(self.norm(h_bsh))  # type: ignore[no-any-return]

    def forward(self, h_bsh: Tensor, labels_bs: Tensor, balance: Tensor | None = None) -> Tensor:
        loss = next_token_loss(self.scores(h_bsh), labels_bs)
        return loss + balance if self.training and balance is not None else loss


def decoder(blocks: int, embeddings: Callable[[], nn.Module], attention: Callable[[], nn.Module],
            mlp: Callable[[], nn.Module], head: Callable[[], nn.Module], *, tied: bool, packed: bool = False,
            mixture: Mixture) -> Model:
    """Return a decoder of 2n + 1 layers for n blocks, from the functions that build each part.

    Batch fields, int64 [B, S]: ``input_ids``, and ``labels``: for every token the next one; -100 where there
    is none to learn. The only tensor between layers is ``h`` [B, S, H]. ``tied``: the head shares the token
    embeddings' weight. ``packed``: samples have several texts, and each is computed as if it were alone; the batch
    has :data:`POSITIONS`, too. ``mixture``: where it has experts, the MLPs are
    :class:`~vpipe.app.families.experts.Experts`, with a second tensor between layers; they take slices of sequences
    only without a loss of balance, which is of all tokens of a microbatch.
    """
    more, beside = (POSITIONS,) if packed else (), (BALANCE,) if mixture.num_local_experts is not None else ()
    carried, of_mlp = (*CARRIED, TEXTS) if packed else CARRIED, None if beside and mixture.router_aux_loss_coef else ()
    layers = [Layer("block0.attention", partial(EmbeddingsAndAttention, embeddings, attention),
                    inputs=("input_ids", *more), carried=carried)]
    for i in range(blocks):
        if i > 0:
            layers.append(Layer(f"block{i}.attention", attention, inputs=("h", *more), carried=carried))
        layers.append(Layer(f"block{i}.mlp", mlp, inputs=("h", *(beside if i > 0 else ())), outputs=("h", *beside),
                            carried=of_mlp))
    layers.append(Layer("head", head, inputs=("h", "labels", *beside), outputs=("loss",), carried=(),
                        ties={"decoder.weight": TOKEN_EMBEDDINGS} if tied else {}))
    return Model(layers, batch=("input_ids", *more, "labels"), labels="labels", label_weights=is_label)
