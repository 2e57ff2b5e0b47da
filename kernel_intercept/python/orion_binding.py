"""The names of OurGPipe's binding; :mod:`vpipe.distributed.orion` is the binding itself."""

from vpipe.distributed.orion import OrionScheduler, SchedulingMode, get_scheduler

__all__ = ["OrionScheduler", "SchedulingMode", "get_scheduler"]
