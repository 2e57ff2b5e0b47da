"""Shards, prepared data and tokenizers that hold something else than they should."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from limits import refusal, shards

from vpipe.app.data.bert_samples import SHAPES, STORAGE, Samples, shape_of
from vpipe.app.data.cache import MANIFEST, _digest
from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.registry import dataset_named
from vpipe.app.data.tokenizers import load_tokenizer
from vpipe.app.families import LARGEST_SIZE

SHAPE = (12, 16)


def samples() -> Samples:
    return {name: np.ones((12, *shape_of(name, 16, 3)), STORAGE[name]) for name in SHAPES}


def epoch(folder: Path, vocab_size: int = -1) -> list[Any]:
    return list(shards().BertHdf5(folder, vocab_size=vocab_size).batches("train", 1, seed=0))


def replaced(folder: Path, name: str, make: Callable[[h5py.File, str], object]) -> None:
    """A shard in which ``make`` puts something else under a name."""
    shards().write_shard(folder / "a_training.hdf5", samples())
    with h5py.File(folder / "a_training.hdf5", "r+") as file:
        del file[name]
        make(file, name)


def virtual(file: h5py.File, name: str) -> None:
    layout = h5py.VirtualLayout(SHAPE, dtype="i1")
    layout[:] = h5py.VirtualSource("b.hdf5", name, shape=SHAPE)
    file.create_virtual_dataset(name, layout)


def external(file: h5py.File, name: str) -> None:
    file.create_dataset(name, SHAPE, dtype="i1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])


@pytest.mark.parametrize(("make", "what"), [
    (lambda file, name: file.create_group(name), "is no array"),
    (lambda file, name: file.__setitem__(name, np.dtype("i4")), "is no array"),
    (lambda file, name: file.create_dataset(name, data=h5py.Empty("i4")), "is no array"),
    (lambda file, name: file.__setitem__(name, h5py.ExternalLink("b.hdf5", name)), "leads to another file"),
    (external, "leads to another file"), (virtual, "leads to another file"),
    (lambda file, name: file.create_dataset(name, SHAPE, dtype="f2"), "holds float16, not integers")])
def test_a_key_that_is_no_array_of_the_file(make: Callable[[h5py.File, str], object], what: str,
                                            tmp_path: Path) -> None:
    shards().write_shard(tmp_path / "b.hdf5", samples())
    replaced(tmp_path, "input_mask", make)
    assert f"'input_mask' in the shard a_training.hdf5 {what}" in str(refusal(lambda: epoch(tmp_path)))


@pytest.mark.parametrize(("name", "value", "what"), [
    ("input_ids", -1, "the token id -1, but vocab_size is 8"), ("masked_lm_ids", 64, "the token id 64, but vocab_size"),
    ("masked_lm_positions", 16, "the masked position 16 in a row of 16 tokens"),
    ("masked_lm_positions", -3, "the masked position -3"), ("input_mask", 2, "2 in 'input_mask', which is 0 or 1"),
    ("segment_ids", -1, "-1 in 'segment_ids'"), ("next_sentence_labels", 2**62, f"{2**62} in 'next_sentence_labels'")])
def test_a_value_out_of_range(name: str, value: int, what: str, tmp_path: Path) -> None:
    array = samples()[name].astype("i8")
    array.flat[-1] = value
    replaced(tmp_path, name, lambda file, name: file.create_dataset(name, data=array))
    with h5py.File(tmp_path / "a_training.hdf5", "r+") as file:
        for each in SHAPES:  # a row for the test split, which has none of it
            content = np.concatenate([file[each][:], np.ones_like(file[each][:1])])
            del file[each]
            file[each] = content
    assert f"the shard a_training.hdf5 has {what}" in str(refusal(lambda: epoch(tmp_path, 8)))


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", ">i4", ">i8", "?"])
def test_integers_of_every_kind_are_read(kind: str, tmp_path: Path) -> None:
    replaced(tmp_path, "input_mask", lambda file, name: file.create_dataset(name, data=np.ones(SHAPE, kind)))
    assert all(batch["input_mask"].tolist() == [[1] * 16] for batch in epoch(tmp_path))


def test_a_shard_that_would_not_fit_into_memory(tmp_path: Path) -> None:
    for rows, chunk in ((10**9, 1000), (12, 10**7)):
        with h5py.File(tmp_path / "a_training.hdf5", "w") as file:
            for name, array in samples().items():
                file.create_dataset(name, (rows, *array.shape[1:]), dtype=array.dtype, compression="gzip",
                                    maxshape=(None, *array.shape[1:]), chunks=(chunk, *array.shape[1:]))
        assert "bytes, but states that it holds" in str(refusal(lambda: epoch(tmp_path)))


@pytest.mark.parametrize(("name", "content", "what"), [
    ("manifest.json", '{"files": {}, "vocab_size": -5}', "vocab_size in manifest.json: -5 is no count"),
    ("manifest.json", '{"files": {}, "vocab_size": true}', "vocab_size in manifest.json: True is no count"),
    ("manifest.json", '{"files": {}, "vocab_size": 1000000000}', "manifest.json makes 1,000,000,000 tokens, more than"),
    ("vocab.txt", b"\xff\xfe", "vocab.txt cannot be read: 'utf-8' codec can't decode"),
    ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer")])
def test_a_vocabulary_beside_the_shards(name: str, content: str | bytes, what: str, tmp_path: Path) -> None:
    shards().write_shard(tmp_path / "a_training.hdf5", samples())
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert what in str(refusal(lambda: epoch(tmp_path)))


def test_ids_beyond_every_vocabulary(tmp_path: Path) -> None:
    replaced(tmp_path, "input_ids", lambda file, name: file.create_dataset(name, data=np.full(SHAPE, 2**30)))
    assert "the largest token id makes 1,073,741,832 tokens, more than 16,777,216" in str(
        refusal(lambda: epoch(tmp_path)))
    assert "vocab_size is 0\nhint: give 1 to 16,777,216 tokens, or -1" in str(refusal(lambda: epoch(tmp_path, 0)))


def test_a_token_with_an_id_beyond_every_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "model": {"type": "WordPiece", "unk_token": "?", "vocab": {"?": 2**31},
                                                        "continuing_subword_prefix": "#",
                                                        "max_input_chars_per_word": 9}}))
    assert "has the token id 2,147,483,648" in str(refusal(lambda: load_tokenizer(tmp_path / "tokenizer.json")))
    assert LARGEST_SIZE == 16_777_216


@pytest.mark.parametrize(("change", "what"), [
    ({"vocab_size": 10**9}, "the prepared data is damaged: vocab_size: 1000000000"),
    ({"vocab_size": None}, "the prepared data is damaged: vocab_size: ValueError"),
    ({"counts": 7}, "the prepared data is damaged: counts.train_tokens: TypeError"),
    ({"counts": {}}, "the prepared data is damaged: counts.train_tokens: KeyError"),
    ({"dtype": "float64"}, "the prepared data is damaged: train.bin does not hold"),
    ({"files": {"train.bin": 3}}, None)])  # it is made anew
def test_prepared_data_is_refused_if_its_sealed_manifest_is_wrong(change: dict[str, Any], what: str | None,
                                                                  tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"code": f"def f{i}(): return {i}"}) + "\n"
                                              for i in range(40)))
    settings = DatasetSettings(path=tmp_path / "a.jsonl", cache_directory=tmp_path / "cache", sequence_length=8)

    def opened() -> int:
        return dataset_named("code_search_net")(settings).vocab_size

    first = opened()
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    manifest = {**json.loads((folder / MANIFEST).read_text()), **change}
    del manifest["sha256"]
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}))
    if what is None:
        assert opened() == first
    else:
        assert what in str(refusal(opened))
