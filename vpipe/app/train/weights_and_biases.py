"""Pass each line of ``metrics.jsonl`` on to Weights & Biases, as numbers of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from vpipe.app.train.tensorboard import scalars
from vpipe.errors import UserError

RUN_ID = "wandb_id.txt"
"""File with the id of the run there, so that a resumed run continues it."""


class WandbWriter:
    """Log lines to a run of Weights & Biases; its own files are in ``wandb/`` of the run folder.

    Its x axis is ``step``: the package's own counter would refuse a line about an earlier step, such as that of a
    checkpoint whose writing has ended.

    Args:
        run: the run folder.
        mode: ``offline`` writes files, which ``wandb sync`` uploads; ``online`` uploads, unless WANDB_MODE says
            otherwise.
        config: of the run, one value per key.

    Raises:
        UserError: the package cannot begin a run.
    """

    name = "Weights & Biases"

    def __init__(self, run: Path, mode: str, config: Mapping[str, Any]) -> None:
        wandb = import_module("wandb")
        known = run / RUN_ID
        try:
            before = known.read_text().strip() if known.exists() else None
            self._run = wandb.init(dir=str(run), name=run.name, config=dict(config), id=before, resume="allow",
                                   mode="offline" if mode == "offline" else None, settings={"console": "off"})
            known.write_text(f"{self._run.id}\n")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # of many classes, some of them the package's
            raise UserError(f"Weights & Biases cannot begin a run: {str(error) or type(error).__name__}",
                            hint="log in with: wandb login; or set metrics.wandb to offline, or to null") from None

    def line(self, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line of ``metrics.jsonl``; those of a checkpoint or the summary go under that name."""
        self._run.log({"step": int(line["step"]), **dict(scalars(line))})

    def close(self, failed: bool = False) -> None:
        """End the run there, as a failed one or not; online this waits until all is uploaded."""
        with suppress(Exception):
            self._run.finish(exit_code=int(failed))
