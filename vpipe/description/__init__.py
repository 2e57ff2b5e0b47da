"""The parts that describe a pipeline: each checks itself when it is made, and is then passed on as it is."""

from vpipe.description.description import Description

__all__ = ["Description"]
