"""A profile that nobody measured: equal layers, round numbers."""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.app.train.job import Job, device_of, microbatch_of
from vpipe.app.train.planning import settings_of
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes
from vpipe.profiling import RankGroup

MIB = 2**20


def made_profile(layers: int = 9, microbatch_size: int = 4, ranks: int = 4, *, forward_ms: Sequence[float] = (),
                 saved: int = 10 * MIB, cores: int | None = None) -> Profile:
    """Of layers that take ``forward_ms`` forward (2 ms where it is left out), twice that backward, in samples' shares.

    Args:
        saved: bytes of activations that a layer keeps, of a microbatch of 4 samples.
    """
    share = microbatch_size / 4
    times = [share * ms / 1e3 for ms in forward_ms or (2.0,) * layers]
    made = [LayerProfile(
        name=f"layer {number}", forward=Seconds(time, 0.01), backward=Seconds(2 * time), input_half=Seconds(1.2 * time),
        weight_half=Seconds(0.9 * time), recompute=Seconds(time), step=Seconds(0.0005), parameter_bytes=4 * MIB,
        optimizer_bytes=8 * MIB, reads=("h" if number else "input",),
        writes=(TensorBytes("h" if number < layers - 1 else "loss", int(share * MIB), True),),
        saved_bytes=int(share * saved), saves=("in:h",) if number else (), weight_half_bytes=int(share * MIB),
        working_bytes=int(share * 2 * MIB), tied={}, forward_flops=10**9, like=min(number, 1))
        for number, time in enumerate(times)]
    identity = Identity(model="0123456789ab", model_name="bert made", layers=layers, microbatch_size=microbatch_size,
                        optimizer="adamw", device="none", threads=1, ranks_per_host=ranks, backend="gloo", torch="2")
    return Profile(identity, tuple(made), {"input": int(share * MIB)}, LinkProfile(1e-4, 1e9), cores=cores,
                   device_bytes=ranks * 2**30)


def identities_of(job: Job, sizes: Sequence[int], ranks: int, hosts: int = 1) -> list[Identity]:
    """The identities of profiles of a job on so many ranks of each host, by microbatch size."""
    return RankGroup.supposed(device_of(job.config), ranks, hosts).identify(
        job.model, [microbatch_of(job, size) for size in sizes], **settings_of(job))
