"""Classes of transformers in a pipeline are the classes themselves, in one and in two processes, there and back."""

from __future__ import annotations

import hashlib
import math
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import quiet_transformers
from world import World

from vpipe import Model, Pipeline, Update
from vpipe.errors import UserError
from vpipe.hugging_face import from_transformers, to_transformers, with_adapters

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers
WORDS, PARTS = 61, 4
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "pad_token_id": 0,
         "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
GROUPS = SIZES | {"num_key_value_heads": 2}
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}
STILL = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob",
                       "attention_probs_dropout_prob"], 0.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": GROUPS | {"tie_word_embeddings": True}, "LlamaForCausalLM": GROUPS | {"rope_parameters": ROPE},
    "Qwen3ForCausalLM": GROUPS | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6,
                                  "max_window_layers": 1, "hidden_size": 30},
    "MistralForCausalLM": GROUPS | {"sliding_window": 6}, "GemmaForCausalLM": GROUPS | {"head_dim": 8},
    "PhiForCausalLM": GROUPS | {"attn_implementation": "eager"}, "GPT2LMHeadModel": SIZES | STILL,
    "BertForPreTraining": SIZES | STILL, "BertForMaskedLM": SIZES | STILL}
TIED = ("embed", "wte", "lm_head", "decoder.weight")


def model_of(name: str, **settings: Any) -> Any:
    kind = getattr(quiet_transformers(), name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings or FAMILIES[name]))
    for parameter in model.parameters():  # norms and biases, too
        nn.init.normal_(parameter, parameter.dim() == 1, 0.1)
    return model


def batch_of(name: str = "") -> dict[str, Tensor]:
    """Some microbatches are padded, and labels count differently often."""
    ids, mask = torch.randint(3, WORDS, (8, 12), generator=torch.Generator().manual_seed(1)), torch.ones(8, 12).long()
    mask[4:6, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, Model.NO_LABEL)}
    if name.startswith("Bert"):
        batch |= {"token_type_ids": (ids > 30).long(), "labels": torch.where(ids % 3 == 0, ids, Model.NO_LABEL)}
    return batch | ({"next_sentence_label": torch.arange(8) % 2} if name == "BertForPreTraining" else {})


def pipeline_of(model: Any, batch: dict[str, Tensor]) -> Pipeline:
    return Pipeline(from_transformers(model, batch), partial(torch.optim.SGD, lr=1.0), stages=2, microbatches=PARTS,
                    schedule="zb_h1")


def trained(name: str) -> list[Any]:
    """The losses of two updates, and a digest of all bits."""
    pipe = pipeline_of(model_of(name), batch_of(name))
    losses = [step.loss for step in pipe.train([batch_of(name)] * 2)]
    return [losses, hashlib.sha256(b"".join(value.numpy().tobytes() for value in pipe.state_dict().values())
                                   ).hexdigest()]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_losses_and_gradients_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    model, batch, parts = model_of(name), batch_of(name), []
    pipe, back = pipeline_of(model, batch), deepcopy(model)
    logits = "prediction_logits" if name == "BertForPreTraining" else "logits"
    _, found = pipe.evaluate([batch], outputs=logits)
    [step] = pipe.train([batch])
    for number in range(PARTS):
        parts.append(model(**{field: values.chunk(PARTS)[number] for field, values in batch.items()}))
        (parts[-1].loss / PARTS).backward()
    assert torch.equal(found[logits], torch.cat([part[logits] for part in parts]))
    assert step.loss == math.fsum(part.loss.item() for part in parts) / PARTS
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    to_transformers(pipe.state_dict(), back).save_pretrained(tmp_path)
    loaded, expected = type(model).from_pretrained(tmp_path).state_dict(), model.state_dict()
    assert loaded.keys() == expected.keys()
    for weight, value in loaded.items():  # those tied across stages are added in another order
        same = torch.allclose(value, expected[weight], atol=1e-6) if any(word in weight for word in TIED) else (
            torch.equal(value, expected[weight]))
        assert same, weight


@pytest.mark.jobs
@pytest.mark.parametrize("name", FAMILIES)
def test_two_processes_compute_the_same_bits(name: str, two: World) -> None:
    assert two.run(trained, name=name) == [trained(name)] * 2


def test_the_class_shifts_the_labels_that_count() -> None:
    model, batch = model_of("LlamaForCausalLM"), batch_of()
    update = Update(partial(torch.optim.SGD, lr=0.0), per_token_loss=True)
    pipe = Pipeline(from_transformers(model, batch), update, stages=2, microbatches=PARTS)
    [step] = pipe.train([batch])
    assert step.loss == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert pipe.evaluate([batch]) == pytest.approx(step.loss, rel=1e-6)


def test_adapters_come_and_go_with_the_names_of_peft() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = model_of("LlamaForCausalLM")
    pipe = Pipeline(with_adapters(from_transformers(model), config), partial(torch.optim.SGD, lr=1.0), stages=2)
    ids = batch_of()["input_ids"]
    list(pipe.train([{"input_ids": ids, "labels": ids}]))
    _, found = pipe.evaluate([{"input_ids": ids, "labels": ids}], outputs="logits")
    with pytest.raises(UserError, match=r"differ: 'model.layers.0.mlp.down_proj.base_layer.weight'"):
        to_transformers(pipe.state_dict(), model)
    peft.inject_adapter_in_model(config, model)
    assert torch.equal(to_transformers(pipe.state_dict(), model).eval()(ids).logits, found["logits"])


@pytest.mark.parametrize(("name", "settings", "why"), [
    ("T5ForConditionalGeneration", {"vocab_size": WORDS, "d_model": 32, "num_layers": 2}, "an encoder and a decoder"),
    ("OPTForCausalLM", SIZES | {"layerdrop": 0.1, "word_embed_proj_dim": 32}, "skips blocks at random"),
    ("AlbertForMaskedLM", SIZES, "another 'loss'"),
    ("MixtralForCausalLM", GROUPS | {"num_local_experts": 4, "output_router_logits": True}, "tuple index")])
def test_another_class_is_refused(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        from_transformers(model_of(name, **settings))
    assert "docs/jobs.md#a-class-of-transformers" in str(caught.value)


def test_what_is_no_model_of_transformers_or_has_no_loss_is_refused() -> None:
    with pytest.raises(UserError, match="is given Linear, not a model of transformers"):
        from_transformers(nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"LlamaModel takes input_ids, .*; the example has input_ids, labels"):
        from_transformers(model_of("LlamaModel", **GROUPS))


def test_a_batch_with_a_field_that_the_example_lacks_is_refused() -> None:
    pipe = Pipeline(from_transformers(model_of("BertForMaskedLM")), partial(torch.optim.SGD, lr=1.0), stages=2)
    with pytest.raises(UserError, match="a batch holds 'attention_mask', which layers made"):
        list(pipe.train([batch_of() | {"position": torch.zeros(8)}]))
