"""The same failure under every starter: the same error and hint, but for what only that starter can know."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from small_run import write_config
from test_run_ends import FORKED, put_program
from test_runs import FRAGILE
from test_torchrun import BIN, TORCHRUN, put_model, srun

from vpipe.app.launch.network import free_port
from vpipe.distributed.fault import Fault

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(sys.platform != "linux", reason="a rank looks into /proc"),
              pytest.mark.usefixtures("forked")]

FAIL = """\
import os, signal
        from pathlib import Path
        failure, folder = os.environ["FAILURE"], Path(os.environ["HERE"])
        if failure == "raises":
            raise ArithmeticError("too hot to handle")
        if failure == "host lost":
            os.kill(int((folder / "ssh.pid").read_text()), signal.SIGKILL)
        else:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if failure == "killed" else signal.SIGSTOP)"""
MODEL = FRAGILE.replace('raise ArithmeticError("too hot to handle")', FAIL.replace("\n    ", "\n        "))
SCRIPT = """\
import torch
from torch import nn
from vpipe import Model, Pipeline, Transfers
from fragile import Breaks

def batches():
    while True:
        yield {"input": torch.ones(8, 4), "target": torch.ones(8, 4)}

model = Model.sequential(nn.Sequential(nn.Linear(4, 4), Breaks()), nn.MSELoss())
pipe = Pipeline(model, lambda weights: torch.optim.SGD(weights, lr=0.1), 2, "1f1b", 4,
                transfers=Transfers(timeout_s=TIMEOUT))
for step in pipe.train(batches()):
    pass
"""
TIMEOUT_S = 6.0
SSH = '#!/bin/bash\necho $$ > "$HERE/ssh.pid"\nexec bash -c "${@: -1}"\n'


def told(folder: Path, starter: str, failure: str) -> str:
    """All that the starter and the ranks print, once they have ended; a rank that is stopped is killed at last."""
    environment = {**os.environ, "PYTHONPATH": put_model(folder, MODEL), "HERE": str(folder), "FAILURE": failure}
    config = write_config(folder, model__name="fragile", parallel__partition=[3, 3], parallel__timeout_s=TIMEOUT_S,
                          training__max_steps=40)
    port = str(free_port(None))
    train = [BIN / "vpipe", "train", config]
    more: list[dict[str, str]] = [{}]
    if starter == "torchrun":
        train = [*TORCHRUN, "--master-port", port, "-m", "vpipe", "train", config]
    elif starter == "ssh":
        put_program(folder / "ssh", SSH)
        put_program(folder / "python", FORKED)
        environment["PATH"] = f"{folder}:{environment['PATH']}"
        # A host that is lost takes its agent along, which must be what ssh has started.
        python = sys.executable if failure == "host lost" else folder / "python"
        train += ["--set", "machines=[localhost:0, hostB:0]", "--set", "parallel.master_address=127.0.0.1", "--set",
                  f"launch.python={python}"]
    elif starter == "srun":
        more = srun(folder)
    elif starter == "script":
        (folder / "script.py").write_text(SCRIPT.replace("TIMEOUT", str(TIMEOUT_S)))
        train = [sys.executable, folder / "script.py"]
        more = [{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
                for rank in range(2)]
    with (folder / "err").open("ab") as err:
        processes = [subprocess.Popen(list(map(str, train)), env={**environment, **own}, stdout=subprocess.DEVNULL,
                                      stderr=err) for own in more]
    try:
        deadline = time.monotonic() + 60
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if failure == "stopped" and "\nhint: " in (folder / "err").read_text():
                with suppress(ProcessLookupError):  # vpipe's launcher has killed it
                    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
            time.sleep(0.05)
        statuses = [process.wait(1) for process in processes]  # the last to end was waited for
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert any(status == 1 for status in statuses), statuses
    return (folder / "err").read_text()


TEXTS = {
    "killed": ("rank 1 (stage 1) died without a message", Fault.ended(1).hint),
    "host lost": ("rank 1 (stage 1) died without a message", Fault.ended(1).hint),
    "stopped": ("rank 1 (stage 1) gave no sign of life for S s", Fault.silent(1.0, 1).hint),
    "raises": ("the forward of LAYER raised ArithmeticError: too hot to handle (rank 1, stage 1, microbatch 5, action "
               "1F1)", "make the layer accept these inputs, or change the outputs of the layers before it")}
"""Failure -> error, without the hosts, and hint."""

KILLED = ", killed by signal 9 (SIGKILL)"
KNOWN = {("killed", "vpipe train"): KILLED, ("killed", "ssh"): KILLED,
         ("host lost", "ssh"): ", as ssh to hostB ended with exit status -9"}
"""What only a launcher sees: how a process that it started has ended."""

HOSTS = {"ssh": "hostB", "srun": "n2"}
"""Of rank 1, where there are several."""

SLOW = [pytest.mark.system, pytest.mark.long]
"""Of failures that are only noticed after a time-out, and of what is known to other tests: for make test-system."""

CELLS = [pytest.param(failure, starter, id=f"{failure}-{starter}",
                      marks=[] if failure == "killed" or (starter in ("ssh", "srun") and failure == "raises")
                      else SLOW)
         for failure in TEXTS for starter in ("vpipe train", "ssh", "torchrun", "srun", "script")
         if failure != "host lost" or starter == "ssh"]


@pytest.mark.parametrize(("failure", "starter"), CELLS)
def test_one_failure_has_one_text(tmp_path: Path, failure: str, starter: str) -> None:
    said = told(tmp_path, starter, failure)
    [error] = re.findall(r"^error: (.*)$", said, re.M)
    [hint] = re.findall(r"^hint: (.*)$", said, re.M)
    if (host := HOSTS.get(starter)) is not None:
        with_host, without = (f", host {host}", "") if failure == "raises" else (f"(stage 1) on {host} ", "(stage 1) ")
        assert with_host in error
        error = error.replace(with_host, without)
    error = re.sub(r"layer \d '\w+' on .*? raised", "LAYER raised", re.sub(r"for [\d.]+ s;", "for S s;", error))
    what, expected_hint = TEXTS[failure]
    known = KNOWN.get((failure, starter), "")
    if failure == "raises":
        assert error == what
    else:
        assert re.match(rf"{re.escape(what + known)}; rank 0 \(stage 0\) was (waiting for|sending) ", error), error
        assert re.search(r" \(rank 0, .*peer rank 1\)$", error), error
    assert hint.startswith(expected_hint), hint
    if starter != "script":  # whose ranks have no logs
        assert f"{tmp_path}/runs/" in hint
        assert "rank1.log" in hint
