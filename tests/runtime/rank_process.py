"""What a process of a test world runs: it joins gloo once and then carries out jobs until its input ends.

A job is a line of JSON that names a function of a test module, its folder and its arguments; what the function returns
goes back as a line of JSON.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

REPLIES = "VPIPE_TEST_REPLIES"
"""Environment variable with the file descriptor that replies go to: standard output belongs to the jobs."""


def tell(kind: str, value: object) -> None:
    """A line to the test: ``result`` and ``error`` end a job, ``progress`` does not."""
    os.write(int(os.environ[REPLIES]), (json.dumps([kind, value]) + "\n").encode())


def serve() -> None:
    """Join, then carry out one job per line of standard input."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # a world that hangs is asked for its stacks
    import torch

    from vpipe.distributed.init import join_world
    from vpipe.errors import PerformanceWarning

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", PerformanceWarning)
    joined = join_world(timeout_s=float(os.environ["VPIPE_TEST_TIMEOUT_S"]))
    tell("result", joined.ranks)
    for line in sys.stdin:
        folder, module, function, arguments = json.loads(line)
        if folder not in sys.path:  # of an extra's tests
            sys.path.append(folder)
        try:
            tell("result", getattr(importlib.import_module(module), function)(**arguments))
        except Exception as error:
            tell("error", described(error))


def described(error: Exception) -> Mapping[str, Any]:
    """An exception as the test sees it."""
    return {"type": type(error).__name__, "text": str(error), "traceback": traceback.format_exc(),
            **{name: getattr(error, name, None) for name in ("rank", "stage", "action", "peer")}}


if __name__ == "__main__":
    import rank_process  # jobs import it by this name, too

    rank_process.serve()
