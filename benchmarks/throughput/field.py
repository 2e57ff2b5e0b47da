"""The field: which entrants take part, and where they are cut."""

from __future__ import annotations

import re
from dataclasses import replace

from entrant import Entrant
from plain_entrants import plain_entrants
from torch_entrants import torch_entrants
from vpipe_entrants import stream_entrants, vpipe_entrants

MICROBATCHES = (4, 8, 16)
STREAMED = (1, 2, 4, 8, 16)
"""Microbatches per update without a flush, where few do not mean a bubble."""
CUT = (12, 6)
"""Layers per stage for two stages: embedding and 5.5 blocks | 2.5 blocks and the head."""
QUARTERS = (6, 5, 6, 1)
"""The same for torch's interleaved 1F1B: stages 0 and 2 on rank 0, stages 1 and 3 on rank 1."""
CUTS = ((10, 8), (11, 7), (12, 6), (13, 5), (14, 4))
QUARTERED = ((5, 6, 6, 1), (6, 5, 6, 1), (6, 6, 5, 1), (7, 6, 4, 1), (7, 5, 5, 1), (6, 5, 5, 2), (7, 4, 5, 2))


def matching(only: str, precision: str) -> list[Entrant]:
    """Those whose names match; vpipe's and the others alternate."""
    field = list(plain_entrants(precision))
    for m in sorted({*STREAMED, *MICROBATCHES}):
        flushed = (m,) if m in MICROBATCHES else ()
        field += [*stream_entrants((m,) if m in STREAMED else (), CUT, precision),
                  *torch_entrants(flushed, CUT, QUARTERS, precision), *vpipe_entrants(flushed, CUT, precision)]
    chosen = [entrant for entrant in field if re.search(only, entrant.name)]
    ours = [entrant for entrant in chosen if entrant.group == "vpipe"]
    others = [entrant for entrant in chosen if entrant.group != "vpipe"]
    place = {entrant: (i + 0.5) / len(side) for side in (ours, others) for i, entrant in enumerate(side)}
    return sorted(chosen, key=place.__getitem__)


def cuts(only: str, precision: str) -> list[Entrant]:
    """1F1B, PipeDream and interleaved 1F1B cut in many ways, to find the best."""
    field = []
    for cut in CUTS:
        every = (*vpipe_entrants((8,), cut, precision), *torch_entrants((8,), cut, QUARTERS, precision),
                 *stream_entrants((2, 4), cut, precision))
        field += [replace(entrant, name=f"{entrant.name} {cut}") for entrant in every
                  if "1f1b" in entrant.name or "pipedream" in entrant.name]
    for quarters in QUARTERED:
        field += [replace(entrant, name=f"{entrant.name} {quarters}")
                  for entrant in torch_entrants((4,), CUT, quarters, precision) if "interleaved" in entrant.name]
    return [entrant for entrant in field if re.search(only, entrant.name)]
