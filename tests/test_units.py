"""Amounts of memory, written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vpipe.app.sizes import parse_size
from vpipe.errors import UserError
from vpipe.units import rounded_up, size_text


@pytest.mark.parametrize(("text", "size"), [
    ("8GiB", 8 * 2**30), ("500 MB", 500_000_000), ("1.5gb", 1_500_000_000), (" .5KiB ", 512), ("1024", 1024),
    (1024, 1024), ("1B", 1), ("2tib", 2**41)])
def test_amounts_of_memory_are_read(text: str | int, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize(("text", "what"), [
    ("abc", "--memory is 'abc', which is no amount of memory"),
    ("", "--memory is '', which is no amount"),
    (True, "--memory is True, which is no amount"),
    (0.5, "--memory is 0.5, which is no amount"),
    ("8G", "--memory is '8G', which may be GB (of 1000s) or GiB (of 1024s)"),
    ("3 parsecs", "--memory is '3 parsecs', with the unknown unit 'parsecs'"),
    ("0", "--memory is 0"), ("-3GiB", "--memory is -3GiB"), ("0.1B", "--memory is 0.1B"), (0, "--memory is 0"),
    ("9" * 30, "which is no amount of memory"),
    ("8", "--memory is 8, which would be 8 bytes")])
def test_texts_that_are_no_amount_are_refused(text: object, what: str) -> None:
    with pytest.raises(UserError) as error:
        parse_size(text, "--memory")  # type: ignore[arg-type]
    assert what in error.value.problems[0].what


def test_amounts_for_people() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 1_500, 10**6, 8 * 2**30, 1023 * 2**20, 5000 * 2**40)] == [
        "0 B", "1023 B", "1 KiB", "1.46 KiB", "977 KiB", "8 GiB", "1 GiB", "5000 TiB"]
    assert size_text(2**30 + 1, up=True) == "1.01 GiB"


@given(st.integers(1, 2**50))
def test_an_amount_rounded_up_suffices(size: int) -> None:
    assert size <= rounded_up(size) == parse_size(size_text(size, up=True), "") <= 1.012 * size + 1
