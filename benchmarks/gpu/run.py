"""Test and measure vpipe on the GPUs of this machine, in one command and under 14 minutes. See README.md.

python benchmarks/gpu/run.py [--device cuda|cpu] [--only PART ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PARTS = {
    "suite": ("the suite's tests that need a GPU, bugs of streams", 100),
    "exactness": ("every schedule on the device beside its oracle", 200),
    "ranks": ("several processes: a shared GPU over gloo, nccl", 110),
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
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: a rehearsal, with a processor and gloo in place of GPU and nccl, and small sizes")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), metavar="PART",
                        help=f"some of the parts: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="folder of report.md and report.json (benchmarks/gpu/reports/DEVICE)")
    return parser.parse_args()


def missing() -> list[str]:
    """Return the modules that are needed and not installed."""
    return [f"{name} (for {use})" for name, use in NEEDED.items() if importlib.util.find_spec(name) is None]


def run_part(name: str, device: str, out: Path, limit_s: float) -> tuple[float, str | None]:
    """Run a part and return its seconds and its failure: the end of what it printed, or that it took too long."""
    log, started = out.with_suffix(".log"), time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with log.open("wb") as written:
        process = subprocess.Popen([sys.executable, HERE / f"{name}.py", "--device", device, "--out", out], cwd=ROOT,
                                   env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True)
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


def machine(device: str) -> dict[str, str]:
    """Describe the machine, the versions and the commit."""
    import torch

    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True,
                            check=False).stdout.strip()
    facts = {"commit": commit or "unknown", "python": platform.python_version(), "torch": torch.__version__,
             "processor": f"{os.cpu_count()} cores, {platform.machine()}"}
    if device == "cuda":
        count = torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        facts |= {"device": f"{count} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB",
                  "cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    else:
        facts["device"] = "cpu: a rehearsal without a GPU, in small sizes; its figures say nothing"
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
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: there is no GPU here that torch can use, so nothing was tested\n"
              "hint: python benchmarks/gpu/run.py --device cpu rehearses every part on a processor", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(0).replace(" ", "-").lower() if options.device == "cuda" else "rehearsal"
    folder: Path = options.out or HERE / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    facts, parts, started = machine(options.device), {}, time.monotonic()
    for part in options.only:
        about, limit_s = PARTS[part]
        limit_s *= 4 if options.device == "cpu" else 1
        print(f"{part}: {about} (at most {limit_s} s)", flush=True)
        out = folder / f"{part}.jsonl"
        out.unlink(missing_ok=True)
        seconds, failure = run_part(part, options.device, out, limit_s)
        print((folder / f"{part}.log").read_text(errors="replace"), end="", flush=True)
        from findings import read

        parts[part] = {"seconds": seconds, "failure": failure, "findings": [asdict(one) for one in read(out)]}
        (folder / "report.json").write_text(json.dumps({"machine": facts, "parts": parts}, indent=1) + "\n")
        (folder / "report.md").write_text(markdown(facts, parts))
        out.unlink(missing_ok=True)
    failed = [part for part, found in parts.items()
              if found["failure"] or any(finding["passed"] is False for finding in found["findings"])]  # type: ignore
    print(f"{folder / 'report.md'}: {len(parts)} parts in {time.monotonic() - started:.0f} s"
          + (f", failed: {', '.join(failed)}" if failed else ", nothing failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
