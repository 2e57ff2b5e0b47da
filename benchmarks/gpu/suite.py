"""Run the suite's tests that need a GPU, and published bugs of programs with streams beside their mended forms.

Both are written for CUDA. A rehearsal on a processor collects the tests and skips them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from findings import Part

from vpipe import accelerator

ROOT = Path(__file__).parent.parent.parent


def tests(part: Part) -> None:
    """Run the tests that are marked gpu, by four processes where pytest can."""
    needed = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if needed:
        part.add("tests marked gpu", f"left out: {', '.join(needed)} is not installed")
        return
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider",
               "-p", "no:benchmark",  # it warns where several processes test
               *(["-n", "4"] if importlib.util.find_spec("xdist") else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout.strip() else done.stderr.strip()
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    ran = part.on_processor or " passed" in summary  # not all skipped
    part.add("tests marked gpu", summary + "".join(f"; {name}" for name in failed), done.returncode == 0 and ran)
    if done.returncode:
        print(done.stdout)


def stream_bugs(part: Part) -> None:
    """Try ten published bugs 20 times each: only of their mended forms is it demanded that they are right."""
    if part.on_processor:
        part.add("published bugs of streams", "left out: a processor has no streams")
        return
    done = subprocess.run([sys.executable, ROOT / "tests" / "device" / "stream_bugs.py", part.device.type],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        part.add("published bugs of streams", done.stderr[-500:], False)
        return
    found = json.loads(done.stdout)
    wrong = {name: tries["wrong"].count(False) for name, tries in found.items()}
    part.add("published bugs of streams, which go wrong", ", ".join(
        f"{name} {count} of {len(found[name]['wrong'])}" for name, count in wrong.items()))
    part.add("their mended forms", f"{sum(all(tries['mended']) for tries in found.values())} of {len(found)} are right "
             "each time", all(all(tries["mended"]) for tries in found.values()))


def main() -> None:
    part = Part(__doc__)
    if part.device.type not in ("cpu", accelerator.USUAL):
        part.add("tests marked gpu, published bugs of streams", "left out: they are written for CUDA")
        return
    tests(part)
    stream_bugs(part)


if __name__ == "__main__":
    main()
