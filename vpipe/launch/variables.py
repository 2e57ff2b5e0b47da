"""Environment variables of vpipe's own, by which a process tells the ones that it starts or becomes."""

from __future__ import annotations

PARENT_PIPE = "VPIPE_PARENT_PIPE"
"""A file descriptor: it ends when the launcher does, and then so must the rank. A byte in it is the number of a signal
that the launcher passes on: unlike a signal it loses none that comes while Python starts, and reaches nothing else."""

HOST = "VPIPE_HOST"
"""The host's name for messages, where a run has several."""

RUN = "VPIPE_RUN"
"""What tells the run from others that might use its port."""

STARTER = "VPIPE_STARTER"
"""The program that started the ranks, for one that starts itself anew in a container."""

AGENT = "VPIPE_AGENT"
"""What would start this process again after a failure, for one that starts itself anew in a container."""
