"""The parts that describe a pipeline: each checks itself when it is made, and is then passed on as it is."""

from vpipe.description.description import Description
from vpipe.description.execution import Executor

__all__ = ["Description", "Executor"]
