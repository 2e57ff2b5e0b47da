"""GPT and LLaMA: published sizes, the papers' formulas, ties, labels, kinds of numbers, the words of their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import assert_golden, refusal
from torch import Tensor, nn

from vpipe.app.config.config import ModelSection
from vpipe.app.families.gpt import GptAttention, GptConfig, GptMlp
from vpipe.app.families.llama import LlamaConfig, RopeScaling, rotary_tables, rotate
from vpipe.app.families.loss import NO_LABEL
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.families.transformer import attention
from vpipe.app.train.model_section import model_settings
from vpipe.model.model import Model

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40, "n_positions": 16, "initializer_range": 0.2,
            "activation_function": "gelu"},
    "llama": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 40, "max_position_embeddings": 16, "initializer_range": 0.2, "rope_theta": 100.0}}
FAMILIES = tuple(SIZES)
SIZES |= {"qwen2": SIZES["llama"], "qwen3": {**SIZES["llama"], "head_dim": 8}}


def model_of(family: str, **changes: Any) -> Model:
    settings = ModelSettings(50, dropout=0.0, overrides=SIZES[family])
    return family_named(family).factory(ModelSettings(**{**vars(settings), **changes}))


def batch_of(samples: int = 3, length: int = 11) -> dict[str, Tensor]:
    """Random tokens, each with its successor; the first and the last of a sample have no label."""
    tokens = torch.randint(0, 50, (samples, length + 1), generator=torch.Generator().manual_seed(7))
    labels = tokens[:, 1:].clone()
    labels[:, 0] = labels[:, -1] = NO_LABEL
    return {"input_ids": tokens[:, :-1], "labels": labels}


def chained(model: Model, modules: nn.ModuleDict, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss, from layers that know of each other by the names of their tensors only."""
    tensors = dict(batch)
    for layer in model.layers:
        tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
    return tensors["loss"]


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of one sample and head, the softmax written out: three [S, D] -> [S, D]."""
    scores = query @ key.T / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
    return scores.softmax(-1) @ value


def by_the_papers(family: str, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """The same loss by the papers' formulas, from a state dict, one sample at a time."""
    heads, groups = (3, 3) if family == "gpt" else (4, 2)
    size = 8 if family == "qwen3" else 24 // heads

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))

    def norm(name: str, x: Tensor) -> Tensor:
        if family != "gpt":
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def turned(x: Tensor) -> Tensor:  # pairs as complex numbers
        if family == "gpt":
            return x
        angles = torch.arange(len(x)).double()[:, None] * 100.0 ** (-torch.arange(0, size, 2).double() / size)
        pairs = torch.complex(x[:, :size // 2], x[:, size // 2:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), -1)

    losses = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        h = weights["block0.attention.embeddings.token.weight"][ids]
        if family == "gpt":
            h = h + weights["block0.attention.embeddings.position.weight"][: len(ids)]
        for block in range(2):
            name = f"block{block}.attention" + (".attention" if block == 0 else "")
            x = norm(f"{name}.norm", h)
            parts = linear(f"{name}.qkv", x).split(24, -1) if family == "gpt" else [
                linear(f"{name}.{part}", x) for part in ("query", "key", "value")]
            queries, keys, values = ([*part.split(size, -1)] for part in parts)
            if family == "qwen3":
                queries, keys = ([norm(f"{name}.{which}_norm", x) for x in each]
                                 for which, each in (("query", queries), ("key", keys)))
            mixed = [written_out(turned(queries[a]), turned(keys[a * groups // heads]), values[a * groups // heads])
                     for a in range(heads)]
            h = h + linear(f"{name}.output", torch.cat(mixed, -1))
            name = f"block{block}.mlp"
            x = norm(f"{name}.norm", h)
            if family == "gpt":
                x = linear(f"{name}.expand", x)
                h = h + linear(f"{name}.contract", x * (1 + torch.erf(x / math.sqrt(2))) / 2)
            else:
                gate = linear(f"{name}.gate", x)
                h = h + linear(f"{name}.down", gate * torch.sigmoid(gate) * linear(f"{name}.up", x))
        scores = linear("head.decoder", norm("head.norm", h)).log_softmax(-1)
        losses += [-scores[place, label] for place, label in enumerate(labels) if label != NO_LABEL]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", SIZES)
def test_chained_layers_compute_the_papers_formulas(family: str, tied: bool) -> None:
    model = model_of(family, tie_weights=tied)
    modules = model.materialize(seed=1).double().eval()
    for name, parameter in modules.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    expected = by_the_papers(family, modules.state_dict(), batch_of())
    # fp64 on both sides, but for LLaMA's tables, which were made in fp32 (as Hugging Face's) and cost 2e-8.
    found = chained(model, modules, batch_of()).item()
    assert found == pytest.approx(expected.item(), rel=1e-12 if family == "gpt" else 1e-6)
    word = modules["block0.attention"].get_parameter("embeddings.token.weight")
    assert (modules["head"].get_parameter("decoder.weight") is word) == tied


@pytest.mark.parametrize(("family", "preset", "vocab_size", "layers", "count"), [
    ("gpt", "small", 50257, 25, 124_439_808), ("gpt", "medium", 50257, 49, 354_823_168),
    ("gpt", "large", 50257, 73, 774_030_080), ("gpt", "xl", 50257, 97, 1_557_611_200),
    ("llama", "15m", 32000, 13, 15_191_712), ("llama", "135m", 49152, 61, 134_515_008),
    ("llama", "1b", 32000, 45, 1_100_048_384), ("llama", "7b", 32000, 65, 6_738_415_616),
    ("llama", "3.2-1b", 128256, 33, 1_235_814_400), ("mistral", "7b", 32768, 65, 7_248_023_552),
    ("mistral", "nemo", 131072, 81, 12_247_782_400), ("qwen2", "0.5b", 151936, 49, 494_032_768),
    ("qwen2", "7b", 152064, 57, 7_615_616_512), ("qwen3", "0.6b", 151936, 57, 596_049_920),
    ("qwen3", "8b", 151936, 73, 8_190_735_360), ("llama", None, 32000, 65, 6_738_415_616)])
def test_presets_have_the_published_sizes_and_flops(family: str, preset: str | None, vocab_size: int, layers: int,
                                                    count: int) -> None:
    found, settings = family_named(family), ModelSettings(vocab_size, preset=preset, sequence_length=512)
    model = found.factory(settings)
    counts = model.parameter_counts()
    assert (len(model), sum(counts)) == (layers, count)
    # 6N + 12 L H Q T: N has the word embeddings once, tied or not, and no positions (Chowdhery et al., appendix B).
    config = {"n_positions": 0} | (found.huggingface.config(settings) if found.huggingface else {})
    hidden = config.get("n_embd", config.get("hidden_size"))
    assert isinstance(hidden, int)
    assert isinstance(config["n_positions"], int)
    tables = config["n_positions"] * hidden + (0 if config["tie_word_embeddings"] else vocab_size * hidden)
    assert found.flops is not None
    flops = found.flops(settings)
    heads = config["head_dim"] * config["num_attention_heads"] if "head_dim" in config else hidden  # as PaLM's H Q
    assert 3 * sum(flops) == 6 * (count - tables) + 12 * (layers // 2) * heads * 512
    assert len(flops) == layers
    assert flops[3] == 2 * counts[3], "an MLP uses each of its weights once"


def test_berts_flops_spread_the_head_over_the_sample() -> None:
    found, settings = family_named("bert"), ModelSettings(30522, preset="base", sequence_length=128)
    assert found.flops is not None
    flops, counts, h = found.flops(settings), found.factory(settings).parameter_counts(), 768
    assert flops[1] == 2 * counts[1]
    assert flops[2] == 2 * counts[2] + 4 * h * 128
    assert flops[0] - flops[2] == 2 * 2 * h, "the norm of the embeddings"
    sentence = h * h + h + 2 * h + 2
    words = counts[-1] - sentence + 30522 * h  # with the decoder, which belongs to the first layer
    assert flops[-1] == round(2 * (20 * words + sentence) / 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_mean_over_labels_and_0_without_any(family: str) -> None:
    model = model_of(family)
    modules = model.materialize()
    batch = batch_of()
    h = torch.randn(3, 11, 24, dtype=torch.bfloat16)
    head = modules["head"].bfloat16()
    loss = head(h, batch["labels"])
    known = batch["labels"] != NO_LABEL
    assert loss.dtype == torch.float32, "in half precision, too"
    assert torch.allclose(loss, F.cross_entropy(head.scores(h).float()[known], batch["labels"][known]))
    loss = head(h, torch.full_like(batch["labels"], NO_LABEL))
    loss.backward()
    assert loss.item() == 0
    assert all(torch.isfinite(p.grad).all() for p in head.parameters())


@pytest.mark.parametrize("how", ["pure", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_keep_the_kind_of_numbers(family: str, how: str) -> None:
    model = model_of(family)
    modules = model.materialize()
    if how == "pure":
        modules.bfloat16()  # buffers, too
    h = modules["block0.attention"](batch_of()["input_ids"]).bfloat16()
    for layer in model.layers[1:-1]:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            h = modules[layer.name](h)
        assert h.dtype == torch.bfloat16, layer.name


def test_gpts_sums_begin_with_smaller_weights() -> None:
    config = GptConfig(n_embd=192, n_layer=8, n_head=3)
    torch.manual_seed(0)
    made = {**dict(GptAttention(config).named_parameters()), **dict(GptMlp(config).named_parameters())}
    for name, std in (("qkv", 0.02), ("output", 0.005), ("expand", 0.02), ("contract", 0.005)):
        assert made[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.02), name
        assert not made[f"{name}.bias"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_turns_and_attention_take_the_kind_of_what_they_are_given(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    turned = rotate(x, *rotary_tables(5, 8, 1e4, None))
    assert turned.dtype == dtype
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    found = attention(turned, x[:, :2], x[:, :2], causal=True, mask=None)
    exact = written_out(turned[1, 3].double(), x[1, 1].double(), x[1, 1].double())
    assert found.dtype == dtype
    assert torch.allclose(found[1, 3].double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-12)  # one rounding


def test_llama_31s_slower_turns() -> None:
    scaling = RopeScaling.parse({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64})
    plain, scaled = (rotary_tables(2, 32, 1e4, one)[1][1].asin() for one in (None, scaling))
    wavelengths = 2 * math.pi / plain
    assert torch.equal(scaled[wavelengths < 16], plain[wavelengths < 16])
    assert torch.allclose(scaled[wavelengths > 64], plain[wavelengths > 64] / 8)
    between = (wavelengths > 16) & (wavelengths < 64)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    assert RopeScaling.parse({"rope_type": "default"}) is None


MISTAKES: list[Callable[[], Model]] = [
    lambda: model_of("gpt", num_heads=5), lambda: model_of("gpt", preset="smal"),
    lambda: model_of("gpt", overrides={"activation_function": "relu"}),
    lambda: model_of("gpt", overrides={"scale_attn_by_inverse_layer_idx": True}),
    lambda: model_of("gpt", sequence_length=17), lambda: model_of("llama", num_kv_heads=3),
    lambda: model_of("llama", num_heads=8), lambda: model_of("llama", overrides={"rope_theta": 0}),
    lambda: model_of("llama", overrides={"head_dim": 5}),
    lambda: model_of("qwen2", overrides={"layer_types": ["full_attention", "sliding_attention"]}),
    lambda: model_of("llama", overrides={"rope_scaling": {"type": "yarn", "factor": 2.0}}),
    lambda: model_of("llama", overrides={"rope_parameters": {"rope_type": "llama3", "factor": 2.0}})]


def test_mistakes() -> None:
    assert_golden(__file__, "mistakes", map(refusal, MISTAKES))


def test_settings_go_before_the_config_file() -> None:
    assert len(model_of("gpt", num_layers=3, overrides=SIZES["gpt"])) == 7
    assert len(model_of("llama", preset="15m", num_layers=1, overrides={})) == 3
    # Nothing said of ties: as the family has it, or the file.
    for family, file, tied in (("gpt", {}, True), ("gpt", {"tie_word_embeddings": False}, False), ("bert", {}, True),
                               ("bert", {"tie_word_embeddings": False}, False), ("llama", {}, False),
                               ("llama", {"tie_word_embeddings": True}, True)):
        settings = replace(model_settings(ModelSection(name=family), 50), overrides=file)
        assert bool(family_named(family).factory(settings).layers[-1].ties) == tied, (family, file)
    # A published file means the approximation that it was trained with; what is made here is exact.
    huggingface = family_named("gpt").huggingface
    assert huggingface is not None
    for file, function in (({"n_layer": 2}, "gelu_new"), ({}, "gelu")):
        assert huggingface.config(ModelSettings(50, overrides=file))["activation_function"] == function
    # As many positions as a sample has, where no config says how many there are.
    assert len(model_of("gpt", sequence_length=2048, preset="small", overrides={})) == 25
    assert LlamaConfig(num_attention_heads=8, hidden_size=64).groups == 8
    shared = ModelSettings(50, hidden_size=64, num_layers=1, num_heads=8, num_kv_heads=2, preset="1b")
    assert family_named("llama").factory(shared).parameter_counts()[0] == 50 * 64 + 64 + 64 * (64 + 16 + 16 + 64)
