"""Several texts of BERT in a sample: borders by hand, and every text in it as it is in a sample of its own."""

from __future__ import annotations

import numpy as np
import pytest

from vpipe.app.data.bert_samples import PackedBertDataset, Samples, mask_tokens, pack
from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.packing import sample_borders
from vpipe.app.data.synthetic import random_pairs, synthetic

LENGTH, PREDICTIONS = 24, 4
FIELDS = ("input_ids", "segment_ids", "positions", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")


@pytest.mark.parametrize(("sizes", "room", "borders"), [
    ([[5], [4], [3], [12], [1], [10], [6], [6]], [12], [0, 3, 4, 6, 8]),
    ([[5, 1], [4, 9], [3, 3], [2, 9]], [12, 12], [0, 2, 4]),  # the target of the third does not fit
    ([[1, 9], [1, 9]], [12, 12], [0, 1, 2]), ([[12]], [12], [0, 1])])
def test_a_text_that_does_not_fit_begins_the_next_sample(sizes: list[list[int]], room: list[int],
                                                         borders: list[int]) -> None:
    assert sample_borders(np.array(sizes), room).tolist() == borders


def made(split: str) -> Samples:
    """Texts of 5 to 16 tokens in rows of 16."""
    rng = np.random.default_rng(len(split))
    fields = pack(random_pairs(40, 50, 5, 16, rng), 16, cls=2, sep=3)
    mask_tokens(fields, PREDICTIONS, special=np.arange(5, dtype=np.int32), mask_id=4,
                words=np.arange(5, 50, dtype=np.int32), rng=rng)
    return fields


def test_every_text_of_bert_is_in_a_sample_as_it_is() -> None:
    arrays = {split: made(split) for split in ("train", "test")}
    counts = {"train": 9, "test": 100}
    data = PackedBertDataset(50, LENGTH, PREDICTIONS, counts, lambda split, field: arrays[split][field])
    assert data.samples("train") == 9, "as dataset.samples says"
    held = next(data.batches("train", 9, seed=0, fields=("next_sentence_labels",)))["next_sentence_labels"]
    assert data.lines == [f"packed: {int((held != -100).sum())} texts in 9 samples"]
    batch = next(data.batches("test", data.samples("test"), seed=0))
    assert tuple(sorted(batch)) == tuple(sorted(FIELDS))
    number, several = 0, 0
    for row in range(data.samples("test")):
        starts = (batch["positions"][row] == 0).nonzero()[:, 0].tolist()
        labels = batch["next_sentence_labels"][row]
        texts = int((labels != -100).sum())
        several += texts > 1
        used = 0
        for start, end, label in zip(starts[:texts], [*starts, LENGTH][1:texts + 1], labels.tolist(), strict=False):
            own = {name: arrays["test"][name][number] for name in arrays["test"]}
            length, masked = int(own["input_mask"].sum()), int(np.count_nonzero(own["masked_lm_ids"]))
            assert end - start == length
            assert label == own["next_sentence_labels"]
            for name in ("input_ids", "segment_ids"):
                assert batch[name][row, start:end].tolist() == own[name][:length].tolist()
            slots = slice(used, used := used + masked)
            assert batch["masked_lm_ids"][row, slots].tolist() == own["masked_lm_ids"][:masked].tolist()
            assert (batch["masked_lm_positions"][row, slots] - start).tolist() == \
                own["masked_lm_positions"][:masked].tolist()
            number += 1
        assert not batch["masked_lm_ids"][row, used:].any()
        assert not batch["input_ids"][row, starts[texts]:].any() if texts < len(starts) else True
    assert number == 40, "none is left out"
    assert several > 5


def test_random_texts_of_bert_are_as_many_as_asked_for() -> None:
    data = synthetic(DatasetSettings(sequence_length=32, vocab_size=60, samples=50, fields=FIELDS, batch_size=4))
    assert isinstance(data, PackedBertDataset)
    assert data.samples("train") == 50
    labels = next(data.batches("train", 50, seed=0, fields=("next_sentence_labels",)))["next_sentence_labels"]
    assert int((labels != -100).sum()) >= 100, "texts of a quarter to half a sample"
    assert not isinstance(synthetic(DatasetSettings(sequence_length=32, fields=("input_ids", "input_mask"))),
                          PackedBertDataset)
