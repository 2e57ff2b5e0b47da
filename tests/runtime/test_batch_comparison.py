"""Ranks that read other batches than the others find out, before an update uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import comparison_jobs as jobs
import pytest
import torch
from world import World

from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import RunError
from vpipe.runtime.batch_comparison import BatchComparison, checksum
from vpipe.runtime.microbatches import Batch, MicrobatchLoader, Segment
from vpipe.runtime.transport.transport import InProcessTransport, Mailbox
from vpipe.schedules.assignment import Assignment

HINT = ("\nhint: every rank must read the same batches in the same order: give a DataLoader that shuffles a generator "
        "with the same seed on all ranks, generator=torch.Generator().manual_seed(0), and no DistributedSampler, since "
        "the pipeline divides each batch itself")

# -- checksums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8,), (8, 1), (16, 128), (64, 3, 96, 96), (1024, 64, 4), (70_000,)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_checksum_tells_orders_of_the_samples_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    field = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    field = field > 0 if dtype is torch.bool else (100 * field).to(dtype)
    swapped = field.clone()
    a, b = next((a, b) for a in range(shape[0]) for b in range(a) if not torch.equal(field[a], field[b]))
    swapped[[a, b]] = field[[b, a]]
    assert checksum(field) == checksum(field.clone())
    assert checksum(field) != checksum(swapped)


def test_a_checksum_is_of_values_not_of_their_layout() -> None:
    for shape in ((4, 3, 5, 7), (8, 3, 128, 128)):
        field = torch.randn(shape)
        assert checksum(field) == checksum(field.to(memory_format=torch.channels_last))
    assert checksum(torch.zeros(4)) != checksum(torch.zeros(4, dtype=torch.int32))
    assert checksum(torch.tensor([1j, 2j]).conj()) == checksum(torch.complex(torch.zeros(2), torch.tensor([-1.0, -2])))


def test_short_sequences_in_a_large_field_are_told_apart() -> None:
    """Their values lie between those that a sample spread over the whole length would take."""
    field = torch.zeros(4096, 512, dtype=torch.int64)
    other = field.clone()
    other[17, 5] = 1
    assert checksum(field) != checksum(other)


# -- in one process, each rank with a loader of its own ----------------------------------------------------


class Ranks:
    """Ranks that read batches and hand microbatches on as a schedule would; the numbers of none are computed."""

    def __init__(self, placement: Sequence[Sequence[int]], microbatches: int, training: bool = True,
                 flush: bool = True) -> None:
        self._placement = tuple(map(tuple, placement))
        self._microbatches, self._training, self._flush = microbatches, training, flush
        self._room: Mailbox = {}
        self.ranks = {rank: BatchComparison(InProcessTransport(rank, self._room), self._placement, ("x", "y"), range(9))
                      for ranks in placement for rank in ranks}

    def run(self, batches_of: Callable[[int], list[Batch]], count: int) -> None:
        """Hand ``count`` batches through all stages."""
        self.loaders = {}
        for rank, comparison in self.ranks.items():
            loader = self.loaders[rank] = MicrobatchLoader(
                iter(batches_of(rank)), self._microbatches, ("x", "y"), lambda _: 1, comparison=comparison)
            loader.has(count * self._microbatches - self._flush)  # in a stream the end is known before the last batch
            comparison.begin(Segment(loader, 0, 0, 0, Assignment(self._placement, self._microbatches, self._flush,
                                                           lambda _: True), self._training))
        total = range(count * self._microbatches)
        for microbatch in total:
            for stage, ranks in enumerate(self._placement):
                comparison = self.ranks[ranks[microbatch % len(ranks)]]
                if stage and ranks[microbatch % len(ranks)] != (before := self._placement[stage - 1])[
                        microbatch % len(before)]:
                    comparison.post(stage, microbatch)
                comparison.compare(stage, microbatch)
        for comparison in self.ranks.values():
            comparison.compare_replicas(total)
            comparison.forget(total.stop)
        assert all(not loader.checksums for loader in self.loaders.values()), "checksums are let go"
        for rank, comparison in self.ranks.items() if not self._flush else ():
            comparison.check_end(self.loaders[rank], Exchange())
        assert not self._room, "all that was sent is received"


def batches(count: int = 3, samples: int = 12, seed: int = 0) -> list[Batch]:
    random = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(samples, 3, generator=random), "y": torch.arange(samples)} for _ in range(count)]


def differing(ranks: Ranks, odd: int, other: list[Batch]) -> str:
    """What is said where one rank reads other batches."""
    with pytest.raises(RunError) as error:
        ranks.run(lambda rank: other if rank == odd else batches(), 3)
    assert str(error.value).endswith(HINT)
    return error.value.what


PLACEMENTS: list[list[list[int]]] = [
    [[0], [1], [2]], [[0, 1], [2], [3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3, 2, 1, 0]], [[0, 1], [2, 3, 4]],
    [[0], [1], [1], [0]]]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_whichever_rank_reads_something_else_is_found(placement: list[list[int]]) -> None:
    for training in (True, False):
        Ranks(placement, 6, training).run(lambda _: batches(), 3)
    for microbatches in (6, 1):
        Ranks(placement, microbatches, flush=False).run(lambda _: batches(12), 12)
    for odd in {rank for ranks in placement for rank in ranks}:
        second = [batches()[0], batches(seed=1)[1], batches()[2]]
        what = differing(Ranks(placement, 6), odd, second)
        assert what.startswith("batches differ between ranks: field 'x' of batch 1 on rank ")
        assert f"rank {odd}" in what


def without(batch: Batch, *names: str) -> Batch:
    return {name: value.to("meta") if name in names else value for name, value in batch.items()}


def test_fields_are_compared_over_ranks_that_do_not_have_them() -> None:
    hidden: dict[int, tuple[str, ...]] = {0: ("y",), 1: ("x", "y"), 2: (), 3: ("x",)}

    def read(rank: int, seed: int) -> list[Batch]:
        return [without(batch, *hidden[rank]) for batch in batches(seed=seed if rank == 0 else 0)]

    Ranks([[0], [1], [2], [3]], 2).run(lambda rank: read(rank, 0), 3)
    with pytest.raises(RunError) as error:
        Ranks([[0], [1], [2], [3]], 2).run(lambda rank: read(rank, 5), 3)
    assert error.value.what == "batches differ between ranks: field 'x' of batch 0 on rank 0 and rank 2"


def test_batches_of_other_sizes_and_shapes_are_named() -> None:
    chain = [[0], [1]]
    assert differing(Ranks(chain, 2), 0, [*batches(1), *batches(2, samples=8)]) == (
        "batches differ between ranks: batch 1 has 8 samples on rank 0 and 12 on rank 1")
    wide = {"x": torch.zeros(12, 9, device="meta"), "y": torch.arange(12)}
    assert differing(Ranks(chain, 2), 1, [wide]) == (
        "batches differ between ranks: the shape of field 'x' of batch 0 on rank 0 and rank 1")


# -- over gloo -----------------------------------------------------------------------------------------


def texts(world: World, job: Callable[..., Any], within_s: float = 10, **arguments: Any) -> list[str]:
    """What every rank says of the failure."""
    world.begin(job, **arguments)
    found = []
    for rank in range(world.ranks):
        kind, error = world.outcome(rank, within_s)
        assert kind == "error", error
        found.append(error["text"])
    return found


@pytest.mark.parametrize(("schedule", "case", "text"), [
    ("1f1b", "shuffled", "batches differ between ranks: field 'input' of batch 0 on rank 0 and rank 1"),
    ("1f1b", "larger", "batches differ between ranks: batch 2 has 8 samples on rank 0 and 4 on rank 1"),
    ("pipedream", "fewer", "batches differ between ranks: there are 2 on rank 0 and more on rank 1")])
def test_all_ranks_end_with_what_differs(pair: World, schedule: str, case: str, text: str) -> None:
    """Of the larger batch a receive is already posted: gloo would abort the process."""
    for rank, said in enumerate(texts(pair, jobs.differing, schedule=schedule, case=case)):
        assert said.startswith(f"error: {text}" if rank == 1 else f"error: rank 1 (stage 1) failed: {text}"), said
        assert said.endswith(HINT)


@pytest.mark.parametrize("sizes", [[2, 3], [3, 1]])
def test_an_evaluation_whose_last_batch_differs_in_size_ends(pair: World, sizes: list[int]) -> None:
    """Each rank expects as many microbatches as its own batch has samples."""
    text = f"batches differ between ranks: batch 2 has {sizes[0]} samples on rank 0 and {sizes[1]} on rank 1"
    assert f"error: {text}" in texts(pair, jobs.other_tails, sizes=sizes)[1]


def test_batches_that_end_on_all_ranks_alike_leave_the_pipeline_usable(world: World) -> None:
    for result in world.run(jobs.ends_alike):
        assert result == jobs.ends_alike()


def test_a_rank_that_cannot_read_ends_the_others_with_its_name(pair: World) -> None:
    first, second = texts(pair, jobs.one_cannot_read)
    assert first == "the disk is gone"
    assert second.startswith("error: rank 0 could not read batch 1: OSError: the disk is gone (rank 1, stage 1, ")
    assert second.endswith("\nhint: the log of that rank has the traceback")
