"""Run ranks in an image with apptainer.

The image has a ``python3`` with what vpipe needs. vpipe itself comes from the image when this host has it as an
installed package; from a checkout, the checkout is bound and goes before what the image has.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vpipe.app.config.config import Config
from vpipe.app.imports import imported_files
from vpipe.errors import UserError

PROGRAMS = ("apptainer", "singularity")
"""In the order in which they are looked for; the second is the first's old name."""

INSIDE = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "VPIPE_IN_CONTAINER")
"""Environment variables of a process in an image; the programs set the first two."""

NVIDIA = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver is."""


@dataclass(frozen=True)
class Container:
    """An image on this host, and the program that runs it.

    Attributes:
        program: the path of apptainer or singularity.
        image: its file, or an address such as ``docker://...``.
        gpus: whether the GPUs of the host are let in.
        bound: files and folders of the host to be seen inside, at the same paths.
    """

    program: str
    image: str
    gpus: bool
    bound: tuple[Path, ...]

    @classmethod
    def from_config(cls, config: Config) -> Container | None:
        """Return the image of ``container``, found on this host; None without one, or when this process is inside.

        Raises:
            UserError: no program on the path runs images, or there is no image.
        """
        image = config.container
        if not image or any(os.environ.get(name) for name in INSIDE):
            return None
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise UserError(f"container is '{image}', but neither apptainer nor singularity is on the path",
                            hint="install one of them, or leave container out")
        if "://" not in image:
            if not Path(image).exists():
                raise UserError(f"container names the image '{image}', but there is no such file",
                                hint=f"copy it to {os.path.abspath(image)}, or write the path that it has")
            image = os.path.abspath(image)
        # Found out without torch, which may be in the image alone.
        gpus = config.parallel.asks_for_gpus or (config.parallel.device is None and NVIDIA.exists())
        return cls(program, image, gpus, tuple(_bound(config)))

    @property
    def environment(self) -> dict[str, str]:
        """The variables for the program, which passes them on to what runs inside."""
        package = _checkout()
        paths = [str(package or ""), os.environ.get("PYTHONPATH", "")]
        return {INSIDE[-1]: "1"} | ({} if package is None else {"PYTHONPATH": os.pathsep.join(filter(None, paths))})

    def wrapped(self, command: Sequence[str], bound: Sequence[Path] = ()) -> list[str]:
        """Return the command that runs ``command`` in the image, which also sees ``bound``."""
        binds = [part for path in _outermost([*self.bound, *bound]) for part in ("--bind", str(path))]
        return [self.program, "exec", *(["--nv"] if self.gpus else []), *binds, "--pwd", os.getcwd(), self.image,
                *command]


def _bound(config: Config) -> list[Path]:
    """Return the working folder, the paths in the config, and vpipe itself where it is no installed package."""
    cache = config.dataset.cache_directory or Path.home() / ".cache" / "vpipe"
    for folder in filter(None, (cache, config.saving.directory)):
        folder.mkdir(parents=True, exist_ok=True)
    schedule = Path(config.parallel.schedule)
    paths = [Path(), config.dataset.path, config.dataset.tokenizer, config.model.config_file, config.parallel.plan,
             cache, config.saving.directory, schedule if schedule.is_file() else None, _checkout()]
    return [path for path in paths if path is not None]


def _checkout() -> Path | None:
    """Return the folder that holds this package, if it is a checkout."""
    folder = Path(__file__).parents[3]
    return None if {"site-packages", "dist-packages"} & set(folder.parts) else folder


def _outermost(paths: Sequence[Path]) -> list[Path]:
    """Return the paths, absolute, without those inside another."""
    absolute = sorted({Path(os.path.abspath(path)) for path in paths})
    for path in absolute:
        if set(",:") & set(str(path)):
            raise UserError(f"'{path}' cannot be bound into a container: it holds a comma or a colon",
                            hint="rename it, or leave container out")
    return [path for path in absolute if not any(other != path and path.is_relative_to(other) for other in absolute)]


def enter(config: Config, resumed: Sequence[Path | None] = ()) -> None:
    """Replace this process by the same command in the image of the config; return when there is nothing to do.

    For processes that torchrun or srun started, which no launcher of vpipe's can wrap.

    Args:
        resumed: folders of the run and the checkpoint to resume, where there are any.
    """
    container = Container.from_config(config)
    if container is None:
        return
    config.log_directory.mkdir(parents=True, exist_ok=True)
    # A flat config names files beside it.
    files = [Path(word).parent for word in (*sys.argv[1:], *imported_files()) if os.path.isfile(word)]
    command = container.wrapped(["python3", "-m", "vpipe", *sys.argv[1:]],
                                bound=[config.log_directory, *filter(None, resumed), *files])
    os.execvpe(command[0], command, {**os.environ, **container.environment})
