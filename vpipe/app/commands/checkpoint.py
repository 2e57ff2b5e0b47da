"""Run ``vpipe checkpoint ls | show | verify``: list checkpoints, show one, compare bytes with hashes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

from vpipe.app.progress import LOADING_TORCH, byte_progress, message_if_slow
from vpipe.app.run_log import EVALUATED, EvaluatedLoss, RunLog, best_checkpoint
from vpipe.app.train.run_folder import CONFIG, check_not_running, checkpoints_root
from vpipe.app.visualize.table import PIPE_COLUMNS, Column, columns, grouped, terminal_columns
from vpipe.checkpoint import Checkpoint, Checkpoints, Manifest
from vpipe.errors import RunError, UserError, counted
from vpipe.units import size_text

KINDS = {"model": "model", "optim": "optimizer", "buffers": "buffers of replicas", "delay_correction": "last changes"}
"""Kind of a tensor, for people, by the first word of its name."""


def run_ls(options: argparse.Namespace) -> None:
    """Print a line for each checkpoint of a run, the oldest first, and which has the lowest evaluation loss."""
    found = checkpoints_in(options.folder)
    runs = options.folder, *options.folder.absolute().parents[:2]  # it may be the run's, or one of checkpoints in it
    evaluations = (EvaluatedLoss.of(line) for run in runs for _, line in RunLog(run).entries(EVALUATED)
                   if line and EVALUATED in line)
    best = best_checkpoint(evaluations, Checkpoints(found[0].parent).all())  # also where one of them is named
    rows, damaged = [], []
    for path in found:
        try:
            rows.append((path, Manifest.load(path)))
        except UserError as error:
            damaged.append(f"{path.name}: {error.problems[0].what}")
    _print_table(Column("checkpoint", [f"{path.name} (best)" if path == best else path.name for path, _ in rows],
                        left=True),
                 Column("step", [f"{manifest.step:,}" for _, manifest in rows]),
                 Column("samples", [f"{manifest.samples:,}" for _, manifest in rows]),
                 Column("size", [size_text(manifest.bytes) for _, manifest in rows]),
                 Column("made", [_time_text(manifest) for _, manifest in rows], left=True),
                 Column("by", [_arrangement_text(manifest.arrangement) for _, manifest in rows], spare=True, left=True))
    partial = sorted(found[0].parent.glob("step-*.tmp"))
    what = "is being written" if partial and _is_running(runs) else "a save that was cut short; it counts for nothing"
    for line in (*damaged, *(f"{path.name}: {what}" for path in partial)):
        print(line)


def _is_running(runs: Iterable[Path]) -> bool:
    """Return whether a run in one of these folders is still going."""
    try:
        for run in runs:
            check_not_running(run)
    except UserError:
        return True
    return False


def run_show(options: argparse.Namespace) -> None:
    """Print what is in a checkpoint: sizes by kind and by layer, files, and the config of its run."""
    folder = checkpoints_in(options.folder)[-1]
    manifest = Manifest.load(folder)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    print(f"{folder}\nafter step {manifest.step:,} and {counted(manifest.samples, 'sample', commas=True)}, "
          f"seed {manifest.seed}, data {manifest.data or '-'}; made {_time_text(manifest)}"
          + (f" with {versions}" if versions else ""))
    print(f"by {_arrangement_text(manifest.arrangement)}\n")
    kinds = grouped(manifest.tensors, lambda name: KINDS.get(name.split(".")[0], name.split(".")[0]))
    _print_sizes("what", manifest, {**kinds, "in all": list(manifest.tensors)})
    print(flush=True)
    _print_layers(manifest, folder)
    print()
    _print_table(Column("file", list(manifest.files), left=True),
                 Column("size", [size_text(facts.bytes) for facts in manifest.files.values()]),
                 Column("SHA-256", [facts.sha256 for facts in manifest.files.values()], spare=True, left=True))
    if manifest.numbers:
        print("\nnumbers: " + ", ".join(f"{name} {value}" for name, value in manifest.numbers.items()))
    if manifest.config:
        print(f"\nconfig\n{manifest.config.rstrip()}")


def run_verify(options: argparse.Namespace) -> None:
    """Read every byte of a checkpoint, or of all that a run has, and compare with what was written.

    Raises:
        RunError: one is damaged.
    """
    found, damaged = checkpoints_in(options.folder), []
    for path in found:
        try:
            manifest = Manifest.load(path)
            with byte_progress(f"reading {path.name}") as progress:
                damage = Checkpoint(path, manifest).damage(progress)
        except UserError as error:
            damage = [error.problems[0].what]
        if damage:
            damaged.append(path)
        print(f"{path.name}: " + ("; ".join(damage) if damage else f"intact, {counted(len(manifest.files), 'file')} of "
                                  f"{size_text(manifest.bytes)}"))
    if damaged:
        intact = [path for path in found if path not in damaged]
        raise RunError(f"{len(damaged)} of {counted(len(found), 'checkpoint')} damaged: "
                       f"{', '.join(path.name for path in damaged)}", hint=f"resume from {intact[-1]}" if intact else
                       "restore the folder from a copy, or start the run again from its config")


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in a run's folder or a folder of checkpoints, the oldest first; or one that is named.

    Raises:
        UserError: there is none.
    """
    if Checkpoints.is_one(path):
        return [path]
    roots = [path / Checkpoints.FOLDER, path]
    if (path / CONFIG).is_file():
        from vpipe.app.train.resume import run_config  # few runs have them elsewhere

        roots.append(checkpoints_root(run_config(path), path))
    for root in roots:
        if found := Checkpoints(root).all():
            return found
    if not path.is_dir():
        raise UserError(f"there is no folder '{path}'" if not path.exists() else f"'{path}' is a file, not a folder",
                        hint="give the folder of a run, or one of its checkpoints: RUN/checkpoints/step-N")
    return [Checkpoints.find(path)]  # one that lost its manifest; else the error says what was searched


def _print_layers(manifest: Manifest, folder: Path) -> None:
    """Print the weights of each layer, and with them its optimizer state."""
    layers = _layer_names(manifest, folder)

    def layer_of(name: str) -> str:
        below = name.partition(".")[2]
        return next((layer for layer in layers if below.startswith(layer + ".")), below.split(".")[0])

    def natural(name: str) -> list[str | int]:  # 4 before 12
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]

    weights, state = (grouped((name for name in manifest.tensors if name.startswith(kind)), layer_of)
                      for kind in ("model.", "optim."))
    order = [layer for layer in layers if layer in weights] or sorted(weights, key=natural)
    optimizer = [_size_text(manifest, state.get(layer, ())) for layer in order]
    _print_sizes("layer", manifest, {layer: weights[layer] for layer in order},
                 [Column("optimizer", optimizer)] if order else [])


def _layer_names(manifest: Manifest, folder: Path) -> list[str]:
    """Return the names of the layers in order; none where the model is unknown, or its files are gone."""
    with message_if_slow(LOADING_TORCH):
        from vpipe.app.train.checkpoint_model import CheckpointModel, has_model

    if not has_model(manifest):
        return []
    try:
        return [layer.name for layer in CheckpointModel.from_manifest(manifest, folder).model().layers]
    except UserError:
        return []


def _size_text(manifest: Manifest, names: Iterable[str]) -> str:
    """Return the size of these tensors together."""
    return size_text(sum(manifest.tensors[name].bytes for name in names))


def _print_sizes(head: str, manifest: Manifest, groups: Mapping[str, Sequence[str]],
                 more: Iterable[Column] = ()) -> None:
    """Print a row per group of tensors, by their names."""
    _print_table(Column(head, list(groups), left=True),
                 Column("tensors", [f"{len(own):,}" for own in groups.values()]),
                 Column("numbers", [f"{sum(prod(manifest.tensors[name].shape) for name in own):,}"
                                    for own in groups.values()]),
                 Column("size", [_size_text(manifest, own) for own in groups.values()]),
                 *more)


def _print_table(*shown: Column) -> None:
    print("\n".join(columns(shown, terminal_columns(PIPE_COLUMNS))))


def _arrangement_text(arrangement: Mapping[str, Any]) -> str:
    """Return the arrangement of a run: ``1f1b of [2, 3], 4 microbatches``."""
    if arrangement.get("imported"):
        return f"import from {arrangement.get('from', 'elsewhere')}"
    text = str(arrangement.get("schedule", "-"))
    if arrangement.get("partition"):
        text += f" of {list(arrangement['partition'])}"
    if arrangement.get("microbatches"):
        text += f", {counted(arrangement['microbatches'], 'microbatch')}"
    return text


def _time_text(manifest: Manifest) -> str:
    """Return the time when a checkpoint was made, by the clock of its host."""
    try:
        return f"{datetime.fromisoformat(manifest.made):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return manifest.made
