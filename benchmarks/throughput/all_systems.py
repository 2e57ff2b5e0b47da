"""Choose which systems take part, and where they are cut."""

from __future__ import annotations

import re
from dataclasses import replace

from plain_systems import plain_systems
from system import System
from torch_systems import torch_systems
from vpipe_systems import stream_systems, vpipe_systems

MICROBATCHES = (4, 8, 16)
STREAMED = (1, 2, 4, 8, 16)
"""Microbatches per update without a flush, where few do not mean a bubble."""
CUT = (12, 6)
"""Layers per stage for two stages: embedding and 5.5 blocks | 2.5 blocks and the head."""
QUARTERS = (6, 5, 6, 1)
"""The same for torch's interleaved 1F1B: stages 0 and 2 on rank 0, stages 1 and 3 on rank 1."""
CUTS = ((10, 8), (11, 7), (12, 6), (13, 5), (14, 4))
QUARTERED = ((5, 6, 6, 1), (6, 5, 6, 1), (6, 6, 5, 1), (7, 6, 4, 1), (7, 5, 5, 1), (6, 5, 5, 2), (7, 4, 5, 2))


def matching(only: str, precision: str) -> list[System]:
    """Those whose names match; vpipe's and the others alternate."""
    field = list(plain_systems(precision))
    for m in sorted({*STREAMED, *MICROBATCHES}):
        flushed = (m,) if m in MICROBATCHES else ()
        field += [*stream_systems((m,) if m in STREAMED else (), CUT, precision),
                  *torch_systems(flushed, CUT, QUARTERS, precision), *vpipe_systems(flushed, CUT, precision)]
    chosen = [system for system in field if re.search(only, system.name)]
    ours = [system for system in chosen if system.group == "vpipe"]
    others = [system for system in chosen if system.group != "vpipe"]
    place = {system: (i + 0.5) / len(side) for side in (ours, others) for i, system in enumerate(side)}
    return sorted(chosen, key=place.__getitem__)


def cuts(only: str, precision: str) -> list[System]:
    """1F1B, PipeDream and interleaved 1F1B cut in many ways, to find the best."""
    field = []
    for cut in CUTS:
        every = (*vpipe_systems((8,), cut, precision), *torch_systems((8,), cut, QUARTERS, precision),
                 *stream_systems((2, 4), cut, precision))
        field += [replace(system, name=f"{system.name} {cut}") for system in every
                  if "1f1b" in system.name or "pipedream" in system.name]
    for quarters in QUARTERED:
        field += [replace(system, name=f"{system.name} {quarters}")
                  for system in torch_systems((4,), CUT, quarters, precision) if "interleaved" in system.name]
    return [system for system in field if re.search(only, system.name)]
