"""What a part of the GPU report found: one finding per line of the report, written as JSON while the part runs."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        subject: what was tried.
        passed: whether it is as it must be; None for a figure that nothing is demanded of.
        text: the result in words and numbers.
    """

    subject: str
    passed: bool | None
    text: str


class Part:
    """A part of the report, run as a program of its own: ``part.py --device cuda --out FILE [--small]``.

    Attributes:
        device: to compute on.
        small: sizes for a rehearsal on a processor.
    """

    def __init__(self, description: str | None) -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
        parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per finding")
        options = parser.parse_args()
        self.device, self.small = torch.device(options.device), options.device == "cpu"
        self._out: Path = options.out
        torch.set_num_threads(1 if self.small else max(1, (os.cpu_count() or 1) // 4))

    def add(self, subject: str, text: str, passed: bool | None = None) -> None:
        """Write a finding: what was found before a part fails stays in the report."""
        with self._out.open("a") as out:
            out.write(json.dumps(asdict(Finding(subject, passed, text))) + "\n")
        print(f"  {'' if passed is None else 'ok  ' if passed else 'FAILED  '}{subject}: {text}", flush=True)

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def read(path: Path) -> list[Finding]:
    """Read the findings of a part; none if it wrote none."""
    return [Finding(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
