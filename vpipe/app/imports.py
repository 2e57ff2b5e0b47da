"""Import the files of ``--import``, at the start of a command and in the ranks that it starts."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from vpipe import files
from vpipe.errors import UserError

IMPORTS = "VPIPE_IMPORT"
"""The environment variable by which the ranks that a command starts are given the files of ``--import``, as JSON."""


def import_files(paths: Sequence[str | Path]) -> None:
    """Import Python files, and name them to the ranks that this process starts.

    The paths stay as they are written: ranks start in the same folder, on another host in ``launch.directory``.

    Raises:
        UserError: a file cannot be imported.
    """
    os.environ.pop(IMPORTS, None)  # the command line alone names them
    for path in paths:
        _import_file(Path(path))
    if paths:
        os.environ[IMPORTS] = json.dumps([str(path) for path in paths])


def imported_files() -> list[str]:
    """Return the files that this process was told to import: by :func:`import_files`, here or where it was started."""
    return list(json.loads(os.environ.get(IMPORTS, "[]")))


def file_digests(paths: Iterable[str]) -> dict[str, str]:
    """Return a hash of the content of each file, to compare those of several hosts."""
    return {path: files.sha256_of(Path(path)) for path in paths}


def _import_file(path: Path) -> None:
    """Import a file as the module of its name, once."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"--import is given '{path}', which cannot be the name of a Python module",
                        hint="name a file such as my_models.py: letters, digits and _, and .py at the end")
    if not path.is_file():
        raise UserError(f"--import is given '{path}', but there is no such file",
                        hint="check the path; relative paths start at the current folder")
    name, file = path.stem, Path(os.path.abspath(path))
    known = sys.modules.get(name)
    other = getattr(known, "__file__", None) if known is not None else getattr(find_spec(name), "origin", None)
    if known is not None or other is not None:
        if other is None or not os.path.exists(other) or not file.samefile(other):
            raise UserError(f"--import is given '{path}', but there is another module '{name}': {other or 'built in'}",
                            hint="give the file another name")
        if known is not None:
            return
    spec = spec_from_file_location(name, file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it ends in .py"
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: of a script that is no module
        del sys.modules[name]
        place = _place(error, path, file)
        if isinstance(error, UserError):
            raise UserError.all_of([replace(problem, where=problem.where or place)
                                    for problem in error.problems]) from None
        raise UserError(f"'{path}' cannot be imported: {type(error).__name__}: "
                        f"{error.msg if isinstance(error, SyntaxError) else error}",
                        hint=_remedy(error, path), where=place) from None


def _place(error: BaseException, path: Path, file: Path) -> str:
    """Return the line of a file at which its import failed."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{path if error.filename == str(file) else error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _remedy(error: BaseException, path: Path) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name.startswith("vpipe."):
            return "change its import"
        beside = path.parent / f"{error.name.partition('.')[0]}.py"
        return f"import that file before it: --import {beside} --import {path}" if beside.is_file() else \
            f"install {error.name.partition('.')[0]} for this Python: {sys.executable}"
    if isinstance(error, SystemExit):
        return "put what runs the script below: if __name__ == '__main__':"
    return f"mend the file; python {path} shows the whole traceback"
