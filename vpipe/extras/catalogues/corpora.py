"""Make corpora of the messages of programs: a text in a language, and pairs to translate."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from vpipe.app.data.cache import file_states
from vpipe.app.data.corpus import Corpus, Document, Pair, Source
from vpipe.app.data.line_files import MOST_PROBLEMS
from vpipe.app.progress import progress
from vpipe.errors import UserError, counted, nearest
from vpipe.extras.catalogues.catalogues import (
    Catalogue,
    catalogues_in,
    locale_folders,
    machine_catalogues,
    most_messages,
    read_messages,
)


def catalogue_corpus(found: Sequence[Catalogue], where: str, root: Path, target: str | None, *,
                     skip: bool = False) -> Corpus:
    """Return the pairs of the catalogues in one language: ``target``, or for None that with the most messages.

    Args:
        where: for messages.
        root: of the files' names.
        skip: leave out files that cannot be read, and say so, instead of raising UserError.
    """
    counts = most_messages(found) if target is None else dict.fromkeys(sorted({each.language for each in found}), 0)
    if not counts:
        raise UserError(f"there are no gettext catalogues {where}",
                        hint="name a file or a folder of *.tsv files as dataset.path; or install something with "
                             "catalogues, such as git, or pip install django")
    language = next(iter(counts)) if target is None else target
    if language not in counts:
        raise UserError(f"dataset.target_language is {language}, but there are no gettext catalogues in it {where}",
                        hint=f"{nearest(language, list(counts))}; there are {', '.join(counts)}")
    own = [each for each in found if each.language == language]

    @cache  # so that a damaged file is reported once
    def read() -> list[Pair]:
        pairs, damaged = [], []
        for catalogue in progress(own, "reading catalogues", unit="file"):
            try:
                pairs += [Pair(source, None, catalogue.path.stem, target) for source, target in catalogue.pairs()]
            except UserError as error:
                if not skip:
                    raise
                damaged.append(error.problems[0].what)
        if damaged:
            print(f"vpipe: {counted(len(damaged), 'catalogue')} left out: {'; '.join(damaged[:MOST_PROBLEMS])}",
                  file=sys.stderr)
        return pairs

    return Corpus(f"{counted(len(own), 'gettext catalogue')} {where}, from English to {language}",
                  {"catalogues": file_states([each.path for each in own], root), "language": language}, read)


class Messages(Source):
    """What programs say, and its translations."""

    def text(self, language: str) -> Corpus:
        """Return the messages of the programs on this machine in a language; one is a document."""
        found = machine_catalogues(locale_folders())
        own = [catalogue.path for catalogue in found if catalogue.language == language]
        if not own:
            known = sorted({catalogue.language for catalogue in found})
            raise UserError(f"no program on this machine has messages in the language '{language}'",
                            hint=nearest(language, known) if known else "name a folder of text as dataset.path")

        def texts() -> Iterator[Document]:
            found = (text for path in own for message in read_messages(path) for text in message.translations)
            return (Document(text) for text in dict.fromkeys(found) if text.strip())

        return Corpus(f"messages in {language} of {counted(len(own), 'program')} on this machine",
                      {"messages": file_states(own, Path("/")), "language": language}, texts)

    def pairs(self, path: Path | None, source: str | None, target: str | None) -> Corpus | None:
        """Return the messages of catalogues with their translations; None where there is no catalogue in ``path``.

        Args:
            path: file or folder; None for this machine.
            source: must be None: what a program says is English.
            target: language; None for that with the most messages.

        Raises:
            UserError: there are none on this machine, or none in the language, or a source language is given.
        """
        found = machine_catalogues(locale_folders()) if path is None else catalogues_in(path)
        if path is not None and not found:
            return None
        if source is not None:
            raise UserError(f"dataset.source_language is {source}, but the source of gettext catalogues is what a "
                            "program says, in English", hint="leave it out; dataset.target_language is the other one")
        root = Path("/") if path is None else path.parent if path.is_file() else path
        where = "on this machine" if path is None else f"in {path}"
        return catalogue_corpus(found, where, root, target, skip=path is None)
