"""Gettext catalogues: what is read of their files, which are found, and the corpora that are made of them."""

from __future__ import annotations

import gettext
import io
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.registry import dataset_named
from vpipe.app.data.text import text as text_dataset
from vpipe.errors import UserError
from vpipe.extras.catalogues.catalogues import (
    Catalogue,
    catalogues_in,
    locale_folders,
    machine_catalogues,
    most_messages,
    read_messages,
)

HEADER = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n != 1;\n"
PO = r'''# A translator's remark.
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"
"Language: de\n"

#: file.c:12
#, c-format
msgid "cannot open %s"
msgstr "%s kann nicht "
"geöffnet\twerden\n"

#, fuzzy, c-format
#| msgid "old"
msgid "not sure"
msgstr "unsicher"

msgctxt "menu"
msgid "Open"
msgstr "Öffnen"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d Datei"
msgstr[1] "%d Dateien"
msgid "not translated"
msgstr ""

msgid "say \"hi\"\\"
msgstr "sag \"hallo\"\\"
#, fuzzy
#~ msgid "obsolete"
#~ msgstr "veraltet"

msgid "yes"
" or no"
msgstr "ja oder nein"

msgid "OK"
msgstr "OK"
'''
FOUND = [("cannot open %s", "%s kann nicht geöffnet werden"), ("Open", "Öffnen"), ("%d file", "%d Datei"),
         ("%d files", "%d Dateien"), ('say "hi"\\', 'sag "hallo"\\'), ("yes or no", "ja oder nein")]


def compiled(entries: dict[str, str], order: str = "<", charset: str = "UTF-8") -> bytes:
    """A ``.mo`` as msgfmt writes it, without its hash table."""
    texts = [(source.encode(charset), target.encode(charset)) for source, target in sorted(entries.items())]
    tables, strings, start = [], b"", 28 + 16 * len(texts)
    for side in (0, 1):
        for entry in texts:
            tables.append(struct.pack(f"{order}2I", len(entry[side]), start + len(strings)))
            strings += entry[side] + b"\0"
    return struct.pack(f"{order}7I", 0x950412de, 0, len(texts), 28, 28 + 8 * len(texts), 0, 0) + b"".join(tables) \
        + strings


def write_mo(path: Path, entries: dict[str, str], **kinds: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    charset = kinds.get("charset", "UTF-8")
    path.write_bytes(compiled({"": HEADER.replace("UTF-8", charset), **entries}, **kinds))
    return path


def test_a_catalogue_of_translators(tmp_path: Path) -> None:
    (tmp_path / "de.po").write_text(PO)
    (catalogue,) = catalogues_in(tmp_path / "de.po")
    assert catalogue.language == "de"
    assert list(catalogue.pairs()) == FOUND
    (tmp_path / "de.po").write_bytes(b"\xef\xbb\xbf" + PO.replace("\n", "\r\n").encode())
    assert list(catalogue.pairs()) == FOUND
    (tmp_path / "de.po").write_bytes(PO.replace("UTF-8", "ISO-8859-1").encode("latin-1"))
    assert list(catalogue.pairs()) == FOUND


@pytest.mark.parametrize("kinds", [{}, {"order": ">"}, {"charset": "ISO-8859-1"}])
def test_a_compiled_catalogue_is_as_the_standard_library_reads_it(tmp_path: Path, kinds: dict[str, str]) -> None:
    entries = {"cannot open %s": "%s kann nicht geöffnet\nwerden", "menu\4Open": "Öffnen", "OK": "OK",
               "%d file\0%d files": "%d Datei\0%d Dateien"}
    path = write_mo(tmp_path / "de" / "LC_MESSAGES" / "x.mo", entries, **kinds)
    assert sorted(Catalogue(path, "de").pairs()) == sorted(FOUND[:4])
    theirs = gettext.GNUTranslations(io.BytesIO(path.read_bytes()))
    assert theirs.gettext("cannot open %s") == entries["cannot open %s"]
    assert theirs.ngettext("%d file", "%d files", 2) == "%d Dateien"


@pytest.mark.parametrize(("translations", "found"), [
    ("datoteka\0datoteki\0datoteke", [("files", "datoteke")]),
    ("\u4e2a\u6587\u4ef6", [("files", "\u4e2a\u6587\u4ef6")]),
    ("Datei\0Dateien", [("file", "Datei"), ("files", "Dateien")]), ("Datei\0", [])])
def test_the_forms_of_a_language(tmp_path: Path, translations: str, found: list[tuple[str, str]]) -> None:
    path = write_mo(tmp_path / "x.mo", {"file\0files": translations})
    assert list(Catalogue(path, "x").pairs()) == found


@pytest.mark.parametrize(("name", "content", "problem"), [
    ("x.mo", b"", "ends too early"), ("x.mo", b"\xde\x12\x04\x95\0\0", "ends too early"),
    ("x.mo", b"PK" + bytes(60), "magic number"), ("x.mo", compiled({"a": "b"})[:40], "ends too early"),
    ("x.mo", compiled({"a": "\xe4"}, charset="latin-1"), "can't decode byte 0xe4"),
    ("x.mo", struct.pack("<7I", 0x950412de, 5 << 16, 0, 28, 28, 0, 0), "major revision"),
    ("x.po", b'"text"', "line 1"),
    ("x.po", b'msgid "a"\n\nmsgid "b"\nmsgstr "c"', "line 3"), ("x.po", b'msgid "a" b', "line 1")])
def test_a_damaged_catalogue_is_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=problem) as caught:
        read_messages(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def machine(folder: Path) -> None:
    """Two languages; the German catalogues have more messages, and one of them is damaged."""
    words = {f"the word number {number} of them": f"das Wort Nummer {number}" for number in range(40)}
    write_mo(folder / "de" / "LC_MESSAGES" / "one.mo", words)
    write_mo(folder / "de" / "LC_MESSAGES" / "two.mo", {"the word number 3 of them": "das Wort Nummer 3", "yes": "ja"})
    write_mo(folder / "de" / "LC_MESSAGES" / "iso_639-3.mo", {f"language {i}": f"Sprache {i}" for i in range(99)})
    (folder / "de" / "LC_MESSAGES" / "one.po").write_text(PO)
    (folder / "de" / "LC_MESSAGES" / "three.po").write_text(PO)
    (folder / "de" / "LC_MESSAGES" / "bad.mo").write_bytes(b"\xde\x12\x04\x95nothing")
    write_mo(folder / "zh_CN.UTF-8" / "LC_MESSAGES" / "one.mo", {"yes": "\u662f", "no": "\u4e0d", "OK": "\u597d"})
    (folder / "locale.alias").write_text("")


def test_without_a_path_the_language_with_the_most_messages_on_this_machine_is_taken(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine(tmp_path / "locale")
    pytest.importorskip("vpipe.extras.translation")
    pairs: Callable[[DatasetSettings], Any] = dataset_named("pairs")
    monkeypatch.setattr("vpipe.extras.catalogues.corpora.locale_folders", lambda: [tmp_path / "locale"])
    settings = DatasetSettings(sequence_length=64, vocab_size=300, cache_directory=tmp_path / "cache", batch_size=4)
    dataset = pairs(settings)
    assert dataset.lines == ("pairs: 47 of 4 gettext catalogues on this machine, from English to de (one 40, three 6, "
                             "two 1); 2 held out", "left out: 1 duplicates")
    assert capsys.readouterr().err == ("vpipe: 1 catalogue left out: bad.mo cannot be read as a catalogue: it ends too "
                                       "early\n")
    chinese = pairs(replace(settings, target_language="zh_CN", batch_size=2))
    assert chinese.lines == ("pairs: 3 of 1 gettext catalogue on this machine, from English to zh_CN (one 3); "
                             "1 held out",)
    for keys, problem in (({"target_language": "zh"}, "no gettext catalogues in it on this machine\nhint: "),
                          ({"source_language": "en"}, "the source of gettext catalogues is what a program says")):
        with pytest.raises(UserError, match=problem):
            pairs(replace(settings, **keys))
    with pytest.raises(UserError, match=r"bad.mo cannot be read"):  # named, it is not skipped
        pairs(replace(settings, path=tmp_path / "locale"))
    monkeypatch.setattr("vpipe.extras.catalogues.corpora.locale_folders", lambda: [])
    with pytest.raises(UserError, match="there are no gettext catalogues on this machine"):
        pairs(settings)


def test_messages_are_counted_by_language_and_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    machine(tmp_path)
    found = machine_catalogues([tmp_path, tmp_path])
    assert [str(each.path.relative_to(tmp_path)) for each in found] == [
        f"de/LC_MESSAGES/{name}" for name in ("bad.mo", "one.mo", "three.po", "two.mo")] + [
        "zh_CN.UTF-8/LC_MESSAGES/one.mo"]
    assert most_messages(found[1:]) == {"de": 41 + 3 + 9, "zh_CN": 4}
    assert [each.language for each in catalogues_in(tmp_path)].count("zh_CN") == 1


def test_locale_folders_of_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("django/contrib/admin/locale", "sphinx/locale", "deep/a/b/c/d/locale", "x/translations"):
        (tmp_path / name).mkdir(parents=True)
    os.symlink(tmp_path, tmp_path / "circle")
    monkeypatch.setattr("vpipe.extras.catalogues.catalogues.sysconfig.get_path", lambda name: str(tmp_path))
    found = [folder.relative_to(tmp_path).as_posix() for folder in locale_folders() if folder.is_relative_to(tmp_path)]
    assert found == ["django/contrib/admin/locale", "sphinx/locale", "x/translations"]


def test_messages_of_programs_are_text_in_a_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "locale" / "zh_CN" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    for program in ("one", "two"):
        (folder / f"{program}.po").write_text("".join(
            f'msgid "cannot open file {number}"\nmsgstr "{program}：无法打开文件 {number}。"\n\n'
            for number in range(200)))
    monkeypatch.setattr("vpipe.extras.catalogues.corpora.locale_folders", lambda: [tmp_path / "locale"])
    settings = DatasetSettings(sequence_length=8, vocab_size=400, language="zh_CN", fields=("input_ids", "labels"),
                               cache_directory=tmp_path / "cache")
    dataset = text_dataset(settings)
    assert list(dataset.lines) == ["text: messages in zh_CN of 2 programs on this machine, 400 documents, "
                                   f"{sum(12 + len(str(number)) for number in range(200)) * 2:,} characters"]
    assert dataset.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(str(dataset.tokenizer_path))
    [batch] = dataset.batches("test", dataset.samples("test"), seed=0)
    assert "无法打开文件" in tokenizer.decode(batch["input_ids"].flatten().tolist())
    for changes, what in (({"language": "zh_XX"}, "no program on this machine has messages in the language 'zh_XX'"),
                          ({"fields": ("input_ids", "masked_lm_ids")}, "BERT's samples are made of prose")):
        with pytest.raises(UserError, match=what):
            text_dataset(replace(settings, **changes))
