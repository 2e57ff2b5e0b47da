"""``checkpoint.json`` says what it was given, and notices when it was changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vpipe.checkpoint.manifest import FORMAT, ITEM_BYTES, MANIFEST, FileEntry, Manifest, TensorEntry, _checksum
from vpipe.errors import UserError

ABOUT = Manifest(40, 1280, 7, data="f00d", config="model:\n  name: bert\n", arrangement={"partition": [2, 3]},
                 numbers={"scale": 0.1})


def manifest() -> Manifest:
    return replace(ABOUT, tensors={"model.a.weight": TensorEntry((4, 3), "float32", "rank0.safetensors"),
                                   "optim.a.weight.step#int": TensorEntry((), "int64", "rank0.safetensors")},
                   files={"rank0.safetensors": FileEntry(200, "ab" * 32)})


def test_it_reads_what_it_wrote(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    assert Manifest.load(tmp_path) == manifest()
    assert manifest().bytes == 200
    assert [stored.bytes for stored in manifest().tensors.values()] == [48, 8]
    assert set(manifest().versions) == {"vpipe", "torch"}


def test_every_kind_of_number_has_its_size() -> None:
    import torch

    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


def test_a_changed_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    path = tmp_path / MANIFEST
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1:])
        try:
            found = Manifest.load(tmp_path)
        except UserError:
            continue
        assert found == manifest(), f"bit {place % 7} of byte {place}"  # a space that became another


def test_a_manifest_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    manifest().save(tmp_path)
    path = tmp_path / MANIFEST
    whole = path.read_bytes()
    for length in (*range(0, len(whole) - 2, 13), len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"manifest of the checkpoint is damaged: it is no JSON .*checkpoint\.json"):
            Manifest.load(tmp_path)


@pytest.mark.parametrize(("put", "text"), [
    (lambda path: path.write_text(json.dumps({"format": FORMAT + 2, "new": "things"})),
     f"has format {FORMAT + 2}, this vpipe reads up to {FORMAT}.*\nhint: resume it"),
    (lambda path: None, f"' is no checkpoint: it has no {MANIFEST}"),
    (Path.mkdir, "cannot read the checkpoint: Is a directory"),
    *((lambda path, text=text: path.write_text(text, encoding="latin-1"), "the manifest of the checkpoint is damaged")
      for text in ("", "null", "[]", "[" * 20_000, "\xff", '{"format": 1}'))],
    ids=["newer", "none", "folder", "empty", "null", "list", "brackets", "bytes", "format alone"])
def test_other_content_is_refused(put: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    put(tmp_path / MANIFEST)
    with pytest.raises(UserError, match=text):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [
    ("format", 0), ("format", "1"), ("step", -1), ("step", True), ("samples", 1.5), ("config", None),
    ("arrangement", []), ("arrangement", {"partition": -1}), ("arrangement", {"schedule": ["1f1b"]}),
    ("arrangement", {"optimizers": [{}]}), ("arrangement", {"optimizer_of": {"a": 1}}), ("step", 2**63),
    ("tensors", {"a": {"shape": [2**62] * 20, "dtype": "int8", "file": "rank0.safetensors"}}),
    ("versions", {"vpipe": 1}), ("tensors", []), ("tensors", {"a": {}}),
    ("tensors", {"a": {"shape": [2], "dtype": "float32", "file": "other.safetensors"}}),
    ("tensors", {"a": {"shape": [2], "dtype": "pickle", "file": "rank0.safetensors"}}),
    ("tensors", {"a": {"shape": [-2], "dtype": "int8", "file": "rank0.safetensors"}}),
    ("files", {"../rank0.safetensors": {"bytes": 1, "sha256": "00"}}), ("files", {"": {"bytes": 1, "sha256": "00"}}),
    ("files", {"/etc/passwd": {"bytes": 1, "sha256": "00"}}), ("files", {".": {"bytes": 1, "sha256": "00"}})],
    ids=str)
def test_content_that_makes_no_sense_is_refused_though_its_checksum_is_right(tmp_path: Path, key: str,
                                                                              value: object) -> None:
    manifest().save(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    del content["checksum"]
    content[key] = value
    (tmp_path / MANIFEST).write_text(json.dumps({**content, "checksum": _checksum(content)}))
    with pytest.raises(UserError, match="the manifest of the checkpoint is damaged"):
        Manifest.load(tmp_path)


def test_a_number_that_json_has_not_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float values"):
        Manifest(0, 0, 0, numbers={"scale": math.nan}).save(tmp_path)
