from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from golden import refusal
from hypothesis import given
from hypothesis import strategies as st

from vpipe.app.data.dataset import Dataset, VaryingBatches
from vpipe.errors import UserError
from vpipe.extras.translation.length_buckets import LengthBuckets, PairDataset, TokenPairs
from vpipe.extras.translation.synthetic import synthetic_pairs

WORDS = ("river", "stone", "quiet", "lantern", "harbour", "winter", "signal", "copper", "meadow", "engine", "silver",
         "morning", "letter", "garden", "window", "thunder", "market", "bridge", "velvet", "compass")


def widths(most: int = 12) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(1, most), min_size=1, max_size=60).map(lambda found: np.array(found, np.int64))


@given(widths(), st.integers(1, 6), st.one_of(st.none(), st.integers(72, 200)), st.integers(0, 3))
def test_every_sample_is_in_one_batch_of_an_epoch_within_the_budget(
        given: np.ndarray, group: int, budget: int | None, seed: int) -> None:
    if group > len(given):
        with pytest.raises(UserError, match="fewer than one batch"):
            LengthBuckets(given, group, budget)
        return
    buckets = LengthBuckets(given, group, budget)
    batches = buckets.epoch(seed)
    rows = Counter(np.concatenate(batches).tolist())
    assert set(rows.values()) == {1}
    left_out = sorted(given[row] for row in range(len(given)) if row not in rows)
    assert left_out == sorted(given)[:len(given) % group]  # the shortest
    for batch in batches:
        assert len(batch) % group == 0
        if budget is None:
            assert len(batch) == group
        else:
            assert len(batch) * given[batch].max() <= budget
    # Every epoch has the same sizes, and a seed alone decides its order.
    sizes = sorted((len(batch), int(given[batch].max())) for batch in batches)
    other = buckets.epoch(seed + 1)
    assert sizes == sorted((len(batch), int(given[batch].max())) for batch in other)
    assert [batch.tolist() for batch in LengthBuckets(given, group, budget).epoch(seed)] == \
        [batch.tolist() for batch in batches]
    # Batches are of similar lengths: sorted, the longest sample of one is no longer than the shortest of the next.
    spans = sorted((int(given[batch].min()), int(given[batch].max())) for batch in batches)
    assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(spans))


def test_the_drawn_example() -> None:
    buckets = LengthBuckets(np.array([9, 9, 8, 7, 7, 6, 6, 6, 5, 4, 4, 4, 4, 4, 3, 3, 2]), 4, 40)
    assert buckets.borders == [0, 4, 8, 16]


def test_a_budget_that_holds_no_batch_of_the_longest_samples_is_refused() -> None:
    assert refusal(LengthBuckets, np.array([3, 50, 4]), 2, 99) == (
        "error: dataset.max_tokens is 99, but the batch_size of 2 times the longest sample's 50 tokens is 100\nhint: "
        "raise it to 100 or more, or lower dataset.batch_size, which with max_tokens is what every batch has a "
        "multiple of, or model.sequence_length")


def small(max_tokens: int | None = None) -> PairDataset:
    """Three pairs of tokens from 2 on; padding is 0 and the end 1."""
    source, target = np.array([2, 3, 4, 5, 6], np.uint16), np.array([7, 8, 9, 2, 3, 4], np.uint16)
    lengths = np.array([[1, 2], [3, 1], [1, 3]])
    pairs = TokenPairs.from_lengths(source, target, lengths)
    return PairDataset(10, 4, {"train": pairs, "test": pairs}, (0, 1), max_tokens,
                       held_out=(("a", "bc"), ("d", "e"), ("f", "gh")))


def test_the_fields_of_a_batch() -> None:
    dataset = small()
    assert isinstance(dataset, Dataset)
    assert isinstance(dataset, VaryingBatches)
    (batch,) = dataset.batches("test", 3, seed=0)
    assert batch["source_ids"].tolist() == [[2, 1, 0, 0], [3, 4, 5, 1], [6, 1, 0, 0]]
    assert batch["source_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["target_ids"].tolist() == [[0, 7, 8, 0], [0, 9, 0, 0], [0, 2, 3, 4]]
    assert batch["labels"].tolist() == [[7, 8, 1, -100], [9, 1, -100, -100], [2, 3, 4, 1]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert [len(batch["labels"]) for batch in dataset.batches("test", 2, seed=0)] == [2, 1]
    assert [len(batch["labels"]) for batch in small(8).batches("test", 1, seed=0)] == [2, 1]


@pytest.mark.parametrize("needed", [(), ("source_mask",), ("labels",), ("target_ids", "source_ids")])
def test_a_field_that_is_not_needed_has_its_shape_alone(needed: tuple[str, ...]) -> None:
    dataset = synthetic_pairs(40, 12, 50, batch_size=2, max_tokens=60)
    for batch, some in zip(dataset.batches("train", 2, seed=2),
                           dataset.batches("train", 2, seed=2, fields=needed), strict=True):
        for name, tensor in batch.items():
            assert some[name].is_meta == (name not in needed)
            assert (some[name].shape, some[name].dtype) == (tensor.shape, tensor.dtype)
            assert some[name].is_meta or torch.equal(some[name], tensor)
    with pytest.raises(UserError, match="a batch has no field 'label'"):
        dataset.batches("train", 2, seed=2, fields=["label"])


def test_an_epoch_begins_with_any_batch_and_its_tokens_are_known_without_reading() -> None:
    dataset = synthetic_pairs(40, 12, 50, batch_size=2, max_tokens=60)
    batches = list(dataset.batches("train", 2, seed=5))
    tokens = dataset.batch_tokens(2, seed=5)
    assert [own.tolist() for own in tokens] == [(batch["labels"] != -100).sum(1).tolist() for batch in batches]
    assert len({len(batch["labels"]) for batch in batches}) > 1
    for first in range(len(batches) + 1):
        rest = list(dataset.batches("train", 2, seed=5, first=first))
        assert len(rest) == len(batches) - first
        for ours, theirs in zip(rest, batches[first:], strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    longest = max(max(batch["labels"].shape[1], batch["source_ids"].shape[1]) for batch in batches)
    largest = dataset.largest_batch(2)
    assert max(largest["labels"].shape[1], largest["source_ids"].shape[1]) == longest == 12
    padded = sum(batch["source_ids"].numel() + batch["labels"].numel() for batch in batches)
    real = sum(int(batch["source_mask"].sum() + (batch["labels"] != -100).sum()) for batch in batches)
    assert dataset.padding_share(2) == pytest.approx(1 - real / padded, abs=0.02)


def test_the_held_out_text_of_pairs_is_their_targets() -> None:
    text = small().held_out_text
    assert text is not None
    assert (text.tokens, text.bytes) == (9, 5)
    # 1 three times, 2, 3, 4, 7, 8, 9 once each
    assert text.unigram_entropy == pytest.approx(-(3 / 9 * np.log(3 / 9) + 6 / 9 * np.log(1 / 9)))
    assert synthetic_pairs(40, 12, 50).held_out_text is None


def test_a_token_out_of_the_vocabulary_is_noticed_when_it_is_read() -> None:
    pairs = TokenPairs.from_lengths(np.array([70000], np.uint32), np.array([3], np.uint32), np.array([[1, 1]]))
    dataset = PairDataset(10, 4, {"train": pairs, "test": pairs}, (0, 1))
    assert len(list(dataset.batches("train", 1, seed=0, fields=["labels"]))) == 1
    with pytest.raises(UserError, match="a pair has the token 70000, but the vocabulary ends at 9"):
        list(dataset.batches("train", 1, seed=0))
