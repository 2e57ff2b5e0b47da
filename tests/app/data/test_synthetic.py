import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vpipe.app.data.dataset import Dataset, DatasetSettings
from vpipe.app.data.synthetic import synthetic, synthetic_bert
from vpipe.errors import UserError

PRINT_AN_EPOCH = """
import hashlib, torch
from vpipe.app.data.synthetic import synthetic_bert
torch.manual_seed(torch.seed() % 1000)
print([hashlib.sha256(b["input_ids"].numpy().tobytes()).hexdigest() for b in
       synthetic_bert(50, 16, 20, seed=1).batches("train", 6, seed=7)])
"""


def test_batches_have_the_shapes_and_types_of_their_fields() -> None:
    dataset = synthetic_bert(100, 32, 64, max_predictions=4)
    assert isinstance(dataset, Dataset)
    batches = list(dataset.batches("train", 10, seed=0))
    assert len(batches) == 6
    for batch in batches:
        assert set(batch) == set(dataset.fields)
        for name, field in dataset.fields.items():
            assert batch[name].shape == (10, *field.shape)
            assert batch[name].dtype == field.dtype == torch.int64
        assert batch["input_ids"].max() < 100
    assert dataset.samples("test") == 8


def test_fields_not_needed_are_on_meta_and_do_not_change_the_others() -> None:
    dataset = synthetic_bert(100, 32, 64)
    whole = list(dataset.batches("train", 16, seed=5))
    part = list(dataset.batches("train", 16, seed=5, fields=["next_sentence_labels"]))
    for full, some in zip(whole, part, strict=True):
        assert torch.equal(full["next_sentence_labels"], some["next_sentence_labels"])
        assert some["input_ids"].is_meta
        assert some["input_ids"].shape == full["input_ids"].shape
        assert some["input_ids"].dtype == full["input_ids"].dtype
    assert all(tensor.is_meta for batch in dataset.batches("train", 16, seed=5, fields=[]) for tensor in batch.values())


def test_an_epoch_holds_every_sample_once_in_an_order_from_the_seed_alone() -> None:
    dataset = synthetic_bert(1000, 32, 60)

    def epoch(seed: int, split: str = "train") -> list[tuple[int, ...]]:
        return [tuple(row) for batch in dataset.batches(split, 5, seed=seed) for row in batch["input_ids"].tolist()]

    first = epoch(0)
    assert len(first) == len(set(first)) == 60
    assert epoch(0) == first
    assert epoch(-1) != epoch(1) != first
    assert sorted(epoch(1)) == sorted(first)
    assert epoch(0, "test") == epoch(1, "test"), "the test split is not shuffled"


def test_the_global_random_state_neither_matters_nor_changes() -> None:
    state = torch.random.get_rng_state()
    list(synthetic_bert(50, 16, 20).batches("train", 5, seed=0))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.usefixtures("forked")
def test_processes_agree(tmp_path: Path) -> None:
    """The other comes from a process with a seed of hashes of its own."""
    program = tmp_path / "an_epoch.py"
    program.write_text(PRINT_AN_EPOCH)
    with contextlib.redirect_stdout(io.StringIO()) as here, torch.random.fork_rng():
        exec(PRINT_AN_EPOCH, {})
    there = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout
    assert here.getvalue() == there != ""


def test_settings_fill_in_sizes() -> None:
    dataset = synthetic(DatasetSettings(sequence_length=64, samples=16))
    assert (dataset.vocab_size, dataset.sequence_length, dataset.fields["masked_lm_ids"].shape) == (8192, 64, (10,))


@pytest.mark.parametrize("fields", [(), ("input_ids", "labels")])
def test_there_is_enough_for_some_batches(fields: tuple[str, ...]) -> None:
    def counts(samples: int | None, batch_size: int) -> tuple[int, int]:
        dataset = synthetic(DatasetSettings(sequence_length=8, samples=samples, fields=fields, batch_size=batch_size))
        return dataset.samples("train"), dataset.samples("test")

    assert counts(None, 4) == counts(None, 128) == (1024, 128)
    assert counts(None, 512) == (4096, 512)  # a flat file's minibatches of 16, 32 of them
    assert counts(64, 8) == (64, 8)
    assert counts(64, 16) == (64, 16)


def test_impossible_requests_are_errors() -> None:
    dataset = synthetic_bert(100, 32, 64)
    with pytest.raises(UserError, match="the train split holds 64 samples, fewer than one batch of 65") as caught:
        dataset.batches("train", 65, seed=0)
    assert "hint: use a batch size of at most 64" in str(caught.value)
    with pytest.raises(UserError, match="batch_size is 0"):
        dataset.batches("train", 0, seed=0)
    with pytest.raises(UserError, match="no field 'input_id'") as caught:
        dataset.batches("train", 4, seed=0, fields=["input_id"])
    assert "did you mean 'input_ids'?" in str(caught.value)
    with pytest.raises(UserError, match="no split is called 'tests'"):
        dataset.samples("tests")
    with pytest.raises(UserError, match="vocab_size is 5, but 5 ids are special"):
        synthetic_bert(5, 32, 4)
    with pytest.raises(UserError, match="samples is 0"):
        synthetic_bert(50, 32, 0)
