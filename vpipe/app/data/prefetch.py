"""Make items ahead of need in a thread, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from threading import Condition, Thread
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
_PATIENCE_S = 5.0  # wait for the item in progress at the end: a disk may be out of reach


class Prefetcher(Iterator[Item], Generic[Item]):
    """Iterate over an iterable in a thread, with up to ``most`` items made before they are needed.

    An error of the iterable is raised in its place: after the items made before it. Leaving the context ends the thread
    and drops the items that were not taken.
    """

    def __init__(self, items: Iterable[Item], most: int) -> None:
        assert most >= 1
        self._items, self._most = items, most
        self._ready: deque[Item] = deque()
        self._changed = Condition()
        self._ended = self._closed = False
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._make, name="vpipe-batches", daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        failure, self._failure = self._failure, None
        raise StopIteration if failure is None else failure

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_PATIENCE_S)

    def _make(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    if not self._closed:
                        self._ready.append(item)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._most)
                    if self._closed:
                        break
        except BaseException as error:  # raised where the item would have been taken
            self._failure = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()
