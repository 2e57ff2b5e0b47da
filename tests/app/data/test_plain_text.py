from errno import EIO
from pathlib import Path

import pytest
from golden import refusal

from vpipe.app.data.code_search_net import jsonl_files
from vpipe.app.data.plain_text import read_blocks, read_documents, split_sentences, text_files
from vpipe.errors import UserError


def test_blank_lines_and_files_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Last one. It has two.")
    (tmp_path / "a.txt").write_text("A wrapped\nline. And more.\n\n \nOnly one sentence.\n\n\nThird. It is\nhere.\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.txt").write_text("Deep. Down.")
    (tmp_path / "notes.md").write_text("Not read. At all.")
    assert read_documents(tmp_path) == [
        ["A wrapped line.", "And more."], ["Third.", "It is here."], ["Last one.", "It has two."], ["Deep.", "Down."]]


def test_a_folder_without_text_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    assert refusal(read_documents, tmp_path) == (
        f"error: no *.txt file in {tmp_path} or below it (1 other entries)\n"
        "hint: unpack the data there: text, documents separated by blank lines")


def test_a_missing_folder_and_a_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_documents(tmp_path / "nowhere")
    (tmp_path / "file.text").write_text("x")
    with pytest.raises(UserError, match=r"file\.text is no \*\.txt file"):
        read_documents(tmp_path / "file.text")


def test_one_file_is_data_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A file. Of two.")
    (tmp_path / "b.txt").write_text("Another one. It is not read.")
    assert read_documents(tmp_path / "a.txt") == [["A file.", "Of two."]]


def test_a_link_that_leads_nowhere_is_missing_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A file. Of two.")
    for name, files_of in (("b.txt", text_files), ("b.jsonl", jsonl_files)):
        (tmp_path / name).symlink_to("gone")
        with pytest.raises(UserError, match=rf"{name} is a link to gone, which is not there"):
            files_of(tmp_path)


def test_characters_that_are_no_end_of_a_line_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\x0ctwo\u2028three\r\nfour\x85\n\nfive".encode())
    assert list(read_blocks(tmp_path)) == [["one\x0ctwo\u2028three", "four\x85"], ["five"]]


def test_text_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> str:
        raise OSError(EIO, "Input/output error")

    (tmp_path / "a.txt").write_text("A file. Of two.")
    monkeypatch.setattr(Path, "read_bytes", broken)
    assert refusal(read_documents, tmp_path) == (
        f"error: a.txt cannot be read: Input/output error ({tmp_path / 'a.txt'})\n"
        "hint: repair it, or remove it")


@pytest.mark.parametrize(("text", "byte"), [
    (b"caf\xe9", 3),
    ("def f():  # 流水线，并行（训练）。".encode("gb18030"), 12),
    ("one\n".encode("utf-16"), 0), ("one\n".encode("utf-16-le"), 1), (b"one\n" + "two\n".encode("utf-16-le"), 5)])
def test_text_that_is_not_utf8_is_named_with_the_byte(text: bytes, byte: int, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes(text)
    assert refusal(lambda: list(read_blocks(tmp_path))) == (
        f"error: old.txt is not UTF-8 (byte {byte}) ({tmp_path / 'old.txt'})\n"
        "hint: convert it: iconv -f ENCODING -t UTF-8, where ENCODING may be GB18030, BIG5, LATIN1 or UTF-16")


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\n\ufefftwo\n\ufeff\nthr\ufeffee\n".encode())  # of joined files
    assert list(read_blocks(tmp_path)) == [["one"], ["two"], ["three"]]


@pytest.mark.parametrize(("text", "sentences"), [
    ("One thing. Another thing! A third? Yes.", ["One thing.", "Another thing!", "A third?", "Yes."]),
    ("Use a list, e.g. Python's own. Then go on.", ["Use a list, e.g. Python's own.", "Then go on."]),
    ("That is i.e. This. Or cf. Knuth.", ["That is i.e. This.", "Or cf. Knuth."]),
    ("The value is 3.14 now. Version 2.0 follows.", ["The value is 3.14 now.", "Version 2.0 follows."]),
    ("Wait... Then go. And so on... to the end.", ["Wait...", "Then go.", "And so on... to the end."]),
    ("After D. Knuth it changed. See Fig. 3 there.", ["After D. Knuth it changed.", "See Fig. 3 there."]),
    ("So do I. Then sleep.", ["So do I.", "Then sleep."]),
    ("Lists, sets etc. Other things (see below.) Next.", ["Lists, sets etc.", "Other things (see below.)", "Next."]),
    ('He said "stop." Then\n   he   left', ['He said "stop."', "Then he left"]),
    ("no capital. follows here", ["no capital. follows here"]),
    ("这是第一句。“第二句！”第三句？还有……一句", ["这是第一句。", "“第二句！”", "第三句？", "还有……一句"]),
    ("它是 3.14。见 D. Knuth。完", ["它是 3.14。", "见 D. Knuth。", "完"]),
    ("", []),
    ("  \n ", []),
])
def test_splits_where_sentences_end(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_no_word_is_lost() -> None:
    text = "A first one, e.g. this. Then 2.5 more... Or not? (Maybe.) Dr. Who knows! The end"
    assert " ".join(split_sentences(text)) == text
