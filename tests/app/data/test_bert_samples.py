from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.app.data.bert_samples import (
    SHAPES,
    STORAGE,
    SentencePair,
    check_lengths,
    default_max_predictions,
    make_samples,
    mask_tokens,
    pack,
    sentence_pairs,
    shape_of,
)
from vpipe.app.data.plain_text import read_documents
from vpipe.app.data.tokenizers import train_wordpiece
from vpipe.errors import UserError


def numbered(lengths: list[list[int]]) -> list[list[list[int]]]:
    """Documents whose tokens are 5, 6, 7, ... throughout, with a gap between documents."""
    token, documents = 5, []
    for document in lengths:
        sentences = []
        for length in document:
            sentences.append(list(range(token, token + length)))
            token += length
        documents.append(sentences)
        token += 1
    return documents


DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=12), min_size=2, max_size=12)


@given(lengths=DOCUMENTS, sequence_length=st.integers(8, 64), seed=st.integers(0, 1000))
def test_a_true_next_passage_follows_and_a_random_one_is_from_elsewhere(lengths: list[list[int]], sequence_length: int,
                                                                        seed: int) -> None:
    documents = numbered(lengths)
    origin = {token: number for number, document in enumerate(documents) for sentence in document for token in sentence}
    pairs = list(sentence_pairs(documents, sequence_length, np.random.default_rng(seed)))
    assert len(pairs) >= len(documents)
    for pair in pairs:
        assert len(pair.a) >= 1
        assert len(pair.b) >= 1
        assert len(pair.a) + len(pair.b) + 3 <= sequence_length
        assert all(after == before + 1 for before, after in pairwise(pair.a))
        assert all(after == before + 1 for before, after in pairwise(pair.b))
        assert (pair.b[0] == pair.a[-1] + 1) is (not pair.is_random)
        assert (origin[pair.b[0]] == origin[pair.a[0]]) is (not pair.is_random)


def test_labels_are_a_fair_coin_and_length_does_not_tell_them() -> None:
    rng = np.random.default_rng(0)
    documents = numbered([rng.integers(4, 20, size=rng.integers(2, 14)).tolist() for _ in range(1500)])
    pairs = list(sentence_pairs(documents, 64, rng))
    label = np.array([pair.is_random for pair in pairs])
    length = np.array([len(pair.b) for pair in pairs])
    assert abs(label.mean() - 0.5) < 0.03
    assert abs(length[label].mean() - length[~label].mean()) < 1.5


def test_one_document_is_too_few() -> None:
    with pytest.raises(UserError, match="1 document with at least 2 sentences"):
        next(sentence_pairs(numbered([[3, 3]]), 32, np.random.default_rng(0)))


def test_a_pair_is_packed_between_its_special_tokens() -> None:
    samples = pack([SentencePair([7, 8], [9], True)], 8, cls=2, sep=3)
    assert samples["input_ids"].tolist() == [[2, 7, 8, 3, 9, 3, 0, 0]]
    assert samples["input_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]
    assert samples["segment_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0]]
    assert samples["next_sentence_labels"].tolist() == [1]


@pytest.fixture
def masked() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Token ids before masking, and the samples after it."""
    rng = np.random.default_rng(1)
    pairs = [SentencePair(rng.integers(5, 100, size=20).tolist(), rng.integers(5, 100, size=length).tolist(), False)
             for length in rng.integers(1, 60, size=5000)]
    samples = pack(pairs, 96, cls=2, sep=3)
    before = samples["input_ids"].copy()
    mask_tokens(samples, 12, special=np.arange(5, dtype=np.int32), mask_id=4, words=np.arange(5, 100, dtype=np.int32),
                rng=rng)
    return before, samples


def test_predictions_hold_the_original_tokens_and_nothing_else_changes(
        masked: tuple[np.ndarray, dict[str, np.ndarray]]) -> None:
    before, samples = masked
    positions, ids = samples["masked_lm_positions"], samples["masked_lm_ids"]
    used = ids > 0
    assert (ids == np.where(used, np.take_along_axis(before, positions, axis=1), 0)).all()
    assert (positions[~used] == 0).all()
    assert (positions[used] > 0).all()
    assert (np.diff(np.where(used, positions, 1000 + np.arange(12)), axis=1) > 0).all(), "ascending, used slots first"
    hidden = np.zeros(before.shape, dtype=bool)
    rows, slots = np.nonzero(used)
    hidden[rows, positions[rows, slots]] = True
    assert (samples["input_ids"] == before)[~hidden].all()
    assert not hidden[before < 5].any(), "[CLS], [SEP] and padding are never masked"


def test_fifteen_percent_are_masked_up_to_the_limit(masked: tuple[np.ndarray, dict[str, np.ndarray]]) -> None:
    _, samples = masked
    length = samples["input_mask"].sum(axis=1)
    wanted = np.minimum(np.maximum(np.rint(0.15 * length), 1), 12)
    assert ((samples["masked_lm_ids"] > 0).sum(axis=1) == wanted).all()


def test_eighty_ten_ten(masked: tuple[np.ndarray, dict[str, np.ndarray]]) -> None:
    _, samples = masked
    used = samples["masked_lm_ids"] > 0
    shown = np.take_along_axis(samples["input_ids"], samples["masked_lm_positions"], axis=1)[used]
    original = samples["masked_lm_ids"][used]
    assert abs((shown == 4).mean() - 0.8) < 0.01
    assert abs((shown == original).mean() - 0.1) < 0.01
    assert (shown >= 4).all()


def test_samples_of_text_have_their_shapes_and_are_repeatable(text_folder: Path) -> None:
    documents = read_documents(text_folder)
    tokenizer = train_wordpiece(documents, 120)
    samples = make_samples(documents, tokenizer, sequence_length=32, max_predictions=5, seed=3)
    rows = len(samples["input_ids"])
    assert rows > 40
    assert {name: array.shape for name, array in samples.items()} == {
        name: (rows, *shape_of(name, 32, 5)) for name in SHAPES}
    assert {name: array.dtype for name, array in samples.items()} == STORAGE
    again = make_samples(documents, tokenizer, sequence_length=32, max_predictions=5, seed=3)
    assert all((samples[name] == again[name]).all() for name in SHAPES)
    other = make_samples(documents, tokenizer, sequence_length=32, max_predictions=5, seed=4)
    assert samples["input_ids"].tobytes() != other["input_ids"].tobytes()


def test_lengths_that_cannot_work_are_errors() -> None:
    assert default_max_predictions(128) == 20
    with pytest.raises(UserError, match="sequence_length is 4"):
        check_lengths(4, 1)
    with pytest.raises(UserError, match="max_predictions is 40 in sequences of 32 tokens") as caught:
        check_lengths(32, 40)
    assert "15 %: 5" in str(caught.value)
