"""Ranks that read other batches than the others find out, before an update uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from threading import Thread
from typing import Any

import comparison_jobs as jobs
import pytest
import torch
from lines import exchanges
from world import World

from vpipe.distributed.fault import Fault
from vpipe.distributed.read_batches import ReadBatch, ReadBatches
from vpipe.distributed.value_exchange import Exchange, Relay
from vpipe.errors import RunError
from vpipe.runtime.checksums import checksum
from vpipe.runtime.loaders import BatchComparison
from vpipe.runtime.microbatches import Batch, BatchForm, MicrobatchLoader

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


# -- what ranks say of their batches -----------------------------------------------------------------------


def batches(count: int = 3, samples: int = 12, seed: int = 0) -> list[Batch]:
    random = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(samples, 3, generator=random), "y": torch.arange(samples)} for _ in range(count)]


def said(read: Iterable[Batch], group: int = 0) -> list[ReadBatch]:
    """What a rank says of all batches that it reads, and of their end."""
    comparison = BatchComparison(Exchange(), ("x", "y"), group)
    loader = MicrobatchLoader(iter(read), BatchForm(("x", "y"), 2), lambda _: 1, told=comparison.read)
    assert not loader.has(1_000)
    return comparison.take()


def difference(of_rank: Sequence[Iterable[Batch]], groups: Sequence[int] = (0, 0, 0, 0),
               order: Sequence[int] | None = None) -> Fault | None:
    """The first difference, where ranks tell of one batch after the other, each in this order."""
    told, compared = [said(read, group) for read, group in zip(of_rank, groups, strict=False)], ReadBatches()
    for number in range(max(map(len, told))):
        for rank in order or range(len(told)):
            if number < len(told[rank]) and (found := compared.add(rank, told[rank][number:number + 1])) is not None:
                return found
    return None


def differing(*of_rank: Iterable[Batch]) -> str:
    found = difference(of_rank)
    assert found is not None
    assert f"\nhint: {found.hint}" == HINT
    assert found.ranks == (), "none is to blame"
    return found.what


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_whichever_rank_reads_something_else_is_found(order: Sequence[int]) -> None:
    assert difference([batches()] * 3, order=order) is None
    for odd in range(3):
        second = [batches()[0], batches(seed=1)[1], batches()[2]]
        found = difference([second if rank == odd else batches() for rank in range(3)], order=order)
        assert found is not None
        assert found.what.startswith("batches differ between ranks: field 'x' of batch 1 on rank ")
        assert f"rank {odd}" in found.what


def without(batch: Batch, *names: str) -> Batch:
    return {name: value.to("meta") if name in names else value for name, value in batch.items()}


def test_fields_are_compared_between_ranks_that_have_them() -> None:
    hidden: dict[int, tuple[str, ...]] = {0: ("y",), 1: ("x", "y"), 2: (), 3: ("x",)}

    def read(rank: int, seed: int) -> list[Batch]:
        return [without(batch, *hidden[rank]) for batch in batches(seed=seed if rank == 0 else 0)]

    assert difference([read(rank, 0) for rank in range(4)]) is None
    assert differing(*(read(rank, 5) for rank in range(4))) == (
        "batches differ between ranks: field 'x' of batch 0 on rank 0 and rank 2")


def test_batches_of_other_sizes_shapes_and_numbers_are_named() -> None:
    assert differing([*batches(1), *batches(2, samples=8)], batches()) == (
        "batches differ between ranks: batch 1 has 8 samples on rank 0 and 12 on rank 1")
    wide = {"x": torch.zeros(12, 9, device="meta"), "y": torch.arange(12)}
    assert differing(batches(), [wide]) == (
        "batches differ between ranks: the shape of field 'x' of batch 0 on rank 0 and rank 1")
    assert differing(batches(), batches(2)) == "batches differ between ranks: there are 2 on rank 1 and more on rank 0"


def torn(read: int) -> Iterator[Batch]:
    yield from batches(read)
    raise OSError("the disk is gone")


def test_a_rank_that_cannot_read_is_named_unless_none_can() -> None:
    assert difference([torn(1), torn(1)]) is None
    for others, ended in ((batches(2), ""), (batches(1), "; on other ranks the batches ended before")):
        found = difference([others, torn(1), others])
        assert found == Fault((1,), f"could not read batch 1: OSError: the disk is gone{ended}",
                              "the log of that rank has the traceback", reported=True)


def test_groups_of_lanes_read_batches_of_their_own_of_the_same_sizes() -> None:
    ours, theirs = batches(), batches(seed=1)
    assert difference([ours, theirs, ours, theirs], groups=(0, 1, 0, 1)) is None
    for other, what in ((theirs, "field 'x' of batch 0 on rank 0 and rank 2"),
                        (batches(samples=8), "batch 0 has 12 samples on rank 0 and 8 on rank 2")):
        found = difference([ours, theirs, other, theirs], groups=(0, 1, 0, 1))
        assert found is not None
        assert found.what == f"batches differ between ranks: {what}"


# -- who hears of it, and when -----------------------------------------------------------------------------


def test_a_rank_waits_before_an_update_until_all_have_told_of_its_batches() -> None:
    """And not for later ones, which only some may have read."""
    one, two = (BatchComparison(exchange, ("x", "y"), 0) for exchange in exchanges(2))
    ours = said(batches(2))
    one.tell(ours)
    two.tell(ours[:1])
    one.confirm(2)
    waits = Thread(target=one.confirm, args=(3,), daemon=True)
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    two.tell(ours[1:])
    waits.join(10)
    assert not waits.is_alive()


def test_a_difference_fails_all_at_once_where_ranks_go_on_and_is_raised_by_all_where_they_wait() -> None:
    claimed: list[Fault] = []
    relay, message = Relay(3, claimed.append), {"give": "1", "of": [0, 1, 2]}
    for rank, seed in ((2, 0), (0, 1)):
        assert not list(relay.give(rank, {**message, "value": ["", None, None], "hears": "later",
                                          "batches": said(batches(seed=seed))}))
    assert [fault.what for fault in claimed] == [
        "batches differ between ranks: field 'x' of batch 0 on rank 0 and rank 2"]
    one, two = exchanges(2)
    waits = [one.begin(1, batches=said(batches(1))), two.begin(2, batches=said(batches(2)))]
    for wait in waits:
        with pytest.raises(RunError) as error:
            wait()
        assert error.value.what == "batches differ between ranks: there are 1 on rank 0 and more on rank 1"
        assert str(error.value).endswith(HINT)


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
    for error in texts(pair, jobs.differing, schedule=schedule, case=case):
        assert error.startswith(f"error: {text}"), error
        assert error.endswith(HINT)


@pytest.mark.parametrize("sizes", [[2, 3], [3, 1]])
def test_an_evaluation_whose_last_batch_differs_in_size_ends(pair: World, sizes: list[int]) -> None:
    """Each rank expects as many microbatches as its own batch has samples."""
    text = f"batches differ between ranks: batch 2 has {sizes[0]} samples on rank 0 and {sizes[1]} on rank 1"
    assert all(error.startswith(f"error: {text}") for error in texts(pair, jobs.other_tails, sizes=sizes))


def test_a_rank_that_cannot_read_ends_the_others_with_its_name(pair: World) -> None:
    first, second = texts(pair, jobs.one_cannot_read)
    assert first == "the disk is gone"
    assert second.startswith("error: rank 0 (stage 0) could not read batch 1: OSError: the disk is gone; rank 1 ")
    assert second.endswith("\nhint: the log of that rank has the traceback")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "interleaved"])
def test_an_update_comes_after_all_have_told_of_its_batches(pair: World, schedule: str) -> None:
    for early in pair.run(jobs.updates_before_confirmed, schedule=schedule):
        assert early == []


def test_a_stream_that_is_left_in_the_middle_of_its_batches_leaves_nothing(world: World) -> None:
    """Some ranks have read a batch ahead, of an iterator that nobody goes on with."""
    *_, alone = [jobs.left_streams()]
    for (losses, left) in world.run(jobs.left_streams):
        assert losses == alone[0]
        assert left == [0, 0]
