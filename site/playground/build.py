"""Build the playground: ``python site/playground/build.py OUT_FOLDER``, which any static web server can then serve.

OUT_FOLDER gets the page, Pyodide (Python for browsers; installed by npm if it is not there) and, as ``vpipe.zip``, the
files of vpipe that ``playground.py`` imports. It needs Python 3.11 and npm, and nothing of vpipe installed.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PYODIDE = HERE / "node_modules" / "pyodide"
PAGE = ("index.html", "style.css", "main.js", "drawing.js", "editor.js", "python.js", "worker.js", "strings.js")
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def build(folder: Path) -> None:
    """Write the playground into ``folder``."""
    install()
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copyfile(HERE / name, folder / name)
    for name in RUNTIME:
        shutil.copyfile(PYODIDE / name, folder / "pyodide" / name)
    with zipfile.ZipFile(folder / "vpipe.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(modules().items()):
            archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)


def install() -> None:
    """Install Pyodide as ``package-lock.json`` has it, unless it is there; one process at a time."""
    lock = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((PYODIDE / name).is_file() for name in RUNTIME):
            _install()
    finally:
        os.close(lock)


def _install() -> None:
    if (npm := shutil.which("npm")) is None:
        sys.exit("error: npm is not installed, and Pyodide comes from it\nhint: install npm (Debian: apt-get install "
                 "npm), then run this again")
    if subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=HERE).returncode:
        sys.exit("error: npm could not install Pyodide\nhint: see its message above; it needs the network once")


def modules() -> dict[str, Path]:
    """Return the files that ``playground.py`` imports, by their name in the archive."""
    sys.path[:0] = [str(ROOT), str(HERE)]
    importlib.import_module("playground").catalog()  # imports the generators, too
    files = [Path(module.__file__) for name, module in sys.modules.items()
             if name.partition(".")[0] == "vpipe" and module.__file__ is not None]
    return {"playground.py": HERE / "playground.py", **{file.relative_to(ROOT).as_posix(): file for file in files}}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: no folder\nhint: python site/playground/build.py OUT_FOLDER")
    build(Path(sys.argv[1]))
    print(f"built; to look at it: python -m http.server --directory {sys.argv[1]}")
