"""Set aside what a script has around a call of vpipe, and put it back where the script's own code runs; refuse what a
script changes while microbatches are in flight.

Contexts of torch belong to a thread: all that is called within them is under them. vpipe's own work must not be.
``no_grad`` and ``inference_mode`` would leave a backward nothing to walk; ``torch.autocast`` would cast in a backward
and in an optimizer's step, and its cache, as that of ``parametrize.cached``, would keep weights from before the step,
or casts without a graph. An autocast reaches every layer by itself instead, as that of a precision
(:class:`~vpipe.runtime.stage.Stage`). Other contexts stay, such as hooks for saved tensors, a default device and modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain, zip_longest
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.nn.utils import parametrize

from vpipe.errors import UserError
from vpipe.runtime.stage import Stage
from vpipe.runtime.stage_layers import Marks
from vpipe.runtime.stage_optimizer import StageOptimizer

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

    @property
    def words(self) -> str:
        """Return the words by which ranks compare what is around their calls."""
        return "" if self.autocast is None else f" under torch.autocast({self.autocast})"

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


class ScriptChanges:
    """Notice changes of weights and parameter groups between two marks: which stage sees a change that is made with
    microbatches in flight would depend on the transport.

    Args:
        stages, optimizers: of this process.
        schedule: its name.
        surroundings: under which functions of the script's run.

    Attributes:
        inside: the function of the script's that runs in the middle of an update; None: none does.
    """

    def __init__(self, stages: Sequence[Stage], optimizers: Sequence[StageOptimizer], schedule: str,
                 surroundings: Surroundings) -> None:
        self._stages, self._optimizers, self._schedule = stages, optimizers, schedule
        self._surroundings = surroundings
        self._marked: tuple[str, list[Marks]] | None = None  # since when, with marks
        self.inside: str | None = None

    def mark(self, when: str, sampled: bool = True) -> None:
        """Let :meth:`check` refuse what changes from now on; ``when``: for its error."""
        for stage in self._stages:
            stage.use_latest()  # a module may be the user's own, who looks at it
        self._marked = when, self._marks(sampled)

    def forget(self) -> None:
        """Allow what was changed: nothing is in flight any more."""
        self._marked = None

    def check(self, sampled: bool = True) -> None:
        """Refuse what a script changed since the latest mark; ``sampled``: also a change of ``p.data`` in place.

        Raises:
            UserError: something changed.
        """
        (when, marks), self._marked = self._marked or ("", []), None
        for before, now in zip(marks, self._marks(sampled) if marks else (), strict=True):
            if before != now:
                name = next((new or old)[0] for old, new in zip_longest(
                    zip(*before, strict=True), zip(*now, strict=True), fillvalue=()) if old != new)
                what = f"'{name}'" if name else "a parameter group of an optimizer"
                if name:  # what is under way has the rates of before
                    self._marked = when, marks
                raise UserError(f"{what} was changed {when}, while '{self._schedule}' has microbatches in flight",
                                hint="change it in the body of the loop, without a flush after drain() or at a pause; "
                                     "give learning rates as learning_rate_factor=lambda step: ...")

    def calling(self, function: Callable[P, T], name: str, in_flight: Callable[[], bool]) -> Callable[P, T]:
        """Return a function of the script's that may change nothing while there are microbatches ``in_flight``."""
        function = self._surroundings.calling(function)

        def call(*arguments: P.args, **keywords: P.kwargs) -> T:
            if not in_flight():
                return function(*arguments, **keywords)
            self.mark(f"by {name}", sampled=False)
            self.inside = name
            try:
                return function(*arguments, **keywords)
            finally:
                self.inside = None
                self.check(sampled=False)  # quicker: this is done in every update
        return call

    def _marks(self, sampled: bool) -> list[Marks]:
        options = [optimizer.options() for optimizer in self._optimizers]
        return [*chain.from_iterable([stage.marks(sampled) for stage in self._stages]), ([""] * len(options), options)]
