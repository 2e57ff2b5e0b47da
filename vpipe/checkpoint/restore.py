"""Tensors of a checkpoint, for whoever wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from vpipe.checkpoint import storage
from vpipe.checkpoint.folder import resume_command
from vpipe.checkpoint.integrity import Progress, check_intact, instead_of
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError


def read(folder: Path, manifest: Manifest, names: Iterable[str], device: torch.device | str = "cpu",
         progress: Progress | None = None, to_go_on: Callable[[Path], str] = resume_command) -> dict[str, Tensor]:
    """The tensors of those names, on ``device``; the files that hold them are checked first, in full.

    Args:
        manifest: of ``folder``.
        progress: told how many bytes of the files were checked.
        to_go_on: see :func:`~vpipe.checkpoint.folder.find`.

    Raises:
        UserError: a name is not in the checkpoint, a file is missing or not what was written, or holds another shape
            than the manifest says.
    """
    wanted = list(names)
    missing = [name for name in wanted if name not in manifest.tensors]
    if missing:
        raise UserError(f"the checkpoint '{folder}' has no '{missing[0]}'"
                        + (f", nor {len(missing) - 1} more that are asked for" if len(missing) > 1 else ""),
                        hint=f"it has {len(manifest.tensors)} tensors: vpipe checkpoint show {folder} lists them")
    check_intact(folder, progress, manifest=manifest, only={manifest.tensors[name].file for name in wanted},
                 to_go_on=to_go_on)
    try:
        return storage.load(folder, manifest, wanted, device)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint '{folder}': {error.strerror or error}",
                        hint=instead_of(folder, progress, to_go_on)) from None
