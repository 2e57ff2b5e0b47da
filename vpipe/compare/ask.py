"""What is to be compared, as the command line says it and as it is handed to the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.compare.systems import names_of, systems_named
from vpipe.errors import UserError
from vpipe.schedules.registry import schedule_names
from vpipe.sizes import parse_size


@dataclass(frozen=True)
class Ask:
    """Systems or schedules, one of the two.

    Attributes:
        systems: names, in order.
        schedules: names, in order.
        memory_bytes: that each rank may use; None: what the device has.
    """

    systems: tuple[str, ...]
    schedules: tuple[str, ...]
    memory_bytes: int | None

    @classmethod
    def of(cls, systems: str | None, schedules: str | None, memory: str | None) -> Ask:
        """From the options of the command.

        Raises:
            UserError: they do not go together, or name what there is not.
        """
        if (systems is None) == (schedules is None):
            raise UserError("vpipe compare takes --systems or --schedules, " +
                            ("and there is neither" if systems is None else "not both"),
                            hint="write --systems gpipe,pipedream,vpipe, or --schedules 1f1b,zb_h1,pipedream")
        if systems is not None:
            return cls(tuple(system.name for system in systems_named(systems)), (),
                       None if memory is None else parse_size(memory, "--memory"))
        if memory is not None:
            raise UserError("--memory decides what systems recompute, but --schedules run as the config says",
                            hint="leave it out, or compare --systems")
        assert schedules is not None, "one of the two is there"
        known = [name for name in schedule_names() if name != "auto"]  # which is whatever the planner takes
        return cls((), names_of(schedules, "--schedules", known, "schedule to compare"), None)

    def words(self) -> tuple[str, ...]:
        """As arguments of a rank's task."""
        return (("systems", ",".join(self.systems)) if self.systems else ("schedules", ",".join(self.schedules))) + (
            () if self.memory_bytes is None else (str(self.memory_bytes),))

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Ask:
        """The inverse of :meth:`words`."""
        kind, names, *memory = words
        named = tuple(names.split(","))
        return cls(named if kind == "systems" else (), named if kind == "schedules" else (),
                   int(memory[0]) if memory else None)
