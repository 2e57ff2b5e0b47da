"""Make items ahead of need in a thread, in order."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TypeVar

Item = TypeVar("Item")
_PATIENCE_S = 5.0  # wait for the item in progress at the end: a disk may be out of reach


@contextmanager
def prefetched(items: Iterable[Item], most: int) -> Iterator[Iterator[Item]]:
    """Iterate over an iterable in a thread, with up to ``most`` items made before they are needed.

    An error of the iterable is raised in its place: after the items made before it. Leaving the context ends the thread
    and drops the items that were not taken.
    """
    assert most >= 1
    ready = SimpleQueue[tuple[Item] | BaseException | None]()  # an item, what was raised in its place, or the end
    room, closed = Semaphore(most), Event()

    def make() -> None:
        source = iter(items)
        try:
            while room.acquire() and not closed.is_set():
                ready.put((next(source),))
        except StopIteration:
            ready.put(None)
        except BaseException as error:  # raised where the item would have been taken
            ready.put(error)

    def take() -> Generator[Item]:
        while (made := ready.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            room.release()
            yield made[0]

    thread, taken = Thread(target=make, name="vpipe-batches", daemon=True), take()
    thread.start()
    try:
        yield taken
    finally:
        taken.close()
        closed.set()
        room.release()
        thread.join(_PATIENCE_S)
