"""Run ``vpipe orion profile``: write the kernel profiles that the Orion library reads."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from vpipe import accelerator
from vpipe.app.config.config import load_config
from vpipe.app.visualize.table import check_output
from vpipe.errors import UserError, counted
from vpipe.extras.orion.kernels import Bound, kernel_csv, kernel_profiles

PROFILED_STEP = 3
"""Of a new run: in the first two, libraries choose their kernels."""


def run_profile(options: argparse.Namespace) -> None:
    """Profile one update of a config, or take a run that was profiled, and write its kernels to a file."""
    check_output(options.output)
    folder = options.config if options.config.is_dir() else _profiled_run(options)
    traces = sorted(folder.glob("profiler_*/rank*/*.pt.trace.json"))
    if not traces:
        raise UserError(f"the run '{folder}' was not profiled", hint="give a config, or train with "
                        f"training.profile_iteration: {PROFILED_STEP}")
    profiles = kernel_profiles(traces)
    if not profiles:
        raise UserError(f"no kernel ran on a GPU in the profiles of '{folder}'",
                        hint="profile a run on GPUs: parallel.device: cuda")
    options.output.write_text(kernel_csv(profiles), encoding="utf-8")
    kinds = Counter(one.bound for one in profiles)
    print(f"{options.output}: {counted(len(profiles), 'kernel')} of {counted(len(traces), 'rank')}, "
          f"{kinds[Bound.COMPUTATION]} bound by computation, {kinds[Bound.MEMORY]} by memory, "
          f"{kinds[Bound.UNKNOWN]} unknown\nuse it: ORION_KERNEL_INFO={options.output.resolve()} vpipe train CONFIG")


def _profiled_run(options: argparse.Namespace) -> Path:
    """Train a config until an update is profiled, and return the folder of the run."""
    config = load_config(options.config, [*options.settings, f"training.profile_iteration={PROFILED_STEP}",
                                          "training.exit_after_profile=true", "parallel.use_orion_scheduler=false"])
    if config.machines is None and (config.parallel.device == "cpu" or not accelerator.count()):
        raise UserError("kernels run on GPUs, but the ranks of this config compute on processors here",
                        hint="profile it on a machine with a GPU")
    from vpipe.app.launch.launcher import run

    folder = run(config, None, None)
    assert folder is not None, "a new run has something to train"
    return folder
