"""Register schedules by name: a generator of actions, and the properties that the rest of vpipe must know of it.

A file in ``generators/`` adds a schedule. So does an installed package, by an entry point with the schedule's name in
the group ``vpipe.schedules`` that points to the module with the decorated generator.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import ClassVar

import vpipe.schedules.generators
from vpipe.description.order import Order
from vpipe.errors import Problem, UserError, VpipeError, counted
from vpipe.plugins import PluginGroup
from vpipe.schedules.assignment import Layout, Placement, PlacementRule, Size, default_warmup, widened
from vpipe.schedules.costs import Number
from vpipe.schedules.kinds import Action
from vpipe.schedules.schedule import Schedule

Program = Callable[..., Iterator[Action]]
"""``program(rank, ranks, microbatches)`` yields the compute actions and steps of one rank, lazily.

A schedule with any number of stages per rank also takes ``chunks``, that number, and one that is ``sliced`` takes
``slices``: its indices are then ``microbatch * slices + slice``. A schedule without a flush also takes
``update_every`` and is *prefix-closed*: its actions on microbatches below n are the program for n microbatches. So a
run whose length nobody knows takes the program for very many microbatches and leaves out those that never come.
"""

Bound = Callable[[int, Size], int]
"""``bound(rank, size)``: a number that the checker holds the schedule to."""

VersionRule = Callable[[int, int, Sequence[int], int, Sequence[int]], int]
"""``rule(microbatch, stage, widths, update_every, warmup)``: the number of updates of the stage that made the weights
which the microbatch uses. ``widths`` are the replicas of every stage, ``warmup`` the forwards of a replica of every
stage before its first backward."""

Limits = Number | Sequence[Number | None] | None
"""The activations that a rank may hold, in the unit of ``StageCosts.activation_bytes`` (:mod:`vpipe.schedules.costs`):
one number for all, or one per rank; None is no limit."""


@dataclass(frozen=True)
class RegisteredSchedule:
    """A registered schedule; made by the decorator of its generator, :data:`register_schedule`.

    Attributes:
        name: its name in a config.
        flush: the pipeline is empty at every optimizer step (bsp), or not (asp).
        layout: places the stages: :class:`~vpipe.schedules.assignment.Layout` or any other function. Stages may have
            several ranks, and ranks may be among those of several stages; the generator then yields of every stage on
            its rank the microbatches that go there.
        chunks: stages per rank that a microbatch passes, by default.
        any_chunks: there may be another number of them.
        peak_activations: microbatch-stages whose activations a rank holds at most, each from its forward until its
            gradient has gone through (B or I).
        versions: weight versions that a stage on a rank holds at most.
        update_every: microbatches per update that a schedule without a flush needs at least, from the number of ranks.
        requires: returns what is wrong with a size, with the numbers to change; None when it fits.
        search: makes the schedule for any placement, costs and limits on memory, with the arguments of
            :func:`~vpipe.schedules.search.search.search`; None when the order is fixed.
        planned: ``vpipe plan`` and ``schedule: auto`` try it; those that are ``sliced``, wherever microbatches have
            slices. A schedule with a search is never tried.
        reversible: its backwards may run in any order of the microbatches, because on every rank they follow all
            forwards. An executor with threads asks for that.
        version_of: the closed form of its weight versions, for ``vpipe verify``, which reads them off the actions where
            it is None. Only with ``any_warmup`` it takes the last argument of :data:`VersionRule`.
        any_warmup: its generator and its ``version_of`` take ``warmup`` as well, so that a rank may do more forwards
            before its first backward than 1F1B's.
        sliced: its generator takes ``slices`` as well, so that an action may be of a slice of a microbatch's sequences.
        program: the generator of one rank's actions: the decorated one.
    """

    DEFAULT: ClassVar[str] = "1f1b"  # where nobody names one
    DEFAULT_ORDER: ClassVar[Order] = Order(DEFAULT, slices=1)  # where nobody says more
    DEFAULT_ASYNCHRONOUS: ClassVar[str] = "pipedream"

    name: str
    _: KW_ONLY
    flush: bool
    layout: PlacementRule = Layout.LOOP
    chunks: int = 1
    any_chunks: bool = False
    peak_activations: Bound = lambda rank, size: size.microbatches * size.chunks
    versions: Bound = lambda rank, size: 1
    update_every: Callable[[int], int] = lambda ranks: 1
    requires: Callable[[Size], Problem | None] = lambda size: None
    search: Callable[..., Schedule] | None = None
    planned: bool = False
    reversible: bool = False
    version_of: Callable[..., int] | None = None
    any_warmup: bool = False
    sliced: bool = False
    program: Program = lambda rank, ranks, microbatches: iter(())

    def __call__(self, program: Program) -> Program:
        """Register a generator with these properties.

        Raises:
            UserError: another schedule has that name. The same definition, executed again, replaces itself.
        """
        if not _definition(program).startswith(_OWN):
            _import_generators()  # so that the names of vpipe's own schedules are known to be taken
        known = _REGISTERED.get(self.name)
        if known is not None and _definition(known.program) != _definition(program):
            raise UserError(f"there is already a schedule called '{self.name}': {_definition(known.program)}",
                            hint="choose another name")
        _REGISTERED[self.name] = replace(self, program=program)
        return program

    @property
    def version_rule(self) -> VersionRule | None:
        """Return ``version_of`` as a rule that is given the warm-up, whether it takes it or not."""
        rule = self.version_of
        if rule is None or self.any_warmup:
            return rule
        return lambda microbatch, stage, widths, update_every, warmup: rule(microbatch, stage, widths, update_every)

    @classmethod
    def named(cls, name: str) -> RegisteredSchedule:
        """Return the schedule called ``name``.

        Raises:
            UserError: there is none (the hint names the nearest), or several, or its package cannot be imported.
        """
        if not isinstance(name, str):
            raise UserError(f"the schedule is {name!r}, which is no name",
                            hint="give the name of a schedule, such as 1f1b, or the path of a CSV file, as text")
        _import_generators()
        return PLUGINS.named(name, _REGISTERED, lambda found: _definition(found.program), cls.names)

    @classmethod
    def find(cls, name: str) -> RegisteredSchedule | None:
        """Return the schedule called ``name``; None where :meth:`named` would refuse it."""
        try:
            return cls.named(name)
        except UserError:
            return None

    @classmethod
    def names(cls) -> list[str]:
        """Return every name of :meth:`named`, without importing the packages that announce them."""
        _import_generators()
        return sorted({*_REGISTERED, *PLUGINS.names})

    @classmethod
    def imported(cls) -> list[RegisteredSchedule]:
        """Return the schedules that are imported, by name: vpipe's own, the user's, and those of imported packages."""
        _import_generators()
        return [_REGISTERED[name] for name in sorted(_REGISTERED)]

    @classmethod
    def for_plans(cls, *, flush: bool, slices: int = 1) -> tuple[str, ...]:
        """Return the names that the planner chooses from, with or without a flush, of packages too.

        Those that take slices are among them where there are ``slices`` of every microbatch.
        """
        known = filter(None, map(cls.find, cls.names()))
        return tuple(one.name for one in known if one.search is None and one.flush == flush
                     and (one.planned or (one.sliced and slices > 1)))

    @classmethod
    def with_reversible_backwards(cls) -> tuple[str, ...]:
        """Return the names of the imported schedules whose backwards may run in any order."""
        return tuple(one.name for one in cls.imported() if one.reversible)

    @classmethod
    def threads_refused(cls, schedule: str) -> tuple[str, str] | None:
        """Return why an executor whose forwards run in threads cannot run a schedule, and what to do instead.

        None when it can: if the backwards may be reversed (:func:`vpipe.schedules.rewrites.reverse_backwards`).
        """
        found = cls.find(schedule)
        if found is not None and found.reversible:
            return None
        possible = " or ".join(cls.with_reversible_backwards())
        return (f"which runs the schedule {possible} alone, but the schedule is {schedule}",
                f"use the schedule {possible}, or the executor overlapped, which runs any")

    def placement(self, ranks: int, chunks: int | None = None) -> Placement:
        """Return the ranks of every stage, with so many stages per rank, or as many as it has by default.

        The layout may be a user's.

        Raises:
            UserError: it is no placement of so many stages.
        """
        chunks = self.chunks if chunks is None else chunks
        placement = tuple(map(tuple, self.layout(ranks, chunks)))
        if len(placement) != ranks * chunks or {rank for group in placement for rank in group} != set(range(ranks)):
            raise UserError(f"the layout of '{self.name}' places {counted(ranks * chunks, 'stage')} on "
                            f"{counted(ranks, 'rank')} as {list(map(list, placement))}",
                            hint="let it return the ranks of every stage, numbered from 0, and leave out no rank")
        return placement

    def placement_of(self, stages: int, chunks: int | None, replicas: int, processes: int | None) -> Placement:
        """Return the ranks of so many stages with so many replicas of each.

        Args:
            chunks: stages per rank; when None, as many as follow from the processes, or as it has by default.

        Raises:
            UserError: the numbers do not fit each other.
        """
        if processes is not None and processes % replicas:
            raise UserError(f"{counted(processes, 'process')} for {counted(replicas, 'replica')} of the pipeline",
                            hint=f"start a multiple of {counted(replicas, 'process')}")
        if chunks is None:
            fitting = self.any_chunks and processes is not None and stages % (processes // replicas) == 0
            chunks = stages // (processes // replicas) if fitting and processes else self.chunks
        ranks, left = divmod(stages, chunks)
        if left:
            low, high = ranks * chunks, (ranks + 1) * chunks
            raise UserError(f"'{self.name}' holds {chunks} stages on each rank, which do not divide "
                            f"{counted(stages, 'stage')}",
                            hint=f"use {f'{low} or ' if low else ''}{high} stages")
        if ranks * replicas > Schedule.MOST_RANKS:
            raise UserError(f"{replicas} replicas of {counted(ranks, 'rank')} are {ranks * replicas:,} ranks",
                            hint=f"use {Schedule.MOST_RANKS:,} ranks at most")
        return widened(self.placement(ranks, chunks), replicas)

    def places_copies(self, stages: int) -> bool:
        """Tell whether it places several copies of a stage, even without replicas."""
        return any(len(ranks) > 1 for ranks in self.placement(max(1, stages // self.chunks)))

    def check_chunks(self, chunks: int | None, key: str = "chunks") -> None:
        """Refuse a number of stages per rank that it cannot have; ``key`` is what the user calls it."""
        if chunks is None or (chunks >= 1 if self.any_chunks else chunks == self.chunks):
            return
        if self.any_chunks:
            raise UserError(f"{key} is {chunks}", hint="give a whole number, 1 or more")
        others = ", ".join(other.name for other in RegisteredSchedule.imported() if other.any_chunks)
        raise UserError(f"{key} is {chunks}, but '{self.name}' holds {counted(self.chunks, 'stage')} on each rank",
                        hint=f"leave {key} out" + f", or choose a schedule with any number: {others}" * bool(others))

    def check_slices(self, slices: int, key: str = "slices") -> None:
        """Refuse a number of slices of every microbatch that it cannot have; ``key`` is what the user calls it."""
        if slices < 1:
            raise UserError(f"{key} is {slices}", hint="give a whole number, 1 or more")
        if slices > 1 and not self.sliced:
            others = ", ".join(other.name for other in RegisteredSchedule.imported() if other.sliced)
            raise UserError(f"{key} is {slices}, but '{self.name}' takes whole microbatches",
                            hint=f"leave {key} out, or choose a schedule of slices: {others}")

    def check_warmup(self, widths: Sequence[int], warmup: Sequence[int] | str) -> None:
        """Refuse forwards before the first backward that it cannot have over stages with ``widths`` replicas.

        The microbatches that a stage has in flight beyond those of 1F1B must not become more from stage to stage: a
        stage can take no more of them than the one before lets in. A text, such as auto, stands for any.
        """
        given, least = warmup if isinstance(warmup, str) else list(warmup), default_warmup(widths)
        if not isinstance(given, str) and len(given) != len(least):
            raise UserError(f"warmup_depth has {counted(len(given), 'number')} for {counted(len(least), 'stage')}",
                            hint="give the forwards of every stage before its first backward, or leave it out")
        if given == list(least):
            return
        if not isinstance(given, str) and max(given) > Schedule.MOST_MICROBATCHES:
            raise UserError(f"warmup_depth is {given}", hint=f"give {Schedule.MOST_MICROBATCHES:,} at most")
        if not self.any_warmup:
            others = ", ".join(other.name for other in RegisteredSchedule.imported() if other.any_warmup)
            why = "has a flush" if self.flush else "has an order of its own"
            raise UserError(f"warmup_depth is {given}, but '{self.name}' {why}",
                            hint=f"leave warmup_depth out, or choose one of: {others}")
        if isinstance(given, str):
            return
        fitting, more = list(least), 0  # of the stage after it, in microbatches
        for stage in reversed(range(len(least) - 1)):
            fitting[stage] += -(-max(more, (given[stage] - least[stage]) * widths[stage]) // widths[stage])
            more = (fitting[stage] - least[stage]) * widths[stage]
        for stage, (depth, low) in enumerate(zip(given, least, strict=True)):
            if depth == fitting[stage]:
                continue
            what = f"stage {stage} does {depth} before its first backward"
            if depth < low:
                what += f", but needs {low}"
            elif stage == len(least) - 1:
                what += ", but the last stage has nothing to wait for"
            else:
                what += f", {depth - low} more than it needs, but a stage behind it does more in addition"
            raise UserError(f"warmup_depth is {given}: {what}", hint=f"use {fitting}, the nearest depths that fit")

    def updates_every(self, microbatches: int, update_every: int | None, depth: int, default: bool) -> int:
        """Return the microbatches per update, and replica; the fewest that it can have when None.

        Args:
            depth: the most microbatches in flight at a stage: as many as ranks in a row by ``default``.

        Raises:
            UserError: it cannot update every so many.
        """
        if self.flush:
            if update_every not in (None, microbatches):
                raise UserError(f"update_every is {update_every}, but '{self.name}' updates once per batch of "
                                f"{counted(microbatches, 'microbatch')}", hint="leave update_every out, or choose a "
                                f"schedule without a flush, such as {self.DEFAULT_ASYNCHRONOUS}")
            return microbatches
        least = self.update_every(depth)
        fitting = [n for n in range(1, microbatches + 1) if microbatches % n == 0 and n >= least]
        where = f"on {counted(depth, 'rank')}" if default else \
            f"with {counted(depth, 'microbatch')} in flight at a stage"
        if not fitting:
            raise UserError(f"'{self.name}' {where} updates every {least} microbatches or more, "
                            f"but there are only {microbatches}", hint=f"use {least} microbatches or more, or "
                            + ("fewer ranks" if default else "a lower warmup_depth"))
        every = fitting[0] if update_every is None else update_every
        if every not in fitting:
            why = (f"is less than the {least} that '{self.name}' needs {where}" if 0 < every < least
                   else f"does not divide {counted(microbatches, 'microbatch')}")
            raise UserError(f"update_every is {every}, which {why}", hint=f"choose one of {fitting}")
        return every

    def generate(self, rank: int, size: Size) -> Iterator[Action]:
        """Yield the actions of a rank of a pipeline of that size.

        Raises:
            UserError: the generator takes other arguments, fails, or yields something that is no action.
        """
        arguments = {"rank": rank, "ranks": size.ranks, "microbatches": size.microbatches}
        options: dict[str, object] = {"chunks": size.chunks} if self.any_chunks else {}
        if not self.flush:
            options["update_every"] = size.update_every
        if self.any_warmup:
            options["warmup"] = size.warmup
        if self.sliced:
            options["slices"] = size.slices
        try:
            inspect.signature(self.program).bind(*arguments.values(), **options)
        except TypeError as error:
            names = ", ".join((*arguments, *options))
            raise UserError(f"schedule '{self.name}' does not take {names}: {error}",
                            hint=f"define its generator with the parameters ({names})") from error
        hint = "yield actions: forward(stage, microbatch), backward(stage, microbatch), step(stage, update), ..."
        try:
            actions = self.program(*arguments.values(), **options)
            if not isinstance(actions, Iterable):
                raise UserError(f"schedule '{self.name}' gives {actions!r} for rank {rank}, not actions", hint=hint)
            for action in actions:
                if not isinstance(action, Action):
                    raise UserError(f"schedule '{self.name}' yields {action!r} on rank {rank}, which is no Action",
                                    hint=hint)
                yield action
        except VpipeError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(f"schedule '{self.name}' fails on rank {rank} of {size.ranks} with "
                            f"{counted(size.microbatches, 'microbatch')}: {type(error).__name__}: {error}",
                            hint="mend its generator, or refuse such sizes with requires",
                            where=f"{place.filename}:{place.lineno}") from error


PLUGINS = PluginGroup("vpipe.schedules", "schedule")
_OWN = "vpipe.schedules.generators."
_REGISTERED: dict[str, RegisteredSchedule] = {}

register_schedule = RegisteredSchedule
"""Register the decorated generator as ``name``; see :class:`RegisteredSchedule` for the arguments."""


def _definition(program: Program) -> str:
    """Return ``module.function`` of a generator."""
    return f"{getattr(program, '__module__', None)}.{getattr(program, '__qualname__', repr(program))}"


@cache
def _import_generators() -> None:
    """Import every module of ``generators/``, so that a schedule is added by one file in it."""
    for module in pkgutil.iter_modules(vpipe.schedules.generators.__path__, prefix=_OWN):
        importlib.import_module(module.name)
