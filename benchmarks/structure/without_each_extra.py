"""Run the whole suite without each extra in turn, and print a row for each.

    python benchmarks/structure/without_each_extra.py [EXTRA ...] [-- PYTEST OPTION ...]

The folder is moved away from this checkout, and back afterwards: so nothing can find it, however vpipe is installed, as
long as it is installed from here. Nobody else may use the checkout meanwhile. With ``-- -n 2`` in two processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ROOT / "vpipe" / "extras"


def run_suite(options: list[str]) -> tuple[str, list[str]]:
    """Return the last line of pytest, and the tests that failed or could not be collected."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT,
                         env=environment, stdout=subprocess.PIPE, text=True)
    lines = ran.stdout.splitlines()
    return (lines[-1] if lines else f"status {ran.returncode}"), [
        line for line in lines if re.match(r"(FAILED|ERROR) ", line)]


def main() -> None:
    """Move each extra away, run the suite, and move it back."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    known = sorted(file.parent.name for file in EXTRAS.glob("*/__init__.py"))
    extras, options = words[:at] or known, words[at + 1:]
    if unknown := set(extras) - set(known):
        sys.exit(f"no extra is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    where = subprocess.run([sys.executable, "-c", "import vpipe; print(vpipe.__file__)"], cwd=tempfile.gettempdir(),
                           env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, check=True)
    assert Path(where.stdout.strip()).is_relative_to(ROOT), f"vpipe is {where.stdout}"
    print("| without | suite | minutes |\n|---|---|---:|", flush=True)
    for extra in extras:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=ROOT.parent) as away:
            (EXTRAS / extra).rename(Path(away) / extra)
            try:
                result, failed = run_suite(options)
            finally:
                (Path(away) / extra).rename(EXTRAS / extra)
        print(f"| `{extra}` | {result} | {(time.monotonic() - began) / 60:.1f} |", flush=True)
        for line in failed:
            print(f"  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
