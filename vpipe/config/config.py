"""Load the config of a run: one frozen :class:`Config`, from a native or a flat VPipe file and the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import Field

from vpipe.config.apply_plan import PLAN, apply_plan, drop_derived
from vpipe.config.machines import machine_mistakes
from vpipe.config.parallel import SCHEDULE_OF_SCHEDULERS, SCHEDULERS, ParallelSection
from vpipe.config.sections import (
    CheckpointSection,
    DatasetSection,
    FilePath,
    LaunchSection,
    MetricsSection,
    ModelSection,
    Texts,
    TrainingSection,
    neighbours,
)
from vpipe.config.validation import CHECKED, Mistake, Section, validated
from vpipe.config.vpipe_flat import FLAT_KEYS, REPLACED_SECTIONS, to_native
from vpipe.config.yaml_tree import Place, Tree, describe, parse, read_yaml, write
from vpipe.errors import UserError
from vpipe.runtime.executors.registry import NO_TIMELINE, THREADED
from vpipe.schedules.registry import recipe_if_any

DEEPEST = 8
"""Largest number of names in a key of ``--set``; keys of a config have at most four."""


class Config(Section):
    """Everything that decides a run. Paths are taken from the current folder."""

    model: ModelSection = Field(description="model to train")
    dataset: DatasetSection = Field(description="training data")
    training: TrainingSection = Field(description="length of the training, optimizer and numerics")
    parallel: ParallelSection = Field(description="stages, their ranks and their schedule")
    checkpoint: CheckpointSection | None = Field(None, description="when checkpoints are written, and where")
    launch: LaunchSection = Field(default_factory=lambda: LaunchSection.model_validate({}), description=(
        "start of the ranks, above all on other hosts"))
    metrics: MetricsSection = Field(default_factory=lambda: MetricsSection.model_validate({}), description=(
        "metrics beside metrics.jsonl"))
    machines: Texts | None = Field(None, description=(
        "host:gpu of each rank, such as [hostA:0, hostA:1, hostB:0]; the first is this host, the others are reached "
        "over ssh; null runs all ranks on this host"))
    container: str | None = Field(None, description="container image for the ranks, run with apptainer or singularity")
    log_directory: FilePath = Field(Path("output"), description="parent folder of the run folders")
    trace: bool = Field(False, description="write the timeline of the run")
    elastic: bool = Field(False, description="restart with fewer ranks when a host stays away")

    @property
    def saving(self) -> CheckpointSection:
        """The checkpoint section; its defaults if the config has none."""
        return self.checkpoint or CheckpointSection.model_validate({})

    @property
    def microbatch_size(self) -> int:
        """Samples per microbatch."""
        return self.dataset.batch_size // self.training.num_microbatches

    def mistakes(self) -> Iterator[Mistake]:
        if self.machines is not None:
            yield from machine_mistakes(self.machines)
        samples, microbatches = self.dataset.batch_size, self.training.num_microbatches
        if samples % microbatches:
            low, high = neighbours(samples, microbatches)
            yield Mistake(("dataset", "batch_size"),
                          f"is {samples}, which the {microbatches} microbatches of training.num_microbatches do not "
                          "divide", f"the nearest batch sizes are {low} and {high}" if low else
                          f"the nearest batch size is {high}")
        every = self.parallel.update_every or 1
        if self.parallel.asynchronous and microbatches % every:
            divisors = ", ".join(str(k) for k in range(1, microbatches + 1) if microbatches % k == 0)
            yield Mistake(("parallel", "update_every"),
                          f"is {every}, which does not divide the {microbatches} microbatches of a batch",
                          f"use one of {divisors}, or make training.num_microbatches a multiple of {every}")

        codecs = self.parallel.compress if isinstance(self.parallel.compress, tuple) else (self.parallel.compress,)
        for key, what, hint in self.training.computed.refused(codecs):
            yield Mistake(("parallel", key), what, hint)

        if self.trace and self.parallel.executor == THREADED:
            yield Mistake(("trace",), f"is true, but {NO_TIMELINE[0]}", NO_TIMELINE[1])

    def with_parallel(self, **changes: object) -> Config:
        """Return this config with other values of ``parallel``, which are not validated."""
        return self.model_copy(update={"parallel": self.parallel.model_copy(update=changes)})

    def resolved_yaml(self) -> str:
        """Return this config as native YAML with every key; loading it gives an equal config."""
        return write(self.model_dump(mode="json"))


def load_config(path: Path, overrides: Sequence[str] = (), scheduler: str | None = None, *,
                resolved: bool = False) -> Config:
    """Load the config in the file at ``path``, native or flat.

    Args:
        overrides: values of ``--set``, such as ``training.learning_rate=3e-4``: native keys; for a flat file its own
            keys, too.
        scheduler: value of ``--scheduler``; it overrides the schedule and the executor of the file.
        resolved: the file is the config of a run, which has every key; keys that derive from an overridden key are
            derived anew.

    Raises:
        UserError: all mistakes in the files and on the command line.
    """
    tree = read_yaml(path)
    settings = [_setting(text) for text in overrides]
    if _is_flat(tree.value):
        flat = [(key, part) for key, part in settings if key in FLAT_KEYS]
        settings = [(key, part) for key, part in settings if key not in FLAT_KEYS]
        for key, part in flat:
            tree.put((key,), part)
        tree = to_native(tree, path.parent, Config.model_fields)
    if scheduler is not None and scheduler not in SCHEDULERS and recipe_if_any(scheduler) is not None:
        raise UserError(f"'{scheduler}' is a schedule; a scheduler is {' or '.join(SCHEDULERS)}",
                        hint=f"write --set parallel.schedule={scheduler}", where="--scheduler")
    if scheduler is not None:
        place = Place("--scheduler", "--scheduler", "--scheduler")
        overridden = {key for key, _ in settings}
        settings.append(("parallel.scheduler", Tree.leaf(scheduler, place)))
        if scheduler in SCHEDULERS:
            meant = {"parallel.schedule": SCHEDULE_OF_SCHEDULERS, "parallel.executor": scheduler}
            settings += [(key, Tree.leaf(value, place)) for key, value in meant.items() if key not in overridden]
            drop_derived(tree, {"parallel.schedule": SCHEDULE_OF_SCHEDULERS})
    if resolved:
        drop_removed(tree)
        drop_derived(tree, {key: part.value for key, part in settings})
    for key, part in settings:
        tree.put(tuple(key.split(".")), part)
    if isinstance(plan := tree.get(PLAN), str):
        apply_plan(tree, plan, [key for key, _ in settings])
    return validated(Config, tree)


def load_resolved(path: Path) -> Config:
    """Load the config of a job that another process of this run wrote; its rules are not checked again."""
    return Config.model_validate(read_yaml(path).value, context=CHECKED)


def parse_resolved(text: str) -> Config:
    """Parse the YAML of the config of a job that another process of this run has; see :func:`load_resolved`."""
    return Config.model_validate(parse(text, "", "config").value, context=CHECKED)


def drop_removed(tree: Tree) -> None:
    """Drop the keys of a run's config that older versions had on by default and this one refuses."""
    tree.drop(("parallel", "compress_feedback"))


def _is_flat(values: Iterable[str]) -> bool:
    """Return whether a file with these top-level keys has VPipe's flat form: flat keys, and no native section."""
    keys = set(values)
    return bool(keys & FLAT_KEYS - set(Config.model_fields)) and not keys & REPLACED_SECTIONS


def _setting(text: str) -> tuple[str, Tree]:
    """Parse the ``key=value`` of a ``--set``; the value is YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    where = f"--set {key}"
    if not equals or not all(parts := key.split(".")) or len(parts) > DEEPEST:
        raise UserError(f"{describe(text)} does not set a key", where=where,
                        hint="write --set training.learning_rate=3e-4")
    return key, parse(value, key, where)
