"""Count the files of vpipe that run a function in three flows: see README.md beside this file.

    python benchmarks/structure/count_files.py [--files] [--root CHECKOUT] [start | exchange | resume ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

STEP = "optimizer step"
CONFIG = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 16,
              "vocab_size": 32},
    "dataset": {"name": "synthetic", "batch_size": 8, "samples": 64},
    "training": {"learning_rate": 0.01, "max_steps": 2, "num_microbatches": 4},
    "parallel": {"model_parallel_size": 2, "schedule": "1f1b", "partition": [3, 2]},
    "checkpoint": {"every_steps": 2},
    "metrics": {"peak_tflops": 1.0}}
MICROBATCHES = 8


class Entry(NamedTuple):
    """A line of the log of ``traced/sitecustomize.py``."""

    process: int
    time_s: float
    function: str  # "file name"


def train(arguments: Sequence[str], root: Path, log: Path) -> None:
    """Run ``vpipe train`` in processes that log the functions that they call."""
    traced = Path(__file__).with_name("traced")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (traced, root))),
                   "VPIPE_COUNT_LOG": str(log), "VPIPE_COUNT_PACKAGE": str(root / "vpipe"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "vpipe", "train", *arguments], env=environment, cwd=log.parent,
                            capture_output=True, text=True, timeout=300)
    if result.returncode:
        sys.exit(f"vpipe train {' '.join(arguments)} failed:\n{result.stdout}{result.stderr}")


def to_first_step(log: Path) -> tuple[set[str], set[str]]:
    """Return the functions that the launcher and the ranks called before the first optimizer step of any rank."""
    entries = []
    for line in log.read_text().splitlines():
        process, time_s, function = line.split(" ", 2)
        entries.append(Entry(int(process), float(time_s), function))
    first_s = min(entry.time_s for entry in entries if entry.function == STEP)
    ranks = {entry.process for entry in entries if entry.function == STEP}
    before = [entry for entry in entries if entry.time_s < first_s and entry.function != STEP]
    return ({entry.function for entry in before if entry.process not in ranks},
            {entry.function for entry in before if entry.process in ranks})


def files_of(functions: set[str]) -> set[str]:
    """Return the files of functions."""
    return {function.split(" ")[0] for function in functions}


def count_training(root: Path, flows: Sequence[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield the files of a start, and those with a function that a resumed run calls and a start does not."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(json.dumps({**CONFIG, "log_directory": str(Path(folder, "runs"))}))
        train([str(config)], root, Path(folder, "start.log"))
        launcher, ranks = to_first_step(Path(folder, "start.log"))
        if "start" in flows:
            yield "from `vpipe train` to the first step, the launcher", files_of(launcher)
            yield "from `vpipe train` to the first step, a rank", files_of(ranks)
            yield "from `vpipe train` to the first step, together", files_of(launcher | ranks)
        if "resume" in flows:
            (run,) = Path(folder, "runs").iterdir()
            train(["--resume", str(run), "--set", "training.max_steps=4"], root, Path(folder, "resume.log"))
            resumed = set[str]().union(*to_first_step(Path(folder, "resume.log")))
            yield "`--resume`: that a start does not enter", files_of(resumed) - files_of(launcher | ranks)
            yield "`--resume`: with a function that a start does not call", files_of(resumed - launcher - ranks)


class Window:
    """Collect the files that are entered between the forwards of two microbatches of one batch.

    In the steady part of 1F1B a rank does one forward, one backward and their transfers between two forwards of its
    stage. So the window from the fourth forward to the sixth, of eight, holds all that happens to an activation and
    its gradient, and nothing of the batch's beginning or end.
    """

    def __init__(self, package: Path) -> None:
        self._package, self.files, self._forwards = os.path.join(package, ""), set[str](), 0

    def forward(self) -> None:
        """Count a forward of the stage's first layer."""
        self._forwards += 1
        within = self._forwards % MICROBATCHES
        if self._forwards > 3 * MICROBATCHES:  # shapes are known, and side effects have been looked for
            sys.setprofile(self if within in (4, 5) else None)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self._package) and frame.f_code.co_name != "<module>":
            self.files.add(os.path.relpath(file, self._package))


def exchange(rank: int, root: Path, store: str) -> None:
    """As a rank of two: train with 1F1B over gloo, and print the files that the window saw."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from vpipe import Layer, Model, Pipeline

    torch.set_num_threads(1)
    torch.manual_seed(0)  # both ranks read the same batches
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    window = Window(root / "vpipe")

    class Watched(nn.Linear):
        """Count its forwards."""

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            window.forward()
            return super().forward(input)

    class Loss(nn.Module):
        """Compute the mean squared error."""

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            return nn.functional.mse_loss(hidden, target)

    model = Model([Layer("first", lambda: Watched(8, 8), ("input",), ("h",)),
                   Layer("second", lambda: Watched(8, 8), ("h",), ("h",)),
                   Layer("loss", Loss, ("h", "target"), ("loss",))], ("input", "target"))
    pipe = Pipeline(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01), stages=[1, 2], schedule="1f1b",
                    microbatches=MICROBATCHES)
    batches = [{"input": torch.randn(16, 8), "target": torch.randn(16, 8)} for _ in range(5)]
    for _ in pipe.train(batches):
        pass
    sys.setprofile(None)
    print(json.dumps(sorted(window.files)))
    dist.destroy_process_group()


def count_exchange(root: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield the files that an activation and its gradient pass between two stages."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--root", str(root), "--store", str(Path(folder, "store")), "--rank"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        ranks = [subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE) for rank in range(2)]
        output = [rank.communicate(timeout=120)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit("a rank failed")
        yield "one activation and its gradient, from forward to backward", {
            file for text in output for file in json.loads(text)}


def main() -> None:
    """Print a count per flow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flows", nargs="*", metavar="FLOW", help="start, exchange, resume; all without one")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="the checkout to count")
    parser.add_argument("--files", action="store_true", help="list the files, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    root = options.root.resolve()
    if options.rank is not None:
        exchange(options.rank, root, options.store)
        return
    flows = options.flows or ["start", "exchange", "resume"]
    if unknown := set(flows) - {"start", "exchange", "resume"}:
        parser.error(f"no flow is called {', '.join(sorted(unknown))}")
    if "exchange" in flows:
        show(count_exchange(root), options.files)
    if {"start", "resume"} & set(flows):
        show(count_training(root, flows), options.files)


def show(counts: Iterator[tuple[str, set[str]]], names: bool) -> None:
    """Print counts, and with ``names`` the files."""
    for title, files in counts:
        print(f"{len(files):4}  {title}", flush=True)
        for file in sorted(files) if names else ():
            print(f"      {file}")


if __name__ == "__main__":
    main()
