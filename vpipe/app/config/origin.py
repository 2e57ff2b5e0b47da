"""Say in a run's folder where the run was started, and find from anywhere the files that its config names."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from vpipe import files
from vpipe.app.config.yaml_tree import Tree
from vpipe.checkpoint import Manifest
from vpipe.errors import UserError
from vpipe.schedules import CsvFile

RUN, KEPT_BY_RUN = "run", "kept"
"""Entries of a checkpoint's arrangement: the folder of its run, and the SHA-256 of each of the copies in that."""

ORIGIN = "origin.json"  # the folder and the host where a run was started, the run's own folder, its data
TOKENIZER, MODEL_CONFIG, SCHEDULE = KEPT = ("tokenizer.json", "config.json", "schedule.csv")
"""Copies in a run's folder: the tokenizer of its data, ``model.config_file``, the file of ``parallel.schedule``."""

PATHS = {"dataset.path": None, "dataset.cache_directory": None, "dataset.tokenizer": TOKENIZER,
         "model.config_file": MODEL_CONFIG, "parallel.schedule": SCHEDULE}
"""Keys of a config that say where a file lies, and the copies of these files."""


def read_origin(run: Path) -> dict[str, Any]:
    """Return what a run's folder says of its start; empty for one of an older version."""
    with suppress(UserError):
        found = files.read_json(run / ORIGIN, 1 << 20, "the origin of a run", "start another run")
        if isinstance(found, dict) and all(isinstance(found.get(key), str) for key in ("folder", "run")):
            return found
    return {}


def kept_file(name: str, manifest: Manifest, checkpoint: Path, *places: Path | None) -> Path | None:
    """Return the copy that the run of a checkpoint keeps of a file; None where it keeps none, is gone, or has changed.

    ``places``: the file, or folders that may have it.
    """
    digest, run = manifest.arrangement.get(KEPT_BY_RUN, {}).get(name), Path(manifest.arrangement.get(RUN) or ".")
    folders = [*filter(None, places), checkpoint.absolute().parent.parent, run, checkpoint]
    copies = (folder / name if folder.is_dir() else folder for folder in folders if digest is not None)
    return next((copy for copy in copies if copy.is_file() and files.sha256_of(copy) == digest), None)


def find_files(tree: Tree, run: Path) -> None:
    """Let the paths in the config of a run lead to what they led to where the run was started.

    Each is tried in the folder that lies to the run as that of its start did, in that, in the current one; then comes
    the copy.
    """
    if not (origin := read_origin(run)):
        return
    start, beside = Path(origin["folder"]), run / os.path.relpath(origin["folder"], origin["run"])
    for key, copy in PATHS.items():
        value = tree.get(keys := tuple(key.split(".")))
        if not isinstance(value, str) or (copy == SCHEDULE and not CsvFile.is_path(value)):
            continue
        name = os.path.relpath(value, start) if Path(value).is_relative_to(start) else value
        places = [beside / name, start / name, Path(name), *([] if copy is None else [run / copy])]
        found = next(filter(os.path.exists, places), Path(value) if "cache" in key else start / name)
        if not (os.path.exists(value) and os.path.samefile(value, found)):
            tree.put(keys, Tree.leaf(os.path.abspath(found), tree.places[keys]))
