"""Made-up profiles: of models like those that people train, and of any kind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes

KIB = 1024


def layer(name: str, forward_s: float = 0.01, *, recompute_s: float | None = None, saved: int = 8 * KIB,
          out: int = KIB, parameters: int = 4 * KIB, reads: Sequence[str] = ("h",), writes: str = "h",
          saves: Sequence[str] = ("in:h",), step_s: float = 0.0, working: int = 0,
          tied: dict[int, int] | None = None, optimizer: int | None = None) -> LayerProfile:
    """A layer with a backward of twice its forward."""
    return LayerProfile(
        name, Seconds(forward_s), Seconds(2 * forward_s), Seconds(1.1 * forward_s), Seconds(forward_s),
        Seconds(forward_s if recompute_s is None else recompute_s), Seconds(step_s), parameters,
        2 * parameters if optimizer is None else optimizer, tuple(reads), (TensorBytes(writes, out, True),), saved,
        tuple(saves), saved // 2, working, tied or {}, 0, 0)


def profile(layers: Sequence[LayerProfile], *, microbatch_size: int = 4, latency_s: float = 0.0,
            bytes_per_s: float = 1e9, cores: int | None = None, ranks_per_host: int = 4,
            fields: dict[str, int] | None = None) -> Profile:
    """Of these layers."""
    identity = Identity("0" * 12, "made up", len(layers), microbatch_size, "adamw", "none", 1, ranks_per_host, "gloo",
                        "2.13")
    return Profile(identity, tuple(layers), fields or {"ids": 64}, LinkProfile(latency_s, bytes_per_s), cores=cores)


def frozen(made: Profile, layers: int) -> Profile:
    """The same with so many layers in front that train nothing, as they are measured."""
    still = [replace(each, backward=Seconds(0.0), input_half=Seconds(0.0), weight_half=Seconds(0.0), step=Seconds(0.0),
                     parameter_bytes=0, optimizer_bytes=0, largest_bytes=0, frozen_bytes=each.parameter_bytes, tied={},
                     writes=tuple(replace(tensor, wants_gradient=False) for tensor in each.writes),
                     saved_bytes=0, saves=(), weight_half_bytes=0, working_bytes=0) for each in made.layers[:layers]]
    return replace(made, layers=(*still, *made.layers[layers:]))


def transformer(blocks: int, **options: object) -> Profile:
    """Embeddings with the first attention, halves of blocks, a heavy head that borrows the embeddings."""
    layers = []
    for block in range(blocks):
        first = block == 0
        layers.append(layer(f"block{block}.attention", 0.012 if first else 0.010, saved=24 * KIB, step_s=0.002,
                            parameters=(64 if first else 16) * KIB, reads=("ids",) if first else ("h",),
                            saves=() if first else ("in:h",)))
        layers.append(layer(f"block{block}.mlp", 0.018, saved=16 * KIB, parameters=32 * KIB, step_s=0.004))
    layers.append(layer("head", 0.020, saved=40 * KIB, parameters=4 * KIB, writes="loss", out=4, step_s=0.001,
                        tied={0: 48 * KIB}))
    return profile(layers, **options)  # type: ignore[arg-type]


def any_profile(seed: int, layers: int, **options: object) -> Profile:
    """Layers of all sorts, some of them alike, with tensors that skip layers and are written again."""
    dice = random.Random(seed)
    kinds = [{"forward_s": dice.randint(1, 20) / 1000, "saved": dice.randint(0, 32) * KIB,
              "parameters": dice.randint(0, 16) * KIB, "recompute_s": dice.randint(1, 20) / 1000,
              "step_s": dice.randint(0, 5) / 1000, "working": dice.randint(0, 8) * KIB} for _ in range(3)]
    made, written = [], ["ids"]
    for number in range(layers):
        name = dice.choice(["h", "h", "h", "side"])
        reads = [*dict.fromkeys(dice.choice(written) for _ in range(2))]
        saves = [f"in:{tensor}" for tensor in reads if dice.random() < 0.6]
        saves += [f"out:{name}"] if dice.random() < 0.4 else []
        made.append(layer(f"l{number}", reads=reads, writes=name, saves=saves, out=dice.choice([1, 2, 6]) * KIB,
                          tied={0: 2 * KIB} if number and dice.random() < 0.1 else None, **dice.choice(kinds)))
        written.append(name)
    any_layers = profile(made, **options)  # type: ignore[arg-type]
    precision = "bf16_pure" if dice.random() < 0.3 else "fp32"
    # Parameters of all shares of their layers; a few profiles are of runs in which replicas step parts.
    layers_of = [replace(each, largest_bytes=each.parameter_bytes // (1 + number % 3),
                         frozen_tied={0: 3 * KIB} if number % 3 == 2 else {})
                 for number, each in enumerate(any_layers.layers)]
    return replace(any_layers, layers=tuple(layers_of), extrapolates=dice.random() < 0.5, averages=seed % 2 == 0,
                   zero1=seed % 3 == 0, identity=replace(any_layers.identity, precision=precision))
