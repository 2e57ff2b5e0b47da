"""Run ``vpipe checkpoint ls | show | verify``: list checkpoints, show one, compare bytes with hashes."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vpipe.checkpoint.directory import FOLDER, Checkpoints, find_checkpoint
from vpipe.checkpoint.integrity import Progress, find_damage
from vpipe.checkpoint.manifest import MANIFEST, Manifest, TensorEntry
from vpipe.errors import RunError, UserError, counted
from vpipe.progress import LOADING_TORCH, message_if_slow
from vpipe.train.run_folder import CONFIG, check_not_running
from vpipe.units import size_text
from vpipe.visualize.plan_tables import Column, columns

PIPE_COLUMNS = 200
"""Width of what goes to a file or a pipe."""

KINDS = {"model": "model", "optim": "optimizer", "buffers": "buffers of replicas", "feedback": "error feedback"}
"""First word of a tensor's name -> what it is."""

_PATIENCE_S = 2.0


def run_ls(options: argparse.Namespace) -> None:
    """Print a line for each checkpoint of a run, the oldest first.

    Raises:
        UserError: there is none.
    """
    found = checkpoints_in(options.folder)
    rows, damaged = [], []
    for path in found:
        try:
            rows.append((path, Manifest.load(path)))
        except UserError as error:
            damaged.append(f"{path.name}: {error.problems[0].what}")
    for line in columns([
            Column("checkpoint", [path.name for path, _ in rows], left=True),
            Column("step", [f"{manifest.step:,}" for _, manifest in rows]),
            Column("samples", [f"{manifest.samples:,}" for _, manifest in rows]),
            Column("size", [size_text(manifest.bytes) for _, manifest in rows]),
            Column("made", [made_text(manifest) for _, manifest in rows], left=True),
            Column("by", [arrangement_text(manifest.arrangement) for _, manifest in rows], spare=True, left=True)],
            width()):
        print(line.rstrip())
    partial = sorted(found[0].parent.glob("step-*.tmp"))
    what = "is being written" if partial and _is_going(options.folder) else (
        "a save that was cut short; it counts for nothing")
    for line in (*damaged, *(f"{path.name}: {what}" for path in partial)):
        print(line)


def _is_going(path: Path) -> bool:
    """Return whether a folder of checkpoints, or one of them, lies in a run's folder."""
    try:
        for run in (path, *path.absolute().parents[:2]):
            check_not_running(run)
    except UserError:
        return True
    return False


def run_show(options: argparse.Namespace) -> None:
    """Print what is in a checkpoint: sizes by kind and by layer, files, and the config of its run.

    Raises:
        UserError: there is none, or its manifest is damaged.
    """
    folder = checkpoints_in(options.folder)[-1]
    manifest = Manifest.load(folder)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    print(f"{folder}\nafter step {manifest.step:,} and {counted_in(manifest.samples, 'sample')}, seed {manifest.seed}, "
          f"data {manifest.data or '-'}; made {made_text(manifest)}" + (f" with {versions}" if versions else ""))
    print(f"by {arrangement_text(manifest.arrangement)}\n")
    print("\n".join(kinds_table(manifest)) + "\n", flush=True)
    print("\n".join(layers_table(manifest, folder)) + "\n")
    print("\n".join(line.rstrip() for line in columns([
        Column("file", list(manifest.files), left=True),
        Column("size", [size_text(facts.bytes) for facts in manifest.files.values()]),
        Column("SHA-256", [facts.sha256 for facts in manifest.files.values()], spare=True, left=True)], width())))
    if manifest.numbers:
        print("\nnumbers: " + ", ".join(f"{name} {value}" for name, value in manifest.numbers.items()))
    if manifest.config:
        print(f"\nconfig\n{manifest.config.rstrip()}")


def run_verify(options: argparse.Namespace) -> None:
    """Read every byte of a checkpoint, or of all that a run has, and compare with what was written.

    Raises:
        UserError: there is none.
        RunError: one is damaged.
    """
    found, wrong = checkpoints_in(options.folder), []
    for path in found:
        try:
            manifest = Manifest.load(path)
            with reading(f"reading {path.name}") as progress:
                bad = [str(damage) for damage in find_damage(path, progress, manifest=manifest)]
        except UserError as error:
            bad = [error.problems[0].what]
        if bad:
            wrong.append(path)
        print(f"{path.name}: " + ("; ".join(bad) if bad else f"intact, {counted(len(manifest.files), 'file')} of "
                                  f"{size_text(manifest.bytes)}"))
    if wrong:
        whole = [path for path in found if path not in wrong]
        raise RunError(f"{len(wrong)} of {counted(len(found), 'checkpoint')} damaged: "
                       f"{', '.join(path.name for path in wrong)}", hint=f"go on from {whole[-1]}" if whole else
                       "bring the folder back from a copy, or start the run anew")


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in a run's folder or a folder of checkpoints, the oldest first; or one that is named.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).is_file():
        return [path]
    for root in (path / FOLDER, path, *_elsewhere(path)):
        if found := Checkpoints(root).all():
            return found
    if not path.is_dir():
        raise UserError(f"there is no folder '{path}'" if not path.exists() else f"'{path}' is a file, not a folder",
                        hint="give the folder of a run, or one of its checkpoints: RUN/checkpoints/step-N")
    return [find_checkpoint(path)]  # one that lost its manifest; else it says what it looked for


def _elsewhere(run: Path) -> Iterator[Path]:
    """Return the folder that a run's config names for its checkpoints."""
    if (run / CONFIG).is_file():
        from vpipe.train.resume import run_config
        from vpipe.train.run_folder import checkpoints_root

        yield checkpoints_root(run_config(run), run)


@contextmanager
def reading(what: str) -> Iterator[Progress]:
    """Show how far the reading of files is, once it has taken two seconds."""
    with tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, delay=_PATIENCE_S, leave=False) as bar:

        def heard(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield heard


def kinds_table(manifest: Manifest) -> list[str]:
    """Return a table of the sizes of weights, optimizer state and the rest."""
    kinds = grouped(manifest.tensors, lambda name: KINDS.get(name.split(".")[0], name.split(".")[0]))
    return sizes_table("what", [*kinds.items(), ("in all", dict(manifest.tensors))])


def layers_table(manifest: Manifest, folder: Path) -> list[str]:
    """Return a table of the weights of each layer, and with them its optimizer state."""
    layers = layer_names(manifest, folder)

    def layer_of(name: str) -> str:
        below = name.partition(".")[2]
        return next((layer for layer in layers if below.startswith(layer + ".")), below.split(".")[0])

    weights, state = (grouped({name: stored for name, stored in manifest.tensors.items() if name.startswith(kind)},
                              layer_of) for kind in ("model.", "optim."))
    order = [layer for layer in layers if layer in weights] or sorted(weights, key=_by_number)
    return sizes_table("layer", [(layer, weights[layer]) for layer in order],
                       [size_text(sum(stored.bytes for stored in state.get(layer, {}).values())) for layer in order])


def _by_number(name: str) -> list[str | int]:
    """Return a name for sorting by the numbers in it: 4 comes before 12."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def layer_names(manifest: Manifest, folder: Path) -> list[str]:
    """Return the names of the layers in order; none where the checkpoint does not say of which model it is."""
    with message_if_slow(LOADING_TORCH):
        from vpipe.train.model_settings import CheckpointModel, has_model

    if not has_model(manifest):
        return []
    try:
        return [layer.name for layer in CheckpointModel.from_manifest(manifest, folder).model().layers]
    except UserError:
        return []  # the model's own files are gone, or its family is not installed here


def sizes_table(head: str, groups: Iterable[tuple[str, Mapping[str, TensorEntry]]],
                state: Iterable[str] = ()) -> list[str]:
    """Return a table with a row per group of tensors."""
    named, state = list(groups), list(state)
    found = columns([
        Column(head, [name for name, _ in named], left=True),
        Column("tensors", [f"{len(tensors):,}" for _, tensors in named]),
        Column("numbers", [f"{sum(prod(stored.shape) for stored in tensors.values()):,}" for _, tensors in named]),
        Column("size", [size_text(sum(stored.bytes for stored in tensors.values())) for _, tensors in named]),
        *([Column("optimizer", state)] if state else [])], width())
    return [line.rstrip() for line in found]


def grouped(tensors: Mapping[str, TensorEntry], key: Callable[[str], str]) -> dict[str, dict[str, TensorEntry]]:
    """Return tensors by what ``key`` makes of their names, in order of the first."""
    groups: dict[str, dict[str, TensorEntry]] = {}
    for name, stored in tensors.items():
        groups.setdefault(key(name), {})[name] = stored
    return groups


def arrangement_text(arrangement: Mapping[str, Any]) -> str:
    """Return the arrangement of a run: ``1f1b of [2, 3], 4 microbatches``."""
    if arrangement.get("imported"):
        return f"import from {arrangement.get('from', 'elsewhere')}"
    parts = [str(arrangement.get("schedule", "-"))]
    if arrangement.get("partition"):
        parts[0] += f" of {list(arrangement['partition'])}"
    if arrangement.get("microbatches"):
        parts.append(counted(arrangement["microbatches"], "microbatch"))
    return ", ".join(parts)


def made_text(manifest: Manifest) -> str:
    """Return the time when a checkpoint was made, by the clock of its host."""
    try:
        return f"{datetime.fromisoformat(manifest.made):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return manifest.made


def counted_in(count: int, word: str) -> str:
    """Return a number with its noun: ``1,024 samples``."""
    return counted(count, word).replace(str(count), f"{count:,}", 1)


def width() -> int:
    """Return the width of the terminal."""
    return shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
