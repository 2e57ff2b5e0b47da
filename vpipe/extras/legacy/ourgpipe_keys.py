"""Read the keys that OurGPipe and older versions of vpipe have in a native config: ``scheduler`` is a schedule with an
executor, ``compress_feedback`` was removed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from vpipe.app.command_line import OptionSetting
from vpipe.app.config.config import Config, load_config
from vpipe.app.config.formats import ConfigAddition
from vpipe.app.config.parallel import OF_SCHEDULE
from vpipe.app.config.validation import Section, checked
from vpipe.app.config.yaml_tree import Tree, describe
from vpipe.errors import Problem, UserError, counted
from vpipe.extras.legacy.options import OPTION
from vpipe.schedules import RegisteredSchedule

Scheduler = Literal["naive", "async_threaded"]
SCHEDULERS: tuple[str, ...] = get_args(Scheduler)
SCHEDULE = "gpipe"
"""The schedule that OurGPipe's schedulers run."""


class OldKeys(Section):
    """Keys of the section ``parallel``."""

    scheduler: Scheduler | None = Field(None, description=(
        "OurGPipe's name for schedule gpipe with this executor; --scheduler on the command line overrides the "
        "schedule and the executor of the config"))
    compress_feedback: bool = Field(False, description="always false: error feedback on gradients was removed")


class OurGPipe(ConfigAddition):
    """The old keys in a native config."""

    def replace_keys(self, tree: Tree, given: Collection[str]) -> None:
        """Replace ``scheduler`` by the schedule and the executor that it means; drop ``compress_feedback``."""
        parallel = tree.get(("parallel",))
        names = [name for name in OldKeys.model_fields if name in parallel] if isinstance(parallel, dict) else []
        if not names:
            return
        old = Tree({}, {(): tree.places["parallel",]})
        if "scheduler" in names and tree.get(count := ("training", "num_microbatches")) is None \
                and isinstance(tree.get(("training",)), dict) and "parallel.scheduler" not in given:
            tree.put(count, Tree.leaf(1, tree.places["parallel", "scheduler"]))  # OurGPipe's own default
        for name in names:
            old.put((name,), tree.at(("parallel", name)))
            tree.drop(("parallel", name))
        scheduler, where = old.get(("scheduler",)), old.where(("scheduler",))
        if isinstance(scheduler, str) and scheduler not in SCHEDULERS \
                and RegisteredSchedule.find(scheduler) is not None:
            raise UserError(f"'{scheduler}' is a schedule; a scheduler is {' or '.join(SCHEDULERS)}",
                            hint=f"write --set parallel.schedule={scheduler}", where=where)
        keys, problems = checked(OldKeys, old)
        tree.problems += problems
        if keys is not None and keys.compress_feedback and _compresses(tree.get(("parallel", "compress"))):
            tree.problems.append(Problem(f"{old.name(('compress_feedback',))} is true, but error feedback was removed: "
                                         "it made gradients less exact", "leave it out",
                                         old.where(("compress_feedback",))))
        if keys is not None and keys.scheduler is not None:
            self._put_meaning(keys.scheduler, tree, old, given)

    def _put_meaning(self, scheduler: Scheduler, tree: Tree, old: Tree, given: Collection[str]) -> None:
        option = old.where(("scheduler",)) == OPTION
        for key, meant in (("schedule", SCHEDULE), ("executor", scheduler)):
            name = f"parallel.{key}"
            written = tree.get(("parallel", key))
            if written not in (None, meant) and not (option and name not in given):
                tree.problems.append(Problem(
                    f"{name} is {describe(written)}, but scheduler: {scheduler} means {key}: {meant}",
                    "leave one of the two out, the scheduler of a file with --set parallel.scheduler=null",
                    tree.where(("parallel", key))))
            tree.put(("parallel", key), Tree.leaf(meant, old.places["scheduler",]))
        if option:
            for key in OF_SCHEDULE:  # of the file's schedule
                if f"parallel.{key}" not in given:
                    tree.drop(("parallel", key))

    def note(self, path: Path, settings: Sequence[str], config: Config) -> str | None:
        """Return a note where ``--scheduler`` gives a flush to a file without one: its batch may be one microbatch."""
        scheduler = next((setting.words[1] for setting in settings if isinstance(setting, OptionSetting)
                          and setting.option == OPTION), None)
        if scheduler is None:
            return None
        with suppress(UserError):  # in a file that is wrong without it
            written = load_config(path, [setting for setting in settings if not isinstance(setting, OptionSetting)],
                                  started=None).parallel
            if written.asynchronous:
                few, stages = config.microbatches, config.parallel.model_parallel_size
                return (f"{OPTION} {scheduler} takes {config.parallel.schedule} instead of "
                        f"{written.schedule}: {counted(few, 'microbatch')} per flush"
                        + (f", so most of the {stages} stages wait; set training.num_microbatches" if few < stages
                           else ""))
        return None


def _compresses(compress: object) -> bool:
    return any(name not in (None, "none") for name in (compress if isinstance(compress, list) else [compress]))
