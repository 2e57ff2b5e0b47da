"""Documents from a folder of plain text files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vpipe.data.prepared import files_among
from vpipe.data.sentences import split_sentences
from vpipe.errors import UserError

_PATTERN = "*.txt"


def text_files(folder: Path) -> list[Path]:
    """The .txt files in ``folder`` and below, sorted. Raises :class:`UserError` when there are none, or one is a link
    that leads nowhere."""
    if not folder.exists():
        raise UserError(f"the folder {folder} does not exist", hint=f"name a folder that holds {_PATTERN} files")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder", hint=f"name the folder that holds the {_PATTERN} files")
    files = files_among(folder.rglob(_PATTERN))
    if not files:
        others = sum(1 for _ in folder.iterdir())
        raise UserError(f"no {_PATTERN} file in {folder} or below it ({others} other entries)",
                        hint="put text there, documents separated by blank lines, in files that end in .txt")
    return files


def read_documents(folder: Path) -> list[list[str]]:
    """Documents of at least two sentences, in the order of the files' names.

    Lines within a document are joined, so they may be wrapped or hold one sentence each. Raises as
    :func:`read_blocks` does.
    """
    documents = (split_sentences(" ".join(block)) for block in read_blocks(folder))
    return [document for document in documents if len(document) >= 2]


def read_blocks(folder: Path) -> Iterator[list[str]]:
    """The lines of every document, in the order of the files' names.

    Blank lines separate documents; the end of a file does too. Raises :class:`UserError` for a folder without text, a
    file that cannot be read, or text that is not UTF-8.
    """
    for path in text_files(folder):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path.name} is not UTF-8 (byte {error.start})",
                            hint="convert it: iconv -f LATIN1 -t UTF-8", where=str(path)) from error
        except OSError as error:
            raise UserError(f"{path.name} cannot be read: {error.strerror}", hint="mend that, or take it away",
                            where=str(path)) from error
        block: list[str] = []
        for line in [*text.split("\n"), ""]:  # of the characters that end a line these alone, and \r, are no text
            if line.strip():
                block.append(line)
            elif block:
                yield block
                block = []
