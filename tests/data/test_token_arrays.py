from pathlib import Path

import numpy as np
import pytest
import torch

from vpipe.data.dataset import Dataset, DatasetSettings, Split, Tokenized
from vpipe.data.synthetic import synthetic
from vpipe.data.synthetic_tokens import synthetic_tokens
from vpipe.data.token_arrays import TokenArrays, samples_in
from vpipe.data.token_fields import for_language_model
from vpipe.errors import UserError


def counting(tokens: int, length: int, dtype: str = "uint16") -> TokenArrays:
    """Token t is t."""
    rows = {"train": np.arange(tokens, dtype=dtype), "test": np.arange(2 * length + 1, dtype=dtype)}
    return TokenArrays(tokens, length, {"train": samples_in(tokens, length), "test": 2}, rows.__getitem__)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_labels_are_the_tokens_that_follow_and_nothing_is_skipped(dtype: str) -> None:
    dataset = counting(23, 4, dtype)
    assert isinstance(dataset, Dataset)
    assert isinstance(dataset, Tokenized)
    assert dataset.samples("train") == 5  # 21 tokens; two are left over
    batches = list(dataset.batches("train", 1, seed=3))
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert rows.dtype == torch.int64
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), rows + 1)
    assert sorted(rows[:, 0].tolist()) == [0, 4, 8, 12, 16]
    assert torch.equal(next(dataset.batches("test", 2, seed=9))["labels"], torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))


def test_a_token_out_of_the_vocabulary_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    rows = {"train": np.array([1, 2, 3, 4, 65535], np.uint16), "test": np.arange(5, dtype=np.uint16)}
    dataset = TokenArrays(8, 2, {"train": 2, "test": 2}, rows.__getitem__, tmp_path / "tokenizer.json")
    assert len(list(dataset.batches("train", 1, seed=0, fields=["input_ids"]))) == 2
    with pytest.raises(UserError) as caught:
        list(dataset.batches("train", 1, seed=0))
    assert str(caught.value) == ("error: the train split has the token 65535, but the vocabulary ends at 7: the "
                                 f"prepared data is damaged ({tmp_path})\nhint: remove its folder, and it is made anew")
    assert len(list(dataset.batches("test", 1, seed=0))) == 2


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_how_many_samples_tokens_give(tokens: int, samples: int) -> None:
    assert samples_in(tokens, 4) == samples


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_epoch_is_in_an_order_from_its_seed_and_begins_with_any_batch(split: Split) -> None:
    dataset = synthetic_tokens(50, 8, 12, 12)

    def epoch(seed: int, first: int = 0) -> list[list[list[int]]]:
        return [batch["input_ids"].tolist() for batch in dataset.batches(split, 5, seed=seed, first=first)]

    assert len(epoch(1)) == 2
    assert (epoch(1) != epoch(2)) == (split == "train")
    for first in range(3):
        assert epoch(1, first) == epoch(1)[first:]


def test_fields_not_needed_are_not_read() -> None:
    asked: list[str] = []

    def tokens(split: str) -> np.ndarray:
        asked.append(split)
        return np.arange(9, dtype=np.uint16)

    dataset = TokenArrays(9, 4, {"train": 2, "test": 1}, tokens)
    batch = next(dataset.batches("train", 2, seed=0, fields=()))
    assert batch["input_ids"].is_meta
    assert batch["labels"].shape == (2, 4)
    assert asked == []
    batch = next(dataset.batches("train", 2, seed=0, fields=("labels",)))
    assert batch["input_ids"].is_meta
    assert asked == ["train"]


def test_synthetic_makes_what_the_model_reads() -> None:
    bert = synthetic(DatasetSettings(sequence_length=16, samples=16))
    assert "masked_lm_ids" in bert.fields
    gpt = synthetic(DatasetSettings(sequence_length=16, samples=16, vocab_size=300, fields=("input_ids", "labels")))
    assert list(gpt.fields) == ["input_ids", "labels"]
    assert (gpt.vocab_size, gpt.samples("train"), gpt.samples("test")) == (300, 16, 2)
    assert next(gpt.batches("train", 16, seed=0))["labels"].max() > 255
    assert not for_language_model(("input_ids", "masked_lm_ids"))


def test_impossible_sizes_are_errors() -> None:
    with pytest.raises(UserError, match="sequence_length is 0"):
        counting(9, 0)
    with pytest.raises(UserError, match="vocab_size is 1"):
        synthetic_tokens(1, 4, 4, 4)
    with pytest.raises(UserError, match="samples is 0"):
        synthetic(DatasetSettings(samples=0, fields=("labels",)))
    with pytest.raises(UserError, match="the train split holds 1 samples, fewer than one batch of 2"):
        counting(6, 4).batches("train", 2, seed=0)
