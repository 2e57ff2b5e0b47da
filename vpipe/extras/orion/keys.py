"""What Orion adds to configs: a switch in the environment, a rule, and the variable that preloads the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vpipe.app.config.config import Config
from vpipe.app.config.formats import ConfigAddition
from vpipe.app.config.parallel import ParallelSection
from vpipe.app.config.validation import Mistake
from vpipe.description import Executor
from vpipe.extras.orion.scheduler import preload_variable, switched_on

EXECUTOR = "async_threaded"
"""The executor whose streams Orion orders, an extra too."""


class OrionKeys(ConfigAddition):
    """The keys ``use_orion_scheduler`` and ``orion_strict``."""

    def settings(self) -> list[str]:
        """Return the values of ``--set`` for which ``USE_ORION_SCHEDULER`` stands."""
        return ["parallel.use_orion_scheduler=true"] if switched_on() else []

    def mistakes(self, parallel: ParallelSection) -> Iterator[Mistake]:
        """Yield that the executor has one stream for all microbatches."""
        if parallel.executor != EXECUTOR:
            there = EXECUTOR in Executor.names()
            yield Mistake(("use_orion_scheduler",), f"is true, but the executor is {parallel.executor}, which has one "
                          "stream for all microbatches", f"set executor: {EXECUTOR}, or use_orion_scheduler: false"
                          if there else "leave it out, or install vpipe with vpipe/extras/async_threaded")

    def rank_variables(self, config: Config) -> Mapping[str, str]:
        """Return what preloads the library into the ranks of a config that asks for it."""
        return preload_variable() if config.parallel.use_orion_scheduler else {}
