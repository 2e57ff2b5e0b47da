"""What stands in place of a file, or fills it, when a user hands in the wrong one: each is refused in words of ours."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import refusal, shards

from vpipe.app.config.config import load_config
from vpipe.app.config.yaml_tree import MOST_BYTES, MOST_VALUES, read_yaml
from vpipe.app.data.code_search_net import jsonl_files, read_functions
from vpipe.app.data.tokenizers import load_tokenizer
from vpipe.checkpoint.manifest import Manifest
from vpipe.description.cut import Cut
from vpipe.description.order import Order
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Profile
from vpipe.schedules import csv_format
from vpipe.schedules.builder import described, proved
from vpipe.schedules.csv_format import CsvFile

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": ("c.yaml", load_config),
    "JSON of a config": ("p.json", lambda path: read_yaml(path, language="JSON")),
    "plan": ("plan.json", Plan.load),
    "profile": ("profile.json", Profile.load),
    "schedule": ("s.csv", CsvFile.read),
    "arranged schedule": ("s.csv", lambda path: proved(described(Order(path), Cut(1), 1))),
    "manifest": ("checkpoint.json", lambda path: Manifest.load(path.parent)),
    "shard": ("a_training.hdf5", lambda path: shards().BertHdf5(path.parent)),
    "functions": ("a.jsonl", lambda path: list(read_functions(jsonl_files(path.parent), path.parent))),
    "tokenizer": ("tokenizer.json", load_tokenizer)}

INSTEAD: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir, "a link to itself": lambda path: path.symlink_to(path), "a pipe": os.mkfifo,
    "nothing": lambda path: None, "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "an empty file": Path.touch, "a mark of byte order": lambda path: path.write_bytes(b"\xef\xbb\xbf"),
    "another encoding": lambda path: path.write_bytes("a: 1\n".encode("utf-16")),
    "null bytes": lambda path: path.write_bytes(bytes(100)), "brackets": lambda path: path.write_bytes(b"[" * 500),
    "a large file": lambda path: os.truncate(path.touch() or path, 129 << 20)}


NOTHING = {("functions", "an empty file"), ("functions", "a mark of byte order")}
"""Which say that there are no functions."""


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_other_kinds_of_files(reader: str, instead: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    INSTEAD[instead](tmp_path / name)
    refused = refusal(lambda: read(tmp_path / name))
    assert refused or (reader, instead) in NOTHING, f"{reader} takes {instead}"


@pytest.mark.parametrize(("text", "what"), [
    ("\n".join(f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['x'] * 9)}]" for i in range(9)),
     f"more than {MOST_VALUES:,} keys and values, what aliases repeat included"),
    (f"a: [{'1, ' * MOST_VALUES}]", f"more than {MOST_VALUES:,} keys and values"),
    ("a" * (MOST_BYTES + 1), "has more than 512 KiB"),
    ("a: &x [*x]\nmodel: {}", "an alias leads into itself"),
    ('model: {name: "\\ud800"}', "a text holds half of a surrogate pair"),
    ('model: {"\\ud800": 1}', "a key holds half of a surrogate pair"),
    ('model: {num_layers: !!int ""}', "a value cannot be read: it is no tag:yaml.org,2002:int"),
    ("model: {name: !!bool 3}", "a value cannot be read: it is no tag:yaml.org,2002:bool"),
    ("model: {name: !!timestamp x}", "a value cannot be read"),
    (f"model: {{num_layers: 0x{'f' * 9000}}}", "a whole number has more than 100 digits"),
    (f"model: {{num_layers: {'9' * 9000}}}", "a value cannot be read: Exceeds the limit"),
    (f"training: {{learning_rate: {':'.join(['1'] * 200)}.5}}", "training.learning_rate must be a number"),
    (f"training: {{max_steps: {':'.join(['1'] * 100_000)}}}", "training.max_steps must be a whole number"),
    *(pytest.param(*case, marks=pytest.mark.extras("legacy")) for case in (
        ('log_directory: "a\\0b"', "is 'a\\x00b', which is no path of a file"),
        (f"log_directory: {'a' * 300}", "which is no path of a file"),
        ("\n".join(f"unknown{i}: 1" for i in range(100)), "and 84 more errors")))])
def test_yaml_that_is_no_config(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert what in str(refusal(lambda: load_config(tmp_path / "c.yaml")))


@pytest.mark.parametrize(("text", "what"), [
    ('{"partition": [1], "partition": [2]}', "the key 'partition' stands twice in an object"),
    ('{"partition": [NaN]}', "NaN is no number of JSON"),
    ('{"digits": 1, "digits": 2}', "the key 'digits' stands twice in an object"),
    (f'{{"partition": [{"9" * 9000}]}}', "a number in it has too many digits"),
    (f'{{"partition": [{"9" * 400}]}}', "use 100,000 at most"),
    ('{"partition": [100000, 1]}', "partition has 100,001 layers in all"),
    ('{"partition": [1], "schedule": "\\ud800"}', "a text in it holds half of a surrogate pair"),
    ('{"partition": [1], "stage_to_rank_map": {"0": [-1]}}', "stage_to_rank_map is {'0': [-1]}"),
    ('{"partition": [1], "microbatches": 1000000000}', "give a whole number, 1 to 65,536"),
    (json.dumps({"partition": [1], "recompute_layers": [[1] * 100_000]}), "layer 1 is to be recomputed in stage 0")])
def test_json_that_is_no_plan(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert what in str(refusal(lambda: Plan.load(tmp_path / "plan.json")))


@pytest.mark.parametrize(("text", "what"), [
    ("0F0,0B0\n" * 16_385, "there are more than 16,384 rows"),
    (",".join(f"{i}F0,{i}B0" for i in range(1025)), "there are 1025 stages"),
    ("," * (9 << 20), "has more than 8 MiB")])
def test_csv_that_is_no_schedule(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text(text)
    assert what in str(refusal(lambda: CsvFile.read(tmp_path / "s.csv").schedule))


def test_a_schedule_that_takes_too_long_to_prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.csv").write_text("0F0,0F1\n1F0,1F1,1B0\n")
    assert CsvFile.read(tmp_path / "s.csv").schedule.stages == 2
    monkeypatch.setattr("vpipe.schedules.schedule.Schedule.MOST_ACTIONS", 4)
    csv_format._read_once.cache_clear()
    found = refusal(lambda: CsvFile.read(tmp_path / "s.csv").schedule)
    assert f"has more than 4 forwards and backwards ({tmp_path / 's.csv'}:2)" in str(found)


@pytest.mark.parametrize("bomb", [False, True])
def test_a_line_without_end(bomb: bool, tmp_path: Path) -> None:
    content = b'{"code": "' + b" " * (50 << 20 if bomb else 5 << 20)
    path = tmp_path / ("a.jsonl.gz" if bomb else "a.jsonl")
    path.write_bytes(gzip.compress(content, 1) if bomb else content)
    found = refusal(lambda: list(read_functions(jsonl_files(tmp_path), tmp_path)))
    assert f"the line has more than 4 MiB; the file is not read on ({path}:1)\nhint: correct or " \
           "remove the line" in str(found)
