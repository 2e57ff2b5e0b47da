"""BERT-large on the emulated GPU as a :class:`Profile`: computed from its sizes, not measured.

Shapes: b samples of s tokens, h hidden, a heads, V vocabulary. Numbers are fp32: VPipe's config files know no other.
"""

from __future__ import annotations

from gpu import DEVICE_BYTES_PER_S, LINK_BYTES_PER_S, LINK_LATENCY_S, MEMORY_BYTES, PEAK_FLOPS_PER_S, Curve

from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes

BLOCKS, HIDDEN, HEADS, VOCABULARY, POSITIONS = 24, 1024, 16, 30522, 512
LAYERS = 2 * BLOCKS + 1
PREDICTED = 0.15
"""Share of the tokens that the head predicts."""
STEP_BYTES = 28
"""Per parameter, of an Adam step: reads weight, gradient and two moments, writes all but the gradient; 4 bytes each."""


def bert_large(samples: int, tokens: int, curve: Curve, step_passes: float = 1.0) -> Profile:
    """Costs of a microbatch of ``samples`` with ``tokens`` each.

    Args:
        step_passes: how many times as long as one fused Adam step an optimizer step takes.
    """
    layers = tuple(_layer(number, samples, tokens, curve, step_passes) for number in range(LAYERS))
    identity = Identity(f"bert-large-{tokens}", f"BERT-large, {tokens} tokens", LAYERS, samples, "adam",
                        f"emulated RTX 2080 Ti, curve {curve.name}", 1, 8, "gloo", "none")
    return Profile(identity, layers, {"input": 4 * samples * tokens}, LinkProfile(LINK_LATENCY_S, LINK_BYTES_PER_S),
                   device_bytes=MEMORY_BYTES, peak_flops_per_s=PEAK_FLOPS_PER_S)


def _layer(number: int, b: int, s: int, curve: Curve, step_passes: float) -> LayerProfile:
    h, first, last = HIDDEN, number == 0, number == LAYERS - 1
    tensor = 4 * b * s * h  # the hidden state of a microbatch
    # Kept for backward, of a block in 16 bits: s b h (34 + 5 a s / h), masks one byte (Korthikanti et al. 2022,
    # arXiv:2205.05198, section 4.1). Here 4 bytes a number: 25 + 9 a s / h for attention, 41 for the MLP, each with its
    # norm, and with the layer's input, which is counted apart.
    if last:
        predicted = max(1, round(PREDICTED * s)) * b
        parameters, flops = h * h + 2 * h + VOCABULARY * (h + 1), 2 * predicted * h * (h + VOCABULARY)
        saved, name = predicted * (5 * 4 * h + 2 * 4 * VOCABULARY), "head"
    elif number % 2:
        parameters, flops = 8 * h * h + 7 * h, 16 * b * s * h * h
        saved, name = 41 * b * s * h - tensor, f"block{number // 2}.mlp"
    else:
        parameters, flops = 4 * h * h + 6 * h, 8 * b * s * h * h + 4 * b * s * s * h
        saved, name = 25 * b * s * h + 9 * HEADS * b * s * s - tensor, f"block{number // 2}.attention"
    if first:
        parameters += (VOCABULARY + POSITIONS + 4) * h
        saved += 9 * b * s * h + tensor  # the embeddings' sum, their dropout's mask, and what attention reads
    forward = curve.seconds(flops, b * s)
    step = step_passes * parameters * STEP_BYTES / DEVICE_BYTES_PER_S
    writes = TensorBytes("loss", 4, True) if last else TensorBytes("h", tensor, True)
    return LayerProfile(
        name, forward=Seconds(forward), backward=Seconds(2 * forward), input_half=Seconds(forward),
        weight_half=Seconds(forward), recompute=Seconds(forward), step=Seconds(step), parameter_bytes=4 * parameters,
        optimizer_bytes=8 * parameters, reads=("input",) if first else ("h",), writes=(writes,), saved_bytes=saved,
        saves=() if first else ("in:h",), weight_half_bytes=saved, working_bytes=2 * tensor, tied={},
        forward_flops=flops, like=number)
