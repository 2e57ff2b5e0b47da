"""Read files that users hand in, of at most so many bytes, without waiting for a writer; replace files; hash them."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from threading import get_ident
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from vpipe.errors import UserError
from vpipe.units import size_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


def read_bounded(path: str | os.PathLike[str], most_bytes: int, what: str) -> bytes:
    """Return the content of a file, a pipe or a device of at most ``most_bytes``.

    Args:
        what: describes the file in the message, such as ``a config``.

    Raises:
        UserError: it is larger.
        OSError: it cannot be read, or its path is no path.
    """
    try:
        # A pipe without a writer is then empty.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            content = file.read(most_bytes + 1)
    except ValueError as error:  # a path with a character that no path can have
        raise OSError(0, str(error)) from None
    if len(content) > most_bytes:
        raise UserError(f"the file '{path}' has more than {size_text(most_bytes)}",
                        hint=f"{what} is not that large: check that it is the right file")
    return content


def replace_text(path: str | os.PathLike[str], text: str | bytes) -> None:
    """Write a file at once or not at all, whoever else does, and wait until the disk has it. Raises OSError."""
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.{get_ident()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(partial.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


PIECE_BYTES = 4 << 20
"""Bytes of a file that are hashed at a time, while other threads of the process can work."""


def sha256_of(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """Return the SHA-256 of a file's content; ``advance`` is called after each piece with its bytes. Raises OSError."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            advance(count)
    return digest.hexdigest()


def read_json(path: str | os.PathLike[str], most_bytes: int, what: str, hint: str) -> Any:
    """Return the values in a JSON file of at most ``most_bytes``.

    Args:
        what: describes the file in messages, such as ``the plan``.
        hint: the remedy.

    Raises:
        UserError: it cannot be read, is larger, or is no JSON.
    """
    try:
        return parse_json(read_bounded(path, most_bytes, what))
    except OSError as error:
        raise UserError(f"cannot read {what}: {error.strerror or error}", where=str(path), hint=hint) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{what} is not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}",
                        hint=hint) from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what} is not JSON: {error}", where=str(path), hint=hint) from None


def parse_json(content: bytes) -> Any:
    """Return the values in the text of a JSON file: numbers finite, no key twice in an object.

    Raises:
        ValueError: it is no JSON in UTF-8; a JSONDecodeError where there is a place in it.
    """
    try:
        text = content.decode("utf-8-sig")
        values = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        if "\\ud" in text.lower():  # an escape for half of a character, perhaps without the other
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("a text in it holds half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, _NoJsonError):
        raise
    except ValueError:  # of Python's int(), the one other thing that raises it
        raise ValueError("a number in it has too many digits") from None
    return values


class _NoJsonError(ValueError):
    """The text is JSON for Python, but not for others."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _), *_] = Counter(key for key, _ in pairs).most_common(1)
        raise _NoJsonError(f"the key '{key}' stands twice in an object")
    return found


def _constant(name: str) -> NoReturn:
    raise _NoJsonError(f"{name} is no number of JSON")


def count_of(value: Any) -> int:
    """Return a value of JSON that counts something; a ValueError, if it is none."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def number_of(value: Any) -> float:
    """Return a value of JSON that was measured; a ValueError, if it is none."""
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise ValueError(f"{value!r} is no measured number")
    return float(value)


def text_of(value: Any) -> str:
    """Return a value of JSON that is text; a ValueError, if it is none."""
    if type(value) is not str:
        raise ValueError(f"{value!r} is no text")
    return value


def truth_of(value: Any) -> bool:
    """Return a value of JSON that must be true or false; ``bool`` takes the text "false" for true."""
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def read_record(kind: type[Record], content: Mapping[str, Any], **readers: Callable[[Any], Any]) -> Record:
    """Make a dataclass from JSON values; a field without a reader is read by its type.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: a value is missing, unknown or of the wrong kind.
    """
    values = dict(content)
    for name, hint in _hints(kind).items():
        if name in values:
            values[name] = readers[name](values[name]) if name in readers else _read(hint, values[name])
    return kind(**values)


_hints = cache(get_type_hints)
_READERS: dict[Any, Callable[[Any], Any]] = {int: count_of, float: number_of, str: text_of, bool: truth_of,
                                             Any: lambda value: value}


def _read(hint: Any, value: Any) -> Any:
    """Return a value of JSON as a number, a text, a tuple, a mapping from numbers or texts, or a dataclass."""
    inner = get_args(hint)
    if hint in _READERS:
        return _READERS[hint](value)
    if NoneType in inner:
        return None if value is None else _read(inner[0], value)
    if get_origin(hint) is tuple:
        return tuple(_read(inner[0], each) for each in value)
    if get_origin(hint) is Mapping:
        return {inner[0](key): _read(inner[1], each) for key, each in value.items()}
    return read_record(hint, value)
