from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from golden import refusal

from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.data.bert_samples import SHAPES, STORAGE, shape_of
from vpipe.app.data.dataset import Dataset, DatasetSettings, Split
from vpipe.errors import UserError
from vpipe.extras.bert_hdf5.shards import BertHdf5, bert_hdf5, write_shard


def write(path: Path, rows: int, first: int = 0, length: int = 16, predictions: int = 3, **changed: object) -> Path:
    """A shard whose row r starts with the token first + r; ``changed`` replaces fields, None leaves one out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples: dict[str, object] = {name: np.ones((rows, *shape_of(name, length, predictions)), STORAGE[name])
                                  for name in SHAPES}
    ids = np.ones((rows, length), np.int32)
    ids[:, 0] = first + np.arange(rows)
    samples |= {"input_ids": ids, "next_sentence_labels": (ids[:, 0] % 2).astype(np.int8), **changed}
    with h5py.File(path, "w") as file:
        for name, array in samples.items():
            if array is not None:
                file[name] = array
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, rows in enumerate((10, 7, 13)):
        write(tmp_path / f"part_training_{number}.hdf5", rows, first=100 * number)
    write(tmp_path / "part_test_0.h5", 6, first=900)
    return tmp_path


def rows_of(dataset: BertHdf5, split: str = "train", batch_size: int = 4, seed: int = 0) -> list[int]:
    return [row for batch in dataset.batches(split, batch_size, seed=seed) for row in batch["input_ids"][:, 0].tolist()]


def test_an_epoch_crosses_shards_and_neither_loses_nor_doubles(folder: Path) -> None:
    dataset = BertHdf5(folder)
    assert isinstance(dataset, Dataset)
    assert dataset.samples("train") == 30
    all_rows = [*range(10), *range(100, 107), *range(200, 213)]
    for batch_size in (1, 3, 30):
        assert sorted(rows_of(dataset, batch_size=batch_size)) == all_rows
    partial = rows_of(dataset, batch_size=4)
    assert len(partial) == len(set(partial)) == 28
    assert rows_of(dataset, batch_size=4) == partial
    assert rows_of(dataset, batch_size=4, seed=1) != partial
    for batch_size in (3, 4, 9):
        assert rows_of(dataset, "test", batch_size, seed=0) == list(range(900, 906))
    assert rows_of(dataset, "test", 3, seed=1) == list(range(900, 906))
    hidden = dataset.batches("test", 4, seed=0, fields=["input_ids"])
    assert [len(batch["input_mask"]) for batch in hidden] == [4, 2]


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_epoch_begins_with_any_batch(folder: Path, split: Split) -> None:
    dataset = BertHdf5(folder)
    whole = [batch["input_ids"] for batch in dataset.batches(split, 3, seed=5)]
    for first in range(len(whole) + 1):
        rest = [batch["input_ids"] for batch in dataset.batches(split, 3, seed=5, first=first)]
        assert len(rest) == len(whole) - first
        assert all(map(torch.equal, rest, whole[first:]))


def test_fields_not_needed_are_on_meta_and_the_rows_stay_aligned(folder: Path) -> None:
    dataset = BertHdf5(folder)
    whole = list(dataset.batches("train", 4, seed=2))
    part = list(dataset.batches("train", 4, seed=2, fields=["next_sentence_labels"]))
    for full, some in zip(whole, part, strict=True):
        assert torch.equal(full["next_sentence_labels"], full["input_ids"][:, 0] % 2)
        assert torch.equal(full["next_sentence_labels"], some["next_sentence_labels"])
        assert some["input_ids"].is_meta
        for name, field in dataset.fields.items():
            assert some[name].shape == full[name].shape == (4, *field.shape)
            assert full[name].dtype == torch.int64


def test_no_shard_is_read_when_no_field_is_needed(folder: Path) -> None:
    dataset = BertHdf5(folder)
    for path in folder.iterdir():
        path.unlink()
    batches = list(dataset.batches("train", 4, seed=0, fields=[]))
    assert len(batches) == 7
    assert all(tensor.is_meta for batch in batches for tensor in batch.values())


def test_without_test_files_the_tail_of_the_last_shard_is_held_out(folder: Path) -> None:
    (folder / "part_test_0.h5").unlink()
    write(folder / "part_training_3.hdf5", 40, first=300)
    dataset = BertHdf5(folder)
    assert rows_of(dataset, "test", 1) == [338, 339]
    assert dataset.samples("train") == 68
    assert not {338, 339} & set(rows_of(dataset, batch_size=1))


def test_samples_bounds_the_training_split(folder: Path) -> None:
    dataset = BertHdf5(folder, samples=12)
    assert sorted(rows_of(dataset, batch_size=1)) == [*range(10), 100, 101]


def test_the_vocabulary_is_asked_of_the_data(folder: Path) -> None:
    assert BertHdf5(folder).vocab_size == 912, "the largest id is 905: 906 rounded up"
    (folder / "vocab.txt").write_text("".join(f"word{number}\n" for number in range(30522)))
    assert BertHdf5(folder).vocab_size == 30522
    assert BertHdf5(folder, vocab_size=30528).vocab_size == 30528
    with pytest.raises(UserError, match="vocab_size is 1000, but the shards were made with 30522 tokens") as caught:
        BertHdf5(folder, vocab_size=1000)
    assert caught.value.problems[0].where == str(folder / "vocab.txt")
    (folder / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"has the token id \d+, but vocab_size is 50"):
        list(BertHdf5(folder, vocab_size=50).batches("train", 4, seed=0))


def test_folders_at_fault(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        BertHdf5(tmp_path / "nowhere")
    path = write(tmp_path / "one_test.hdf5", 4)
    assert refusal(BertHdf5, tmp_path) == (
        f"error: no file named *training*.hdf5 or *training*.h5 in {tmp_path} (1 other HDF5 files)\n"
        "hint: download or build shards: vpipe data build-bert --text FOLDER --out FOLDER")
    with pytest.raises(UserError, match=r"one_test\.hdf5 is a file, not a folder"):
        BertHdf5(path)
    with pytest.raises(UserError, match="'bert_hdf5' has no path"):
        bert_hdf5(DatasetSettings())


def test_sequence_length_must_be_the_shards(folder: Path) -> None:
    assert bert_hdf5(DatasetSettings(folder, sequence_length=16)).sequence_length == 16
    with pytest.raises(UserError, match=r"sequence_length is 128, but the samples in part_training_0\.hdf5 have 16"):
        bert_hdf5(DatasetSettings(folder))


def broken(folder: Path, **changed: object) -> str:
    write(folder / "x_training.hdf5", 4, **changed)
    with pytest.raises(UserError) as caught:
        BertHdf5(folder)
    assert caught.value.problems[0].where == str(folder / "x_training.hdf5")
    return str(caught.value)


def test_shards_at_fault(tmp_path: Path) -> None:
    text = broken(tmp_path, masked_lm_ids=None)
    assert "the shard x_training.hdf5 has no key 'masked_lm_ids'; its keys are: input_ids, input_mask, " in text
    text = broken(tmp_path, input_mask=np.ones((3, 16), np.int8))
    assert "'input_mask' in the shard x_training.hdf5 has 3 rows, but 'input_ids' has 4" in text
    assert "[N, S] and [N, S] with the same N" in text
    text = broken(tmp_path, masked_lm_ids=np.ones((4, 5), np.int32))
    assert "'masked_lm_ids' in the shard x_training.hdf5 has 5 predictions per row" in text
    assert "but 'masked_lm_positions' has 3" in text
    text = broken(tmp_path, segment_ids=np.ones(4, np.int8))
    assert "'segment_ids' in the shard x_training.hdf5 has 1 dimensions instead of 2" in text
    assert "its shape is [4], not [N, S]" in text
    assert "holds float32, not integers" in broken(tmp_path, input_ids=np.ones((4, 16), np.float32))


def test_files_that_are_no_hdf5_or_truncated_are_all_named(folder: Path) -> None:
    (folder / "part_training_1.hdf5").write_bytes(b"not hdf5")
    whole = (folder / "part_training_2.hdf5").read_bytes()
    (folder / "part_training_2.hdf5").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(UserError) as caught:
        BertHdf5(folder)
    first, second = caught.value.problems
    assert "the shard part_training_1.hdf5 (8 bytes) is not an HDF5 file or is truncated" in first.what
    assert second.where == str(folder / "part_training_2.hdf5")
    assert first.hint == "copy or build it again"


def test_shards_of_different_lengths(folder: Path) -> None:
    write(folder / "part_training_9.hdf5", 4, length=32)
    with pytest.raises(UserError) as caught:
        BertHdf5(folder)
    assert ("the samples in part_training_9.hdf5 have 32 tokens, those in part_training_0.hdf5 have 16"
            in str(caught.value))


def test_write_shard_round_trips(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = {name: rng.integers(0, 16 if name.endswith(("ids", "positions")) and "segment" not in name else 2,
                                  size=(8, *shape_of(name, 16, 3))).astype(STORAGE[name]) for name in SHAPES}
    write_shard(tmp_path / "a_training.hdf5", samples)
    write_shard(tmp_path / "a_test.hdf5", samples)
    batch = next(BertHdf5(tmp_path).batches("test", 8, seed=0))
    assert all((batch[name].numpy() == samples[name]).all() for name in SHAPES)


def test_init_finds_shards_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shard.hdf5", "f.jsonl"):
        Path(name).touch()
    assert main(["init", "--data", "shard.hdf5", "-o", "c.yaml"]) == 0
    config = load_config(Path("c.yaml"))
    assert (config.model.name, config.dataset.name) == ("bert", "bert_hdf5")
    assert main(["init", "--data", "f.jsonl", "--family", "bert"]) == 2
    assert "or data with *.txt, *.hdf5\n" in capsys.readouterr().err
