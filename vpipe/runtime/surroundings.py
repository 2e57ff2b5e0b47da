"""Set aside what a script has around a call of vpipe, and put it back where the script's own code runs.

Contexts of torch belong to a thread: all that is called within them is under them. vpipe's own work must not be.
``no_grad`` and ``inference_mode`` would leave a backward nothing to walk; ``torch.autocast`` would cast in a backward
and in an optimizer's step. An autocast reaches every layer by itself instead, as that of a precision
(:class:`~vpipe.runtime.stage.Stage`). Other contexts stay, such as hooks for saved tensors, a default device and modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class _Contexts(NamedTuple):
    """The contexts of a thread; the dtype of an autocast that is enabled."""

    grad: bool = True
    inference: bool = False
    autocast: torch.dtype | None = None


class Surroundings:
    """What a script has around the calls of a pipeline on a kind of device."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._given: _Contexts | None = None  # around the present call

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the autocast around the present call."""
        return None if self._given is None else self._given.autocast

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Set aside the contexts around a call; a call within this one has none."""
        if self._given is not None:
            yield
            return
        dtype = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        self._given = _Contexts(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype)
        try:
            with self._within(_Contexts()):
                yield
        finally:
            self._given = None

    @contextmanager
    def _within(self, contexts: _Contexts) -> Iterator[None]:
        with (torch.inference_mode(contexts.inference), torch.set_grad_enabled(contexts.grad),
              torch.autocast(self._kind, contexts.autocast, enabled=contexts.autocast is not None)):
            yield

    def calling(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function of the script's that runs under the contexts around the present call."""
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            with self._within(self._given or _Contexts()):
                return function(*arguments, **keywords)
        return call


def set_aside(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Let a method run with the contexts around its call set aside; its object has ``surroundings``."""
    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        with self.surroundings.set_aside():
            return method(self, *arguments, **keywords)
    return call
