"""The field: which entrants take part, and where they are cut."""

from __future__ import annotations

import re
from dataclasses import replace

from entrant import Entrant
from plain_entrants import plain_entrants
from torch_entrants import torch_entrants
from vpipe_entrants import vpipe_entrants

MICROBATCHES = (4, 8, 16)
CUT = (12, 6)
"""Layers per stage for two stages: embedding and 5.5 blocks | 2.5 blocks and the head."""
QUARTERS = (6, 5, 6, 1)
"""The same for torch's interleaved 1F1B: stages 0 and 2 on rank 0, stages 1 and 3 on rank 1."""
CUTS = ((10, 8), (11, 7), (12, 6), (13, 5), (14, 4))
QUARTERED = ((5, 6, 6, 1), (6, 5, 6, 1), (6, 6, 5, 1), (7, 6, 4, 1), (7, 5, 5, 1), (6, 5, 5, 2), (7, 4, 5, 2))


def contest(only: str) -> list[Entrant]:
    """Those whose names match; those of vpipe and of torch alternate."""
    field = {entrant.name: entrant for entrant in plain_entrants()}
    for m in MICROBATCHES:
        both = (*vpipe_entrants((m,), CUT), *torch_entrants((m,), CUT, QUARTERS))
        field |= {entrant.name: entrant for entrant in both}
    return [entrant for entrant in field.values() if re.search(only, entrant.name)]


def cuts(only: str) -> list[Entrant]:
    """1F1B and interleaved 1F1B cut in many ways, to find the best."""
    field = []
    for cut in CUTS:
        for entrant in (*vpipe_entrants((8,), cut), *torch_entrants((8,), cut, QUARTERS)):
            if "1f1b" in entrant.name or "pipedream m8" in entrant.name:
                field.append(replace(entrant, name=f"{entrant.name} {cut}"))
    for cut in QUARTERED:
        for entrant in torch_entrants((4,), CUT, cut):
            if "interleaved" in entrant.name:
                field.append(replace(entrant, name=f"{entrant.name} {cut}"))
    return [entrant for entrant in field if re.search(only, entrant.name)]
