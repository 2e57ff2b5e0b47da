"""Test and measure vpipe on the accelerators of this machine, in one command and under 14 minutes. See README.md.

python benchmarks/gpu/run.py [--device KIND] [--import MODULE] [--small] [--only PART ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PARTS = {
    "suite": ("the suite's tests that need a GPU, bugs of streams", 100),
    "exactness": ("every schedule on the device beside its oracle", 200),
    "ranks": ("several processes: a shared device over gloo, its own backend", 110),
    "prediction": ("predicted memory and step time beside the measured ones", 90),
    "utilization": ("a stage beside the plain model", 80),
    "host": ("cost of an action on the host, gaps between kernels, executors", 70),
    "orion": ("kernels of microbatches through the gate of Orion", 180),
}
"""Each a program beside this one, what it is about, and the seconds that it may take on a GPU: 830 in all."""
NEEDED = {"torch": "everything", "numpy": "everything", "pydantic": "configs", "yaml": "configs",
          "safetensors": "checkpoints"}
"""Modules without which nothing runs, and what for."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", metavar="KIND",
                        help="the kind of device, such as cuda, xpu or npu (default: the one that torch names); cpu: a "
                        "rehearsal, with a processor and gloo in place of a device and its backend, and --small")
    parser.add_argument("--import", dest="module", metavar="MODULE",
                        help="what makes the device known to torch, where torch does not import that by itself")
    parser.add_argument("--small", action="store_true", help="small sizes, of whose speed nothing is demanded")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="PART",
                        help=f"some of the parts: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="folder of report.md and report.json (benchmarks/gpu/reports/DEVICE)")
    return parser.parse_args()


def missing() -> list[str]:
    """Return the modules that are needed and not installed."""
    return [f"{name} (for {use})" for name, use in NEEDED.items() if importlib.util.find_spec(name) is None]


def put_on_path(folder: Path) -> None:
    """Let this process and those that it starts import from a folder."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def import_with_torch(module: str, folder: Path) -> None:
    """Have torch import a module whenever it is imported itself, as it does with packages that have such an entry
    point: in every process of every part.
    """
    package = f"with_torch_{module.replace('.', '_')}"
    (folder / f"{package}.py").write_text(f"def load() -> None:\n    import {module}\n")
    info = folder / f"{package}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{module} = {package}:load\n")
    put_on_path(folder)


def run_part(name: str, arguments: list[str], out: Path, limit_s: float) -> tuple[float, str | None]:
    """Run a part and return its seconds and its failure: the end of what it printed, or that it took too long."""
    log, started = out.with_suffix(".log"), time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen([sys.executable, HERE / f"{name}.py", *arguments, "--out", out], cwd=ROOT,
                                   stdout=written, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    failure = None if status == 0 else f"took more than {limit_s:.0f} s\n{end}" if status is None else \
        f"ended with status {status}\n{end}"
    return time.monotonic() - started, failure


def machine(kind: str, small: bool) -> dict[str, str]:
    """Describe the machine, the versions and the commit, as far as they can be asked for."""
    import torch

    from vpipe import accelerator

    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True,
                            check=False).stdout.strip() if shutil.which("git") else ""
    facts = {"commit": commit or "unknown", "python": platform.python_version(), "torch": torch.__version__,
             "processor": f"{os.cpu_count()} cores, {platform.machine()}"}
    if kind == "cpu":
        return facts | {"device": "cpu: a rehearsal without a device, in small sizes; its figures say nothing"}
    device, module = accelerator.current(), accelerator.module_of(kind)
    memory = accelerator.total_bytes(device) / 2**30
    facts["device"] = (f"{accelerator.count()} x {accelerator.name_of(device)} ({kind}), "
                       + (f"{memory:.0f} GiB" if memory else "of unknown memory")
                       + "; small sizes, whose figures say nothing" * small)
    facts |= {name: str(version) for name in ("cuda", "hip", "xpu") if (version := getattr(torch.version, name, None))}
    facts |= {found.dist.name: found.dist.version for found in entry_points(group="torch.backends") if found.dist}
    if driver := getattr(getattr(module, "get_device_properties", lambda device: None)(device), "driver_version", None):
        facts["driver"] = str(driver)
    elif kind == accelerator.USUAL and shutil.which("nvidia-smi"):
        facts["driver"] = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                         capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    backend = accelerator.collectives()
    version = getattr(getattr(module, backend, None), "version", None)
    facts[backend] = ".".join(map(str, version())) if version and accelerator.has_collectives() else (
        "there" if accelerator.has_collectives() else "not there")
    return facts


def markdown(facts: dict[str, str], parts: dict[str, dict[str, object]]) -> str:
    """Write the report as Markdown."""
    lines = ["# GPU report", "", f"`make gpu`; {'; '.join(f'{key} {value}' for key, value in facts.items())}.", ""]
    for name, part in parts.items():
        lines += [f"## {name}: {PARTS[name][0]} ({part['seconds']:.0f} s)", "", "| | | |", "|---|---|---|"]
        for finding in part["findings"]:  # type: ignore[attr-defined]
            word = {True: "ok", False: "**failed**", None: ""}[finding["passed"]]
            lines.append(f"| {finding['subject']} | {word} | {finding['text']} |")
        if part["failure"]:
            lines += ["", f"**{name} failed**: it", "", "```", str(part["failure"]), "```"]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Run the parts one after the other and write the report after each; 0 if all passed, 1 if not."""
    options = arguments()
    if absent := missing():
        print(f"error: packages are missing: {', '.join(absent)}\nhint: this command installs nothing; "
              f"name a Python that has them: make gpu PYTHON=/path/to/python", file=sys.stderr)
        return 2
    put_on_path(ROOT)
    with tempfile.TemporaryDirectory() as name:
        if options.module:
            import_with_torch(options.module, Path(name))
        try:
            import torch  # noqa: F401
        except RuntimeError as error:
            print(f"error: torch cannot be imported: {error}\n{error.__cause__!r}\nhint: set up what it names, or "
                  "TORCH_DEVICE_BACKEND_AUTOLOAD=0", file=sys.stderr)
            return 2
        from vpipe import accelerator
        from vpipe.errors import UserError

        try:
            wanted = None if options.device == "auto" else options.device
            kind = accelerator.choose(wanted, None, accelerator.Visible(accelerator.count())).type
        except UserError as error:
            print(error, file=sys.stderr)
            return error.exit_status
        if kind == "cpu" and wanted is None:
            print("error: there is no accelerator here that torch can use, so nothing was tested\n"
                  "hint: --device cpu rehearses every part on a processor; --import MODULE imports what knows a "
                  "device", file=sys.stderr)
            return 2
        return run(kind, options.small or kind == "cpu", options.only, options.out)


def run(kind: str, small: bool, only: list[str], out: Path | None) -> int:
    """Run parts on a kind of device, and write the report to a folder."""
    from findings import read

    from vpipe import accelerator

    name = "rehearsal" if kind == "cpu" else accelerator.name_of(accelerator.current()).replace(" ", "-").lower()
    folder = out or HERE / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    facts, parts, started = machine(kind, small), {}, time.monotonic()
    for part in only:
        about, limit_s = PARTS[part]
        limit_s *= 6 if small else 1
        print(f"{part}: {about} (at most {limit_s} s)", flush=True)
        found = folder / f"{part}.jsonl"
        found.unlink(missing_ok=True)
        seconds, failure = run_part(part, ["--device", kind, *["--small"] * small], found, limit_s)
        print((folder / f"{part}.log").read_text(errors="replace"), end="", flush=True)
        parts[part] = {"seconds": seconds, "failure": failure, "findings": [asdict(one) for one in read(found)]}
        (folder / "report.json").write_text(json.dumps({"machine": facts, "parts": parts}, indent=1) + "\n")
        (folder / "report.md").write_text(markdown(facts, parts))
        found.unlink(missing_ok=True)
    failed = [name for name, part in parts.items()
              if part["failure"] or any(finding["passed"] is False for finding in part["findings"])]  # type: ignore
    print(f"{folder / 'report.md'}: {len(parts)} parts in {time.monotonic() - started:.0f} s"
          + (f", failed: {', '.join(failed)}" if failed else ", nothing failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
