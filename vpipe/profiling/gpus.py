"""What GPUs compute at most, by the name that their driver gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A line of the table, in TFLOP/s of products of matrices that are dense.

    Attributes:
        name: what the driver says, without ``NVIDIA`` before it, as a regular expression for all of it. A part of a
            GPU (MIG) and a laptop's have names of their own, and are not in the table.
        fp32: products in fp32.
        tf32: the same with TF32 allowed; None where the GPU has none.
        bf16, fp16: with sums in fp32, as training needs them; None where the data sheet has none.
        source: where the manufacturer says so.
    """

    name: str
    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    source: str


GPUS = (
    Gpu("B200", 75.0, 1100.0, 2250.0, 2250.0, "data sheet HGX B200, which counts sparse products: halved"),
    Gpu("H200", 66.9, 494.7, 989.4, 989.4, "as H100 SXM5, whose chip it has"),
    Gpu("H200 NVL", None, None, 835.5, 835.5, "data sheet H200, which counts sparse products: halved"),
    Gpu("H100 80GB HBM3", 66.9, 494.7, 989.4, 989.4, "white paper H100: SXM5"),
    Gpu("H100 PCIe", 51.2, 378.0, 756.0, 756.0, "white paper H100: PCIe"),
    Gpu("H100 NVL", None, None, 835.5, 835.5, "data sheet H100, which counts sparse products: halved"),
    Gpu(r"A100-SXM4-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe", 19.5, 156.0, 312.0, 312.0, "white paper A100"),
    Gpu("A40", 37.4, 74.8, 149.7, 149.7, "data sheet A40"),
    Gpu("A30", None, None, 165.0, 165.0, "data sheet A30"),
    Gpu("A10", 31.2, 62.5, 125.0, 125.0, "data sheet A10"),
    Gpu("GeForce RTX 3090", 35.6, 35.6, 71.0, 71.0, "white paper GA102"),
    Gpu("GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2, "white paper Ada"),
    Gpu("RTX 6000 Ada Generation", 91.1, 182.1, 364.2, 364.2, "data sheet RTX 6000 Ada, which counts sparse products: "
                                                              "halved"),
    Gpu("L40S", 91.6, 183.0, 362.0, 362.0, "data sheet L40S"),
    Gpu("L4", 30.3, 60.0, 121.0, 121.0, "data sheet L4, which counts sparse products: halved"),
    Gpu(r"Tesla V100-SXM2-(16|32)GB", 15.7, None, None, 125.0, "data sheet V100: SXM2"),
    Gpu(r"Tesla V100-PCIE-(16|32)GB", 14.0, None, None, 112.0, "data sheet V100: PCIe"),
    Gpu("Tesla T4", 8.1, None, None, 65.0, "data sheet T4"))
"""Of NVIDIA's publications. What is not here is measured."""


def known_tflops(name: str, kind: str) -> float | None:
    """Of one GPU; None where the table does not say.

    Args:
        name: as :func:`torch.cuda.get_device_name` says it.
        kind: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    """
    gpu = next((gpu for gpu in GPUS if re.fullmatch(gpu.name, name.removeprefix("NVIDIA "))), None)
    if gpu is None:
        return None
    return {"fp32": gpu.fp32, "tf32": gpu.tf32, "bf16": gpu.bf16, "fp16": gpu.fp16}[kind]
