"""Report mistakes that the ranks find before they train, and failures after which no attempt follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vpipe.errors import RunError, UserError


class StartError(UserError):
    """A mistake that the ranks of a run found before they trained, such as data that a host does not have."""


class LastingError(RunError):
    """A failure that would happen again from the same state, such as a loss that is not finite: no restart follows."""


@contextmanager
def os_errors(what: str, hint: str) -> Iterator[None]:
    """Let an error of the system be one of the user: ``cannot write 'a.csv': No space left on device``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}", hint=hint) from None
