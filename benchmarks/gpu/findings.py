"""What a part of the GPU report found: one finding per line of the report, written as JSON while the part runs."""

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vpipe import accelerator


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
        device: to compute on, without an index.
        on_processor: whether that is a processor, which stands in for a device.
        small: sizes for a rehearsal, of whose speed nothing is demanded.
    """

    def __init__(self, description: str | None) -> None:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--device", required=True, help="cpu, or the kind that torch names")
        parser.add_argument("--small", action="store_true", help="sizes for a rehearsal")
        parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per finding")
        options = parser.parse_args()
        self.device, self.on_processor = torch.device(options.device), options.device == "cpu"
        self.small: bool = options.small
        self._out: Path = options.out
        torch.set_num_threads(1 if self.small else max(1, (os.cpu_count() or 1) // 4))

    def add(self, subject: str, text: str, passed: bool | None = None) -> None:
        """Write a finding: what was found before a part fails stays in the report."""
        with self._out.open("a") as out:
            out.write(json.dumps(asdict(Finding(subject, passed, text))) + "\n")
        print(f"  {'' if passed is None else 'ok  ' if passed else 'FAILED  '}{subject}: {text}", flush=True)

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        accelerator.synchronize(self.device)

    def free(self) -> None:
        """Give back what no tensor needs: the next model may need it in one piece."""
        gc.collect()
        if not self.on_processor:
            getattr(accelerator.module_of(self.device), "empty_cache", lambda: None)()


def read(path: Path) -> list[Finding]:
    """Read the findings of a part; none if it wrote none."""
    return [Finding(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
