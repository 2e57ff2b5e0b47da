"""Profiles of a job: from the cache, or measured by its ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.errors import UserError
from vpipe.launch.world import join_world
from vpipe.plan.profile import Identity, Profile
from vpipe.profiling.cache import cached, store
from vpipe.profiling.identity import identify
from vpipe.profiling.measure import measure
from vpipe.profiling.world import World
from vpipe.train.device import device_of
from vpipe.train.job import Job

log = logging.getLogger("vpipe")

Say = Callable[[str], None]


PROGRESS_S = 2.0
"""Between two lines of progress."""


def file_of(size: int) -> str:
    """What a rank calls the profile at a size of microbatch."""
    return f"profile-{size}.json"


def leave_profiles(job: Job, folder: Path, words: Sequence[str]) -> None:
    """What a rank of ``vpipe profile`` does: measure with the others; the first writes the profiles into the folder.

    Args:
        words: the sizes of microbatches; ``again`` among them ignores the cache.
    """
    config = job.config
    torch.set_num_threads(config.training.threads)
    join_world(config.parallel.backend, config.parallel.timeout_s)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def say(line: str) -> None:
        log.info(line)
        if rank == 0:
            print(line, file=sys.stderr, flush=True)

    found = profile_job(job, [int(word) for word in words if word != "again"], again="again" in words, say=say)
    if rank == 0:
        for size, profile in found.items():
            profile.save(folder / file_of(size))


def profile_job(job: Job, sizes: Sequence[int] | None = None, *, again: bool = False,
                say: Say = lambda line: None) -> dict[int, Profile]:
    """The profiles of a job at some sizes of microbatch, measured where they are not in the cache, and kept there.

    Every rank of the joined world calls this, or a process alone, which then measures no transfers.

    Args:
        sizes: samples per microbatch; the config's when left out.
        again: measure whatever the cache holds.
        say: told of the progress, on every rank.

    Returns:
        By size; the same on every rank.

    Raises:
        UserError, RunError: a layer cannot be run.
    """
    config = job.config
    torch.set_num_threads(config.training.threads)
    device = device_of(config)
    world = World(device)
    wanted = sorted(set(sizes or [config.microbatch_size]))
    identities = identities_of(job, wanted, world.ranks_per_host)
    directory = config.dataset.cache_directory
    known: dict[str, object] = {}
    if world.rank == 0 and not again:
        known = {str(size): profile.as_json() for size, identity in zip(wanted, identities, strict=True)
                 if (profile := cached(identity, directory, say)) is not None}
    shared = world.share([known, [asdict(identity) for identity in identities]])[0]
    found = {int(size): Profile.of_json(content) for size, content in shared[0].items()}
    missing = [(size, Identity(**identity)) for size, identity in zip(wanted, shared[1], strict=True)
               if size not in found]
    if missing:
        told = -PROGRESS_S

        def progress(line: str) -> None:
            nonlocal told
            if monotonic() - told >= PROGRESS_S:
                told = monotonic()
                say(line)

        measured = measure(job.model, [microbatch_of(job, size) for size, _ in missing], job.optimizer().from_named,
                           identities=[identity for _, identity in missing], device=device, seed=config.training.seed,
                           timeout_s=config.parallel.timeout_s, tell=progress)
        found |= {size: profile for (size, _), profile in zip(missing, measured, strict=True)}
    if world.rank == 0:
        for size, _ in missing:
            _keep(found[size], job, say)
    return {size: found[size] for size in wanted}


def identity_of(job: Job, size: int, ranks_per_host: int) -> Identity:
    """What a profile of the job on this kind of device would be of."""
    config = job.config
    name = config.model.name + (f" {config.model.preset}" if config.model.preset else "")
    return identify(job.model, microbatch_of(job, size), model_name=name, optimizer=config.training.optimizer,
                    device=device_of(config), ranks_per_host=ranks_per_host, backend=config.parallel.backend,
                    threads=config.training.threads)


def identities_of(job: Job, sizes: Sequence[int], ranks_per_host: int) -> list[Identity]:
    """The same for several sizes; looks at the layers once."""
    first = identity_of(job, sizes[0], ranks_per_host)
    return [replace(first, microbatch_size=size) for size in sizes]


def microbatch_of(job: Job, size: int) -> Mapping[str, Tensor]:
    """The first samples for training; more than there are in a batch repeat."""
    batch = next(job.training_batches(job.model.batch))
    return {name: batch[name][torch.arange(size) % len(batch[name])] for name in job.model.batch}


def _keep(profile: Profile, job: Job, say: Say) -> None:
    try:
        store(profile, job.config.dataset.cache_directory)
    except UserError as error:  # what was measured is here all the same
        say(f"{error.problems[0].what}; {error.problems[0].hint}")
