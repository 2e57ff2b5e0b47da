"""A text file that grows line by line while a run goes on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from vpipe.errors import UserError


class Lines:
    """Appends each line at once. Where it cannot, the disk being full, the line waits in memory and is tried again with
    the next one: no run should end for it.

    Args:
        path: of the file.
        anew: whether what is in it goes.

    Attributes:
        error: why the lines that wait could not be written, in words; None while none wait.

    Raises:
        UserError: the file cannot be made.
    """

    def __init__(self, path: Path, anew: bool) -> None:
        self.error: str | None = None
        self._waiting = bytearray()
        try:
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0), 0o666)
        except OSError as error:
            raise UserError(f"cannot write '{path}': {error.strerror}", hint="make it writable, or make room") from None

    @property
    def waiting(self) -> int:
        """How many lines are not in the file, or not all of them."""
        return self._waiting.count(b"\n")

    def write(self, line: str) -> None:
        """Append a line."""
        self._waiting += f"{line}\n".encode()
        self._try()

    def sync(self) -> None:
        """Let what was written reach the disk; another thread may call it.

        Raises:
            OSError: it could not.
        """
        if (file := self._file) is not None:
            os.fsync(file)

    def close(self) -> None:
        """Try once more to write what waits."""
        self._try()
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _try(self) -> None:
        if self._file is None:
            return
        try:
            while self._waiting:  # a disk that is nearly full takes a part
                del self._waiting[:os.write(self._file, self._waiting)]
            self.error = None
        except OSError as error:
            self.error = error.strerror or str(error)
