"""The encoder's output of a translation model crosses every cut behind it: the planner counts its bytes."""

from __future__ import annotations

import torch
from measured import ADAMW
from test_translation_exact import batches, model

from vpipe.model.structure import structure
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds
from vpipe.plan.stage_costs import stage_costs
from vpipe.profiling.layer_runner import LayerRunner
from vpipe.profiling.measurement import survey

WIDTH, BYTES = 8, 4
CPU = torch.device("cpu")


def counted(batch: dict[str, torch.Tensor]) -> Profile:
    """What is counted of the layers, without the times."""
    made, nothing = model(), Seconds(0.0)
    found = survey(made, [structure(layer) for layer in made.layers], batch,
                   lambda number: LayerRunner(made, number, CPU, 0), CPU, ADAMW)
    layers = []
    for number, layer in enumerate(made.layers):
        counts = found.counts[found.like[number]]
        reads = tuple(name for name in layer.inputs if name not in made.batch)
        places = {"in": [*reads, *(name for name in layer.inputs if name in made.batch)], "out": layer.outputs}
        writes = tuple(tensor.__class__(name, tensor.bytes, tensor.wants_gradient)
                       for name, tensor in zip(layer.outputs, counts.writes, strict=True))
        layers.append(LayerProfile(
            layer.name, nothing, nothing, nothing, nothing, nothing, nothing, counts.parameter_bytes, 0, reads, writes,
            counts.saved_bytes, tuple(f"{way}:{places[way][place]}" for way, place in counts.saves), 0, 0, {}, 0,
            found.like[number]))
    identity = Identity("", "translation", len(made), len(batch["labels"]), "adamw", "cpu", 1, 1, "gloo", "2")
    return Profile(identity, tuple(layers), found.fields, LinkProfile(0.0, 1e9))


def test_the_bytes_of_every_cut_are_those_of_the_tensors_that_cross_it() -> None:
    source, target, samples = 5, 4, 6
    profile = counted(batches(samples, [(source, target)])[0])
    encoder, decoder = (samples * length * WIDTH * BYTES for length in (source, target))
    crossing = [*[encoder] * 4, *[decoder + encoder] * 4, decoder, decoder]  # behind layer 0, 1, ...
    for cut, size in enumerate(crossing, 1):
        assert profile.activations.output_bytes(cut) == profile.activations.gradient_bytes(cut) == size
        assert stage_costs(profile, range(cut - 1, cut)).output_bytes == size
        assert ("memory" in [tensor.name for tensor in profile.activations.crossing[cut]]) == (4 <= cut <= 8)
