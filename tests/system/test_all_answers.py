"""Every answer about schedules is as before the checker, simulator and orders read one table of kinds.

See ``tests/schedules/answers.py``: all generators, hand-broken schedules and 10,000 random ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent / "schedules"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_answers() -> None:
    found = subprocess.run([sys.executable, HERE / "answers.py"], capture_output=True, text=True, timeout=580)
    assert found.returncode == 0, found.stderr
    new, old = json.loads(found.stdout), json.loads((HERE / "answers.json").read_text())
    for name, digests in old.items():
        assert new[name][:len(digests)] == digests, name
