"""Style a report: its templates, and colours that differ for colour-blind eyes, on a light and on a dark page."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.app.report.idle_causes import Cause
from vpipe.app.visualize.svg import mixed
from vpipe.schedules import kinds

if TYPE_CHECKING:
    from jinja2 import Environment

FILLS = {Cause.SCHEDULE: "var(--idle)", Cause.TRANSFER: "url(#transfer)", Cause.STRAGGLER: "url(#straggler)",
         Cause.DISPATCH: "url(#dispatch)", Cause.UNKNOWN: "url(#unknown)"}


def render(template: str, **values: Any) -> str:
    """Return a template of this folder with its values, which it escapes unless it says that they are safe."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, for most commands write no page

    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


def shades_of(used: set[kinds.Kind], stages: int) -> dict[kinds.Kind, list[str]]:
    """Return the colours of each operation by the number of the stage on its rank; of ``stages`` later ones are paler.
    """
    return {op: [mixed(op.colour, 0.6 * number / max(1, stages - 1))
                 for number in range(stages if op.per_microbatch else 1)]
            for op in kinds.known() if op.works and op in used}
