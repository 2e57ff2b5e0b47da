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


def operation_fills(used: set[kinds.Kind], stages: int) -> dict[str, str]:
    """Return the colour of each class of CSS: an operation, and the number of the stage on its rank.

    Args:
        stages: the most that a rank has.
    """
    return {f"{op}{number}": shade(op, number, stages) for op in kinds.known() if op.works and op in used
            for number in range(stages if op.per_microbatch else 1)}


def shade(op: kinds.Kind, number: int, stages: int) -> str:
    """Return the colour of an operation on stage ``number`` of the ``stages`` of its rank; later ones are paler."""
    return mixed(op.colour, 0.6 * number / max(1, stages - 1))
