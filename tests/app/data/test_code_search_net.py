import gzip
import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from vpipe.app.data.code_search_net import jsonl_files, read_functions, with_documentation
from vpipe.app.data.corpus import Document
from vpipe.errors import UserError

CODE = 'def f():\n    """Give one."""\n    return 1'


def write(path: Path, *records: Any) -> Path:
    """A file with a line per record; texts and bytes are lines as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, bytes) else
             (record if isinstance(record, str) else json.dumps(record)).encode() for record in records]
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path: Path) -> list[Document]:
    return list(read_functions(jsonl_files(path), path.parent if path.is_file() else path))


def problems(path: Path) -> list[tuple[str, str | None]]:
    with pytest.raises(UserError) as caught:
        read(path)
    return [(problem.what, problem.where) for problem in caught.value.problems]


def test_both_spellings_of_the_public_layout_gzipped_or_not(tmp_path: Path) -> None:
    published = {"repo": "a/b", "path": "c.py", "func_name": "f", "original_string": CODE, "language": "python",
                 "code": CODE, "code_tokens": ["def"], "docstring": "Give one.", "docstring_tokens": ["Give"],
                 "sha": "0", "url": "u", "partition": "valid"}
    loaded = {"repository_name": "a/b", "func_path_in_repository": "c.py", "func_name": "f", "whole_func_string": CODE,
              "language": "python", "func_code_string": CODE, "func_code_tokens": ["def"],
              "func_documentation_string": "Give one.", "split_name": "validation", "func_code_url": "u"}
    write(tmp_path / "0.jsonl.gz", published, "  ", loaded)
    write(tmp_path / "1.jsonl", {"code": CODE, "split": "TEST"})
    (tmp_path / "definitions.pkl").write_bytes(b"never opened")
    assert read(tmp_path) == [Document(CODE, "valid", "python"), Document(CODE, "valid", "python"),
                              Document(CODE, "test")]


@pytest.mark.parametrize(("name", "part"), [
    ("python/final/jsonl/train/python_train_0.jsonl.gz", "train"), ("valid/0.jsonl", "valid"), ("test.jsonl", "test"),
    ("test/code-validation.jsonl", "valid"), ("dev/0.jsonl", "valid"), ("train_or_test.jsonl", None),
    ("latest/contest.jsonl", None), ("0.jsonl", None)])
def test_files_and_folders_tell_the_part(tmp_path: Path, name: str, part: str | None) -> None:
    write(tmp_path / "train" / name, {"code": CODE}, {"code": CODE, "partition": "train"})
    assert [document.part for document in read(tmp_path / "train")] == [part, "train"]


def test_a_single_file_is_told_by_its_own_name(tmp_path: Path) -> None:
    path = write(tmp_path / "test" / "train.jsonl", {"code": CODE})
    assert read(path)[0].part == "train"


@pytest.mark.parametrize(("code", "documentation", "text"), [
    (CODE, "Give one.", CODE), (CODE, "  Give one.  \n\nMore.", CODE), ("f = 1", None, "f = 1"),
    ("f = 1", " ", "f = 1"), ("func F() {}", "// F does\n// nothing", "// F does\n// nothing\nfunc F() {}")])
def test_documentation_goes_before_code_that_has_it_not(code: str, documentation: str | None, text: str) -> None:
    assert with_documentation(code, documentation) == text


def test_every_malformed_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"code": CODE}, "{", "[1]", {"docstring": "x", "url": "u"}, {"code": 3},
                 {"code": " "}, {"code": CODE, "partition": "training set"}, b'{"code": "\xff"}',
                 '{"code": "\\ud800"}', {"code": CODE, "language": ["go"]}, {"code": None, "url": "u"})
    assert problems(tmp_path) == [
        ("the line is not JSON: Expecting property name enclosed in double quotes (column 2)",
         f"{path}:2"),
        ("the line is a JSON array, not an object", f"{path}:3"),
        ("the line has no 'func_code_string' or 'code' (its keys: docstring, url)", f"{path}:4"),
        ("'code' is a JSON number, not a string", f"{path}:5"),
        ("the code is empty", f"{path}:6"),
        ("the part is 'training set', not train, valid or test", f"{path}:7"),
        ("the line is not UTF-8 (byte 10)", f"{path}:8"),
        ("'code' holds half of a surrogate pair (character 0)", f"{path}:9"),
        ("'language' is a JSON array, not a string", f"{path}:10"),
        ("the line has no 'func_code_string' or 'code' (its keys: url)", f"{path}:11")]
    path = write(tmp_path / "a.jsonl", f'{{"code": {"1" * 5000}}}')
    assert problems(tmp_path) == [("the line has a number with too many digits", f"{path}:1")]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", BOM_UTF8 + json.dumps({"code": CODE}).encode(), {"code": CODE})
    assert [document.text for document in read(tmp_path)] == [CODE, CODE]


def test_no_more_than_ten_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *["{"] * 30)
    assert len(problems(tmp_path)) == 10


def test_a_file_that_ends_too_early_is_named_with_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", *[{"code": CODE + str(number)} for number in range(2000)])
    path.write_bytes(path.read_bytes()[:-20])
    [(what, where)] = problems(tmp_path)
    assert what.startswith("a.jsonl.gz cannot be read on: ")
    assert where is not None
    assert where.startswith(f"{path}:")
    path.write_bytes(b"no gzip")
    assert problems(tmp_path)[0][1] == f"{path}:1"
    path.write_bytes(b"")
    assert problems(tmp_path) == [("a.jsonl.gz cannot be read on: it has 0 bytes", f"{path}:1")]


def test_paths_without_such_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        jsonl_files(tmp_path / "nowhere")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match=r"no \*\.jsonl or \*\.jsonl\.gz file in .* \(1 other entries\)"):
        jsonl_files(tmp_path)
    with pytest.raises(UserError, match=r"a\.json is no \*\.jsonl or \*\.jsonl\.gz file"):
        jsonl_files(tmp_path / "a.json")
