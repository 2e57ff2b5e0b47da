"""What a process of a test world runs whose ranks compute on the late device, see rank_process.py."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "runtime")]

import late_device  # noqa: E402
import rank_process  # noqa: E402

if __name__ == "__main__":
    late_device.load()
    rank_process.serve()
