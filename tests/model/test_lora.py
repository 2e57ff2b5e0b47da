"""Adapters of peft in the layers of a model: through pipelines as without one, and there and back to peft's files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_models import MICROBATCHES, RATE, check_files, check_training
from pipelines import parts
from small_run import write_config
from torch import Tensor, nn
from transformers_models import batch, names_of, our_logits, quiet_transformers, weights_of

from vpipe import Layer, Model, Pipeline
from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.families.lora import LoraSettings, base_names, is_adapter
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.train.job import Job, new_run
from vpipe.app.train.loop import train
from vpipe.app.train.resume import find_resume_point, prepare_run, resumed_config
from vpipe.app.train.run_folder import unlock_runs
from vpipe.app.weights.export import export_huggingface, export_peft
from vpipe.checkpoint import Checkpoint, Checkpoints
from vpipe.errors import UserError
from vpipe.hugging_face import with_adapters
from vpipe.runtime.slices import SliceAware
from vpipe.testing import assert_equals_oracle

WORDS = 50
SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "sequence_length": 11}
LORA = LoraSettings(4, 8.0, ("query", "value", "up"))


@pytest.fixture(autouse=True)
def peft() -> Any:
    """Imported for these tests alone: not by every process that collects them, which takes each two seconds."""
    return pytest.importorskip("peft")


def settings(lora: LoraSettings | None = LORA, tied: bool = True) -> ModelSettings:
    return ModelSettings(WORDS, **SIZES, num_kv_heads=2, tie_weights=tied, packed=True, dropout=0.0, lora=lora)


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, WORDS, (count, 8, 12), generator=generator)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]).expand(8, 11)
    labels = torch.where(positions == 4, Model.NO_LABEL, ids[..., 1:])
    return [{"input_ids": one[:, :-1], "positions": positions, "labels": label}
            for one, label in zip(ids, labels, strict=True)]


@pytest.mark.parametrize("words", [{"schedule": "1f1b", "recompute": 1.0}, {"schedule": "zb_h1"},
                                   {"schedule": "pipedream", "update_every": 4}], ids=lambda words: words["schedule"])
def test_a_pipeline_is_its_oracle(words: dict[str, Any]) -> None:
    """With dropout in the adapters, a stage without any, and a head whose frozen weight is that of the embeddings."""
    lora = LoraSettings(4, 8.0, ("query", "value"), dropout=0.2)
    pipe = Pipeline(family_named("qwen3").model(settings(lora)), **parts(
        stages=[1, 1, 1, 2], microbatches=MICROBATCHES, optimizer=partial(torch.optim.AdamW, lr=RATE), **words))
    assert_equals_oracle(pipe, batches())


def test_a_layer_with_adapters_carries_the_same_and_draws_for_each_slice(peft: Any) -> None:
    """Adapters draw for the tokens at hand alone, so that each slice needs a seed of its own."""
    plain = family_named("gpt").factory(ModelSettings(WORDS, **SIZES, dropout=0.1))
    adapted = with_adapters(plain, peft.LoraConfig(r=4, target_modules=["qkv"], lora_dropout=0.1))
    assert [layer.carried for layer in adapted.layers] == [layer.carried for layer in plain.layers]
    assert [SliceAware(made.layers[2].make()).by_element for made in (plain, adapted)] == [True, False]


def test_a_pipeline_is_peft_without_one() -> None:
    check_training(family_named("qwen3").factory(settings(None)), ["query", "value", "up"], batches())


BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 11,
        "type_vocab_size": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert_batches() -> list[dict[str, Tensor]]:
    fields = {name: field.repeat(2, 1) for name, field in batch().items()}
    return [{**{name: fields[name] for name in ("input_ids", "segment_ids", "input_mask", "masked_lm_positions")},
             "masked_lm_ids": fields["input_ids"] * (torch.arange(11) % 3 == step),
             "next_sentence_labels": torch.arange(8) % 2} for step in range(2)]


def test_bert_is_peft_without_a_pipeline() -> None:
    base = family_named("bert").factory(ModelSettings(WORDS, overrides=BERT))
    check_training(base, ["query", "contract", "transform"], bert_batches())


def test_bert_over_replicas_that_share_the_steps() -> None:
    model = family_named("bert").model(ModelSettings(WORDS, overrides=BERT, lora=LoraSettings(4, 8.0)))
    pipe = Pipeline(model, **parts(partition=[3, 2], placement=[[0, 1], [2, 3]], microbatches=MICROBATCHES, zero1=True,
                                   optimizer=partial(torch.optim.AdamW, lr=RATE)))
    assert_equals_oracle(pipe, bert_batches())


@pytest.mark.parametrize("targets", [None, ("query", "contract")])
def test_files_of_bert(targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    check_files("bert", BERT, LoraSettings(4, 8.0, targets), tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    ({"target_modules": ["query", "valeu"]}, "no module has the name of 1 target of the adapters: 'valeu'"),
    ({"target_modules": r".*\.(decoder|query)"}, "the adapters' targets match 'head.decoder', whose weight is tied"),
    ({"target_modules": "all-linear"}, "does not list its target_modules"),
    ({"target_modules": ["query"], "bias": "all"}, "trains other weights, too")])
def test_what_is_refused(peft: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        with_adapters(family_named("qwen3").factory(settings(None)), peft.LoraConfig(**change))


def test_a_layer_may_be_a_target_itself(peft: Any) -> None:
    model = Model.sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), nn.CrossEntropyLoss())
    named = with_adapters(model, peft.LoraConfig(r=2, target_modules=["0"])).materialize()
    assert [name for name, weight in named.named_parameters() if weight.requires_grad] == [
        "0.lora_A.default.weight", "0.lora_B.default.weight"]
    late = Model([Layer("a", partial(nn.Linear, 3, 3), inputs=("x",), outputs=("loss",))], batch=("x",))
    assert len(with_adapters(late, peft.LoraConfig(r=2, target_modules=["a"])).outline()) == 4


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, which peft reads
@pytest.mark.parametrize(("family", "targets"), [("qwen3", ["query", "value", "up"]), ("gpt", ["qkv"]),
                                                 ("qwen2", None)])
def test_there_and_back(peft: Any, family: str, targets: list[str] | None, tmp_path: Path,
                        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of transformers, tuned by a run: peft has its logits from the adapters alone, bit for bit, and merges
    them as the export does; the adapters, read back, are the run's."""
    transformers = quiet_transformers()
    monkeypatch.chdir(tmp_path)
    names = names_of(family)
    sizes = names.config(ModelSettings(WORDS, **SIZES, tie_weights=True))
    kind = getattr(transformers, names.architecture)
    kind(kind.config_class(**sizes)).save_pretrained("base")
    assert main(["checkpoint", "import", "base", "-o", "start"]) == 0
    start = find_resume_point(Path("start"))
    job = Job.from_config(resumed_config(start, write_config(
        tmp_path, model__name=family, model__preset=None, model__hidden_size=None, model__vocab_size=WORDS,
        model__config_file="start/config.json", model__lora={"rank": 4, "alpha": 8, "targets": targets},
        checkpoint__at_end=True), []))
    train(job, run := prepare_run(start, job), start)
    unlock_runs()
    assert "random" not in capsys.readouterr().err
    assert main(["checkpoint", "export", str(run), "--format", "peft", "-o", "adapter"]) == 0
    assert main(["checkpoint", "export", str(run), "--format", "huggingface", "-o", "merged"]) == 0
    assert main(["checkpoint", "import", "base", "--adapter", "adapter", "-o", "again"]) == 0
    assert "alpha: 8\n" in Checkpoint.open(Path("again")).manifest.config
    tuned, again = (Checkpoint.open(Checkpoints.find(folder)).weights() for folder in (run, Path("again")))
    assert tuned.keys() == again.keys()
    assert all(torch.equal(tuned[name], weight) for name, weight in again.items())
    assert all(weight.any() for name, weight in tuned.items() if is_adapter(name)), "B begins with zeros"
    ids = torch.arange(16).view(2, 8) % WORDS
    with torch.no_grad():
        ours = our_logits(job.model, job.model.with_weights(tuned, seed=0), {"input_ids": ids})[0]
        theirs = peft.PeftModel.from_pretrained(kind.from_pretrained("base"), "adapter").eval()
        assert torch.equal(theirs(ids).logits, ours)
        assert not torch.equal(kind.from_pretrained("base").eval()(ids).logits, ours)
        merged = theirs.merge_and_unload()(ids).logits
        assert torch.equal(kind.from_pretrained("merged").eval()(ids).logits, merged)


def test_commands_that_cannot_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names, model = names_of("qwen3"), family_named("qwen3").model(settings(LoraSettings(4, 8.0, ("query",))))
    weights = weights_of(model, model.materialize())
    export_huggingface({theirs: weights[name] for name, theirs in base_names(weights).items()}, names, settings(),
                       Path("base"), None)
    export_peft(weights, LoraSettings(4, 8.5, ("query",)), names, settings(), Path("adapter"))
    assert json.loads(Path("adapter/adapter_config.json").read_text())["lora_alpha"] == 8.5
    write_config(tmp_path, model__name="qwen3", model__preset=None, model__hidden_size=None, model__vocab_size=WORDS,
                 model__config_file="base/config.json", model__lora={"rank": 4, "alpha": 8.5, "targets": ["key"]})

    def said(*words: str) -> str:
        main(["checkpoint", *words])
        return " ".join(capsys.readouterr())

    said("import", "base", "--config", "c.yaml", "-o", "start")
    assert "has no adapters: no run has trained any yet" in said("export", "start", "--format", "peft", "-o", "x")
    assert "merged" not in said("export", "start", "--format", "huggingface", "-o", "same")
    said("import", "base", "-o", "whole")
    assert "has no adapters: its model is trained whole" in said("export", "whole", "--format", "peft", "-o", "x")
    assert "'adapter' holds adapters of peft alone, not the model" in said("import", "adapter", "-o", "x")
    assert "the adapter in 'adapter' has rank 4, alpha 8.5 and the targets query, model.lora rank 4, alpha 8.5 and " \
        "the targets key" in said("import", "base", "--adapter", "adapter", "--config", "c.yaml", "-o", "x")
    assert "model.lora is not given" in said("import", "base", "--adapter", "adapter", "--config", "c.yaml", "--set",
                                             "model.lora=null", "-o", "x")
    assert not Path("x").exists()
    job = Job.from_config(load_config(Path("c.yaml"), ["training.max_steps=1"]))
    train(job, new_run(job))
    unlock_runs()
    assert "warning: the weights beside the adapters are random" in capsys.readouterr().err
