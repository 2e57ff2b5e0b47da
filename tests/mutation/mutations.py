"""Changes to values and bytes of files, decided by a seed: what hands, disks and other programs do to them."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 1000, 65_537, 10**9, 2**31, 2**63, 2**64, 10**30, -10**9, -0.0, 0.5, 1e-320,
    1e308, float("inf"), float("-inf"), float("nan"), "", "x", "auto", "1", "-1", "1e9", "../..", "/", "/dev/zero",
    "\0", "a\nb", "é", "x" * 5000, "9" * 6000, "a.csv", "localhost:0", "8GiB", [], {}, [[]], [{}], {"": ""}, {"0": [0]},
    [0], [-1], [10**9], [None], ["x"], [1] * 1000, [float("nan")] * 4]
KEYS = ["", "x", "0", "-1", "1e9", "null", "__class__", "a" * 3000, "\0"]
BYTES = [b"\0", b"\xff", b"\xff" * 8, b"\0" * 8, b"\xef\xbb\xbf", b"[", b"]", b"{", b"}", b'"', b"'", b",", b":", b"\n",
         b"- ", b"&a ", b"*a", b"!!set ", b"null", b"NaN", b"1e999", b"9" * 5000, b"[" * 400, b'{"a":' * 400,
         b"\\ud800", b"\t"]


def mutated(dice: Random, value: Any) -> Any:
    """``value``, of dicts and lists, with one to three changes; it is changed in place."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = [(inside, key) for inside in _containers(value) for key in _keys(inside)]
        if not places:
            return dice.choice(ODD)
        inside, key = dice.choice(places)
        match dice.randrange(7):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[dice.choice([*KEYS, f"{key}x", str(key)[:-1], str(dice.choice(places)[1])])] = inside.pop(key)
            case 2 if isinstance(inside, list):
                inside[:] = deepcopy((inside * (many := dice.choice((2, 10, 1000))))[:many])
            case 3 if type(inside[key]) in (int, float):
                inside[key] = dice.choice([inside[key] + 1, -inside[key], inside[key] * 10**9, str(inside[key])])
            case 4:
                other, there = dice.choice(places)
                inside[key] = str(other[there]) if isinstance(other[there], (dict, list)) else other[there]
            case _:
                inside[key] = deepcopy(dice.choice(ODD))
    return value


def mutated_bytes(dice: Random, content: bytes) -> bytes:
    """``content`` with bits turned, parts cut out, put in or doubled."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 4))):
        place = dice.randrange(len(changed) + 1)
        match dice.randrange(5):
            case 0 if place < len(changed):
                changed[place] ^= 1 << dice.randrange(8)
            case 1:
                del changed[place:place + dice.choice((1, 2, 20, 200))]
            case 2:
                del changed[place:]
            case 3:
                start = dice.randrange(len(changed) + 1)
                changed[place:place] = changed[start:start + dice.choice((1, 8, 300))]
            case _:
                changed[place:place] = dice.choice(BYTES)
    return bytes(changed)


def _containers(value: Any) -> list[Any]:
    """``value`` and all within it that holds values; of a long list the first fifty."""
    if not isinstance(value, (dict, list)):
        return []
    return [value, *(found for key in _keys(value) for found in _containers(value[key]))]


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(min(len(value), 50)))
