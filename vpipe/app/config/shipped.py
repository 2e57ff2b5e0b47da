"""Find the configs that come with vpipe, and open them by name.

Their home is the folder ``configs`` of the repository, of which a wheel has a copy in the package (``build_wheel.py``),
and that of each extra.
"""

from __future__ import annotations

import os
from pathlib import Path

from vpipe.errors import UserError, nearest

ENDINGS = (".yaml", ".yml")


def shipped_configs() -> dict[str, Path]:
    """Return the files of the configs that come with vpipe by name, in order of the names."""
    package = Path(__file__).parents[2]
    folders = (package / "configs", package.parent / "configs")  # of a wheel; of the repository
    homes = [*[folder for folder in folders if folder.is_dir()][:1], *package.glob("extras/*/configs")]
    files = [file for folder in homes for file in folder.iterdir() if file.suffix in ENDINGS]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def find_config(path: Path) -> Path:
    """Return the file of a config: ``path`` where it exists, else that of the shipped config of this name.

    Raises:
        UserError: there is neither.
    """
    try:
        if not os.path.isdir(path):
            os.stat(path)
            return path
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError):
        return path  # reading it gives the error
    shipped, name = shipped_configs(), path.stem if path.suffix in ENDINGS else path.name
    if name in shipped and path.name == str(path):
        return shipped[name]
    if os.path.isdir(path):
        return path
    if path.suffix in ENDINGS or path.name != str(path):
        raise UserError(f"there is no file '{path}'", where=str(path),
                        hint="check the path; relative paths start at the current folder"
                        + (f"; a config '{name}' comes with vpipe: write {name}" if name in shipped else ""))
    hint = nearest(name, list(shipped))
    hint = hint if hint.endswith("?") else "name a YAML file, or one of these; vpipe configs explains them"
    raise UserError(f"there is no file '{path}', and no config of that name comes with vpipe: {', '.join(shipped)}",
                    hint=hint)
