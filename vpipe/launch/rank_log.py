"""The log of a rank."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress


class RankLog(logging.FileHandler):
    """A file that says once that it cannot be written, the disk being full; training goes on."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Called where a line could not be written, which is tried again with the next one."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with suppress(OSError):
                print(f"warning: cannot write '{self.baseFilename}': {error.strerror}", file=sys.stderr, flush=True)
