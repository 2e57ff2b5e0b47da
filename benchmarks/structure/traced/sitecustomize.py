"""Log the first call of each function of vpipe in this process: count_files.py puts this on PYTHONPATH.

A line of the log: process id, seconds since the epoch, the file, the function. A line ``optimizer step`` marks the
first step of a torch optimizer. Modules that are being imported, and what they call, are left out.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from time import time
from types import CodeType, FrameType

LOG, PACKAGE = os.environ.get("VPIPE_COUNT_LOG"), os.environ.get("VPIPE_COUNT_PACKAGE", "")
STEP = "optimizer step"


class Tracer:
    """Write each new function of a package to a log, from every thread of this process."""

    def __init__(self, log: str, package: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._package = os.path.join(package, "")
        self._known: set[CodeType] = set()
        self._importing: Counter[int] = Counter()  # modules under way, by thread

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            thread = threading.get_ident()  # the first to end is this module itself, which began before
            self._importing[thread] = max(0, self._importing[thread] + {"call": 1, "return": -1}.get(event, 0))
        elif event == "call" and code not in self._known and not self._importing[threading.get_ident()]:
            self._known.add(code)
            self._note(code)

    def _note(self, code: CodeType) -> None:
        file = code.co_filename
        if f"{os.sep}torch{os.sep}optim{os.sep}" in file and code.co_name == "step":
            entry = STEP
        elif file.startswith(self._package):
            entry = f"{os.path.relpath(file, self._package)} {code.co_qualname}"
        else:
            return
        os.write(self._log, f"{os.getpid()} {time():.6f} {entry}\n".encode())


if LOG:
    tracer = Tracer(LOG, str(Path(PACKAGE).resolve()))
    threading.setprofile(tracer)
    sys.setprofile(tracer)
