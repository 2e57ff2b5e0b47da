"""Schedules as data: build, check, lower and simulate the list of actions of every rank. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.lazy import lazy

if TYPE_CHECKING:
    from vpipe.schedules import delays, kinds
    from vpipe.schedules.builder import build, outline
    from vpipe.schedules.checker import check
    from vpipe.schedules.costs import Costs
    from vpipe.schedules.csv_format import CsvFile
    from vpipe.schedules.kinds import Action
    from vpipe.schedules.lowering import lower
    from vpipe.schedules.registry import RegisteredSchedule, register_schedule
    from vpipe.schedules.schedule import Schedule
    from vpipe.schedules.simulator.timeline import Timeline, simulate
    from vpipe.schedules.trace import Dependencies, RecordedAction

__all__ = ["Action", "Costs", "CsvFile", "Dependencies", "RecordedAction", "RegisteredSchedule", "Schedule", "Timeline",
           "build", "check", "delays", "kinds", "lower", "outline", "register_schedule", "simulate"]

# Loaded when first asked for: what reads a config must not wait for the simulator.
__getattr__ = lazy(__name__, {
    "Action": "kinds", "RecordedAction": "trace", "build": "builder", "check": "checker",
    "Costs": "costs", "CsvFile": "csv_format", "Dependencies": "trace", "lower": "lowering",
    "RegisteredSchedule": "registry", "register_schedule": "registry",
    "outline": "builder", "Schedule": "schedule", "Timeline": "simulator.timeline", "simulate": "simulator.timeline"})
