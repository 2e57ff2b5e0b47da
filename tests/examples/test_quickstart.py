"""The first example that people run: what it prints, and on fewer batches the same numbers under torchrun."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


def printed_here(program: Path) -> str:
    """What the example prints in a process without a launcher: this one, which has torch already."""
    with contextlib.redirect_stdout(io.StringIO()) as out, torch.random.fork_rng():
        runpy.run_path(str(program))
    return out.getvalue()


def printed(program: Path, *launcher: str) -> str:
    """What it prints under a launcher; ends it with all that it started when it takes too long."""
    with subprocess.Popen([sys.executable, *launcher, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}) as process:
        try:
            out, err = process.communicate(timeout=100)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err
    return out


def test_what_quickstart_prints() -> None:
    lines = printed_here(QUICKSTART).splitlines()
    number = r"\d\.\d{6}"
    for line, schedule, updates in zip(lines, ("gpipe", "1f1b", "pipedream"), (36, 36, 288), strict=False):
        match = re.fullmatch(rf" *{schedule}: partition \[\d, \d, \d, \d\], {updates} updates, "
                             rf"loss ({number}) -> ({number}), held out ({number})", line)
        assert match, line
        first, last, held_out = map(float, match.groups())
        assert last < 0.7 * first
        assert held_out < 0.7 * first
    assert lines[0].split(":")[1] == lines[1].split(":")[1], "both wait for the pipeline to empty: one run"
    assert lines[3:] == ["8 tensors: 0.weight, 0.bias, 2.weight, 2.bias, ..."]


@pytest.mark.usefixtures("forked")
def test_it_prints_the_same_under_torchrun(tmp_path: Path) -> None:
    shorter = tmp_path / "quickstart.py"
    shorter.write_text(QUICKSTART.read_text().replace("range(36)", "range(6)"))
    alone = printed_here(shorter)
    assert "6 updates" in alone
    assert printed(shorter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4") == alone
