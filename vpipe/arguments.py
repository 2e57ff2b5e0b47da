"""Check type and range of the arguments of a call from Python, and report all mistakes at once."""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from vpipe.errors import Problem, UserError, counted, nearest

Part = TypeVar("Part")

INT64_LIMIT = 2**63
"""A whole number must be less: it is sent in 64 bits."""


class Arguments:
    """Collect the problems of a call's arguments, to raise them together.

    The methods note a problem and return the value, converted to one type. None is valid where ``or_none``. After a
    problem the returned value serves only to check the next argument.
    """

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def refuse(self, what: str, hint: str) -> None:
        """Note a problem."""
        self._problems.append(Problem(what, hint))

    def check(self) -> None:
        """Raise a UserError with the problems that were noted, if there are any."""
        if self._problems:
            raise UserError.all_of(self._problems)

    def integer(self, name: str, value: Any, least: int | None = None, or_none: bool = False) -> Any:
        """Return a whole number as an int; numbers of numpy count, texts and True do not."""
        if value is None and or_none:
            return None
        found = as_integer(value)
        if found is None or abs(found) >= INT64_LIMIT or (least is not None and found < least):
            meant = f": {name}={int(value)}" if isinstance(value, str) and value.isdecimal() and len(value) < 20 else ""
            bounds = "" if least is None else f", {least} or more"
            if found is not None and abs(found) >= INT64_LIMIT:
                bounds = f", {1 - INT64_LIMIT if least is None else least} to {INT64_LIMIT - 1}"
            self.refuse(f"{name} is {shown(value)}", f"give a whole number{bounds}{meant}")
        return found

    def integers(self, name: str, value: Any, example: str) -> Any:
        """Return a sequence of whole numbers as a list, or None."""
        if value is None:
            return None
        items = _items(value)
        found = None if items is None else [as_integer(item) for item in items]
        if found is None or None in found:
            self.refuse(f"{name} is {shown(value)}", f"give a list of whole numbers, such as {name}={example}")
        return found

    def number(self, name: str, value: Any, example: float, or_none: bool = False, most: float = math.inf) -> Any:
        """Return a number above 0, at most ``most``, as a float."""
        if value is None and or_none:
            return None
        found = as_number(value)
        if found is None or not 0 < found <= most:
            limit = "" if most == math.inf else f" and at most {most:g}"
            self.refuse(f"{name} is {shown(value)}", f"give a number above 0{limit}, such as {name}={example:g}")
        return found

    def flag(self, name: str, value: Any) -> None:
        """Check that the value is True or False."""
        if not isinstance(value, bool):
            self.refuse(f"{name} is {shown(value)}", f"write {name}=True or {name}=False")

    def name(self, name: str, value: Any, *known: str) -> None:
        """Check that the value is a text; ``known``: all valid names, or an example."""
        if not isinstance(value, str) or not value:
            self.refuse(f"{name} is {shown(value)}",
                        nearest(shown(value), known) if len(known) > 1 else f"give a name, such as '{known[0]}'")

    def function(self, name: str, value: Any, arguments: int, hint: str) -> None:
        """Check that the value can be called with so many arguments."""
        if not callable(value):
            self.refuse(f"{name} is {shown(value)}", hint)
            return
        try:
            inspect.signature(value).bind(*[None] * arguments)
        except TypeError as error:
            self.refuse(f"{name} is {shown(value)}, which cannot be called with "
                        f"{counted(arguments, 'argument') if arguments else 'no arguments'}: {error}", hint)
        except ValueError:  # some functions in C have no signature
            pass

    def part(self, kind: type[Part], value: Any) -> Any:
        """Return a part of a description, made of a plain value where one stands for it; it notes its own problems."""
        if isinstance(value, kind):
            return value
        try:
            return kind(value)  # type: ignore[call-arg]
        except UserError as error:
            self._problems += error.problems
            return None

    def instance(self, name: str, value: object, kind: type) -> None:
        """Check that the value is of a class."""
        if not isinstance(value, kind):
            self.refuse(f"{name} is {shown(value)}", f"write {name}={kind.__name__}(...)")

    def names(self, what: str, value: Any, example: str) -> tuple[str, ...]:
        """Return several names as a tuple; one text is refused: it would be taken for its letters."""
        if isinstance(value, str):
            self.refuse(f"{what} are the text {shown(value)}, not a tuple of names",
                        f"write ({value!r},), with a comma" if len(value) < 50 else f"write {example}")
            return ()
        items = _items(value)
        if items is None or not all(isinstance(item, str) and item for item in items):
            self.refuse(f"{what} are {shown(value)}", f"give a tuple of names, such as {example}")
            return ()
        return tuple(items)


def as_integer(value: object) -> int | None:
    """Return a whole number, also numpy's, as an int; None for other values, such as True and 2.0."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # an array, or a tensor, of several
        return None


def as_number(value: object) -> float | None:
    """Return a number, also numpy's and torch's, as a float; None for other values."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def check_path(name: str, value: object, example: str) -> None:
    """Refuse, by a UserError, a value that is neither a text nor a path."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in os.fsdecode(value):
        raise UserError(f"{name} is {shown(value)}", hint=f"give a path, such as '{example}'")


def shown(value: object) -> str:
    """Return a value as a message shows it: its repr if that is short, else its class."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, list, tuple, set, dict, range, os.PathLike)):
        try:
            text = repr(value)
        except Exception:  # such as that of a list of something that cannot be shown
            text = "\n"
        if len(text) <= 60 and "\n" not in text:
            return text
        if isinstance(value, (str, bytes)):
            return f"{text[:40]}...{text[-1]}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Callable) and hasattr(value, "__name__"):  # type: ignore[arg-type]
        return "a function" if value.__name__ == "<lambda>" else f"the function {value.__name__}"
    return f"an object of class {type(value).__name__}"


def _items(value: object) -> list[Any] | None:
    """Return the elements of a list, a tuple, a range or an array of one dimension; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    return list(value) if isinstance(value, Iterable) and getattr(value, "ndim", None) == 1 else None
