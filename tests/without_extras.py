"""Try vpipe without its extras: a program that has imported torch, and forks a process per copy of the tree.

It reads the paths of the copies, a line each. Each copy lacks one extra, the one that its folder is named after, or all
of them. A process imports vpipe from its copy alone, whatever way vpipe is installed, and prints a line of JSON: why
checks failed, by their names.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

CONFIG = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 16,
              "vocab_size": 32},
    "dataset": {"name": "synthetic", "batch_size": 4, "samples": 16},
    "training": {"learning_rate": 0.01, "max_steps": 2, "num_microbatches": 2},
    "parallel": {"model_parallel_size": 2, "schedule": "1f1b", "partition": [3, 2], "device": "cpu"},
    "metrics": {"peak_tflops": 1.0}}

COMMANDS = [["--help"], ["configs"], ["schedule", "1f1b", "--ranks", "4", "--microbatches", "8"]]


def import_from(copy: Path) -> None:
    """Let Python find vpipe and its tests in a copy, and nowhere else.

    An editable install is a finder, which would find in the checkout what the copy lacks, or an entry of the path.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not getattr(
        finder, "__module__", "").startswith("__editable__")]
    sys.path[:] = [str(copy), str(copy / "tests"),
                   *(entry for entry in sys.path if not (Path(entry or ".") / "vpipe").is_dir()
                     and Path(entry or ".").resolve() != Path(__file__).parent)]
    sys.path_importer_cache.clear()
    os.chdir(copy)


def extras_of(tree: Path) -> set[str]:
    return {file.parent.name for file in tree.glob("vpipe/extras/*/__init__.py")}


def check_absent(copy: Path) -> None:
    """See that what the copy lacks is nowhere to be found, and that what was imported is of the copy."""
    for extra in extras_of(Path(__file__).parents[1]) - extras_of(copy):
        try:
            importlib.import_module(f"vpipe.extras.{extra}")
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"vpipe.extras.{extra} is still found")
    elsewhere = [file for name, module in sys.modules.items() if name.partition(".")[0] == "vpipe"
                 and (file := getattr(module, "__file__", None)) and not Path(file).is_relative_to(copy)]
    assert not elsewhere, f"imported from elsewhere: {elsewhere[:3]}"


def import_all(copy: Path) -> None:
    """Import every module of vpipe."""
    for file in sorted((copy / "vpipe").rglob("*.py")):
        parts = file.relative_to(copy).with_suffix("").parts
        if "tests" not in parts and parts[-1] != "__main__":
            importlib.import_module(".".join(parts).removesuffix(".__init__"))


def collect(copy: Path) -> None:
    """Collect the tests as pytest does: all of them where no extra is left, else those that name the missing one.

    To collect all takes a minute, and a file that does not name an extra is collected alike without it.
    """
    import pytest

    files = [str(copy / "tests")]
    if extras_of(copy):
        files = [str(file) for folder in ("tests", "vpipe/extras") for file in copy.joinpath(folder).rglob("test_*.py")
                 if copy.name in file.read_text()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-n", "0", "--assert=plain",
                              "-W", "ignore", "--rootdir", str(copy), *files])
    wrong = [line for line in out.getvalue().splitlines() if line.startswith("ERROR")]
    assert status == 0, "\n".join(sorted(set(wrong))) or out.getvalue()[-2000:]


def run(words: list[str]) -> None:
    """Run a command of vpipe, which must succeed."""
    from vpipe.app.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    assert not status, f"vpipe {' '.join(words)} ends with {status}:\n{out.getvalue()[-1500:]}"


def train(words: list[str]) -> None:
    """Train on two ranks, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        if not (child := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            _end(lambda: run(["train", *words]))
        ranks.append(child)
    failed = [rank for rank, child in enumerate(ranks) if os.waitpid(child, 0)[1]]
    assert not failed, f"vpipe train fails on ranks {failed}"


def run_commands(copy: Path) -> None:
    """Run a few commands, the last of which trains on two ranks for two steps."""
    for words in COMMANDS:
        run(words)
    config = copy / "tiny.yaml"
    config.write_text(json.dumps({**CONFIG, "log_directory": str(copy / "runs")}))
    train([str(config)])
    assert len(list((copy / "runs").glob("*/metrics.jsonl"))) == 1


def go_on(copy: Path) -> None:
    """Resume and export a run folder of 5332972d: of the application alone, or of translation where it is left."""
    run_folder = {"all": "text", "generation": "pairs"}.get(copy.name)
    if run_folder is None:
        return
    os.chdir(shutil.copytree(copy / "tests" / "fixtures" / "made_at_5332972d", copy / "made"))
    train(["--resume", run_folder])
    run(["checkpoint", "export", run_folder, "--format", "safetensors", "-o", "exported.safetensors"])
    os.chdir(copy)


def _end(task: Callable[[], None]) -> None:
    """Do it, and end this forked process."""
    try:
        task()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


CHECKS: dict[str, Callable[[Path], None]] = {"imports": import_all, "tests": collect, "commands": run_commands,
                                            "runs": go_on}


def failures(copy: Path) -> Iterator[tuple[str, str]]:
    """Yield the checks that fail, and why."""
    import_from(copy)
    for name, check in CHECKS.items():
        try:
            check(copy)
        except BaseException as error:
            at = [f"{frame.filename.removeprefix(f'{copy}/')}:{frame.lineno}: " for frame in traceback.extract_tb(
                error.__traceback__) if frame.filename.startswith(str(copy))][-1:]
            yield name, f"{''.join(at)}{type(error).__name__}: {error}"
    check_absent(copy)


def main() -> None:
    for name in ("torch", "torch._dynamo", "torch.distributed", "numpy", "pytest", "hypothesis", "h5py", "pydantic",
                 "tokenizers", "yaml", "jinja2"):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        if not os.fork():
            os.write(1, (json.dumps(dict(failures(Path(line.strip()).resolve()))) + "\n").encode())
            os._exit(0)
        if status := os.wait()[1]:
            print(json.dumps({"process": f"ended with status {status}"}), flush=True)


if __name__ == "__main__":
    main()
