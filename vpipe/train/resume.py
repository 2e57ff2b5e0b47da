"""Going on with a run: where, from which checkpoint, whether that fits, and the run's folder made ready for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from vpipe.checkpoint.directory import Checkpoints, find_checkpoint
from vpipe.checkpoint.integrity import newest_intact_before, older_intact_hint
from vpipe.checkpoint.manifest import Manifest, no_longer_used
from vpipe.config.config import Config, load_config
from vpipe.config.parallel import AUTO
from vpipe.config.sections import ModelSection
from vpipe.config.validation import validated
from vpipe.config.yaml_tree import describe, parse
from vpipe.data.dataset import Tokenized
from vpipe.errors import Problem, UserError, counted
from vpipe.plan.plan import Plan
from vpipe.plan.recompute import recomputed_layers
from vpipe.runtime.state_dict import Position
from vpipe.train.changes import changes
from vpipe.train.roots import RUN, absolute, config_of, new_root, put_away_later, roots_of
from vpipe.train.run_folder import (
    CONFIG,
    METRICS,
    PLAN,
    begin_attempt,
    last_step,
    make_run_folder,
    next_attempt,
    take,
    why_unsaved,
)

if TYPE_CHECKING:
    from vpipe.train.job import Job

IMPORTED = "imported"
"""Entry of the arrangement of a checkpoint that no run made: it has weights, and no past."""

_BINDING = {"training.seed": "the initial weights, dropout and the order of the data follow from it",
            "dataset.batch_size": "which samples are done follows from it",
            "training.optimizer": "the state in the checkpoint is the other optimizer's"}
"""What a run that goes on may not change, and why."""


@dataclass(frozen=True)
class Start:
    """Where a run begins that is not a new one.

    Attributes:
        folder: of the run that goes on; None for a new one that takes a checkpoint from elsewhere.
        checkpoint: the absolute path of one; None to go on from the beginning, when a run ended before its first.
    """

    folder: Path | None
    checkpoint: Path | None

    @property
    def folders(self) -> list[Path]:
        """What must be there to go on."""
        return [path for path in (self.folder, self.checkpoint) if path is not None]


def start_of(path: Path) -> Start:
    """What ``--resume`` names: the folder of a run, its checkpoints, or one of them.

    Raises:
        UserError: there is no checkpoint.
    """
    path = absolute(path)
    if (path / CONFIG).is_file():
        roots = list(roots_of(path))
        newest = next((found for root in roots if (found := Checkpoints(root).newest()) is not None), None)
        if newest is None:
            raise _unsaved(path, roots)
        return Start(path, newest)
    checkpoint = absolute(find_checkpoint(path))
    manifest = _manifest(checkpoint)
    if manifest.arrangement.get(IMPORTED):
        return Start(None, checkpoint)
    said = manifest.arrangement.get(RUN)
    for run in (checkpoint.parent.parent, *([Path(said)] if isinstance(said, str) else [])):
        # Only where the run would look for it, too: a copy of a checkpoint is the beginning of another run.
        with suppress(UserError):
            if (run / CONFIG).is_file() and checkpoint.parent in roots_of(run):
                return Start(run, checkpoint)
    return Start(None, checkpoint)


def _unsaved(run: Path, roots: Sequence[Path]) -> UserError:
    """Of a run that has nothing to go on from."""
    config = config_of(run)
    every = "" if config.saving.every_steps is not None else " --set checkpoint.every_steps=N"
    return UserError(f"there is no checkpoint of the run in '{run}': {why_unsaved(config, run)}",
                     where=f"looked in {', '.join(map(str, roots))}",
                     hint=f"begin anew: vpipe train {quote(str(run / CONFIG))}{every}")


def resumed_config(start: Start, path: Path | None, settings: Sequence[str], scheduler: str | None) -> Config:
    """The config of a run that goes on: a file's, or when none is named the run's own, with what is set over it.

    Raises:
        UserError: it is no config, or it contradicts the checkpoint.
    """
    if path is not None:
        config = load_config(path, settings, scheduler)
        plan = None if start.folder is None else start.folder / PLAN
        if plan is not None and plan.exists() and _still_holds(Plan.load(plan), config, settings):
            config = load_config(path, [*settings, f"parallel.plan={json.dumps(str(plan))}"], scheduler)
    elif start.folder is not None:
        config = load_config(start.folder / CONFIG, settings, scheduler, resolved=True)
    else:
        raise UserError(f"the checkpoint '{start.checkpoint}' is in no run's folder, so nothing says what to train",
                        hint="name a config, too: vpipe train CONFIG --resume CHECKPOINT")
    if start.checkpoint is not None:
        check_config(config, _manifest(start.checkpoint))
    return config


def _still_holds(plan: Plan, config: Config, settings: Sequence[str]) -> bool:
    """Whether what a run planned is what its config leaves to be planned, and nobody has set another value now."""
    parallel = config.parallel
    if not parallel.to_plan or any(text.startswith(f"parallel.{key}") for text in settings
                                   for key in ("partition", "recompute", "schedule", "plan")):
        return False
    try:
        recomputed = isinstance(parallel.recompute, str) or recomputed_layers(parallel.recompute, plan.partition) == \
            plan.recomputed
    except UserError:
        return False
    return (len(plan.partition) == parallel.model_parallel_size and parallel.partition in (AUTO, plan.partition)
            and (parallel.schedule == AUTO or plan.schedule in (None, parallel.schedule)) and recomputed
            and plan.microbatches in (None, config.training.num_microbatches))


def _manifest(checkpoint: Path) -> Manifest:
    """Of a checkpoint that a user wants to go on from.

    Raises:
        UserError: it is damaged or too new; with an older one in its place, if there is one.
    """
    try:
        return Manifest.load(checkpoint)
    except UserError as error:
        [problem] = error.problems
        if newest_intact_before(checkpoint) is None:
            raise
        raise UserError(problem.what, where=problem.where,
                        hint=f"{problem.hint}; here {older_intact_hint(checkpoint)}") from None


def check_config(config: Config, manifest: Manifest) -> None:
    """Refuse a config that would make other steps of the past than the checkpoint has.

    Raises:
        UserError: each entry that differs, with both values.
    """
    if manifest.arrangement.get(IMPORTED):
        return
    before = parse(manifest.config, "", "the checkpoint's config")
    problems = []
    for key, why in _BINDING.items():
        section, _, name = key.partition(".")
        then, now = before.get((section, name)), getattr(getattr(config, section), name)
        if then is not None and then != now:
            problems.append(Problem(f"{key} is {describe(now)}, but the checkpoint was made with {describe(then)}",
                                    f"leave it as it was: {why}"))
    if problems:
        raise UserError.all_of(problems)


def nothing_left(start: Start, job: Job) -> str | None:
    """For a run that has made all its steps and its last evaluation: what to say instead of starting ranks.

    Raises:
        UserError: the run is still going; the checkpoint does not fit the job.
    """
    if start.folder is None or start.checkpoint is None:
        return None
    from vpipe.train.metrics import Past  # which needs torch, as a job does

    manifest = Manifest.load(start.checkpoint)
    steps = manifest.step
    if job.resumed(steps, manifest.samples).updates != steps:
        return None
    evaluations = Past.read(start.folder / METRICS, steps).evaluations
    if not evaluations or evaluations[-1][0] != steps - 1:
        return None  # a signal ended it just there
    take(start.folder)
    check_fits_job(manifest, job)
    longer = [f"training.{key}={2 * limit}" for key in ("max_steps", "epochs")
              if (limit := getattr(job.config.training, key)) is not None]
    return (f"nothing is left to do: {counted(steps, job.step_name)} are done; to go on, give a larger limit: vpipe "
            f"train --resume {start.folder} --set {' --set '.join(longer)}")


def take_up(start: Start, job: Job) -> Path:
    """Make a run's folder ready for the attempt that begins now; a new one, where none goes on.

    What earlier attempts left moves to ``earlier/<n>/``, so do checkpoints after the one to go on from: they belong to
    steps that will be made anew. What is done again, and otherwise than before, is said on stderr. To be called once,
    when all ranks can start; this process then holds the run.

    Raises:
        UserError: the run is still going; the checkpoint does not fit the job; a folder cannot be written.
    """
    manifest, steps = None, 0
    if start.checkpoint is not None:
        manifest = Manifest.load(start.checkpoint)
        check_fits_job(manifest, job)
        steps = manifest.step
        if lost := no_longer_used(manifest):
            print(f"warning: {lost}", file=sys.stderr, flush=True)
    config = job.config.resolved_yaml()
    if start.folder is None:
        saving = job.config.saving
        folder = make_run_folder(job.config.log_directory, config, saving.directory if saving.makes_any else None)
        take(folder)
        job.keep_plan(folder)
        if manifest is not None:
            print(_begins_with(manifest, start), file=sys.stderr, flush=True)
            if warning := other_tokens(manifest, job):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        return folder
    from vpipe.train.metrics import Past  # which needs torch, as a job does

    folder = start.folder
    take(folder)
    roots = list(dict.fromkeys([new_root(job.config, folder), *roots_of(folder)]))
    attempt, last = next_attempt([folder, *roots]), last_step(folder)
    # First the checkpoints: a process that is killed here leaves none that is ahead of metrics.jsonl.
    moved = [name for root in roots for name in put_away_later(root, steps, attempt)]
    begin_attempt(folder, attempt, config, Past.read(folder / METRICS, steps).lines)
    job.keep_plan(folder)
    if (folder / PLAN).exists() and Plan.load(folder / PLAN).partition != job.partition:
        (folder / PLAN).unlink()  # this attempt follows it no more
    if (last is not None and last >= steps) or moved:
        print(_anew(job.step_name, steps, last, moved, attempt), file=sys.stderr, flush=True)
    if manifest is not None and (changed := changes(manifest, job.config)):
        print(f"changed since step {steps}: {'; '.join(changed)}", file=sys.stderr, flush=True)
    return folder


def _begins_with(manifest: Manifest, start: Start) -> str:
    """``begins with the weights in 'start': 46 tensors from Hugging Face``."""
    tensors, arrangement = counted(len(manifest.tensors), "tensor"), manifest.arrangement
    if arrangement.get(IMPORTED):
        return f"begins with the weights in '{start.checkpoint}': {tensors} from {arrangement.get('from', 'elsewhere')}"
    return f"begins with the checkpoint '{start.checkpoint}': {tensors} after step {manifest.step}"


def other_tokens(manifest: Manifest, job: Job) -> str | None:
    """What is to be said of imported weights where nobody said that the data have their tokenizer."""
    data, given = job.dataset, job.config.dataset.tokenizer
    own = data.tokenizer_path if isinstance(data, Tokenized) else None
    if not manifest.arrangement.get(IMPORTED) or given is not None or own is None:
        return None
    return (f"the data's tokens are those of '{own}'; unless that is the imported weights' tokenizer, an id means "
            "another word to them: for text, give theirs with --set dataset.tokenizer=FOLDER/tokenizer.json")


def _anew(step: str, steps: int, last: int | None, moved: Sequence[str], attempt: str) -> str:
    """What is put aside: ``updates 41 to 60 are made anew; their lines and step-60 are in earlier/1``."""
    aside = [*(["their lines"] if last is not None and last >= steps else []), *moved]
    listed = " and ".join(filter(None, [", ".join(aside[:-1]), aside[-1]]))
    where = f"earlier/{attempt}"
    text = f"{listed} {'is' if len(aside) == 1 and moved else 'are'} in {where}"
    if last is None or last < steps:
        return f"put aside: {text}"
    return (f"{step} {steps + 1} is" if last == steps else f"{step}s {steps + 1} to {last + 1} are") + \
        f" made anew; {text}"


def check_fits_job(manifest: Manifest, job: Job) -> None:
    """Refuse a checkpoint that is not one of this model, these data and these batches.

    Raises:
        UserError: with what differs.
    """
    from vpipe.checkpoint.compatibility import check_compatible

    was = parse(manifest.config, "", "").get(("model", "name"))
    if was is not None and was != job.config.model.name:
        raise UserError(f"the checkpoint is of the model '{was}', but model.name is '{job.config.model.name}'",
                        hint=f"set model.name to {was}, with its sizes: vpipe checkpoint show prints them")
    check_compatible(manifest, job.model)
    if problems := list(_misfits(manifest, job)):
        raise UserError.all_of(problems)
    Position.of_numbers(manifest.step, manifest.samples, manifest.numbers, job.config.training.num_microbatches)


def _misfits(manifest: Manifest, job: Job) -> Iterator[Problem]:
    for difference in _other_model(manifest, job):
        yield Problem(f"the checkpoint is of another model: {difference}", "set model.* as it was")
    if manifest.arrangement.get(IMPORTED):
        return
    data = job.fingerprint()
    if manifest.data and manifest.data != data:
        yield Problem(f"the data are not those of the checkpoint: their fingerprint is {data}, it was {manifest.data} "
                      "(a hash of the vocabulary's size, the numbers of samples and the first batch)",
                      "set dataset.* as it was, or bring the files back")
    size = job.config.microbatch_size
    if manifest.samples % size:
        yield Problem(f"the checkpoint was made after {manifest.samples} samples, which are no whole number of "
                      f"microbatches of {size}", "set training.num_microbatches as it was")
    batch = job.config.dataset.batch_size
    if not job.schedule.stream and manifest.samples % batch:
        yield Problem(f"the checkpoint was made after {manifest.samples % batch} of the {batch} samples of a batch, "
                      f"but the schedule {job.config.parallel.schedule} takes whole batches", "go on with the schedule "
                      "that made it, or from a checkpoint at the end of a batch")


def _other_model(manifest: Manifest, job: Job) -> list[str]:
    """What names and shapes do not show, such as the number of attention heads."""
    from vpipe.train.model_settings import model_differences, model_file, model_settings

    ours, before = job.config.model, parse(manifest.config, "", "the checkpoint's config")
    if before.get(("model",)) is None:
        return []  # made by a script
    with suppress(UserError):  # its config_file may be gone by now
        theirs = validated(ModelSection, before.at(("model",)))
        if theirs.name == ours.name:
            return model_differences(ours.name, model_settings(ours, ours.vocab_size, model_file(ours)),
                                     model_settings(theirs, theirs.vocab_size, model_file(theirs)))
    return []
