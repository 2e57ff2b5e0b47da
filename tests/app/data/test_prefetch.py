from collections.abc import Iterator
from threading import Event, current_thread
from threading import enumerate as threads

import pytest

from vpipe.app.data.epoch import prefetched


class Source:
    """Counts from 0; ``made[n]`` is set when n was made, and n is not made before ``let[n]`` is."""

    def __init__(self, items: int, *, held: int | None = None, fails: int | None = None) -> None:
        self.made, self.let = [Event() for _ in range(items)], [Event() for _ in range(items)]
        self._fails, self.threads = fails, set[str]()
        for number, event in enumerate(self.let):
            if held is None or number < held:
                event.set()

    def __iter__(self) -> Iterator[int]:
        for number, (made, let) in enumerate(zip(self.made, self.let, strict=True)):
            assert let.wait(10)
            self.threads.add(current_thread().name)
            if number == self._fails:
                raise ValueError(f"item {number}")
            made.set()
            yield number


def check_thread_ended() -> None:
    assert "vpipe-batches" not in [thread.name for thread in threads()]


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_everything_comes_in_order_from_one_thread(most: int) -> None:
    source = Source(20)
    with prefetched(source, most) as items:
        assert list(items) == list(range(20))
        assert next(items, None) is None
    assert source.threads == {"vpipe-batches"}
    check_thread_ended()


def test_so_many_are_made_before_they_are_asked_for_and_no_more() -> None:
    source = Source(10)
    with prefetched(source, 3) as items:
        for taken in range(7):
            assert source.made[taken + 2].wait(10)
            assert not source.made[taken + 3].wait(0.01)
            assert next(items) == taken


def test_a_failure_comes_in_its_place_and_ends_it() -> None:
    with prefetched(Source(5, fails=3), 5) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="item 3"):
            next(items)
        assert list(items) == []
    check_thread_ended()


@pytest.mark.parametrize("asked", [0, 2])
def test_leaving_early_ends_the_thread(asked: int) -> None:
    source = Source(100)
    with prefetched(source, 4) as items:
        assert [next(items) for _ in range(asked)] == list(range(asked))
    check_thread_ended()
    assert not source.made[asked + 5].is_set()
    assert list(items) == []


def test_one_that_waits_gets_what_comes() -> None:
    source = Source(3, held=1)
    with prefetched(source, 2) as items:
        assert next(items) == 0
        source.let[1].set()
        source.let[2].set()
        assert [next(items), next(items)] == [1, 2]
