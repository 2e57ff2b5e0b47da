"""The names of OurGPipe's binding; :mod:`vpipe.extras.orion.scheduler` is the binding itself."""

from vpipe.extras.orion.scheduler import OrionScheduler, SchedulingMode, get_scheduler

__all__ = ["OrionScheduler", "SchedulingMode", "get_scheduler"]
