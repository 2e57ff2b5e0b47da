import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import refusal
from test_code_search_net import write
from tokenizers import Tokenizer, models, pre_tokenizers

from vpipe.app.data import code_search_net as data_set
from vpipe.app.data.code_search_net import code_search_net
from vpipe.app.data.corpus import Corpus, Document, prepare_tokens
from vpipe.app.data.dataset import Dataset, DatasetSettings, Split, Tokenized
from vpipe.app.data.epoch import TokenDataset, samples_in
from vpipe.app.data.local_corpus import machine_functions
from vpipe.app.data.synthetic import synthetic, synthetic_tokens
from vpipe.app.data.text import text
from vpipe.app.data.tokenizers import save_tokenizer
from vpipe.errors import UserError


def counting(tokens: int, length: int, dtype: str = "uint16") -> TokenDataset:
    """Token t is t."""
    rows = {"train": np.arange(tokens, dtype=dtype), "test": np.arange(2 * length + 1, dtype=dtype)}
    return TokenDataset(tokens, length, {"train": samples_in(tokens, length), "test": 2}, rows.__getitem__)


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


def test_held_out_samples_that_fill_no_batch_are_one_nevertheless() -> None:
    rows = {"test": np.arange(29, dtype=np.uint16)}
    dataset = TokenDataset(29, 4, {"train": 0, "test": 7}, rows.__getitem__)
    for batch_size, sizes in ((9, [7]), (7, [7]), (3, [3, 3, 1])):
        batches = list(dataset.batches("test", batch_size, seed=0, fields=["labels"]))
        assert [len(batch["labels"]) for batch in batches] == [len(batch["input_ids"]) for batch in batches] == sizes
        assert torch.cat([batch["labels"] for batch in batches]).flatten().tolist() == list(range(1, 29))
    with pytest.raises(UserError, match="the train split holds 0 samples, fewer than one batch of 1"):
        dataset.batches("train", 1, seed=0)
    with pytest.raises(UserError, match="the test split holds 0 samples"):
        TokenDataset(29, 4, {"train": 7, "test": 0}, rows.__getitem__).batches("test", 1, seed=0)


def test_a_token_out_of_the_vocabulary_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    rows = {"train": np.array([1, 2, 3, 4, 65535], np.uint16), "test": np.arange(5, dtype=np.uint16)}
    dataset = TokenDataset(8, 2, {"train": 2, "test": 2}, rows.__getitem__, tmp_path / "tokenizer.json")
    assert len(list(dataset.batches("train", 1, seed=0, fields=["input_ids"]))) == 2
    assert refusal(lambda: list(dataset.batches("train", 1, seed=0))) == (
        "error: the train split has the token 65535, but the vocabulary ends at 7: the "
        f"prepared data is damaged ({tmp_path})\nhint: remove its folder: the next run "
        "prepares it again")
    assert len(list(dataset.batches("test", 1, seed=0))) == 2


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_how_many_samples_tokens_give(tokens: int, samples: int) -> None:
    assert samples_in(tokens, 4) == samples


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_epoch_is_in_an_order_from_its_seed_and_begins_with_any_batch(split: Split) -> None:
    dataset = synthetic_tokens(50, 8, 12, 12)

    def epoch(seed: int, first: int = 0) -> list[list[list[int]]]:
        return [batch["input_ids"].tolist() for batch in dataset.batches(split, 5, seed=seed, first=first)]

    assert [len(batch) for batch in epoch(1)] == ([5, 5] if split == "train" else [5, 5, 2])
    assert (epoch(1) != epoch(2)) == (split == "train")
    for first in range(3):
        assert epoch(1, first) == epoch(1)[first:]


def test_fields_not_needed_are_not_read() -> None:
    asked: list[str] = []

    def tokens(split: str) -> np.ndarray:
        asked.append(split)
        return np.arange(9, dtype=np.uint16)

    dataset = TokenDataset(9, 4, {"train": 2, "test": 1}, tokens)
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


def test_impossible_sizes_are_errors() -> None:
    with pytest.raises(UserError, match="sequence_length is 0"):
        counting(9, 0)
    with pytest.raises(UserError, match="vocab_size is 1"):
        synthetic_tokens(1, 4, 4, 4)
    with pytest.raises(UserError, match="samples is 0"):
        synthetic(DatasetSettings(samples=0, fields=("labels",)))
    with pytest.raises(UserError, match="the train split holds 1 sample, fewer than one batch of 2"):
        counting(6, 4).batches("train", 2, seed=0)


READS = ("input_ids", "labels")
WORDS = ("river", "stone", "winter", "signal", "copper", "engine")


def function(number: int) -> str:
    return f"def {WORDS[number % 6]}_{number}(x):\n    return {WORDS[number // 6 % 6]}(x) + {number}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "code" / "train.jsonl.gz", *[{"code": function(n), "language": "python"} for n in range(60)])
    write(tmp_path / "code" / "test.jsonl", *[{"code": function(n), "language": "python"} for n in range(60, 70)])
    write(tmp_path / "code" / "valid.jsonl", {"code": "def left_out(): ...", "language": "python"})
    return tmp_path / "code"


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> DatasetSettings:
    return DatasetSettings(folder, sequence_length=16, vocab_size=300, cache_directory=tmp_path / "cache", fields=READS)


def corpus(*documents: Document) -> Corpus:
    return Corpus("the texts", {"numbers": len(documents)}, lambda: documents)


def test_documents_lie_behind_each_other_each_with_its_end(settings: DatasetSettings, tmp_path: Path) -> None:
    dataset = code_search_net(settings)
    assert isinstance(dataset, Dataset)
    assert isinstance(dataset, Tokenized)
    assert dataset.vocab_size == 300
    path = dataset.tokenizer_path
    assert path is not None
    tokenizer = Tokenizer.from_file(str(path))
    manifest = json.loads((path.parent / "manifest.json").read_text())
    assert manifest["languages"] == {"python": 71}
    assert manifest["counts"]["left_out_documents"] == 1
    assert manifest["dtype"] == "uint16"
    whole = np.fromfile(path.parent / "test.bin", np.uint16)
    assert len(whole) == manifest["counts"]["test_tokens"]
    ends = np.flatnonzero(whole == tokenizer.token_to_id("<|endoftext|>"))
    starts = [0, *(ends + 1)]
    assert starts.pop() == len(whole)
    assert [tokenizer.decode(whole[start:end]) for start, end in zip(starts, ends, strict=True)] == [
        function(number) for number in range(60, 70)]
    rows = torch.cat([batch["input_ids"] for batch in dataset.batches("test", 1, seed=0)]).flatten()
    assert rows.tolist() == whole[:len(rows)].tolist()
    assert len(whole) - len(rows) <= 16


def test_made_tokens_are_found_again_for_any_length(settings: DatasetSettings, tmp_path: Path) -> None:
    path = code_search_net(settings).tokenizer_path
    assert path is not None
    written = path.stat().st_mtime_ns
    longer = code_search_net(replace(settings, sequence_length=-1, samples=2, seed=5))
    assert (longer.tokenizer_path, path.stat().st_mtime_ns) == (path, written)
    assert (longer.sequence_length, longer.samples("train")) == (128, 2)
    assert code_search_net(replace(settings, vocab_size=-1)).tokenizer_path != path
    elsewhere = code_search_net(replace(settings, cache_directory=tmp_path / "elsewhere")).tokenizer_path
    assert elsewhere is not None
    assert all((path.parent / name).read_bytes() == (elsewhere.parent / name).read_bytes()
               for name in ("manifest.json", "tokenizer.json", "train.bin", "test.bin"))


def test_other_files_or_a_damaged_folder_are_tokenized_anew(settings: DatasetSettings, folder: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    path = code_search_net(settings).tokenizer_path
    assert path is not None
    good = (path.parent / "test.bin").read_bytes()
    (path.parent / "test.bin").write_bytes(good[:-2])
    assert code_search_net(settings).tokenizer_path == path
    assert (path.parent / "test.bin").read_bytes() == good
    assert "vpipe: prepared data is built again: test.bin has" in capsys.readouterr().err
    write(folder / "more.jsonl", {"code": "def more(): ..."})
    assert code_search_net(settings).tokenizer_path != path


def test_the_tokenizer_is_trained_on_what_is_trained_on(tmp_path: Path) -> None:
    documents = [Document("stone stone stone", "train"), Document("river river river", "test")]
    words = Tokenizer.from_file(str(prepare_tokens(corpus(*documents), 280, None, tmp_path).tokenizer_path)).get_vocab()
    assert "stone" in words
    assert not any("riv" in word for word in words)


def test_the_vocabulary_is_the_tokenizers(settings: DatasetSettings, tmp_path: Path) -> None:
    dataset = code_search_net(replace(settings, vocab_size=-1))
    path = dataset.tokenizer_path
    assert path is not None
    words = Tokenizer.from_file(str(path)).get_vocab_size()
    assert 257 < words < 1000
    assert dataset.vocab_size == -(-words // 8) * 8
    assert code_search_net(replace(settings, vocab_size=3000)).vocab_size == 3000
    given = replace(settings, tokenizer=path, vocab_size=-1)
    assert code_search_net(given).vocab_size == dataset.vocab_size
    with pytest.raises(UserError, match=f"vocab_size is 270, but the tokenizer has {words} tokens"):
        code_search_net(replace(given, vocab_size=270))


def test_ranks_find_what_the_launcher_prepared(settings: DatasetSettings, tmp_path: Path) -> None:
    """It asks with -1, they with the number that came of it."""
    asked = code_search_net(replace(settings, vocab_size=-1))
    told = replace(settings, vocab_size=asked.vocab_size)
    path, found = asked.tokenizer_path, code_search_net(told)
    assert path is not None
    assert (found.tokenizer_path, found.vocab_size) == (path, asked.vocab_size)
    assert code_search_net(replace(told, vocab_size=asked.vocab_size + 8)).tokenizer_path != path
    anew = code_search_net(replace(told, cache_directory=tmp_path / "elsewhere")).tokenizer_path
    assert anew is not None
    assert all((path.parent / name).read_bytes() == (anew.parent / name).read_bytes()
               for name in ("tokenizer.json", "train.bin", "test.bin")), "it is what they would have made"


def test_a_folder_that_goes_is_read_to_the_end(settings: DatasetSettings) -> None:
    dataset = code_search_net(settings)
    before = [batch["labels"].tolist() for batch in dataset.batches("train", 4, seed=1)]
    assert dataset.tokenizer_path is not None
    shutil.rmtree(dataset.tokenizer_path.parent)
    assert [batch["labels"].tolist() for batch in dataset.batches("train", 4, seed=1)] == before
    assert next(dataset.batches("test", 1, seed=1))["labels"].shape == (1, 16)


@pytest.mark.parametrize("edit", [{"files": {}}, {"files": {"train.bin": None}}, {"counts": {}}, {"vocab_size": 10},
                                  {"sha256": None}])
def test_a_manifest_that_was_changed_is_noticed(settings: DatasetSettings, capsys: pytest.CaptureFixture[str],
                                                edit: dict[str, object]) -> None:
    path = code_search_net(settings).tokenizer_path
    assert path is not None
    manifest = path.parent / "manifest.json"
    good = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(good) | edit))
    assert code_search_net(settings).vocab_size == 300
    assert manifest.read_text() == good
    assert "built again: manifest.json was changed" in capsys.readouterr().err


def test_nothing_is_left_where_the_disk_was_full(settings: DatasetSettings, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tokenizer: Tokenizer, path: Path) -> None:
        path.write_text("{")
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr("vpipe.app.data.tokenizers.save_tokenizer", full)
    with pytest.raises(UserError, match=r"preparing data in .*cache failed: .*No space left on device"):
        code_search_net(settings)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_tokenizer_is_saved_as_its_package_does(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"é": 0}, unk_token="é"))
    tokenizer.save(str(tmp_path / "theirs"))
    save_tokenizer(tokenizer, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(OSError, match="No such file"):
        save_tokenizer(tokenizer, tmp_path / "nowhere" / "ours")


def test_sequences_longer_than_the_data_are_refused_with_both_numbers(settings: DatasetSettings) -> None:
    with pytest.raises(UserError, match=r"train split has \d+ tokens, but a batch of 1 sample of sequence_length 5000 "
                                        r"takes 5001"):
        code_search_net(replace(settings, sequence_length=5000))
    with pytest.raises(UserError) as caught:
        code_search_net(replace(settings, sequence_length=200))
    [problem] = caught.value.problems
    assert re.search(r"the test split has \d+ tokens, but a batch of 1 sample of sequence_length 200 takes 201$",
                     problem.what)
    assert problem.hint == ("use a shorter model.sequence_length, or add data; held out is what is marked test, else 1 "
                            "document in 20")


def test_held_out_samples_need_not_fill_a_batch(settings: DatasetSettings) -> None:
    dataset = code_search_net(replace(settings, batch_size=(train := code_search_net(settings).samples("train"))))
    assert dataset.samples("test") < train
    [batch] = dataset.batches("test", train, seed=0)
    assert len(batch["labels"]) == dataset.samples("test")


def test_a_tokenizer_that_cuts_and_fills_up_gives_whole_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 1, "</s>": 2, "pad": 3}, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(pad_id=3, pad_token="pad", length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = corpus(Document("the the the the", "train"), Document("the", "test"))
    cache = prepare_tokens(texts, -1, tmp_path / "tokenizer.json", tmp_path)
    assert cache.tokens("train").tolist() == [1, 1, 1, 1, 2]
    assert cache.tokens("test").tolist() == [1, 2]
    assert prepare_tokens(texts, cache.vocab_size, tmp_path / "tokenizer.json", tmp_path).folder == cache.folder


def test_a_large_vocabulary_takes_wider_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for largest, dtype in ((65535, np.uint16), (65536, np.uint32)):
        Tokenizer(models.WordLevel({"the": 1, "</s>": largest}, unk_token="the")).save(str(path))  # with a gap
        cache = prepare_tokens(corpus(Document("the", "train"), Document("the", "test")), -1, path, tmp_path)
        assert cache.tokens("train").tolist() == [1, largest]
        assert cache.tokens("test").dtype == dtype
        assert cache.vocab_size == -(-(largest + 1) // 8) * 8


def test_a_text_that_spells_the_end_is_text(tmp_path: Path) -> None:
    documents = [Document("a <|endoftext|> b", "train"), Document("c", "test")]
    cache = prepare_tokens(corpus(*documents), -1, None, tmp_path)
    assert cache.tokens("train").tolist().count(0) == 1
    assert cache.tokens("train")[-1] == 0


def test_nothing_is_left_of_data_at_fault(settings: DatasetSettings, folder: Path, tmp_path: Path) -> None:
    write(folder / "more.jsonl", "{")
    with pytest.raises(UserError) as caught:
        code_search_net(settings)
    assert caught.value.problems[0].where == f"{folder / 'more.jsonl'}:1"
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_plain_text_is_for_either_model(text_folder: Path, tmp_path: Path) -> None:
    settings = DatasetSettings(text_folder, sequence_length=32, vocab_size=300, cache_directory=tmp_path / "cache")
    bert, gpt = text(settings), text(replace(settings, fields=READS))
    assert "masked_lm_ids" in bert.fields
    assert list(gpt.fields) == list(READS)
    assert isinstance(gpt, Tokenized)
    assert gpt.tokenizer_path is not None
    counts = json.loads((gpt.tokenizer_path.parent / "manifest.json").read_text())["counts"]
    assert (counts["documents"], counts["test_documents"]) == (40, 2)
    tokens = [row for batch in gpt.batches("test", 1, seed=0) for row in batch["input_ids"].flatten().tolist()]
    shown = Tokenizer.from_file(str(gpt.tokenizer_path)).decode(tokens, skip_special_tokens=False)
    lines = {line for path in text_folder.iterdir() for line in path.read_text().splitlines()}
    assert shown.splitlines()[0] in lines  # lines stay as they are


def test_without_a_path_functions_are_gathered_here(settings: DatasetSettings,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def few(cache_directory: Path | None) -> object:
        return machine_functions(cache_directory, ("json", "argparse"))

    monkeypatch.setattr(data_set, "machine_functions", few)
    dataset = code_search_net(replace(settings, path=None))
    assert dataset.samples("train") > 10
    assert dataset.samples("test") > 1


def test_no_process_reads_what_another_prepared(settings: DatasetSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    code_search_net(settings)

    def never(*arguments: object) -> Iterator[Document]:
        raise AssertionError

    monkeypatch.setattr(data_set, "read_functions", never)
    assert code_search_net(settings).samples("train") > 10


def test_the_held_out_text_of_a_tokenizer_of_bytes() -> None:
    rows = {"train": np.array([0, 0, 0, 1], np.uint16), "test": np.array([1, 1, 2, 2, 0], np.uint16)}
    text = TokenDataset(4, 2, {"train": 2, "test": 2}, rows.__getitem__, held_out_bytes=4).held_out_text
    assert text is not None
    assert (text.tokens, text.bytes, text.alike) == (5, 4, pytest.approx(0.2 + 0.25))
    assert text.unigram_entropy == pytest.approx(-0.8 * math.log(0.4) - 0.2 * math.log(0.2))
    assert text.bits_per_byte(math.log(2)) == pytest.approx(5 / 4)
    assert TokenDataset(4, 2, {"train": 2, "test": 2}, rows.__getitem__).held_out_text is None
