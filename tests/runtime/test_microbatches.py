"""The stream of microbatches: cut evenly, read late, let go early."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.runtime.microbatches import PER_SAMPLE, Batch, BatchForm, MicrobatchLoader

FORM = BatchForm(("x", "y"), 2)


def numbered(batches: int, samples: int = 4) -> Iterator[Batch]:
    """Batches whose ``x`` counts the samples of the run."""
    for batch in range(batches):
        x = torch.arange(batch * samples, (batch + 1) * samples)
        yield {"x": x, "y": -x[:, None], "unused": torch.zeros(1)}


def loader(batches: Iterator[Batch], microbatches: int = 2, uses: int = 1, equal: bool = True) -> MicrobatchLoader:
    return MicrobatchLoader(batches, BatchForm(("x", "y"), microbatches, equal=equal), lambda _: uses)


def failure(batch: Batch) -> str:
    stream = loader(iter([batch]), 4)
    assert not stream.has(0)
    assert isinstance(stream.error, UserError)
    return str(stream.error)


def test_microbatches_are_numbered_through_all_batches() -> None:
    stream = loader(numbered(3))
    assert [stream.has(i) for i in range(7)] == [True] * 6 + [False]
    taken = [stream.consume(i) for i in range(6)]
    assert [t["x"].tolist() for t in taken] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert taken[5]["y"].tolist() == [[-10], [-11]]
    assert {name for t in taken for name in t} == {"x", "y"}, "a field that no layer reads is left out"
    assert [stream.samples(0, i) for i in range(7)] == [0, 2, 4, 6, 8, 10, 12]


def test_batches_are_read_when_first_asked_for() -> None:
    read: list[int] = []

    def counting() -> Iterator[Batch]:
        for number, batch in enumerate(numbered(4)):
            read.append(number)
            yield batch

    stream = loader(counting())
    assert read == []
    assert stream.has(0)
    assert stream.has(1)
    assert read == [0]
    assert stream.has(2)
    assert read == [0, 1]


def test_an_ended_stream_is_asked_for_no_more() -> None:
    batches = numbered(1)
    stream = loader(batches)
    assert not stream.has(2)
    assert not stream.has(2)
    assert stream.has(1)
    assert next(batches, None) is None


def test_a_batch_is_let_go_when_every_taker_has_had_it() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watched() -> Iterator[Batch]:
        for batch in numbered(2):
            alive.append(weakref.ref(batch["x"].untyped_storage()))
            yield batch

    stream = loader(watched(), uses=2)
    assert stream.has(2)
    for taking in (0, 0, 1):
        stream.consume(taking)
    assert alive[0]() is not None
    stream.consume(1)
    assert alive[0]() is None
    assert alive[1]() is not None
    with pytest.raises(KeyError):
        stream.consume(1)


def test_a_batch_is_let_go_when_those_who_take_its_microbatches_have_had_them() -> None:
    """As a replica sees it: of two microbatches the second is its own, of every third batch none is."""
    stream = MicrobatchLoader(numbered(3), FORM, lambda microbatch: int(microbatch in (1, 3)))
    assert stream.has(5)
    assert stream.consume(1)["x"].tolist() == [2, 3]
    with pytest.raises(KeyError):
        stream.consume(0)
    assert stream.consume(3)["x"].tolist() == [6, 7]
    with pytest.raises(KeyError):
        stream.consume(4)


def test_a_pause_holds_the_stream_and_its_reading() -> None:
    batches = numbered(9)
    stream = loader(batches)
    stream.end = 3
    assert [stream.has(i) for i in range(5)] == [True, True, True, False, False]
    assert next(batches)["x"].tolist() == [8, 9, 10, 11], "no batch beyond it is read"
    stream.end = 1
    assert [stream.has(i) for i in range(3)] == [True, False, False]
    stream.end = None
    assert stream.has(2)


def test_a_field_without_values_has_shapes() -> None:
    stream = loader(iter([{"x": torch.zeros(4, 3, device="meta"), "y": torch.arange(4)}]))
    assert stream.has(0)
    assert stream.signature(1) == (("x", (2, 3)), ("y", (2,)))
    assert stream.consume(1)["y"].tolist() == [2, 3]


@pytest.mark.parametrize("equal", [True, False])
def test_a_batch_without_samples_is_refused(equal: bool) -> None:
    stream = loader(iter([{"x": torch.zeros(0), "y": torch.zeros(0)}]), equal=equal)
    assert not stream.has(0)
    assert str(stream.error) == "error: a batch has no samples\nhint: leave it out"


def test_a_batch_of_any_size_is_cut_as_evenly_as_it_can_be() -> None:
    """And one of fewer samples than microbatches has a microbatch for each, whatever comes before and behind."""
    sizes = [4, 6, 6, 2, 9, 1, 1, 4]
    parts = [[1, 1, 1, 1], [2, 2, 1, 1], [2, 2, 1, 1], [1, 1], [3, 2, 2, 2], [1], [1], [1, 1, 1, 1]]
    stream = loader(({"x": torch.arange(size), "y": torch.zeros(size, 1)} for size in sizes), 4, equal=False)
    flat = [(number, size) for number, part in enumerate(parts) for size in part]
    assert stream.has(len(flat) - 1)
    assert not stream.has(len(flat))
    assert (stream.total, stream.ended, stream.batches_read) == (len(flat), True, len(sizes))
    seen: dict[int, list[int]] = {}
    for microbatch, (number, size) in enumerate(flat):
        assert stream.samples(microbatch, microbatch + 1) == size
        assert stream.signature(microbatch) == (("x", (size,)), ("y", (size, 1)))
        seen.setdefault(number, []).extend(stream.consume(microbatch)["x"].tolist())
    assert list(seen.values()) == [list(range(size)) for size in sizes], "every sample once, in order"
    assert stream.samples(0, len(flat)) == sum(sizes)


def test_a_later_batch_may_be_at_fault() -> None:
    stream = loader(iter([{"x": torch.zeros(4), "y": torch.zeros(4)}, {"x": torch.zeros(3), "y": torch.zeros(3)}]))
    assert stream.has(1)
    assert stream.error is None
    assert not stream.has(2)
    assert "a batch of 3 samples cannot be cut into 2 equal microbatches" in str(stream.error)
    assert (stream.total, stream.batches_read) == (2, 1), "what was read before is there"


@pytest.mark.parametrize(("batch", "text"), [
    ({"y": torch.zeros(4), "z": torch.zeros(4)},
     "error: a batch holds ['y', 'z'], but not ['x']\nhint: give every batch the fields ['x', 'y']"),
    ({"x": torch.zeros(4), "y": torch.zeros(3)},
     "error: the fields of a batch disagree on the number of samples: {'x': 4, 'y': 3}\n"
     f"hint: {PER_SAMPLE}"),
    *(({"x": torch.zeros(samples), "y": torch.zeros(samples)},
       f"error: a batch of {samples} samples cannot be cut into 4 equal microbatches\n"
       f"hint: use batches of {sizes} samples, or drop the incomplete last batch") for samples, sizes in (
           (7, "4 or 8"), (3, "4"))),
    ([torch.zeros(4), torch.zeros(4)],
     "error: a batch is list, not a dict of tensors\n"
     "hint: name the fields: ({'x': batch[0], 'y': batch[1]} for batch in batches)"),
    ([{"x": torch.zeros(()), "y": torch.zeros(())}] * 2,
     "error: a batch is list, not a dict of tensors\n"
     "hint: join its samples: map(torch.utils.data.default_collate, batches)"),
    (torch.zeros(4), "error: a batch is Tensor, not a dict of tensors\n"
                     "hint: name the fields: {'x': ..., 'y': ...}"),
    (None, "error: a batch is NoneType, not a dict of tensors\nhint: name the fields: {'x': ..., 'y': ...}"),
    ({}, "error: a batch holds [], but not ['x', 'y']\nhint: give every batch the fields ['x', 'y']"),
    ({1: 2, "x": 3}, "error: a batch holds [1, 'x'], but not ['y']\nhint: give every batch the fields ['x', 'y']"),
    ({"x": torch.zeros(()), "y": torch.zeros(2)}, "error: the field 'x' of a batch is a tensor without dimensions\n"
                                                  f"hint: {PER_SAMPLE}"),
    ({"x": [1, 2], "y": torch.zeros(2)}, "error: the field 'x' of a batch is list, not a tensor\n"
                                         "hint: give tensors; torch.as_tensor makes one of an array or of numbers")])
def test_a_batch_is_a_dict_of_tensors_that_can_be_cut_evenly(batch: Any, text: str) -> None:
    assert failure(batch) == text


def test_values_that_layers_read_must_be_there() -> None:
    batch = {"x": torch.zeros(4, device="meta"), "y": torch.zeros(4)}
    stream = MicrobatchLoader(iter([batch]), FORM, lambda _: 1, ("x",))
    assert not stream.has(0)
    assert str(stream.error) == (
        "error: the field 'x' of a batch is on the meta device, but layers of this process read it\n"
        "hint: leave out the values of such fields alone as no layer of a rank reads")


@pytest.mark.parametrize("copied", [False, True])
def test_batches_read_ahead_are_copied(copied: bool) -> None:
    """As numpy fills the memory of a batch with the next one, unseen by torch."""
    memory = torch.zeros(4)

    def refilled() -> Iterator[Batch]:
        for number in range(2):
            memory.numpy()[:] = number
            yield {"x": memory, "y": memory}

    stream = MicrobatchLoader(refilled(), FORM, lambda _: 1, ("x",), torch.device("cpu") if copied else None)
    assert stream.has(3)
    first = stream.consume(0)
    assert first["x"].tolist() == ([0, 0] if copied else [1, 1])
    assert first["y"].data_ptr() == memory.data_ptr(), "nothing computes with it"


@pytest.mark.parametrize(("end", "ended", "rest"), [(None, True, 0), (6, True, 0), (4, False, 0), (2, False, 2)])
def test_the_batches_have_ended_where_nothing_else_ends_them(end: int | None, ended: bool, rest: int) -> None:
    stream = loader(numbered(2))
    assert not stream.has(4)
    stream.end = end
    assert (stream.ended, stream.rest) == (ended, rest)
