"""Importing vpipe changes nothing of the process, beyond what its dependencies do when they are imported."""

from __future__ import annotations

import json
import subprocess
import sys

from public_names import faces

PROGRAM = """\
import json, os, resource, signal, sys, threading, warnings
from contextlib import suppress
import torch.distributed.tensor, numpy, pydantic, yaml, hypothesis, tqdm, safetensors


def state():
    # What other code of the process could notice.
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            files[name] = os.readlink(f"/proc/self/fd/{name}")
    return {
        "hooks": [sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook],
        "ways of imports": [sys.meta_path[:], sys.path_hooks[:], sys.path[:]],
        "threads": [threading.enumerate(), sorted(os.listdir("/proc/self/task"))],
        "open files": files,
        "signals": {one: signal.getsignal(one) for one in signal.valid_signals()},
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "warnings": warnings.filters[:],
        "environment": [dict(os.environ), os.getcwd()],
        "torch": [torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
                  torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
                  torch.get_float32_matmul_precision(), torch.get_rng_state().numpy().tobytes()],
    }


before = state()
for statement in json.loads(sys.stdin.read()):
    exec(statement)
    after = state()
    for what in before:
        if after[what] != before[what]:
            print(f"{statement} changes the {what}: {before[what]} -> {after[what]}")
    before = after
"""


def test_importing_changes_nothing_of_the_process() -> None:
    names = [f"from {room} import {name}" for room, names in faces().items() for name in names]
    statements = ["import vpipe", "from vpipe import Pipeline", "import vpipe.app", *names]
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(statements), capture_output=True, text=True,
                          timeout=100)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
