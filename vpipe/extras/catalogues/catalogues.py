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
    """Return the messages of a catalogue that are translated, and surely so.

    Raises:
        UserError: the file cannot be read, or is no catalogue.
    """
    import polib

    try:
        content = files.read_bounded(path, _MOST_BYTES, "a catalogue")
        entries = polib.mofile(content) if path.suffix == ".mo" else polib.pofile(
            content.decode(polib.detect_encoding(content)).replace(BYTE_ORDER_MARK, ""))
    except (OSError, ValueError, LookupError, struct.error) as error:
        why = "it ends too early" if isinstance(error, struct.error) else getattr(error, "strerror", None) or error
        raise UserError(f"{path.name} cannot be read as a catalogue: {why}", hint="repair or remove it",
                        where=str(path)) from None
    found = []
    for entry in entries:
        translations = tuple(entry.msgstr_plural.values()) if entry.msgid_plural else (entry.msgstr,)
        unsure = entry.obsolete or "fuzzy" in getattr(entry, "flags", ())  # those of a .mo have no flags
        if entry.msgid and all(translations) and not unsure:
            found.append(CatalogueEntry(entry.msgid, entry.msgid_plural, translations))
    return found


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
