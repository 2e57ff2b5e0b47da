"""Read pairs from gettext catalogues (``.mo``, ``.po``), and find those on this machine.

A catalogue has messages of a program with their translations. It lies in ``<language>/LC_MESSAGES/<program>.mo``, below
``share/locale`` or in an installed package. The formats: https://www.gnu.org/software/gettext/manual, "MO Files" and
"PO Files".
"""

from __future__ import annotations

import os
import re
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vpipe import files
from vpipe.app.data.plain_text import BYTE_ORDER_MARK
from vpipe.errors import UserError

SUFFIXES = (".mo", ".po")
_MOST_BYTES = 64 << 20
_CATEGORY = "LC_MESSAGES"
_DEEPEST = 4  # folders of a package above its locale/
_NAMES_ALONE = re.compile(r"iso[_-]\d")  # of the package iso-codes: languages and countries, no sentences
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_HEADER_OF_MO = 20


@dataclass(frozen=True)
class CatalogueEntry:
    """An entry of a catalogue: what the program says, for one thing and for several, and its translations.

    ``plural`` is empty for an entry without; otherwise there is a translation for each form of the language.
    """

    text: str
    plural: str
    translations: tuple[str, ...]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield what surely translates what.

        The last form of a language is one for several things. The first is that for one thing where there are two.
        """
        if not self.plural or len(self.translations) == 2:
            yield self.text, self.translations[0]
        if self.plural:
            yield self.plural, self.translations[-1]


@dataclass(frozen=True)
class Catalogue:
    """A file of messages in a language, such as ``zh_CN``."""

    path: Path
    language: str

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield every message with its translation, white space made one space; not those that are equal, or empty.

        Raises UserError for a file that is no catalogue.
        """
        for message in read_messages(self.path):
            for pair in message.pairs():
                source, target = (" ".join(side.split()) for side in pair)
                if source and target and source != target:
                    yield source, target


def read_messages(path: Path) -> list[CatalogueEntry]:
    """Return the messages of a catalogue that are translated. Raises :class:`UserError` for a file that is none."""
    try:
        content = files.read_bounded(path, _MOST_BYTES, "a catalogue")
        return _read_mo(content) if path.suffix == ".mo" else _read_po(content)
    except OSError as error:
        what, where = f"{path.name} cannot be read: {error.strerror or error}", str(path)
    except _LineError as error:
        what, where = f"{path.name} is no catalogue: {error}", f"{path}:{error.line}"
    except ValueError as error:
        what, where = f"{path.name} is no catalogue: {error}", str(path)
    raise UserError(what, hint="repair or remove it", where=where)


def _read_mo(content: bytes) -> list[CatalogueEntry]:
    """Parse a compiled catalogue. Raises ValueError with the mistake in it."""
    order = _MAGIC.get(content[:4])
    if order is None or len(content) < _HEADER_OF_MO:
        raise ValueError(f"it begins with the bytes {content[:4].hex(' ')}" if order is None else
                         f"it ends after {len(content)} bytes")
    version, count, *tables = struct.unpack(f"{order}4I", content[4:_HEADER_OF_MO])
    if version >> 16 > 1:
        raise ValueError(f"its format has the version {version >> 16}")
    for table in tables:
        if table + 8 * count > len(content):
            raise ValueError(f"{count} entries at byte {table} end behind its {len(content)} bytes")

    def text(table: int, number: int) -> bytes:
        length, start = struct.unpack_from(f"{order}2I", content, table + 8 * number)
        if start + length > len(content):
            raise ValueError(f"entry {number}, {length} bytes at byte {start}, ends behind its {len(content)} bytes")
        return content[start:start + length]

    entries = [(text(tables[0], number), text(tables[1], number)) for number in range(count)]
    charset = _charset(dict(entries).get(b"", b""))
    found = []
    for number, entry in enumerate(entries):
        try:
            source, target = (side.decode(charset) for side in entry)
        except UnicodeDecodeError as error:
            raise ValueError(f"entry {number} is not {charset} (byte {error.start} of it)") from error
        one, _, several = source.rpartition("\4")[2].partition("\0")
        if source and all(translations := target.split("\0")):
            found.append(CatalogueEntry(one, several, tuple(translations)))
    return found


def _charset(header: bytes) -> str:
    """Return the encoding that the header of a catalogue names. Raises ValueError for none that Python has."""
    named = re.search(rb"charset=([\w-]+)", header)
    name = named.group(1).decode() if named and named.group(1) != b"CHARSET" else "UTF-8"  # which templates have
    try:
        "".encode(name)
    except LookupError:
        raise ValueError(f"Python has no encoding '{name}', which its header names") from None
    return name


class _LineError(ValueError):
    """A mistake in a line."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PART = re.compile(rf"(?:(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)\s*)?((?:{_STRING.pattern}\s*)*)")
_BYTE = r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]+)"
_ESCAPE = re.compile(rf"(?P<bytes>(?:{_BYTE})+)|\\(?P<letter>.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", '"': '"', "\\": "\\"}


def _read_po(content: bytes) -> list[CatalogueEntry]:
    """Parse a catalogue as translators write it. Raises ValueError with the mistake in it."""
    header = re.search(rb'"Content-Type:[^"]*"', content)
    charset = _charset(header.group() if header else b"")
    try:
        text = content.decode(charset)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not {charset} (byte {error.start})") from error
    found: list[CatalogueEntry] = []
    entry: dict[str, str] = {}
    fuzzy, key = False, ""
    for number, line in enumerate([*text.replace(BYTE_ORDER_MARK, "").split("\n"), 'msgid ""'], 1):
        line = line.strip()
        if line.startswith("#"):
            if "msgstr" in key:
                _add(found, entry, fuzzy)
                entry, fuzzy, key = {}, False, ""
            fuzzy = not line.startswith("#~") and (fuzzy or (line.startswith("#,") and "fuzzy" in line))
            continue
        if not line or line.startswith("domain "):
            continue
        while line:
            match = _PART.match(line)
            assert match is not None, "it matches the empty string, too"
            if match[1] is not None:
                if match[1] in ("msgctxt", "msgid") and "msgstr" in key:
                    _add(found, entry, fuzzy)
                    entry, fuzzy = {}, False
                key = match[1]
                if key in entry:
                    raise _LineError(number, f"a second {key} of one entry")
                entry[key] = ""
            if not match.end() or not key:
                raise _LineError(number, "the line is no keyword with a text in quotes")
            try:
                entry[key] += "".join(_ESCAPE.sub(partial(_unescaped, charset), text)
                                      for text in _STRING.findall(match[2]))
            except UnicodeDecodeError as error:
                raise _LineError(number, f"the bytes that it names are not {charset}") from error
            line = line[match.end():]
    return found


def _unescaped(charset: str, escape: re.Match[str]) -> str:
    letter: str | None = escape["letter"]
    if letter is not None:
        return _ESCAPES.get(letter, letter)
    codes = re.findall(_BYTE, escape["bytes"])  # of one or several characters
    return bytes((int(code[2:], 16) if code[1] == "x" else int(code[1:], 8)) % 256 for code in codes).decode(charset)


def _add(found: list[CatalogueEntry], entry: dict[str, str], fuzzy: bool) -> None:
    """Add an entry, unless it is the header, has no translation, or is not sure."""
    translations = tuple(text for key, text in entry.items() if key.startswith("msgstr"))
    if entry.get("msgid") and not fuzzy and translations and all(translations):
        found.append(CatalogueEntry(entry["msgid"], entry.get("msgid_plural", ""), translations))


def catalogues_in(path: Path) -> list[Catalogue]:
    """Return the catalogues in a folder and below, sorted, or the file that it is."""
    if path.is_file():
        return [Catalogue(path, _language(path))] if path.suffix in SUFFIXES else []
    return sorted((Catalogue(file, _language(file)) for suffix in SUFFIXES for file in path.rglob(f"*{suffix}")),
                  key=lambda found: found.path)


def locale_folders() -> list[Path]:
    """Return the folders of this machine, and of the Python packages on it, that hold catalogues by language."""
    prefixes = dict.fromkeys(["/usr", "/usr/local", sys.prefix, sys.base_prefix])
    found = [folder for prefix in prefixes if (folder := Path(prefix, "share", "locale")).is_dir()]
    for packages in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        found += _locale_folders(Path(packages), _DEEPEST)
    return found


def machine_catalogues(folders: Iterable[Path]) -> list[Catalogue]:
    """Return the catalogues of programs in such folders, sorted by path.

    A ``.po`` beside its ``.mo`` is the same again. Names of languages and countries, as iso-codes has them, are left
    out.
    """
    files: dict[Path, Catalogue] = {}
    for folder in folders:
        for language in folder.iterdir():
            messages = language / _CATEGORY
            names = sorted(os.listdir(messages)) if messages.is_dir() else []
            for name in names:
                stem, suffix = os.path.splitext(name)
                if suffix in SUFFIXES and not _NAMES_ALONE.match(name) and not (
                        suffix == ".po" and f"{stem}.mo" in names):
                    files.setdefault(messages / name, Catalogue(messages / name, _plain(language.name)))
    return [files[path] for path in sorted(files)]


def _locale_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders in ``folder`` that hold catalogues by language, not deeper than ``depth``."""
    try:
        inside = sorted((each for each in os.scandir(folder) if each.is_dir(follow_symlinks=False)),
                        key=lambda each: each.name)
    except OSError:
        return
    for each in inside:
        if each.name in ("locale", "locales", "translations"):
            yield Path(each.path)
        elif depth > 1 and each.name != "__pycache__" and not each.name.endswith((".dist-info", ".libs")):
            yield from _locale_folders(Path(each.path), depth - 1)


def most_messages(found: Iterable[Catalogue]) -> dict[str, int]:
    """Return the messages of every language, the most first; equal ones by name.

    Of a ``.mo`` its header says the number; of a ``.po`` every keyword counts.
    """
    counts: dict[str, int] = {}
    for catalogue in found:
        counts[catalogue.language] = counts.get(catalogue.language, 0) + _messages(catalogue.path)
    return dict(sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def _messages(path: Path) -> int:
    try:
        if path.suffix == ".po":
            return path.read_bytes().count(b"\nmsgid ")
        with path.open("rb") as file:
            head = file.read(12)
    except OSError:
        return 0
    order = _MAGIC.get(head[:4])
    return 0 if order is None or len(head) < 12 else int(struct.unpack(f"{order}I", head[8:])[0])


def _language(path: Path) -> str:
    """Return the language of a catalogue: its folder's name, or its own where that says none."""
    parts = path.parts
    return _plain(parts[-3] if len(parts) > 2 and parts[-2] == _CATEGORY else path.stem)


def _plain(name: str) -> str:
    """Return a language without its encoding: ``zh_CN`` of ``zh_CN.UTF-8``."""
    return name.split(".")[0]
