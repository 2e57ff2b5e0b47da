"""Set aside what a script has around a call of vpipe, and put it back where the script's own code runs.

Contexts of torch belong to a thread: all that is called within them is under them. vpipe's own work must not be.
``no_grad`` and ``inference_mode`` would leave a backward nothing to walk. ``torch.autocast`` would cast in a backward
and in an optimizer's step, and its cache would keep weights from before the step, as that of ``parametrize.cached``
would. An autocast reaches every layer by itself instead, as that of a precision (:class:`~vpipe.runtime.stage.Stage`).
Other contexts stay, such as hooks for saved tensors, a default device and other modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn.utils import parametrize

from vpipe.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


class _Contexts(NamedTuple):
    """The contexts of a thread: the dtype of an autocast that is enabled; how many are entered, enabled or not."""

    grad: bool = True
    inference: bool = False
    autocast: torch.dtype | None = None
    autocasts: int = 0
    parametrized: int = 0


class Surroundings:
    """What a script has around the calls of a pipeline.

    Args:
        kind: of the pipeline's device.
        autocasts: whether layers run in an autocast of the precision, which wins.
    """

    def __init__(self, kind: str, autocasts: bool) -> None:
        self._kind, self._autocasts = kind, autocasts
        self._given: _Contexts | None = None  # around the present call

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the autocast around the present call, if it reaches the layers."""
        return None if self._given is None or self._autocasts else self._given.autocast

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Set aside the contexts around a call; a call within this one has none."""
        if self._given is not None:
            yield
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UserError("a pipeline is used within a transform of torch.func, such as vmap or grad",
                            hint="call the pipeline outside the transform; its layers may use transforms themselves")
        with self._within(_Contexts(), self._here()):
            yield

    @contextmanager
    def _within(self, contexts: _Contexts, given: _Contexts | None = None) -> Iterator[None]:
        """Have these contexts around meanwhile; ``given``: those that they set aside, if they do."""
        before, self._given, around = self._given, given, self._here()
        try:
            with torch.inference_mode(contexts.inference), torch.set_grad_enabled(contexts.grad):
                self._put(contexts)
                yield
        finally:
            self._put(around)
            self._given = before

    def _here(self) -> _Contexts:
        torch.autocast_increment_nesting()
        autocasts, kind = torch.autocast_decrement_nesting(), self._kind
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return _Contexts(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype, autocasts,
                         parametrize._cache_enabled)

    def _put(self, contexts: _Contexts) -> None:
        """Put an autocast and the cache of parametrizations. At no depth the end of every autocast drops its casts."""
        now = self._here().autocasts
        for _ in range(now, contexts.autocasts):
            torch.autocast_increment_nesting()
        for _ in range(contexts.autocasts, now):
            torch.autocast_decrement_nesting()
        torch.set_autocast_enabled(self._kind, contexts.autocast is not None)
        parametrize._cache_enabled, parametrize._cache = contexts.parametrized, {}

    def calling(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function of the script's that runs under the contexts around the present call."""
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            with self._within(self._given or _Contexts()):
                return function(*arguments, **keywords)
        return call

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Read batches so; a generator that yields within ``no_grad`` or ``inference_mode`` finds itself there again.
        """
        left: _Contexts | None = None
        while True:
            before = left or self._given or _Contexts()
            with self._within(before):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                left = self._here()
                if left.autocasts != before.autocasts and hasattr(batches, "close"):
                    batches.close()  # here, where it leaves what it has entered
            if left.autocasts != before.autocasts:
                raise UserError("the batches come from a generator that yields within torch.autocast, which stays on "
                                "in the training", hint="leave the autocast before yield")
            left = None if left == self._given else left
            yield batch


def set_aside(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Let a method run with the contexts around its call set aside; its object has ``surroundings``."""
    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        with self.surroundings.set_aside():
            return method(self, *arguments, **keywords)
    return call
