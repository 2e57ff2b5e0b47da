"""Why a run has no checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path

from vpipe.config.config import Config
from vpipe.errors import counted
from vpipe.launch.folder import log_path
from vpipe.launch.restart import last_step


def why_unsaved(config: Config, folder: Path) -> str:
    """``its first is due after step 20, and it made 12 steps``.

    Args:
        config: of the run in ``folder``.
    """
    every, last = config.saving.every_steps, last_step(folder)
    done = 0 if last is None else last + 1
    if not done:
        return "it made no step"
    if every is None:
        return "checkpoint.every_steps is not set"
    if done < every:
        return f"its first is due after step {every}, and it made {counted(done, 'step')}"
    return f"no save came to its end, see {log_path(folder, 0)}"
