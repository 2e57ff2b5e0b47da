"""The machine: what it is, and whether somebody else was using it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import vpipe


def busy_s() -> float:
    """Processor time that user programs and the system have used so far on all cores, in seconds."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def description() -> str:
    """Processor, system, Python, torch, and which vpipe."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n")]
    processor = {key.strip(): value.strip() for key, _, value in lines}
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().split("\n") if "=" in line)
    name = f"{processor.get('model name')} (family {processor.get('cpu family')}, model {processor.get('model')})"
    return (f"{os.cpu_count()} cores {name}, {release['PRETTY_NAME'].strip(chr(34))}, "
            f"Python {platform.python_version()}, torch {torch.__version__} "
            f"({torch.backends.cpu.get_cpu_capability()}), vpipe {commit()}")


def commit(*paths: str) -> str:
    """The commit of the vpipe that was measured, the last that changed ``paths``; "+" when its files differ from it."""
    root = Path(vpipe.__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True).stdout.strip()

    found = git("log", "-1", "--format=%h", "--", *paths) or "unknown"
    return found + ("+" if git("status", "--porcelain", "vpipe") else "")
