import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from vpipe.app.data.dataset import Dataset, DatasetSettings
from vpipe.app.data.text import BertTextSettings, bert_text, prepare_text, split_documents
from vpipe.errors import UserError

PREPARE = """
import sys, time
from pathlib import Path
from vpipe.app.data import text as bert_cache
from vpipe.app.data.text import BertTextSettings
build = bert_cache.build_corpus
def counted(wanted):
    print("built", flush=True)
    time.sleep(0.5)
    return build(wanted)
bert_cache.build_corpus = counted
wanted = BertTextSettings(Path(sys.argv[1]), sequence_length=32, vocab_size=120)
cache = bert_cache.prepare_text(wanted, Path(sys.argv[2]))
print(cache.folder.name, cache.samples("train"))
"""


def test_prepared_data_is_found_again(wanted: BertTextSettings, tmp_path: Path) -> None:
    cache = prepare_text(wanted, tmp_path / "cache")
    written = (cache.folder / "manifest.json").stat().st_mtime_ns
    again = prepare_text(wanted, tmp_path / "cache")
    assert again == cache
    assert (cache.folder / "manifest.json").stat().st_mtime_ns == written
    assert Tokenizer.from_file(str(cache.tokenizer_path)).get_vocab_size() <= 120
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix in (".new", ".old")] == []


def test_the_manifest_tells_how_it_was_made(wanted: BertTextSettings, tmp_path: Path) -> None:
    cache = prepare_text(wanted, tmp_path / "cache")
    manifest = json.loads((cache.folder / "manifest.json").read_text())
    assert manifest["counts"]["documents"] == 40
    assert manifest["counts"]["test_documents"] == 2
    assert manifest["python"] == ".".join(map(str, sys.version_info[:3]))
    assert manifest["parameters"]["sequence_length"] == 32
    assert set(manifest["files"]) == {path.name for path in cache.folder.iterdir()} - {"manifest.json"}
    assert all(len(fact["sha256"]) == 64 for fact in manifest["files"].values())


def test_other_parameters_or_other_text_are_another_folder(wanted: BertTextSettings, tmp_path: Path) -> None:
    folder = prepare_text(wanted, tmp_path / "cache").folder
    assert prepare_text(replace(wanted, seed=1), tmp_path / "cache").folder != folder
    assert wanted.text is not None
    (wanted.text / "more.txt").write_text("One more. It has two.")
    assert prepare_text(wanted, tmp_path / "cache").folder != folder


@pytest.mark.parametrize(("name", "damage", "trouble"), [
    ("train_input_ids.npy", b"short", r"train_input_ids\.npy has 5 bytes instead of \d+"),
    ("tokenizer.json", None, r"tokenizer\.json was changed \(its SHA-256 differs\)"),
    ("manifest.json", b"{", r"manifest\.json cannot be read"),
    ("test_input_mask.npy", b"", r"test_input_mask\.npy has 0 bytes"),
])
def test_damaged_data_is_built_again_and_said_so(wanted: BertTextSettings, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str],
                                                 name: str, damage: bytes | None, trouble: str) -> None:
    cache = prepare_text(wanted, tmp_path / "cache")
    path = cache.folder / name
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?" if damage is None else damage)
    assert prepare_text(wanted, tmp_path / "cache") == cache
    assert path.read_bytes() == good
    message = capsys.readouterr().err
    assert "vpipe: prepared data is built again: " in message
    assert re.search(trouble, message)


def test_several_processes_build_once(text_folder: Path, tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", PREPARE, str(text_folder), str(tmp_path / "cache")],
                                stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    assert "".join(outputs).count("built") == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_the_data_set_reads_what_was_prepared(text_folder: Path, tmp_path: Path) -> None:
    settings = DatasetSettings(text_folder, sequence_length=32, cache_directory=tmp_path / "cache")
    dataset = bert_text(settings)
    assert isinstance(dataset, Dataset)
    assert dataset.vocab_size % 8 == 0
    seen = [tuple(row) for batch in dataset.batches("train", 1, seed=0) for row in batch["input_ids"].tolist()]
    assert len(seen) == dataset.samples("train")
    stored = prepare_text(BertTextSettings(text_folder, 32), tmp_path / "cache").array("train", "input_ids")
    assert sorted(seen) == sorted(map(tuple, stored.tolist()))
    batch = next(dataset.batches("test", 2, seed=0, fields=["masked_lm_ids", "input_mask"]))
    assert batch["masked_lm_ids"].dtype == torch.int64
    assert batch["input_ids"].is_meta
    assert bert_text(replace(settings, samples=7)).samples("train") == 7


def test_a_folder_that_goes_is_read_to_the_end(text_folder: Path, tmp_path: Path) -> None:
    settings = DatasetSettings(text_folder, sequence_length=32, cache_directory=tmp_path / "cache")
    dataset = bert_text(settings)
    before = [batch["masked_lm_ids"].tolist() for batch in dataset.batches("train", 4, seed=0)]
    for path in (tmp_path / "cache").glob("*/*.npy"):
        os.unlink(path)
    after = list(dataset.batches("train", 4, seed=0, fields=["masked_lm_ids"]))
    assert [batch["masked_lm_ids"].tolist() for batch in after] == before
    assert after[0]["input_ids"].is_meta


def test_ranks_find_what_the_launcher_prepared(text_folder: Path, tmp_path: Path) -> None:
    """It asks with -1, they with the number that came of it."""
    asked = prepare_text(BertTextSettings(text_folder, 32), tmp_path / "cache")
    told = BertTextSettings(text_folder, 32, vocab_size=asked.vocab_size)
    assert prepare_text(told, tmp_path / "cache") == asked
    assert prepare_text(replace(told, seed=1), tmp_path / "cache") != asked
    assert prepare_text(told, tmp_path / "elsewhere").manifest["files"] == asked.manifest["files"]


def test_the_machines_own_prose_works(tmp_path: Path) -> None:
    cache = prepare_text(BertTextSettings(sequence_length=64, vocab_size=400, packages=("json", "argparse")), tmp_path)
    assert cache.samples("train") >= 5


def test_a_tokenizer_may_be_given(wanted: BertTextSettings, tmp_path: Path) -> None:
    path = prepare_text(wanted, tmp_path / "cache").tokenizer_path
    given = replace(wanted, tokenizer=path, vocab_size=-1)
    size = Tokenizer.from_file(str(path)).get_vocab_size()
    assert prepare_text(given, tmp_path / "cache").vocab_size == -(-size // 8) * 8
    with pytest.raises(UserError, match=f"vocab_size is 40, but the tokenizer has {size} tokens"):
        prepare_text(replace(given, vocab_size=40), tmp_path / "cache")


def test_the_split_depends_on_the_texts_and_not_on_their_order() -> None:
    documents = [[f"Text {number}.", "End."] for number in range(100)]
    train, test = split_documents(documents)
    assert (len(train), len(test)) == (95, 5)
    _, turned = split_documents(documents[::-1])
    assert sorted(turned) == sorted(test)
    with pytest.raises(UserError, match="the text has 3 documents of at least 2 sentences; to train and to test, 4"):
        split_documents(documents[:3])


def test_an_unwritable_cache_is_an_error(wanted: BertTextSettings, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"preparing data in .*taken failed") as caught:
        prepare_text(wanted, tmp_path / "taken")
    assert "dataset.cache_directory" in str(caught.value)
