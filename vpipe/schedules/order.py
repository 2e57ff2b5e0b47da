"""Keep ``from vpipe.schedules.order import build`` working, which earlier documentation printed."""

from vpipe.schedules.build import build
from vpipe.schedules.schedule import Schedule

__all__ = ["Schedule", "build"]
