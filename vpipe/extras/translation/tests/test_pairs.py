import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import refusal
from test_length_buckets import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers

from vpipe.app.data.dataset import DatasetSettings, Described, Tokenized
from vpipe.app.data.registry import dataset_named
from vpipe.app.data.tokenizers import load_tokenizer, save_tokenizer, train_byte_bpe
from vpipe.errors import UserError
from vpipe.extras.translation.length_buckets import PairDataset
from vpipe.extras.translation.pairs import pairs


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Sentences, and the same words spelled backwards."""
    rng = np.random.default_rng(seed)
    found = [list(rng.choice(WORDS, size=rng.integers(2, 9))) for _ in range(count)]
    return [(" ".join(words), " ".join(word[::-1] for word in words)) for words in found]


def write_pairs(path: Path, found: list[tuple[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{source}\t{target}\n" for source, target in found)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "b.tsv", sentences(120))
    write_pairs(folder / "sub" / "a.tsv.gz", [*sentences(80, 1), sentences(1)[0]])
    return folder


def settings_of(folder: Path, cache: Path) -> DatasetSettings:
    return DatasetSettings(folder, sequence_length=64, vocab_size=300, cache_directory=cache, batch_size=4)


def texts(dataset: PairDataset, split: str) -> list[tuple[str, str]]:
    """Return the pairs of an epoch as the tokens spell them."""
    assert dataset.tokenizer_path is not None
    tokenizer, found = load_tokenizer(dataset.tokenizer_path), []
    for batch in dataset.batches(split, 1, seed=0):  # type: ignore[arg-type]
        source, labels = batch["source_ids"][0].tolist(), batch["labels"][0].tolist()
        assert batch["target_ids"][0].tolist() == [0, *labels[:-1]]
        assert source[-1] == labels[-1] == 1
        found.append((tokenizer.decode(source), tokenizer.decode(labels)))
    return found


def test_files_become_pairs_without_duplicates_and_none_is_on_both_sides(folder: Path, tmp_path: Path) -> None:
    settings = settings_of(folder, tmp_path)
    dataset = dataset_named("pairs")(settings)
    assert isinstance(dataset, PairDataset)
    assert isinstance(dataset, Described)
    assert isinstance(dataset, Tokenized)
    everything = set(sentences(120) + sentences(80, 1))
    train, test = texts(dataset, "train"), texts(dataset, "test")
    assert sorted([*train, *test]) == sorted(everything)
    assert tuple(test) == dataset.held_out
    assert not {source for source, _ in train} & {source for source, _ in test}
    assert len(test) == len(everything) // 20
    assert dataset.samples("train") == len(train)
    assert dataset.lines == (f"pairs: {len(everything):,} of {folder}; {len(test)} held out", "left out: 1 duplicates")
    tokenizer = load_tokenizer(dataset.tokenizer_path or Path())
    assert [tokenizer.id_to_token(number) for number in (0, 1)] == ["<pad>", "</s>"]
    assert dataset.vocab_size == 300
    # Another process finds the same; nothing is built again.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = pairs(replace(settings, vocab_size=-1, sequence_length=7))
    assert again.samples("train") < dataset.samples("train")
    assert pairs(settings).lines == dataset.lines
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path in before}.items()


def test_pairs_that_are_too_long_are_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    every = pairs(settings_of(folder, tmp_path))
    widths = [max(batch["source_ids"].shape[1], batch["labels"].shape[1])
              for split in ("train", "test") for batch in every.batches(split, 1, seed=0)]  # type: ignore[arg-type]
    dataset = pairs(replace(settings_of(folder, tmp_path), sequence_length=12))
    kept = sum(width <= 12 for width in widths)
    assert dataset.samples("train") + dataset.samples("test") == kept
    assert dataset.lines[1] == f"left out: {len(widths) - kept} with more than 12 tokens on a side, 1 duplicates"
    assert len(dataset.held_out) == dataset.samples("test")
    assert set(texts(dataset, "test")) == set(dataset.held_out)
    with pytest.raises(UserError, match="pairs of the train split have more than 2 tokens on a side"):
        pairs(replace(settings_of(folder, tmp_path), sequence_length=2))
    assert pairs(replace(settings_of(folder, tmp_path), samples=10)).samples("train") == 10


def test_names_of_files_give_the_parts_and_training_leaves_out_what_is_held_out(tmp_path: Path) -> None:
    found = sentences(60)
    write_pairs(tmp_path / "data" / "train.tsv", found[:50])
    write_pairs(tmp_path / "data" / "valid.tsv", found[50:52])
    write_pairs(tmp_path / "data" / "test.tsv", [*found[52:], (found[3][0], "another translation")])
    dataset = pairs(settings_of(tmp_path / "data", tmp_path / "cache"))
    assert texts(dataset, "test") == [*found[52:], (found[3][0], "another translation")]  # in their order
    assert sorted(texts(dataset, "train")) == sorted(set(found[:50]) - {found[3]})
    assert dataset.lines[1] == ("left out: 1 whose source is also held out, 2 marked valid, as others are marked test")


@pytest.mark.parametrize("part", ["valid", "test"])
def test_pairs_of_the_training_that_are_also_held_out_stay_held_out(tmp_path: Path, part: str) -> None:
    found = sentences(40)
    write_pairs(tmp_path / "data" / "train.tsv", [*found, *found[:2]])
    write_pairs(tmp_path / "data" / f"{part}.tsv", found[:5])
    dataset = pairs(settings_of(tmp_path / "data", tmp_path / "cache"))
    assert texts(dataset, "test") == found[:5]
    assert sorted(texts(dataset, "train")) == sorted(found[5:])
    assert dataset.lines[1] == "left out: 2 duplicates, 5 whose source is also held out"


@pytest.mark.parametrize(("line", "problem"), [
    (b"no tab here", "the line has no tab"), (b"a\tb\tc", "the line has 3 columns"), (b"\tb", "the source is empty"),
    (b"a\t ", "the target is empty"), (b"a\t\xff", "the line is not UTF-8 (byte 2)")])
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    (tmp_path / "x.tsv").write_bytes(b"good\tgut\n\n" + line + b"\nbad\tschlecht\n")
    assert refusal(pairs, settings_of(tmp_path / "x.tsv", tmp_path / "cache")) == (
        f"error: {problem} ({tmp_path / 'x.tsv'}:3)\nhint: a line is a source, a tab and a "
        "target; correct or remove it")


def test_many_wrong_lines_are_shown_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("wrong\n" * 1000)
    with pytest.raises(UserError) as caught:
        pairs(settings_of(tmp_path, tmp_path / "cache"))
    assert len(caught.value.problems) == 10
    (tmp_path / "x.tsv").unlink()
    write_pairs(tmp_path / "x.tsv.gz", sentences(9))
    (tmp_path / "x.tsv.gz").write_bytes((tmp_path / "x.tsv.gz").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"x.tsv.gz cannot be read on"):
        pairs(settings_of(tmp_path, tmp_path / "cache"))


def test_a_path_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("no *.tsv or *.tsv.gz file in")):
        pairs(settings_of(tmp_path, tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        pairs(settings_of(tmp_path / "nowhere", tmp_path))
    write_pairs(tmp_path / "one.tsv", sentences(1))
    with pytest.raises(UserError, match="1 different document to train on"):
        pairs(settings_of(tmp_path, tmp_path))


def test_a_tokenizer_of_ones_own_is_used(folder: Path, tmp_path: Path) -> None:
    own = train_byte_bpe(["river stone"] * 9, 280, special=("</s>", "<unk>", "<pad>"))
    save_tokenizer(own, tmp_path / "own.json")
    settings = replace(settings_of(folder, tmp_path / "cache"), tokenizer=tmp_path / "own.json", vocab_size=-1)
    dataset = pairs(settings)
    batch = next(dataset.batches("train", 2, seed=0))
    assert set(batch["target_ids"][:, 0].tolist()) == {2}
    assert batch["source_ids"][:, -1].tolist().count(0) >= 1
    assert dataset.vocab_size % 8 == 0
    save_tokenizer(train_byte_bpe(["river"], 260, special=("</s>",)), tmp_path / "own.json")
    with pytest.raises(UserError, match=r"own.json has no <pad>"):
        pairs(settings)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "river": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(words, tmp_path / "own.json")
    labels = torch.cat([b["labels"].flatten() for b in pairs(settings).batches("test", 1, seed=0)])
    assert set(labels.tolist()) <= {1, 2, 3}


def test_prepared_pairs_that_were_changed_are_made_again_or_refused(
        folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs(settings_of(folder, tmp_path))
    (cache,) = tmp_path.glob("pairs-*[!k]")
    (cache / "test.jsonl").write_text(json.dumps(["a", "b"]) + "\n")
    assert pairs(settings_of(folder, tmp_path)).samples("test") == 10
    assert "prepared data is built again: test.jsonl" in capsys.readouterr().err
    shutil.rmtree(cache)
    assert pairs(settings_of(folder, tmp_path)).samples("test") == 10


def test_tab_separated_files_do_not_name_languages(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target_language is de, but tab-separated files do not name languages"):
        pairs(replace(settings_of(folder, tmp_path), target_language="de"))
