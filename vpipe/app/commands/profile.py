"""Run ``vpipe profile``: measure the time and memory of every layer on the ranks of a config."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.app.config.config import load_config
from vpipe.app.launch import local
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import check_alone, check_gpus, hosts_of, ranks_here
from vpipe.app.train.run_folder import CONFIG
from vpipe.app.visualize.table import check_output, grouped, table
from vpipe.errors import UserError, VpipeError, counted
from vpipe.plan import Profile
from vpipe.units import size_text

if TYPE_CHECKING:
    from vpipe.app.train.job import Job

MOST_RANKS, PER_CORE = 16, 4
"""Most ranks, in all and per core, that are started to be measured on CPUs: torch takes 200 MB in each, and they would
mostly wait for each other."""

NOISY = 0.1
"""Largest spread that is not marked."""

_COLUMNS = ("forward", "backward", "input_half", "weight_half", "recompute", "step")


def run_profile(options: argparse.Namespace) -> None:
    """Measure, or read an earlier profile from the cache, and print it."""
    check_output(options.output)
    config = load_config(options.config, options.settings, started=None)
    free_port(config.parallel.master_port)
    # torch is slow to import: only when the config is worth it.
    from vpipe.app.train.job import Job
    from vpipe.app.train.profile_cache import profile_path

    job = Job.from_config(config)
    size = job.config.microbatch_size
    profile = profiles_of(job, [size], again=options.again)[size]
    print(described(profile))
    kept = profile_path(profile.identity.digest, config.dataset.cache_directory)
    if kept.exists():
        print(f"kept in {kept}")
    if options.output is not None:
        profile.save(options.output)
        print(f"written to {options.output}")


def profiles_of(job: Job, sizes: Sequence[int], *, again: bool = False) -> dict[int, Profile]:
    """Return profiles of a job by samples per microbatch: from the cache, or measured by ranks that are started for it.

    Args:
        again: measure whatever the cache holds.

    Raises:
        VpipeError: the ranks would be on several hosts, or one failed.
    """
    import torch  # slow, as what follows: only when the config is worth it

    from vpipe.app.train.job import microbatch_of, on_processors
    from vpipe.app.train.planning import file_of, settings_of
    from vpipe.app.train.profile_cache import cached
    from vpipe.profiling import RankGroup

    config = job.config
    check_alone("vpipe profile")
    hosts = hosts_of(config)
    if hosts is not None and hosts.others:
        raise UserError(f"ranks are measured on this host alone, but machines names {len(hosts.others)} more",
                        hint="let the run measure: set parallel.partition to auto and start it with vpipe train")
    ranks, processes, tensor = job.schedule.ranks, job.processes, config.parallel.tensor
    found: dict[int, Profile] = {}
    if on_processors(config) and not again:  # of a GPU only its ranks know the name
        identities = RankGroup.supposed(torch.device("cpu"), ranks, tensor=tensor).identify(
            job.model, [microbatch_of(job, size) for size in sizes], **settings_of(job))
        for size, identity in zip(sizes, identities, strict=True):
            if (profile := cached(identity.kept_as, config.dataset.cache_directory)) is not None:
                found[size] = job.with_correction(profile)
    missing = [size for size in sizes if size not in found]
    if not missing:
        return found
    cores = os.cpu_count() or 1
    if on_processors(config) and processes > (most := max(MOST_RANKS, PER_CORE * cores)):
        raise UserError(f"{counted(processes, 'process')} would be started to be measured, on {counted(cores, 'core')}",
                        hint=f"measure {most} at most, or on a larger host")
    check_gpus(config, range(processes) if hosts is None else hosts.on(None).values())
    print(f"measuring {config.model.name} on {counted(ranks, 'rank')}"
          + f" of {tensor} processes, which split each layer" * (tensor > 1) + ", microbatches of "
          f"{', '.join(map(str, missing))} samples", file=sys.stderr, flush=True)
    here = ranks_here(config, hosts, processes, "profile", *map(str, missing), *(["again"] if again else []))
    with folder_unless_failed("vpipe-profile-") as folder:
        (folder / CONFIG).write_text(config.resolved_yaml())
        try:
            local.run_ranks(here, folder, job.describe)
        except VpipeError:
            print(f"logs of the ranks: {folder}", file=sys.stderr, flush=True)
            raise
        return found | {size: Profile.load(folder / file_of(size)) for size in missing}


@contextmanager
def folder_unless_failed(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder, which stays if ranks fail: their logs are in it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except VpipeError:
            cleanup.pop_all()
            raise


def described(profile: Profile) -> str:
    """Return a profile as text: a row per distinct layer, the links, the device."""
    identity, held = profile.identity, profile.activations
    kinds = grouped(range(len(profile.layers)), lambda number: profile.layers[number].like)
    rows = []
    for first, numbers in kinds.items():
        layer = profile.layers[first]
        rows.append([layer.name + f" x {len(numbers)}" * (len(numbers) > 1),
                     *(_time(time.median, time.spread) for figure in _COLUMNS for time in [getattr(layer, figure)]),
                     *map(size_text, (held.held(range(first, first + 1))[0], layer.parameter_bytes,
                                      layer.optimizer_bytes))])
    head = ["layer", *(figure.replace("_", " ") for figure in _COLUMNS), "kept", "weights", "optimizer"]
    noisy = max(getattr(layer, figure).spread for layer in profile.layers for figure in _COLUMNS
                if getattr(layer, figure).median > profile.dispatch_s)
    lines = [f"{identity.model_name}: {counted(identity.layers, 'layer')}, {len(kinds)} distinct; microbatches of "
             f"{counted(identity.microbatch_size, 'sample')}, {identity.optimizer}, {identity.precision}"
             + f"; layers split over {identity.tensor} processes, bytes of one" * (identity.tensor > 1),
             f"{identity.device}, {counted(identity.threads, 'thread')} per rank, "
             f"{counted(identity.ranks_per_host, 'rank')} on a host busy at the same time"
             + f", each of {identity.tensor} processes that split its layers" * (identity.tensor > 1)
             + f", torch {identity.torch}", "",
             *table(head, rows, left=1), "",
             "times of one microbatch in ms, ± half the distance of the quartiles; kept: for backward, by a stage of "
             "this layer alone"]
    if noisy > NOISY:
        lines.append(f"* spreads above {NOISY:.0%}: the machine did something else as well; --again measures again")
    lines += [f"equal layers differ by {profile.checked:.1%} at most", *_links(profile), _device(profile)]
    return "\n".join(lines)


def _time(median_s: float, spread: float) -> str:
    digits = 1 if median_s >= 0.01 else 2 if median_s >= 0.001 else 3
    return f"{1e3 * median_s:.{digits}f} ±{spread:4.0%}{'*' if spread > NOISY else ' '}"


def _links(profile: Profile) -> Iterator[str]:
    if profile.identity.ranks_per_host == 1 and not profile.links:
        yield f"one rank alone: tensors change hands in memory, {profile.default_link.bytes_per_s / 1e9:.1f} GB/s"
        return
    named = [("between two ranks", profile.default_link)]
    shown = [(ends, link) for ends, link in sorted(profile.links.items()) if ends[0] < ends[1]]
    if len(shown) > 1:
        slowest, link = max(shown, key=lambda item: item[1].latency_s + 1e6 / item[1].bytes_per_s)
        named.append((f"slowest, rank {slowest[0]} to {slowest[1]}", link))
    for name, link in named:
        yield f"{name}: {1e3 * link.latency_s:.2f} ms, then {link.bytes_per_s / 1e9:.2f} GB/s (± {link.spread:.0%})"


def _device(profile: Profile) -> str:
    shared = "" if profile.cores is None else f"; {counted(profile.cores, 'rank')} of a host can compute at once"
    return (f"matrices at {profile.peak_flops_per_s / 1e9:,.0f} GFLOP/s, {size_text(profile.device_bytes)} of memory"
            f"{shared}; {1e6 * profile.dispatch_s:.0f} µs per action; measured in {profile.took_s:.0f} s")
