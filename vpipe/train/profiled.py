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

from vpipe.distributed.device import device_name
from vpipe.errors import UserError
from vpipe.plan.profile import Identity, Profile
from vpipe.profiling.cache import cached, store, to_stderr
from vpipe.profiling.identity import identify
from vpipe.profiling.kinds import digest, structure
from vpipe.profiling.measure import measure
from vpipe.profiling.world import World
from vpipe.train.device import device_of, join, on_processors
from vpipe.train.job import Job
from vpipe.train.optimizers import OptimizerSettings

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
    join(config)
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
    identities = identities_of(job, wanted, world.ranks_per_host, world.ranks, len(set(world.hosts)), world.cores())
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
            if not _keep(found[size], job, say):
                break
    return {size: found[size] for size in wanted}


def identity_of(job: Job, size: int, ranks_per_host: int, ranks: int | None = None, hosts: int = 1,
                cores: int | None = None) -> Identity:
    """What a profile of the job on this kind of device would be of; arguments as those of ``identify``."""
    config, device = job.config, device_of(job.config)
    own_gpus = device.type == "cuda" and cores is None
    return identify(job.model, microbatch_of(job, size), model_name=_model_name(job),
                    optimizer=_optimizer(job.optimizer()), device=device, ranks_per_host=ranks_per_host,
                    backend=config.parallel.backend or ("nccl" if own_gpus else "gloo"),
                    threads=config.training.threads, ranks=ranks, hosts=hosts, cores=cores,
                    precision=config.training.precision)


def identities_of(job: Job, sizes: Sequence[int], ranks_per_host: int, ranks: int | None = None, hosts: int = 1,
                  cores: int | None = None) -> list[Identity]:
    """The same for several sizes; looks at the layers once."""
    first = identity_of(job, sizes[0], ranks_per_host, ranks, hosts, cores)
    return [replace(first, microbatch_size=size) for size in sizes]


def _optimizer(settings: OptimizerSettings) -> str:
    """Its name, and those settings without which it keeps less or does less."""
    return (settings.name + (" with momentum" if settings.name == "sgd" and settings.momentum else "")
            + (" and weight decay" if settings.weight_decay else ""))


def model_digest(job: Job) -> str:
    """What stands for a job's model in the identity of a profile."""
    return digest(job.model, [structure(layer) for layer in job.model.layers],
                  microbatch_of(job, job.config.microbatch_size))


def check_planned_for(job: Job, say: Say = to_stderr) -> None:
    """Whether the plan that a job follows was made for it, where the plan says what it was made for.

    Args:
        say: told where the plan was made for something else that can follow it.

    Raises:
        UserError: it is for another model.
    """
    made_for = None if job.plan is None else job.plan.profiled
    if made_for is None:
        return
    here = model_digest(job)
    if made_for.get("model") != here:
        raise UserError(f"the plan is for another model: {made_for.get('model_name')} (digest {made_for.get('model')}) "
                        f"there, {_model_name(job)} (digest {here}) here",
                        hint="vpipe plan CONFIG makes a plan for the model of a config")
    wanted: dict[str, object] = {"microbatch_size": job.config.microbatch_size,
                                 "precision": job.config.training.precision}
    if on_processors(job.config):  # of a GPU only its ranks know the name
        wanted["device"] = device_name(torch.device("cpu"))
    made_for = {"precision": "fp32", **made_for}  # plans were not always made in several
    others = [f"{name.replace('_', ' ')} {made_for.get(name)}, not {value}" for name, value in wanted.items()
              if made_for.get(name) != value]
    if others:
        say(f"warning: the plan was made for {' and '.join(others)}: its predictions do not hold here")


def _model_name(job: Job) -> str:
    model = job.config.model
    return model.name + (f" {model.preset}" if model.preset else "")


def microbatch_of(job: Job, size: int) -> Mapping[str, Tensor]:
    """The first samples for training; more than there are in a batch repeat."""
    batch = next(job.training_batches(job.model.batch))
    return {name: batch[name][torch.arange(size) % len(batch[name])] for name in job.model.batch}


def _keep(profile: Profile, job: Job, say: Say) -> bool:
    """Whether it can be kept; says why not."""
    try:
        store(profile, job.config.dataset.cache_directory)
    except UserError as error:  # what was measured is here all the same
        say(f"{error.problems[0].what}; {error.problems[0].hint}")
        return False
    return True
