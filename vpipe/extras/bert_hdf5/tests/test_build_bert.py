"""Shards made from text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_text import write_text

from vpipe.app.cli import main
from vpipe.app.data.text import BertTextSettings, prepare_text
from vpipe.errors import UserError
from vpipe.extras.bert_hdf5.command import build_bert
from vpipe.extras.bert_hdf5.shards import BertHdf5


@pytest.fixture
def wanted(tmp_path: Path) -> BertTextSettings:
    return BertTextSettings(write_text(tmp_path / "text"), sequence_length=32, vocab_size=120)


def test_shards_hold_the_samples_that_the_text_data_set_has(wanted: BertTextSettings, tmp_path: Path) -> None:
    facts = build_bert(wanted, tmp_path / "out", samples_per_shard=50)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"training_00000.hdf5", "training_00001.hdf5", "test_00000.hdf5", "tokenizer.json", "manifest.json"} <= names
    assert not (tmp_path / "out.new").exists()
    dataset = BertHdf5(tmp_path / "out")
    cache = prepare_text(wanted, tmp_path / "cache")
    assert facts["counts"] == cache.manifest["counts"]
    assert dataset.vocab_size == facts["vocab_size"] == 120
    assert dataset.samples("train") == facts["counts"]["train_samples"]
    for split in ("train", "test"):
        rows = [tuple(row) for batch in dataset.batches(split, 1, seed=0) for row in batch["input_ids"].tolist()]
        assert sorted(rows) == sorted(map(tuple, cache.array(split, "input_ids").tolist()))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json"}


def test_an_empty_folder_is_filled_and_a_full_one_refused(wanted: BertTextSettings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    build_bert(wanted, out)
    with pytest.raises(UserError, match=r"the output folder .*out holds 4 entries") as caught:
        build_bert(wanted, out)
    assert "hint: name a new or an empty folder, or remove this one" in str(caught.value)
    with pytest.raises(UserError, match=r"manifest\.json is a file"):
        build_bert(wanted, out / "manifest.json")
    with pytest.raises(UserError, match="samples_per_shard is 0"):
        build_bert(wanted, tmp_path / "other", samples_per_shard=0)


def test_nothing_is_left_when_the_text_is_at_fault(wanted: BertTextSettings, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        build_bert(replace(wanted, text=tmp_path / "nowhere"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "what", "hint"), [
    (["bild"], "vpipe data has no command 'bild'", "known names: build-bert"),
    ([], "the following arguments are required: COMMAND", "run vpipe data --help"),
    (["build-bert", "--out", "o", "--seed", "x"], "argument --seed: invalid int value: 'x'",
     "run vpipe data build-bert --help"),
    (["build-bert", "--out", "o", "--text", "none"], "none does not exist",
     "name a file or a folder of *.txt files"),
    (["build-bert", "--out", "."], "the output folder . holds 1 entries",
     "name a new or an empty folder, or remove this one"),
    (["build-bert", "--text", "text", "--out", "file/out", "--vocab-size", "120"],
     "cannot write the folder 'file/out': Not a directory", "name a folder that can be made and written as --out")])
def test_a_wrong_command_line(arguments: list[str], what: str, hint: str, tmp_path: Path,
                              monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if "file/out" in arguments:
        write_text(tmp_path / "text")
    (tmp_path / "file").touch()
    try:
        status: object = main(["data", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert f"error: {what}" in said.replace(f"{tmp_path}/", "")
    assert f"hint: {hint}" in said
