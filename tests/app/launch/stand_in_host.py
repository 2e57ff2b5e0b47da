"""The launcher of another host with stand-ins for its ranks: the program in ``STAND_IN_RANK``, without torch.

No torch can be imported: a host whose ranks run in a container needs none (docs/launching.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

from vpipe.app.launch import remote_agent as host
from vpipe.app.launch.rank_env import HostRanks

HEAD = """\
import json, os, sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()  # as a rank does
folder, task = sys.argv[1:3]
rank = int(os.environ["RANK"])
"""


def command(ranks: HostRanks, folder: Path | str) -> list[str]:
    """Instead of :meth:`HostRanks.command`."""
    program = HEAD + "exec(os.environ['STAND_IN_RANK'])"
    return [sys.executable, "-S", "-c", program, str(folder), *ranks.task]


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    HostRanks.command = command  # type: ignore[method-assign]
    sys.exit(host.main())
