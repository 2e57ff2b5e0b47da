"""Report errors with their place and a remedy.

A :class:`UserError` is a mistake in a config, a partition or a data folder. It is found before a process starts and
ends the command with exit status 2. A :class:`RunError` happens during a run. It has the rank, stage and action, and
ends the command with exit status 1. The command shows neither with a traceback.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from types import FrameType, TracebackType
from typing import Any

__all__ = ["CheckError", "PerformanceWarning", "Problem", "RunError", "UserError", "VpipeError", "counted", "nearest"]

MOST_SHOWN = 20
"""Largest number of problems that one error shows."""

LONGEST_LINE = 1000
"""Largest length of an error's line: names, values and paths come from files, and may have any length."""

_EXPORT = "vpipe checkpoint export RUN --format huggingface -o DIR"
_SEARCH = f"export the model ({_EXPORT}) and search with transformers: model.generate(ids, num_beams=4)"

RETIRED: dict[str, str] = {
    "vpipe bench": "write vpipe compare --models NAME,...",
    "vpipe.Model.with_adapters": "from vpipe.hugging_face import with_adapters: with_adapters(model, config)",
    "vpipe.checkpoint.Manifest.no_longer_used": "leave it out: checkpoints have no error feedback of gradients",
    "vpipe.schedules.Advice": "from vpipe.schedules import delays: delays.mean_delay(schedule, stage), "
                              "delays.greatest_delay(schedule, stage); Pipeline warns where they cost much",
    "vpipe.schedules.Repeating": "vpipe schedule NAME --ranks 4 --microbatches 60000 proves and draws a schedule that "
                                 "is too long to list; outline(name, placement, microbatches) generates its programs",
    "vpipe launch": "start each rank by hand: RANK=0 LOCAL_RANK=0 WORLD_SIZE=4 MASTER_ADDR=hostA MASTER_PORT=29400 "
                    "vpipe train CONFIG",
    "training.optimizer=soap": "take muon, which loses as little under delay; in Python any optimizer: Pipeline(model, "
                               "Update(lambda params: YourSoap(params, lr=3e-3)), ...)",
    "vpipe.plan.PlanRequest.with_measured": "measure the layers again: vpipe profile CONFIG --again",
    "vpipe.testing.TrainingRecipe.apply(overflow)": "leave it out: the gradients that are given tell of an overflow",
    "vpipe.testing.TrainingRecipe.weight": "say what labels count: Model(..., labels='labels', label_weights=...)",
    "vpipe.testing.ReferencePrecision.weight": "round it: master.to(precision.dtype) if precision.pure else master",
    "vpipe sample --beams": _SEARCH,
    "vpipe sample --best": _SEARCH,
    "vpipe sample --length-penalty": _SEARCH,
    "vpipe sample --ranks": f"leave it out; if one process cannot hold the model: {_EXPORT}, for transformers",
    "vpipe.runtime.Ring": "send tensors with torch.distributed.send and torch.distributed.recv",
}
"""What vpipe had once, and what to do instead: refused where a config, a command or a call asks for it.

A key is what a user wrote: a key of a config (``training.name``), a key with one of its values
(``training.optimizer=soap``), a command with an option of it (``vpipe launch --print``), a public name with its module.
"""


@dataclass(frozen=True)
class Problem:
    """One mistake: ``what`` (with its numbers), ``hint`` (the remedy), ``where`` (``file:line:column``)."""

    what: str
    hint: str
    where: str | None = None

    def __str__(self) -> str:
        place = f" ({shortened(self.where)})" if self.where else ""
        return f"error: {shortened(self.what)}{place}\nhint: {shortened(self.hint)}"


class VpipeError(Exception):
    """Base of all errors that vpipe raises on purpose.

    Attributes:
        brief: the line that this process prints if another rank reports the error.
    """

    exit_status = 1
    brief: str | None = None
    _frames = ""

    @property
    def frames(self) -> str:
        """Return the lines of the user's code that led to it, as in a traceback; set, those in another process."""
        return self._frames or user_frames(self)

    @frames.setter
    def frames(self, lines: str) -> None:
        self._frames = lines

    def with_frames(self) -> str:
        """Return the error with the lines of the user's code that led to it: before the remedy, if it has one."""
        what, mark, hint = str(self).partition("\nhint: ")
        return f"{what}\n{self.frames}{mark.lstrip()}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the text and all fields for another process, with the user's lines, which a traceback has here."""
        # Made without __init__, whose arguments a subclass may change.
        return Exception.__new__, (type(self), *self.args), {**vars(self), "_frames": self.frames}

    def show(self) -> None:
        """Print it with those lines on stderr, and write it for the summary of torchrun."""
        text = self.with_frames()
        print(text, file=sys.stderr)
        write_error_file(text)


class UserError(VpipeError, ValueError):
    """One or several mistakes of the user, each with its remedy; exit status 2. ``retired``: see :data:`RETIRED`."""

    exit_status, retired = 2, RETIRED

    def __init__(self, what: str, *, hint: str, where: str | None = None) -> None:
        self.problems: tuple[Problem, ...] = (Problem(what, hint, where),)
        super().__init__(str(self.problems[0]))

    def with_frames(self) -> str:
        """Return the error with the lines of the user's code: before the remedy, if there is one of them."""
        return super().with_frames() if len(self.problems) == 1 else f"{self}\n{self.frames}".rstrip()

    @classmethod
    def all_of(cls, problems: Sequence[Problem]) -> UserError:
        """Return one error that lists the problems, at most :data:`MOST_SHOWN`."""
        assert problems, "an error needs at least one problem"
        first, more = problems[0], len(problems) - MOST_SHOWN
        error = cls(first.what, hint=first.hint, where=first.where)
        error.problems = tuple(problems)
        rest = [f"and {counted(more, 'more error')}"] if more > 0 else []
        error.args = ("\n".join([*map(str, problems[:MOST_SHOWN]), *rest]),)
        return error


class CheckError(UserError):
    """A schedule breaks a rule; the text holds the grid with the actions at fault marked.

    Attributes:
        marks: (rank, position in its program) of each; the position after the last action is the end.
    """

    marks: tuple[tuple[int, int], ...] = ()


class RunError(VpipeError):
    """A run failed; the error has the rank, the stage, the action and the reason; exit status 1.

    Attributes:
        host: of the rank, where there are several.
    """

    host: str | None = None

    def __init__(self, what: str, *, hint: str, rank: int | None = None, stage: int | None = None,
                 microbatch: int | None = None, action: str | None = None, peer: int | None = None) -> None:
        self.what, self.hint = what, hint
        self.rank, self.stage, self.microbatch, self.action, self.peer = rank, stage, microbatch, action, peer
        super().__init__(what)

    @classmethod
    def for_want_of_descriptors(cls, error: Exception, rank: int | None = None) -> RunError | None:
        """Return an error that memory, or file descriptors, ran out, if that is why another was raised; else, or if
        that one says so itself, None.

        Args:
            rank: where the error was raised; None in a process that is none.
        """
        hint = hint_if_exhausted(error)
        if hint is None or (isinstance(error, RunError) and error.hint == hint):
            return None
        who = "this process" if rank is None else f"rank {rank}"
        what = "too little memory" if hint == LESS_MEMORY else f"no file descriptor left, of {_most_descriptors()}"
        named = cls(f"{who} has {what}: {str(error).partition(chr(10))[0] or type(error).__name__}", hint=hint,
                    rank=rank)
        named.__cause__ = error
        return named

    @property
    def located(self) -> str:
        """Return the reason and the place: ``out of luck (rank 2, stage 3, microbatch 5, action 3F5)``."""
        places = [f"{name} {value}" for name, value in
                  (("rank", self.rank), ("stage", self.stage), ("host", self.host), ("microbatch", self.microbatch),
                   ("action", self.action), ("peer rank", self.peer)) if value is not None]
        return f"{self.what} ({', '.join(places)})" if places else self.what

    def __str__(self) -> str:
        return f"error: {self.located}\nhint: {self.hint}"


class PerformanceWarning(UserWarning):
    """A request that is valid but slow, or learns slowly: the text has the reason, with numbers, and a better way."""


LESS_MEMORY = "smaller microbatches, more recompute, or fewer layers in this stage take less memory"


def hint_if_exhausted(error: BaseException) -> str | None:
    """Return the remedy for an error because memory, or file descriptors, ran out; None for any other error."""
    seen = set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, MemoryError) or type(one).__name__ == "OutOfMemoryError" or (
                "can't allocate memory" in str(one)):  # the latter two are torch's
            return LESS_MEMORY
        number = one.errno if isinstance(one, OSError) else None
        if number == errno.ENFILE or "Too many open files in system" in str(one):
            return "the whole machine has none left: end other programs, or raise fs.file-max"
        if number == errno.EMFILE or "Too many open files" in str(one):
            return f"raise the limit before it starts: ulimit -n {2 * _most_descriptors()}"
        one = one.__cause__ or one.__context__
    return None


def _most_descriptors() -> int:
    """Return how many file descriptors this process may have."""
    import resource  # here, for Python in a browser lacks it

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shortened(text: str) -> str:
    """Return ``text`` with every line cut to :data:`LONGEST_LINE` characters."""
    return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE - 3]}..."
                     for line in text.split("\n"))


def counted(count: int, word: str, *, commas: bool = False) -> str:
    """Return ``1 rank``, ``2 ranks``, ``2 microbatches``; with commas ``1,024 samples``."""
    number = f"{count:,}" if commas else str(count)
    return f"{number} {word}" + ("" if count == 1 else "es" if word.endswith(("ch", "s")) else "s")


def nearest(word: str, known: Sequence[str], *, open_list: bool = False) -> str:
    """Return a hint for an unknown name: the nearest valid one, whatever its case, or all of them.

    Args:
        open_list: whether users may add to the names: of a schedule, a model or a data set.
    """
    folded = {name.casefold(): name for name in known}
    close = get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    hint = f"did you mean '{folded[close[0]]}'?" if close else f"known names: {', '.join(sorted(known))}"
    adding = "our own are added by importing their file (--import FILE.py) or by a package"
    return hint if not open_list else f"{hint} Y{adding}" if close else f"{hint}; y{adding}"


# -- the user's own code in a traceback ------------------------------------------------------------------------------

HIDDEN = frozenset({"vpipe", "torch", "numpy", "pydantic", "yaml", "tokenizers", "h5py", "tqdm", "safetensors"})
"""Packages whose lines are no user's: vpipe, and what it stands on."""

STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def user_frames(error: BaseException) -> str:
    """Return the lines of the user's code in the traceback of an error, and in that of its cause if it is vpipe's."""
    text, seen = "", set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        text += "".join(traceback.format_tb(without_hidden(one.__traceback__)))
        one = one.__cause__ if isinstance(one, VpipeError) else None
    return text


def without_hidden(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback of the user's frames alone; None where there is none."""
    result: TracebackType | None = None
    for link in reversed(list(links(trace))):
        if is_users(link.tb_frame):
            result = TracebackType(result, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return result


def links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def package(frame: FrameType) -> str:
    """Return the package of a frame's module; where ``python -m`` runs the module, its name is ``__main__``."""
    spec = frame.f_globals.get("__spec__")
    return str(frame.f_globals.get("__name__", "") if spec is None else spec.name).partition(".")[0]


def is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return (package(frame) not in HIDDEN and not file.startswith("<frozen ")
            and (not file.startswith(STANDARD_LIBRARY) or "-packages" in file))


def write_error_file(text: str) -> None:
    """Write the error for the summary of torchrun, if it started this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        with suppress(OSError), open(path, "x") as file:
            json.dump({"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
