"""What a rank's process runs: ``python -m vpipe.launch.worker FOLDER TASK``, started by a launcher.

The task is ``train``, or ``verify N``: leave a trail of N updates.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

from vpipe.errors import RunError, UserError, VpipeError
from vpipe.launch.folder import CONFIG, failure_path, log_path
from vpipe.launch.local import PARENT_PIPE


def main(folder: Path, task: str, *arguments: str) -> int:
    """Do the task as the folder's config says; a failure is written down for the launcher. Returns the exit status."""
    rank = int(os.environ["RANK"])
    _follow_parent()
    logging.basicConfig(filename=log_path(folder, rank), level=logging.INFO,
                        format="%(asctime)s %(levelname)s %(message)s")
    log = logging.getLogger("vpipe")
    try:
        from vpipe.train.config import load_config
        from vpipe.train.job import Job
        from vpipe.train.loop import train
        from vpipe.train.verify import leave_trail

        job = Job.of(load_config(folder / CONFIG))
        if task == "verify":
            leave_trail(job, folder, int(arguments[0]))
        else:
            train(job, folder)
    except VpipeError as error:
        log.exception("rank %d failed", rank)
        _report(folder, rank, error)
        return error.exit_status
    except Exception as error:
        log.exception("rank %d failed", rank)
        _report(folder, rank, RunError(f"{type(error).__name__}: {error}", rank=rank,
                                       hint=f"the traceback is in {log_path(folder, rank)}"))
        return 1
    log.info("rank %d has ended", rank)
    return 0


def _follow_parent() -> None:
    """End at once when the launcher is gone, whatever this process is waiting for."""
    pipe = os.environ.get(PARENT_PIPE)
    if pipe is None:
        return

    def wait() -> None:
        os.read(int(pipe), 1)  # returns when the other end is closed: nobody ever writes
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _report(folder: Path, rank: int, error: VpipeError) -> None:
    if isinstance(error, UserError):
        problems = [[p.what, p.hint, p.where] for p in error.problems]
        blames = False
    else:
        assert isinstance(error, RunError)
        problems = [[error.located, error.hint, None]]
        blames = error.peer is not None
    report = {"rank": rank, "time": time.time(), "user": isinstance(error, UserError), "blames_peer": blames,
              "problems": problems}
    partial = failure_path(folder, rank).with_suffix(".tmp")
    partial.write_text(json.dumps(report))
    partial.replace(failure_path(folder, rank))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
