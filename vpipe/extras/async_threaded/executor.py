"""Register the executor ``async_threaded``, and say what does not go with threads. A config is read without torch."""

from __future__ import annotations

from vpipe.description import Executor

Executor(
    "async_threaded", "vpipe.extras.async_threaded.worker:ThreadedWorker", threaded=True, refuses={
        "timeline": ("the forwards of the executor async_threaded go on in threads, several at one time: there is no "
                     "timeline of actions one after the other",
                     "use the executor overlapped, which computes the same numbers"),
        "hooks": ("the executor async_threaded adds gradients when all microbatches have theirs",
                  "use the executor overlapped"),
        "mesh": ("threads would begin the collectives of layers in another order on each rank",
                 "use the executor overlapped"),
        "slices": ("the executor async_threaded adds gradients in the order of the forwards",
                   "use the executor overlapped")}).register()
