"""Resume a run: find it and its checkpoint, check that the config fits, and make the run's folder ready."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Any

from vpipe import Plan
from vpipe.app.config.apply_plan import contradictions, read_plan
from vpipe.app.config.config import Config, ModelSection, config_row, config_tree, flatten, load_config
from vpipe.app.config.origin import PATHS, RUN, TOKENIZER, read_origin
from vpipe.app.config.validation import CHECKED, validated
from vpipe.app.config.yaml_tree import describe, parse
from vpipe.app.data.registry import keys_read
from vpipe.app.errors import os_errors
from vpipe.app.families.lora import is_adapter
from vpipe.app.run_log import PastMetrics, RunLog, evaluations_since_best
from vpipe.app.train.run_folder import CONFIG, EARLIER, PLAN, begin_attempt, checkpoints_root, lock_run, why_unsaved
from vpipe.checkpoint import Checkpoint, Checkpoints, Manifest
from vpipe.errors import Problem, UserError, counted

if TYPE_CHECKING:
    from vpipe.app.train.job import Job

IMPORTED = "imported"
"""Entry of the arrangement of a checkpoint that no run made: it has weights, and no past."""

_BINDING = {"training.seed": "the initial weights, dropout and the order of the data follow from it",
            "dataset.batch_size": "which samples are done follows from it",
            "dataset.max_tokens": "which samples are done follows from it",
            "training.optimizer": "the state in the checkpoint is the other optimizer's"}
"""Keys that a resumed run may not change, and why."""

_CHANGE_NUMBERS = {"model.lora", "training.num_microbatches", "training.precision", "training.loss_scale",
                   "parallel.compress", "parallel.compress_rounding", "training.delay_correction",
                   "training.delay_correction_strength"}
"""Keys of how a run is arranged that change its numbers under every schedule."""

_CHANGE_NUMBERS_WITHOUT_FLUSH = {
    "parallel.partition", "parallel.update_every", "parallel.stage_to_rank_map", "parallel.data_parallel_size",
    "checkpoint.every_steps", "training.evaluate_every"}
"""Keys that do so without a flush; with one at most the order of sums is another."""


@dataclass(frozen=True)
class ResumePoint:
    """The run and the checkpoint, by its absolute path, from which training resumes."""

    folder: Path | None  # None for a new run that takes a checkpoint from elsewhere
    checkpoint: Path | None  # None for the beginning, when a run ended before its first checkpoint
    _loaded: Manifest | None = field(default=None, compare=False, repr=False)
    other_data: bool = field(default=False, compare=False)  # whether the user gave data in place of the run's

    @cached_property
    def manifest(self) -> Manifest | None:
        """Return the manifest of the checkpoint; it is loaded once.

        Raises:
            UserError: it is damaged or too new; the hint names an older checkpoint, if there is one.
        """
        if self.checkpoint is None or self._loaded is not None:
            return self._loaded
        return Checkpoint.open(self.checkpoint).manifest


def find_resume_point(path: Path) -> ResumePoint:
    """Find the run and the checkpoint that ``--resume`` names: the folder of a run, its checkpoints, or one of them.

    Raises:
        UserError: there is no checkpoint.
    """
    path = absolute_path(path)
    if (path / CONFIG).is_file():
        roots = list(checkpoint_roots(path))
        newest = next((found for root in roots if (found := Checkpoints(root).newest()) is not None), None)
        if newest is not None:
            return ResumePoint(path, newest)
        config = run_config(path)
        every = "" if config.saving.every_steps is not None else " --set checkpoint.every_steps=N"
        raise UserError(f"there is no checkpoint of the run in '{path}': {why_unsaved(config, path)}",
                        where=f"looked in {', '.join(map(str, roots))}",
                        hint=f"start a new run: vpipe train {quote(str(path / CONFIG))}{every}")
    checkpoint = absolute_path(Checkpoints.find(path))
    manifest = Checkpoint.open(checkpoint).manifest
    made_by, imported = (manifest.arrangement.get(key) for key in (RUN, IMPORTED))
    runs = [checkpoint.parent.parent, *([Path(made_by)] if isinstance(made_by, str) else [])]
    for run in [] if imported else runs:
        # Only where the run would look for it, too: a copy of a checkpoint is the beginning of another run.
        with suppress(UserError):
            if (run / CONFIG).is_file() and checkpoint.parent in checkpoint_roots(run):
                return ResumePoint(run, checkpoint, manifest)
    return ResumePoint(None, checkpoint, manifest)


def absolute_path(path: Path) -> Path:
    """Return the same path from anywhere, links as they are."""
    return Path(os.path.abspath(path))


def run_config(folder: Path) -> Config:
    """Return the config of an attempt of a run, with what was planned for it; its rules are not checked again.
    Its paths are found from any folder.

    Raises:
        UserError: its ``config.yaml`` cannot be read.
    """
    return validated(Config, config_tree(folder / CONFIG, resolved=True), context=CHECKED)


def data_settings(folder: Path | None, data: Path) -> list[str]:
    """Return settings by which a run, if there is one, reads other data in its own tokens: what ``--data`` means."""
    values = {"path": absolute_path(data)}
    if folder and (folder / TOKENIZER).is_file() and "tokenizer" in keys_read(run_config(folder).dataset.name):
        values["tokenizer"] = absolute_path(folder / TOKENIZER)
    return [f"dataset.{key}={json.dumps(str(path))}" for key, path in values.items()]


def resumed_config(start: ResumePoint, path: Path | None, settings: Sequence[str],
                   started: bool | None = None) -> Config:
    """Return the config of a resumed run: that of ``path``, or else the run's own, with ``settings`` over it.

    Args:
        started: as of :func:`~vpipe.app.config.config.load_config`.

    Raises:
        UserError: it is no config, or it contradicts the checkpoint.
    """
    if path is not None:
        config = load_config(path, settings, started=started)
        plan = None if start.folder is None else start.folder / PLAN
        if plan is not None and plan.exists() and _still_holds(plan, path, config, settings):
            config = load_config(path, [*settings, f"parallel.plan={json.dumps(str(plan))}"], started=started)
        if start.folder is not None and config.saving.every_steps is None and (start.folder / CONFIG).is_file():
            before = run_config(start.folder).saving
            if before.every_steps is not None and before.every_minutes == config.saving.every_minutes:
                config = config.saving_every(before.every_steps)  # as the run has measured them
    elif start.folder is not None:
        config = load_config(start.folder / CONFIG, settings, resolved=True, started=started)
    else:
        raise UserError(f"the checkpoint '{start.checkpoint}' is in no run's folder, so nothing says what to train",
                        hint="name a config, too: vpipe train CONFIG --resume CHECKPOINT")
    if start.manifest is not None:
        check_config(config, start.manifest)
    return config


def _still_holds(file: Path, path: Path, config: Config, settings: Sequence[str]) -> bool:
    """Return whether the plan of a run contradicts nothing that its config, read from ``path``, and the settings say.
    """
    if not config.parallel.to_plan or any(text.startswith(f"parallel.{key}") for text in settings
                                          for key in ("partition", "recompute", "schedule", "plan")):
        return False
    found, plan = read_plan(str(file))
    return len(plan.partition) == config.parallel.model_parallel_size and plan.microbatches in (
        None, config.microbatches) and not any(contradictions(config_tree(path, settings), found, plan, str(file)))


def check_config(config: Config, manifest: Manifest) -> None:
    """Refuse a config with which the steps of the checkpoint would have been others.

    Raises:
        UserError: each entry that differs, with both values.
    """
    if manifest.arrangement.get(IMPORTED):
        return
    before, now = parse(manifest.config, "", "the checkpoint's config"), config_row(config)
    problems = [Problem(f"{key} is {describe(now[key])}, but the checkpoint was made with {describe(then)}",
                        f"leave it as it was: {why}")
                for key, why in _BINDING.items() if (then := before.get(tuple(key.split(".")))) not in (None, now[key])]
    if problems:
        raise UserError.all_of(problems)


def changed_keys(manifest: Manifest, config: Config) -> list[str]:
    """Return the keys that differ from the checkpoint's config, with both values and the effect.

    Such as ``training.max_steps 60 -> 80 (the learning rate follows the new end)``. None for a script's checkpoint.
    """
    before = parse(manifest.config, "", "the checkpoint's config")
    if not isinstance(before.value, dict):
        return []
    no_section = config.model_copy(update={"checkpoint": None}).saving.model_dump(mode="json")
    then = _options_apart(flatten({name: no_section if name == "checkpoint" and section is None else section
                         for name, section in before.value.items()}))
    had_flush = not manifest.arrangement.get("drained")
    found = []
    for key, value in _options_apart(config_row(config).items()).items():
        if key in then and then[key] != value and (key not in PATHS or key == "parallel.schedule"):
            effect = _effect(key, config, had_flush=had_flush)
            found.append(f"{key} {describe(then[key])} -> {describe(value)}" + (f" ({effect})" if effect else ""))
    return found


def _options_apart(row: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the keys of a config by path, with those of a model family's own apart."""
    keys = dict(row)
    options = keys.pop("model.options", None)
    return keys | {f"model.options.{name}": value for name, value in (options or {}).items()}


def _effect(key: str, config: Config, *, had_flush: bool) -> str:
    """Return the effect of another value on the losses from here on; empty without one."""
    training, flush = config.training, not config.parallel.asynchronous
    if key in ("training.max_steps", "training.epochs"):
        return "the learning rate follows the new end" if training.lr_policy != "constant" or \
            0 < training.warmup_steps < 1 else ""
    if key == "parallel.schedule" and flush != had_flush:
        return f"with{'' if flush else 'out'} a flush, so another run from here on"
    if key in _CHANGE_NUMBERS:
        return "other losses from here on"
    if key in _CHANGE_NUMBERS_WITHOUT_FLUSH and not flush and not had_flush:
        return "without a flush, so another run from here on"
    return ""


def checkpoint_roots(run: Path) -> Iterator[Path]:
    """Yield the absolute folders in which checkpoints of a run may be, the latest attempt's first.

    Raises:
        UserError: the run's ``config.yaml`` cannot be read.
    """
    root = absolute_path(checkpoints_root(run_config(run), run))
    yield root
    texts, found = {(run / CONFIG).read_text(errors="replace")}, {root}
    for path in sorted(_earlier(run), key=lambda path: int(path.name), reverse=True):
        with suppress(OSError, UserError):  # that of another version
            text = (path / CONFIG).read_text(errors="replace")
            if text in texts:
                continue
            texts.add(text)
            root = absolute_path(checkpoints_root(run_config(path), run))
            if root not in found:
                found.add(root)
                yield root


def _earlier(folder: Path) -> list[Path]:
    """Return what earlier attempts have left in a folder, a folder each."""
    return [path for path in (folder / EARLIER).glob("*") if path.name.isdecimal()]


def _next_root(config: Config, run: Path) -> Path:
    """Return the folder for the next checkpoints of a run.

    Raises:
        UserError: it holds checkpoints of another run, which would be overwritten.
    """
    root = absolute_path(checkpoints_root(config, run))
    for path in [] if root.is_relative_to(run) else reversed(Checkpoints(root).all()):
        with suppress(UserError):  # the newest that can be read says whose they are
            other = Manifest.load(path).arrangement.get(RUN)
            break
    else:
        return root
    if isinstance(other, str) and (Path(other) / CONFIG).is_file() and not Path(other).samefile(run):
        raise UserError(f"the checkpoints in '{root}' are those of another run, '{other}'",
                        hint="resume that one, or set checkpoint.directory to another folder")
    return root


def _move_later(root: Path, steps: int, attempt: str) -> list[str]:
    """Move checkpoints of later steps to ``earlier/<attempt>``; return their names, the oldest first.

    The newest is moved first: if this process is killed, a run can resume from the newest that is left.

    Raises:
        UserError: the folder cannot be written.
    """
    folder, moved = Checkpoints(root), list[str]()
    if not root.is_dir():
        return moved
    with os_errors(f"cannot tidy the folder of checkpoints '{root}'", "make it writable"):
        folder.clear_leftovers()
        for path in reversed(folder.all()):
            if Checkpoints.step_of(path) > steps:
                aside = root / EARLIER / attempt
                aside.mkdir(parents=True, exist_ok=True)
                path.rename(aside / path.name)
                moved.insert(0, path.name)
        folder.update_latest()
    return moved


def nothing_left(start: ResumePoint, job: Job) -> str | None:
    """Return a message for a run that has reached one of its limits and made its last evaluation; None for another.

    Raises:
        UserError: the run is still going; the checkpoint does not fit the job.
    """
    manifest = start.manifest
    if start.folder is None or manifest is None:
        return None
    steps, training, past = manifest.step, job.config.training, PastMetrics.read(start.folder, manifest.step)
    if not past.evaluations or past.evaluations[-1].step != steps - 1:
        return None  # or a signal ended it just there
    why, done = f"{counted(steps, job.step_name)} are done", dict[str, float]()
    if replace(job, steps_done=steps, samples_done=manifest.samples).updates == steps:
        done = {"max_steps": steps, "epochs": job.epochs.locate(manifest.samples).epoch}
    elif training.max_minutes is not None and training.max_minutes <= max(past.time_s / 60, past.minutes):
        why, done = f"training.max_minutes, {training.max_minutes:g}, is over", {"max_minutes": past.minutes}
    elif training.patience is not None and training.patience <= (since := evaluations_since_best(past.evaluations)):
        why, done = f"{why}, and training.patience, {training.patience}, is over", {"patience": since}
    if not done:
        return None
    lock_run(start.folder)
    check_fits_job(start, manifest, job)
    longer = [f"training.{key}={2 * max(limit, had)}" for key, had in done.items()
              if (limit := getattr(training, key)) is not None]
    return (f"nothing is left to do: {why}; to continue, give a larger limit: vpipe train --resume {start.folder} "
            f"--set {' --set '.join(longer)}")


def prepare_run(start: ResumePoint, job: Job) -> Path:
    """Prepare and lock the folder of a run for its next attempt; a new folder for a checkpoint from elsewhere.

    The files of earlier attempts move to ``earlier/<n>/``, and so do checkpoints after the one to resume from: their
    steps are repeated. A note on stderr names the repeated steps and the changed keys.

    Raises:
        UserError: the run is still going; the checkpoint does not fit the job; a folder cannot be written.
    """
    from vpipe.app.train.job import check_room, new_run  # which needs torch

    manifest, steps = start.manifest, 0
    if manifest is not None:
        check_fits_job(start, manifest, job)
        steps = manifest.step
    if (folder := start.folder) is None:
        folder = new_run(job)
        if manifest is not None:
            tensors, origin = counted(len(manifest.tensors), "tensor"), manifest.arrangement.get("from", "elsewhere")
            print(f"begins with the weights in '{start.checkpoint}': {tensors} from {origin}"
                  if manifest.arrangement.get(IMPORTED) else
                  f"begins with the checkpoint '{start.checkpoint}': {tensors} after step {manifest.step}",
                  file=sys.stderr, flush=True)
            if warning := other_tokens(manifest, job):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        return folder
    lock_run(folder)
    roots = list(dict.fromkeys([_next_root(job.config, folder), *checkpoint_roots(folder)]))
    check_room(job, roots[0])
    before = [int(path.name) for root in (folder, *roots) for path in _earlier(root)]
    attempt, last = str(max(before, default=0) + 1), RunLog(folder).last_step()
    # First the checkpoints: a process that is killed here leaves none that is ahead of metrics.jsonl.
    moved = [name for root in roots for name in _move_later(root, steps, attempt)]
    changed = [] if manifest is None else changed_keys(manifest, job.config) + _data_differences(folder, manifest, job)
    begin_attempt(folder, attempt, job.config.resolved_yaml(), PastMetrics.read(folder, steps).lines)
    job.keep_files(folder)
    job.keep_plan(folder)
    if (folder / PLAN).exists() and Plan.load(folder / PLAN).partition != job.cut.partition:
        (folder / PLAN).unlink()  # this attempt does not follow it
    if (last is not None and last >= steps) or moved:
        print(_repeated(job.step_name, steps, last, moved, attempt), file=sys.stderr, flush=True)
    if changed:
        print(f"changed since step {steps}: {'; '.join(changed)}", file=sys.stderr, flush=True)
    return folder


def other_tokens(manifest: Manifest, job: Job) -> str | None:
    """Return a warning about imported weights whose tokenizer the data do not use."""
    given, own = job.config.dataset.tokenizer, job.tokenizer_path
    if not manifest.arrangement.get(IMPORTED) or given is not None or own is None:
        return None
    return (f"the data's tokens are those of '{own}'; unless that is the imported weights' tokenizer, an id means "
            "another word to them: for text, give theirs with --set dataset.tokenizer=FOLDER/tokenizer.json")


def _repeated(step: str, steps: int, last: int | None, moved: Sequence[str], attempt: str) -> str:
    """Return ``updates 41 to 60 are repeated; their lines and step-60 are in earlier/1``."""
    aside = [*(["their lines"] if last is not None and last >= steps else []), *moved]
    listed = " and ".join(filter(None, [", ".join(aside[:-1]), aside[-1]]))
    text = f"{listed} {'is' if len(aside) == 1 and moved else 'are'} in earlier/{attempt}"
    if last is None or last < steps:
        return f"put aside: {text}"
    return (f"{step} {steps + 1} is" if last == steps else f"{step}s {steps + 1} to {last + 1} are") + \
        f" repeated; {text}"


def check_fits_job(start: ResumePoint, manifest: Manifest, job: Job) -> None:
    """Refuse a checkpoint that is not one of this model, these data and these batches.

    Raises:
        UserError: with what differs.
    """
    was = parse(manifest.config, "", "").get(("model", "name"))
    if was is not None and was != job.config.model.name:
        raise UserError(f"the checkpoint is of the model '{was}', but model.name is '{job.config.model.name}'",
                        hint=f"set model.name to {was}, with its sizes: vpipe checkpoint show prints them")
    manifest.check_compatible(job.base_model if lacks_adapters(manifest, job) else job.model)
    if problems := list(_differences(start, manifest, job)):
        raise UserError.all_of(problems)
    manifest.position(job.config.microbatches)


def lacks_adapters(manifest: Manifest, job: Job) -> bool:
    """Return whether a checkpoint of an import has the frozen weights of a model alone, whose adapters begin anew."""
    return job.config.model.lora is not None and bool(manifest.arrangement.get(IMPORTED)) and not any(
        map(is_adapter, manifest.tensors))


def _data_differences(run: Path | None, manifest: Manifest, job: Job) -> list[str]:
    """Return how the data differ from those of a checkpoint: ``training samples 120 -> 180``; empty if they do not."""
    if not manifest.data or manifest.data == job.data_facts["fingerprint"]:
        return []
    was = {} if run is None else read_origin(run).get("data")
    known = was if isinstance(was, dict) and was.get("fingerprint") == manifest.data else {"fingerprint": manifest.data}
    return [f"{key} {known[key]} -> {value}" for key, value in job.data_facts.items() if known.get(key, value) != value]


def _differences(start: ResumePoint, manifest: Manifest, job: Job) -> Iterator[Problem]:
    from vpipe.app.train.checkpoint_model import model_differences
    from vpipe.app.train.model_section import model_settings

    ours, before = job.config.model, parse(manifest.config, "", "the checkpoint's config")
    if before.get(("model",)) is not None:  # else it was made by a script
        with suppress(UserError):  # its config_file may be gone by now
            theirs = validated(ModelSection, before.at(("model",)))
            same = theirs.name == ours.name
            # What names and shapes do not show, such as the number of attention heads.
            for difference in model_differences(ours.name, *map(model_settings, (ours, theirs))) if same else ():
                yield Problem(f"the checkpoint is of another model: {difference}", "set model.* as it was: "
                              "vpipe checkpoint show prints it")
    if manifest.arrangement.get(IMPORTED):
        return
    if not start.other_data and (differ := _data_differences(start.folder, manifest, job)):
        words = ["vpipe", "train", *([] if start.folder else ["CONFIG"]), "--resume",
                 str(start.folder or start.checkpoint), "--data", job.data_facts["path"] or "PATH"]
        yield Problem(f"the data are not those of the checkpoint: {', '.join(differ)} (a hash of the vocabulary's "
                      "size, the numbers of samples and the first batch)", "set dataset.* as it was, bring the files "
                      f"back, or go on with other ones: {join(words)}")
    at = job.epochs.locate(manifest.samples)
    size = at.samples // job.config.microbatches
    if at.done % size:
        yield Problem(f"the checkpoint was made after {manifest.samples} samples, which are no whole number of "
                      f"microbatches of {size}", "set training.num_microbatches as it was")
    if not job.schedule.stream and at.done:
        yield Problem(f"the checkpoint was made after {at.done} of the {at.samples} samples of a batch, "
                      f"but the schedule {job.config.parallel.schedule} takes whole batches", "go on with the schedule "
                      "that made it, or from a checkpoint at the end of a batch")
