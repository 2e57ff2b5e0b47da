"""Run the suite's tests that need a GPU; a rehearsal on a processor collects them and skips them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from findings import Part

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    part = Part(__doc__)
    needed = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if needed:
        part.add("tests marked gpu", f"skipped: {', '.join(needed)} is not installed")
        return
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout.strip() else done.stderr.strip()
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    part.add("tests marked gpu", summary + "".join(f"; {name}" for name in failed), done.returncode == 0)
    if done.returncode:
        print(done.stdout)


if __name__ == "__main__":
    main()
