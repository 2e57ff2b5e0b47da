"""Read a checkpoint: compare its files with what was written, and load tensors of it by their global names, into any
partition, schedule or number of ranks.

The names that a stage asks for: :mod:`vpipe.runtime.state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.checkpoint.directory import previous, resume_command
from vpipe.checkpoint.manifest import (
    WEIGHTS,
    FileEntry,
    Manifest,
    TensorEntry,
    TensorKind,
    average_of,
    factor_of,
    last_change_of,
    view_of,
)
from vpipe.errors import UserError, counted
from vpipe.files import sha256_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vpipe.model.model import Model

Progress = Callable[[int, int], None]
"""A function that is called with how many bytes of how many were read."""

Hint = Callable[[Path], str]
"""A function that returns how to resume from a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its folder, and what its manifest says."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the manifest of a checkpoint.

        Raises:
            UserError: there is none, or it is damaged; the hint names an older checkpoint that is intact, if there is
                one.
        """
        try:
            return cls(folder, Manifest.load(folder))
        except UserError as error:
            [problem] = error.problems
            if _newest_intact_before(folder, None) is None:
                raise
            raise UserError(problem.what, where=problem.where,
                            hint=f"{problem.hint}; here {_older_intact_hint(folder, None, resume_command)}") from None

    @classmethod
    def of_weights(cls, folder: Path, about: Manifest, model: Model, weights: Mapping[str, Tensor],
                   more: Sequence[Path] = ()) -> Checkpoint:
        """Write a checkpoint of weights alone, from which a run can begin, into a folder, which is made.

        They are cast to the dtypes of the model.

        Args:
            about: the manifest, without the tensors and files.
            weights: ``<layer>.<parameter>``, tied ones once.
            more: files of the folder that the manifest lists, too.

        Raises:
            UserError: they are not the model's.
            OSError: they cannot be written.
        """
        from vpipe.checkpoint.shards import write_shards  # here, for checkpoints are listed without torch

        kinds = {name: tensor.dtype for name, tensor in model.outline().items()}
        tensors = {WEIGHTS + name: tensor.to(kinds.get(name, tensor.dtype)) for name, tensor in weights.items()}
        entries = {name: TensorEntry(*TensorKind.of(tensor), "") for name, tensor in tensors.items()}
        try:
            replace(about, tensors=entries).check_compatible(model)
        except UserError as error:
            raise UserError(error.problems[0].what.replace("the checkpoint of step 0 is", "the weights are"),
                            hint="give the config of the model that the weights are of") from None
        result = write_shards(folder, 0, tensors)
        manifest = replace(about, tensors=result.tensors,
                           files={**result.files, **{path.name: FileEntry.of(path) for path in more}})
        manifest.save(folder)
        return cls(folder, manifest)

    def damage(self, progress: Progress | None = None, only: Iterable[str] | None = None) -> list[str]:
        """Return what is wrong with the files; every byte is read. ``only``: names of those to check; None for all."""
        files = self.manifest.files
        chosen = {name: files[name] for name in (files if only is None else sorted(set(only)))}
        total, done = sum(file.bytes for file in chosen.values()), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        return [f"{name} {what}" for name, entry in chosen.items()
                if (what := _damage(self.folder / name, entry, advance))]

    def check_intact(self, progress: Progress | None = None, only: Iterable[str] | None = None,
                     resume_hint: Hint = resume_command) -> None:
        """Compare every byte of the files with what was written; the arguments are those of :meth:`damage`.

        Raises:
            UserError: one is damaged; the hint is ``resume_hint`` of the newest older checkpoint that is intact.
        """
        if found := self.damage(progress, only):
            raise UserError(f"the checkpoint '{self.folder}' is damaged: {'; '.join(found[:4])}"
                            + (f"; and {counted(len(found) - 4, 'more file')}" if len(found) > 4 else ""),
                            hint=_older_intact_hint(self.folder, progress, resume_hint))

    def tensors(self, names: Iterable[str], device: torch.device | str = "cpu", progress: Progress | None = None,
                resume_hint: Hint = resume_command, *, checked: bool = False) -> dict[str, Tensor]:
        """Return tensors on ``device``; the files that hold them are hashed first, unless ``checked``.

        Raises:
            UserError: a name is not in the checkpoint, or a file is missing or is not the one that was written; see
                :meth:`check_intact`.
        """
        from vpipe.checkpoint.shards import read_file  # here, for checkpoints are listed without torch

        manifest, wanted = self.manifest, list(names)
        missing = [name for name in wanted if name not in manifest.tensors]
        if missing:
            raise UserError(f"the checkpoint '{self.folder}' has no '{missing[0]}'"
                            + (f", nor {len(missing) - 1} more that are asked for" if len(missing) > 1 else ""),
                            hint=f"it has {len(manifest.tensors)} tensors: vpipe checkpoint show {self.folder} lists "
                                 "them")
        by_file: dict[str, list[str]] = {}
        for name in wanted:
            by_file.setdefault(manifest.tensors[name].file, []).append(name)
        if not checked:
            self.check_intact(progress, by_file, resume_hint)
        found: dict[str, Tensor] = {}
        try:
            for file, own in by_file.items():
                for name, tensor in read_file(self.folder / file, {name: manifest.tensors[name] for name in own}):
                    found[name] = tensor.to(device, copy=True)
        except OSError as error:
            raise UserError(f"cannot read the checkpoint '{self.folder}': {error.strerror or error}",
                            hint=_older_intact_hint(self.folder, progress, resume_hint)) from None
        return {name: found[name] for name in wanted}

    def weights(self, names: Iterable[str] | None = None, progress: Progress | None = None, *, corrected: bool = True,
                averaged: bool = False, checked: bool = False) -> dict[str, Tensor]:
        """Return parameters and buffers of the model: ``<layer>.<parameter>``, tied ones under their owner's name.

        Args:
            names: of those that are wanted; None for all.
            corrected: False: without what the correction of late gradients has added.
            averaged: the average that followed the weights, where there is one, in their place.
            checked: whether the files need not be hashed, so that only the weights are read of them.

        Raises:
            UserError: a file is damaged; or nothing was corrected, but ``corrected`` is False, or nothing averaged; or
                both are asked for.
        """
        known, view = self.manifest.tensors, view_of(corrected, averaged)
        model = [name.removeprefix(WEIGHTS) for name in known if name.startswith(WEIGHTS)]
        wanted = model if names is None else list(names)
        added = [name for name in wanted if view == "uncorrected" and last_change_of(name) in known]
        if view == "uncorrected" and not any(last_change_of(name) in known for name in model):
            raise UserError(f"the checkpoint '{self.folder}' has no last changes of its weights: no late gradients "
                            "were corrected", hint="leave out --uncorrected: the weights are what the optimizer made")
        if unknown := [name for name in added if factor_of(name) not in known]:
            raise UserError(f"the checkpoint '{self.folder}' does not say by which factor "
                            f"{counted(len(unknown), 'parameter')}, such as '{unknown[0]}', look ahead",
                            hint="leave out --uncorrected: the weights are what the run trained with")
        stored = {name: average_of(name) if view == "average" and average_of(name) in known else WEIGHTS + name
                  for name in wanted}
        if view == "average" and not any(average_of(name) in known for name in model):
            raise UserError(f"the checkpoint '{self.folder}' has no average of its weights: none followed them",
                            hint="leave out --averaged, or train with training.average: 0.999")
        found = self.tensors([*stored.values(), *(of(name) for name in added for of in (last_change_of, factor_of))],
                             progress=progress, checked=checked)
        for name in added:
            found[WEIGHTS + name].sub_(found[last_change_of(name)], alpha=found[factor_of(name)].item())
        return {name: found[there] for name, there in stored.items()}


def _damage(path: Path, entry: FileEntry, advance: Callable[[int], None]) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
        if size != entry.bytes:
            return f"has {size:,} bytes instead of {entry.bytes:,}"
        found = sha256_of(path, advance)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if found == entry.sha256 else f"was changed: its SHA-256 is {found[:12]}..., not {entry.sha256[:12]}..."


def _older_intact_hint(folder: Path, progress: Progress | None, resume_hint: Hint) -> str:
    """Return the hint to resume from the newest older checkpoint that is intact, if there is one."""
    older = _newest_intact_before(folder, progress)
    if older is None:
        return "no older checkpoint beside it is intact: start the run again, or bring the folder back from a copy"
    return f"resume from step {older.manifest.step} with: {resume_hint(older.folder)}"


def _newest_intact_before(folder: Path, progress: Progress | None) -> Checkpoint | None:
    """Return the newest older checkpoint of the same folder of which nothing is damaged, or None."""
    while (older := previous(folder)) is not None:
        with suppress(UserError):
            found = Checkpoint(older, Manifest.load(older))
            if not found.damage(progress):
                return found
        folder = older
    return None
