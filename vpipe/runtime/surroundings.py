"""Set aside what a script has around a call of vpipe, and put it back where the script's own code runs.

Contexts of torch belong to a thread: all that is called within them is under them. vpipe's own work must not be.
``no_grad`` and ``inference_mode`` would leave a backward nothing to walk; ``torch.autocast`` would cast in a backward
and in an optimizer's step, and its cache, as that of ``parametrize.cached``, would keep weights from before the step,
or casts without a graph. An autocast reaches every layer by itself instead, as that of a precision
(:class:`~vpipe.runtime.stage.Stage`). Other contexts stay, such as hooks for saved tensors, a default device and modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.nn.utils import parametrize

P = ParamSpec("P")
T = TypeVar("T")


class Surroundings:
    """What a script has around the calls of a pipeline.

    Args:
        kind: of the pipeline's device.

    Attributes:
        autocast: the dtype of the autocast around the present call, if it is enabled.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.autocast: torch.dtype | None = None
        self._given: Callable[[], AbstractContextManager[None]] | None = None  # around the present call

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Set aside the contexts around a call; a call within this one has none."""
        if self._given is not None:
            yield
            return
        self.autocast = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        given = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.autocast
        self._given = partial(self._within, *given)
        cached, parametrize._cache_enabled = parametrize._cache_enabled, 0
        try:
            with nullcontext() if given == (True, False, None) else self._within(True, False, None):
                yield
        finally:
            self._given = None
            parametrize._cache_enabled, parametrize._cache = cached, {}

    @contextmanager
    def _within(self, grad: bool, inference: bool, autocast: torch.dtype | None) -> Iterator[None]:
        with (torch.inference_mode(inference), torch.set_grad_enabled(grad),
              torch.autocast(self._kind, autocast, enabled=autocast is not None)):
            torch.clear_autocast_cache()
            yield
            torch.clear_autocast_cache()

    def calling(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function of the script's that runs under the contexts around the present call."""
        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            with (self._given or nullcontext)():
                return function(*arguments, **keywords)
        return call


def set_aside(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Let a method run with the contexts around its call set aside; its object has ``surroundings``."""
    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        with self.surroundings.set_aside():
            return method(self, *arguments, **keywords)
    return call
