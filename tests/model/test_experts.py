"""Experts in place of MLPs: the papers' formulas, any schedule, packed texts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pipelines import parts
from torch import Tensor, nn

from vpipe import Model, Pipeline
from vpipe.app.families.experts import Experts
from vpipe.app.families.gpt import Gelu
from vpipe.app.families.llama import SwiGlu
from vpipe.app.families.lora import LoraSettings, to_peft
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.train.checkpoint_model import model_differences
from vpipe.errors import UserError
from vpipe.testing import assert_equals_oracle

SIZES = ModelSettings(40, hidden_size=16, num_layers=3, num_heads=4, sequence_length=8, dropout=0.0, experts=4,
                      balance_weight=0.1, tie_weights=False)


def model(family: str, **changes: Any) -> Model:
    return family_named(family).factory(replace(SIZES, **changes))


def batch(seed: int, samples: int = 4) -> dict[str, Tensor]:
    """Few words, so that some experts of a microbatch have no token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3, (samples, 9), generator=generator)
    return {"input_ids": ids[:, :-1], "positions": torch.arange(8).remainder(5).expand(samples, -1),
            "labels": ids[:, 1:].clone()}


def layer_outputs(model: Model, modules: nn.ModuleDict, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = dict(fields)
    for layer in model.layers:
        found = modules[layer.name](*(tensors[name] for name in layer.inputs))
        tensors.update(zip(layer.outputs, found if isinstance(found, tuple) else (found,), strict=True))
    return tensors


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_each_token_is_computed_by_its_best_experts(family: str) -> None:
    """One token at a time, in fp64: softmax over the chosen scores; Switch's loss with all chosen experts counted."""
    layer = next(one for one in model(family, experts_per_token=3).layers if one.name == "block1.mlp")
    module = layer.materialize(0, seed=5).double()
    assert isinstance(module, Experts)
    h = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, balance = module(h, torch.tensor(7.0))
    chosen, odds = torch.zeros(2, 4, dtype=torch.float64)
    for token, result in zip(h.flatten(0, 1), found.flatten(0, 1), strict=True):
        x = module.norm(token)
        scores = module.router.weight @ x
        best = scores.argsort(descending=True)[:3]
        outputs = torch.stack([module.experts[number](x) for number in best.tolist()])
        # Sums of 16, 64 and 4 terms, none of which is above 4: each rounds it by 2^-53 of that at most.
        assert torch.allclose(result, token + scores[best].softmax(0) @ outputs, rtol=0, atol=2 ** -44)
        chosen[best] += 1 / 16
        odds += scores.detach().softmax(0) / 16
    assert balance.item() == pytest.approx(7 + 0.1 / 3 * 4 * (chosen @ odds).item(), rel=2 ** -44)


@pytest.mark.parametrize(("family", "words"), [
    ("llama", {"schedule": "1f1b", "recompute": 1.0}), ("gpt", {"schedule": "zb_h1", "precision": "bf16"}),
    ("qwen3", {"schedule": "pipedream", "update_every": 1}), ("mixtral", {"schedule": "zb_v", "stages": 4})],
    ids=lambda value: value if isinstance(value, str) else value["schedule"])
def test_a_pipeline_is_its_oracle(family: str, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counted(forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda module, x: (counts.append(len(x)), forward(module, x))[1]  # type: ignore[func-returns-value]

    for kind in (SwiGlu, Gelu):
        monkeypatch.setattr(kind, "forward", counted(kind.forward))
    pipe = Pipeline(model(family, packed=True, dropout=0.1),
                    **parts(**{"stages": 3, **words}, microbatches=4, optimizer=partial(torch.optim.AdamW, lr=1e-2)))
    assert_equals_oracle(pipe, [batch(seed) for seed in range(3)])
    assert 0 in counts, "an expert without tokens"


def test_an_evaluation_is_of_the_labels_alone() -> None:
    fields, changed = [batch(1)], [model("gpt", balance_weight=weight) for weight in (0.0, 0.9)]
    pipes = [Pipeline(one, **parts(stages=3, microbatches=2, optimizer=partial(torch.optim.SGD, lr=0.0)))
             for one in changed]
    assert pipes[0].evaluate(fields) == pipes[1].evaluate(fields)
    losses = [next(iter(pipe.train(fields))).loss for pipe in pipes]
    assert losses[1] > losses[0] + 0.9, "two experts per token are at least 1"


def test_packed_texts_have_experts_as_if_they_were_alone() -> None:
    """In fp64: the same but for the order of sums of 64 terms at most."""
    packed, alone, fields = model("llama", packed=True), model("llama"), batch(3)
    modules = packed.materialize(3).double().eval()
    found = layer_outputs(packed, modules, fields)["h"]
    for part in (slice(0, 5), slice(5, 8)):
        text = {name: tensor[:, part] for name, tensor in fields.items()}
        assert torch.allclose(layer_outputs(alone, modules, text)["h"], found[:, part], rtol=0, atol=2 ** -44)


def test_a_token_uses_the_weights_of_its_experts() -> None:
    for family in ("gpt", "llama"):
        flops = family_named(family).flops
        assert flops is not None
        layer = model(family).layers[1].materialize(0, seed=0)
        expert = sum(p.numel() for p in layer.get_submodule("experts.0").parameters())
        others = sum(p.numel() for name, p in layer.named_parameters() if not name.startswith("experts"))
        assert flops(SIZES)[1] == 2 * (others + 2 * expert)


def test_what_experts_cannot_is_refused() -> None:
    for family, changes, words in (
            ("gpt", {"experts_per_token": 5}, "a token has 5 experts of 4"),
            ("llama", {"experts": None}, "balance_weight given, but the model has no experts")):
        with pytest.raises(UserError, match=words):
            model(family, **changes)
    for family in ("gpt", "mistral"):
        found = family_named(family)
        assert found.huggingface is not None
        with pytest.raises(UserError, match="has no experts, and this model has 4"):
            found.huggingface.names(found.huggingface.config(SIZES))
    qwen = family_named("qwen3_moe").huggingface
    assert qwen is not None
    for config, words in (({"decoder_sparse_step": 2}, "'decoder_sparse_step' is 2, but this Qwen3-MoE computes 1"),
                          ({"mlp_only_layers": [0]}, r"'mlp_only_layers' is \[0\], but this Qwen3-MoE computes \[\]"),
                          ({"num_experts": 0}, "num_local_experts is 0"),
                          ({"num_experts": 8, "num_local_experts": 9}, "'num_experts' is 8, but 'num_local_experts'")):
        with pytest.raises(UserError, match=words):
            qwen.settings(config)
    with pytest.raises(UserError, match="adapters of experts"):
        to_peft({"block0.mlp.experts.0.gate.lora_A.default.weight": torch.zeros(1)}, LoraSettings(1, 1.0), {}, (), True)
    assert model_differences("llama", SIZES, replace(SIZES, balance_weight=0.2, experts_per_token=1)) == [
        "num_experts_per_tok is 2, not 1"]
