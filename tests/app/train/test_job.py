"""From a config to a job: what is filled in, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import assert_golden, refusal
from small_run import job_of, put_in, write_config

from vpipe.app.config.config import load_config, parse_resolved
from vpipe.app.data.synthetic import synthetic_bert
from vpipe.app.data.tokenizers import train_byte_bpe
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.train.job import Job
from vpipe.app.train.model_section import model_flops
from vpipe.app.train.optimizers import hidden_matrices
from vpipe.app.train.resume import IMPORTED, other_tokens
from vpipe.app.train.summary import headline
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.model.layer import Layer
from vpipe.model.model import Model


def refused(folder: Path, **changes: Any) -> str:
    return refusal(job_of, folder, **changes)


def test_a_job_fills_in_the_config(tmp_path: Path) -> None:
    job = job_of(tmp_path, model__vocab_size=-1)
    assert job.config.model.vocab_size == 8192  # the data set's
    partition = job.config.parallel.partition
    assert len(partition) == 2
    assert not isinstance(partition, str)
    assert sum(partition) == len(job.model) == 5
    path = tmp_path / "resolved.yaml"
    path.write_text(job.config.resolved_yaml())
    assert load_config(path) == job.config


def test_an_optimizer_of_matrices_knows_them_for_every_partition(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__optimizer="muon")
    assert job.optimizer.matrices == sorted(hidden_matrices(job.model)), "the same text in every process"
    assert job_of(tmp_path).optimizer.matrices is None


@pytest.mark.parametrize(("limits", "updates"), [
    ({"training__max_steps": 3}, 3),
    ({"training__max_steps": None, "training__epochs": 2}, 16),
    ({"training__max_steps": None}, 8),
    ({"training__max_steps": 3, "training__epochs": 1}, 3),
    ({"training__max_steps": 300, "training__epochs": 1}, 8),
    ({"training__max_steps": None, "training__max_minutes": 1.0}, None),
    ({"training__max_steps": None, "training__epochs": 1, "parallel__schedule": "pipedream"}, 32),
    ({"training__max_steps": None, "training__epochs": 1, "parallel__schedule": "pipedream",
      "parallel__update_every": 2}, 16),
    ({"training__max_steps": None, "training__epochs": 1, "dataset__samples": 71}, 8),
    ({"training__max_steps": None, "training__epochs": 1, "parallel__data_parallel_size": 2}, 8),
    ({"training__max_steps": None, "training__epochs": 1, "parallel__schedule": "pipedream",
      "parallel__stage_to_rank_map": {"0": [0, 1, 2], "1": [3]}}, 11),  # of 32 microbatches 3 at a time
])
def test_how_many_updates(tmp_path: Path, limits: dict[str, Any], updates: int | None) -> None:
    assert job_of(tmp_path, **limits).updates == updates


def test_samples_and_tokens_per_update(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    assert job.step_size == (8, 128)
    job = job_of(tmp_path, parallel__schedule="pipedream", parallel__update_every=2)
    assert job.step_size == (4, 64)
    job = job_of(tmp_path, parallel__schedule="pipedream", parallel__stage_to_rank_map={"0": [0, 1, 2], "1": [3]})
    assert job.step_size == (6, 96)


def test_placement(tmp_path: Path) -> None:
    assert job_of(tmp_path).schedule.placement == ((0,), (1,))
    ranks = {"0": [2], "1": [0], "2": [1]}
    assert job_of(tmp_path, parallel__model_parallel_size=3,
                  parallel__stage_to_rank_map=ranks).schedule.placement == ((2,), (0,), (1,))
    assert job_of(tmp_path, parallel__data_parallel_size=2).schedule.placement == ((0, 1), (2, 3))
    job = job_of(tmp_path, parallel__stage_to_rank_map={"0": [2, 0], "1": [1]})
    assert job.schedule.placement == ((2, 0), (1,))
    assert job.describe(2) == "rank 2 (stage 0)"


def test_processes_that_split_layers(tmp_path: Path) -> None:
    """Sizes that cannot be split, and a model without plans, are refused."""
    job = job_of(tmp_path, parallel__tensor=2, parallel__partition="auto")
    assert (job.config.parallel.to_plan, sum(job.cut.partition), job.processes) == (("partition",), 5, 4)
    assert [job.describe(rank) for rank in (0, 3)] == ["rank 0 (lane 0, stage 0)", "rank 3 (lane 1, stage 1)"]
    assert headline(job).endswith(
        "one process per stage, times 2 that split its layers: ranks 0-1, 2-3 on one host each")
    with pytest.raises(UserError) as raised:
        job_of(tmp_path, parallel__tensor=3)
    assert [problem.what.partition(",")[0] for problem in raised.value.problems] == [
        "vocab_size is 32", "num_heads is 2", "intermediate_size is 64", "sequence_length is 16"]


SLICED = {"parallel__schedule": "seq1f1b", "parallel__slices": 3}
GPT = {"model__name": "gpt", "model__preset": None, "model__num_layers": 2, "model__num_heads": 2}


TOGETHER: list[dict[str, Any]] = [
    SLICED, SLICED | GPT | {"model__name": "mixtral"}, SLICED | GPT | {"parallel__tensor": 2},
    SLICED | GPT | {"training__compile": True}, {"dataset__max_tokens": 64}, {"training__profile_iteration": 5}]


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    assert_golden(__file__, "together", [refused(tmp_path, **changes) for changes in TOGETHER])


def test_a_model_without_plans_is_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(family_named("bert"), tensor_sizes=None)
    monkeypatch.setattr("vpipe.app.train.job.family_named", lambda name: family)
    with pytest.raises(UserError, match=r"parallel.tensor is 2, but the model 'bert' does not say how its layers are"):
        job_of(tmp_path, parallel__tensor=2)


def test_an_older_run_of_packed_texts_does_not_go_on_without(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, model__packed=True), resolved=True)
    assert refusal(Job.from_config, config) == (
        "error: model.packed is true, but the model 'bert' does not tell the texts of a sample apart\n"
        "hint: set it to false, or train a gpt, a llama or one of its kinds")


def test_epochs_are_in_orders_of_their_own_and_repeatable(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__max_steps=None, training__epochs=2)
    batches = [batch["input_ids"] for batch in job.training_batches(("input_ids",))]
    assert len(batches) == 16
    again = [batch["input_ids"] for batch in job.training_batches(("input_ids",))]
    assert all(map(torch.equal, batches, again))
    first, second = torch.cat(batches[:8]), torch.cat(batches[8:])
    assert not torch.equal(first, second)
    assert torch.equal(first.unique(dim=0), second.unique(dim=0))


def test_evaluation_batches(tmp_path: Path) -> None:
    job = job_of(tmp_path, training__evaluation_batches=3, dataset__samples=400)
    batches = [list(job.evaluation_batches(("input_ids",))) for _ in range(2)]
    assert len(batches[0]) == 3
    assert torch.equal(batches[0][2]["input_ids"], batches[1][2]["input_ids"])
    assert batches[0][0]["input_mask"].device.type == "meta"  # not asked for


def test_the_data_seed_is_its_own(tmp_path: Path) -> None:
    def first(**changes: Any) -> torch.Tensor:
        return next(job_of(tmp_path, **changes).training_batches(("input_ids",)))["input_ids"]

    assert not torch.equal(first(), first(training__seed=1))
    assert torch.equal(first(dataset__seed=3), first(dataset__seed=3, training__seed=1))


def test_a_models_file_gives_sizes(tmp_path: Path) -> None:
    path = tmp_path / "bert_config.json"
    path.write_text(json.dumps({"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
                                "layer_norm_eps": 1e-12, "hidden_act": "gelu"}))
    job = job_of(tmp_path, model__preset=None, model__config_file=str(path), model__vocab_size=-1,
                 parallel__partition=[4, 3])
    assert len(job.model) == 7
    assert job.config.model.vocab_size == job.dataset.vocab_size == 40


@pytest.mark.parametrize(("model", "fields"), [("bert", {"masked_lm_ids", "next_sentence_labels"}),
                                               ("gpt", {"input_ids", "labels"})])
def test_the_data_are_made_for_what_the_model_reads(tmp_path: Path, model: str, fields: set[str]) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(
        f"The river number {number} is quiet. It has {number} stones. Winter comes." for number in range(80)))
    job = job_of(tmp_path, model__name=model, model__preset=None, model__num_layers=2, model__num_heads=2,
                 model__vocab_size=-1, dataset__name="text", dataset__path=str(tmp_path / "text"),
                 dataset__cache_directory=str(tmp_path / "cache"), dataset__batch_size=2,
                 training__num_microbatches=2)
    assert fields <= set(job.dataset.fields)
    assert set(job.model.batch) <= set(job.dataset.fields)
    assert job.config.model.vocab_size == job.dataset.vocab_size != 8192
    [batch] = islice(job.training_batches(job.model.batch), 1)
    assert all(batch[name].max() < job.dataset.vocab_size for name in job.model.batch)


def test_more_tokens_in_the_data_than_in_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.app.train.job.dataset_named", lambda name: lambda settings: synthetic_bert(48, 16, 64))
    assert refused(tmp_path) == ("error: the data set has 48 tokens, but the model only 32\n"
                                 "hint: set model.vocab_size to 48 or more, or to -1")


def test_a_model_that_reads_what_the_data_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Layer("only", torch.nn.Identity, inputs=("pixels",), outputs=("loss",))], batch=("pixels",))
    put_in(monkeypatch, model)
    assert "the model 'bert' reads ['pixels'], which the data set 'synthetic' does not hold" in refused(
        tmp_path, parallel__model_parallel_size=1)


def out_of_the_settings(settings: ModelSettings) -> list[int]:
    """As a package may have it."""
    return [int(str(settings.overrides["vocab"]))]


@pytest.mark.parametrize(("flops", "what"), [
    (lambda settings: [1, 2], "the model 'bert' has 1 layer, but its family says the operations of 2"),
    (lambda settings: [float("nan")], "the family of the model 'bert' says that layer 0 has nan operations per token"),
    (lambda settings: [None], "the family of the model 'bert' says that layer 0 has None operations per token"),
    (lambda settings: [-1], "the family of the model 'bert' says that layer 0 has -1 operations per token"),
    (out_of_the_settings,
     "the family of the model 'bert' failed to count the operations of its layers: KeyError: 'vocab'")])
def test_operations_that_cannot_be_are_refused_before_the_start(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flops: Any, what: str) -> None:
    model = Model([Layer("only", torch.nn.Identity, inputs=("input_ids",), outputs=("loss",))], batch=("input_ids",))
    put_in(monkeypatch, model, flops)
    changes = {"parallel__model_parallel_size": 1, "parallel__partition": [1]}
    assert refused(tmp_path, **changes).startswith(f"error: {what}\nhint: let the flops of its register_model give")
    put_in(monkeypatch, model, lambda settings: [6])
    assert model_flops(job_of(tmp_path, **changes).config.model, 1) == [6]


def write_story(folder: Path) -> Path:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n\n".join(f"The river {number} is quiet." for number in range(600)))
    return folder / "text"


def test_a_tokenizer_may_be_given_and_imported_weights_ask_for_theirs(tmp_path: Path) -> None:
    gpt: dict[str, Any] = {
        "model__name": "gpt", "model__preset": None, "model__num_layers": 2, "model__num_heads": 2,
        "model__vocab_size": -1, "dataset__name": "text", "dataset__path": str(write_story(tmp_path)),
        "dataset__samples": 16, "dataset__cache_directory": str(tmp_path / "cache")}
    train_byte_bpe(["some other words than those of the river"], 290).save(str(tmp_path / "theirs.json"))
    ours, theirs = job_of(tmp_path, **gpt), job_of(tmp_path, **gpt, dataset__tokenizer=str(tmp_path / "theirs.json"))
    assert theirs.dataset.vocab_size < ours.dataset.vocab_size
    weights = Manifest(0, 0, 0, arrangement={IMPORTED: True})
    assert "unless that is the imported weights' tokenizer, an id means" in str(other_tokens(weights, ours))
    assert other_tokens(weights, theirs) is None
    assert other_tokens(replace(weights, arrangement={}), ours) is None


def test_a_models_file_of_another_family_is_told_by_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_embd": 16, "summary_type": "cls_index"}))
    assert refused(tmp_path, model__name="llama", model__preset=None, model__config_file=str(path)) == (
        f"error: model.config_file names '{path}', which is of a gpt2, but model.name is llama\n"
        "hint: set model.name to the family of that file, or name a file of this one")


@pytest.mark.parametrize("changes", [
    {}, {"parallel__schedule": "pipedream"}, {"parallel__data_parallel_size": 2}, {"parallel__partition": "auto"}])
def test_a_rank_makes_the_same_job_without_checking_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             changes: dict[str, Any]) -> None:
    job = job_of(tmp_path, **changes)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(job.config.resolved_yaml())

    def refused(*arguments: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("vpipe.schedules.checker.check", refused)
    monkeypatch.setattr("vpipe.app.config.config.Config.mistakes", refused)
    monkeypatch.setattr(Job, "_check", refused)
    config = parse_resolved(resolved.read_text())
    assert config == job.config
    again = Job.from_config(config, checked=True)
    assert (again.schedule, again.cut.partition, again.updates) == (job.schedule, job.cut.partition, job.updates)
    assert [layer.name for layer in again.model.layers] == [layer.name for layer in job.model.layers]
