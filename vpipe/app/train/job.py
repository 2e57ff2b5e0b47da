"""Turn a config into a job: its data, model, partition and proved schedule, checked before a process starts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vpipe import Cut, Execution, Model, Plan, Update, accelerator, files
from vpipe.app.config.config import Config
from vpipe.app.config.options import all_options
from vpipe.app.config.origin import MODEL_CONFIG, ORIGIN, SCHEDULE, TOKENIZER, read_origin
from vpipe.app.data.dataset import Comparable, Dataset, DatasetSettings, HeldOutText, Tokenized, VaryingBatches
from vpipe.app.data.registry import dataset_named
from vpipe.app.data.tokenizers import load_tokenizer
from vpipe.app.errors import os_errors
from vpipe.app.families.experts import BALANCE
from vpipe.app.families.lora import is_adapter
from vpipe.app.families.registry import family_named
from vpipe.app.families.tensor_parallel import TensorMesh, parallel, problems
from vpipe.app.train.epochs import Epochs, epoch_seed
from vpipe.app.train.event_writers import check_installed
from vpipe.app.train.model_section import model_file, model_flops, model_settings
from vpipe.app.train.optimizers import LearningRatePolicy, OptimizerSettings, hidden_matrices
from vpipe.app.train.profile_cache import cached, to_stderr
from vpipe.app.train.run_folder import PLAN, PROFILE, lock_run, make_run_folder
from vpipe.app.visualize.advice import Advice
from vpipe.checkpoint import Checkpoints
from vpipe.description import Description
from vpipe.distributed import RankEnvironment
from vpipe.errors import UserError
from vpipe.plan import Profile
from vpipe.plugins import PluginGroup
from vpipe.runtime import check_slices, prepare_schedule
from vpipe.schedules import CsvFile, Schedule
from vpipe.units import size_text

OBSERVERS = PluginGroup("vpipe.observers", "observer")
"""The group of entry points, see :mod:`vpipe.app.train.observers`."""

_STAND_IN = 8192
"""Size of the vocabulary while it is not known: the model is then only asked for its batch fields."""


@dataclass(frozen=True)
class Job:
    """A config with its data, model and schedule.

    Keys that are planned when the run starts have stand-ins until then: balanced stages, no recomputation, 1F1B.
    """

    config: Config  # resolved: with the values of the data and the plan file; keys to be planned are still "auto"
    dataset: Dataset
    model: Model  # its layers are not materialized
    cut: Cut  # with the layers of every stage
    schedule: Schedule  # lowered and proved; for a stream, the finite part that was proved
    plan: Plan | None  # that the job follows
    steps_done: int = 0  # by earlier attempts of the run
    samples_done: int = 0

    @classmethod
    def from_config(cls, config: Config, *, checked: bool = False) -> Job:
        """Open the data, describe the model, cut it, and prove the schedule.

        Args:
            checked: ``config`` is the :attr:`config` of a job that another process has made and checked.

        Raises:
            UserError: the config does not fit the data, the model or this machine.
        """
        if not checked:
            show, wandb = config.metrics.tensorboard, config.metrics.wandb is not None
            check_installed(show, "tensorboard", "metrics.tensorboard is true", "set metrics.tensorboard to false")
            check_installed(wandb, "wandb", "metrics.wandb is set", "set metrics.wandb to null")
        vocab_size = config.model.vocab_size
        if vocab_size == -1 and type(vocab_size := model_file(config.model).get("vocab_size", -1)) is not int:
            raise UserError(f"vocab_size is {vocab_size!r}", hint="give a whole number")
        describe = family_named(config.model.name).model
        settings = model_settings(config.model, _STAND_IN if vocab_size == -1 else vocab_size)
        model = describe(settings)
        if settings.packed and model.batch == describe(replace(settings, packed=False)).batch:  # of an older run
            raise UserError(f"model.packed is true, but the model '{config.model.name}' does not tell the texts of a "
                            "sample apart", hint="set it to false, or train a gpt, a llama or one of its kinds")
        dataset = dataset_named(config.dataset.name)(DatasetSettings(
            **config.dataset.model_dump(exclude={"name", "num_workers", "seed"}), fields=model.batch,
            sequence_length=config.model.sequence_length, vocab_size=vocab_size, seed=_data_seed(config)))
        if checked:
            return cls._prepare(config, dataset, model, None, proved=True)
        if vocab_size == -1:
            vocab_size = dataset.vocab_size
            model = describe(replace(settings, vocab_size=vocab_size))
        elif dataset.vocab_size > vocab_size:
            raise UserError(f"the data set has {dataset.vocab_size} tokens, but the model only {vocab_size}",
                            hint=f"set model.vocab_size to {dataset.vocab_size} or more, or to -1")
        _check_data(model, dataset, config)
        options = None if settings.options is None else all_options(settings.options)
        config = config.model_copy(update={
            "model": config.model.model_copy(update={"vocab_size": vocab_size, "options": options})})
        plan = None
        if config.parallel.plan is not None:
            plan = Plan.load(config.parallel.plan)
            plan.check_fits(len(model), where=str(config.parallel.plan))
            config = config.with_parallel(plan=None)  # the config has all of its values
        job = cls._prepare(config, dataset, model, plan)
        job._check()
        return job

    def _check(self) -> None:
        """Check what else could fail in a rank: plan, profiled step, FLOPs, optimizer, evaluation, first batch."""
        check_plan(self)
        if self.config.parallel.tensor > 1 and (found := list(problems(self.config.parallel.tensor,
                                                                       self.tensor_sizes))):
            raise UserError.all_of(found)
        self._check_slices()
        profiled, last = self.config.training.profile_iteration, self.updates
        if profiled is not None and last is not None and profiled > last:
            raise UserError(f"training.profile_iteration is {profiled}, but the run ends after {self.step_name} {last}",
                            hint=f"profile one of the {self.step_name}s 1 to {last}, or let the run be longer")
        model_flops(self.config.model, len(self.model))
        self.lr_policy()
        self.update.counted_labels(self.model.labels)
        self.evaluation_batches(())
        next(self.dataset.batches("train", self.config.dataset.batch_size, seed=0, fields=()))
        for observer in OBSERVERS.added():
            observer.check(self)

    @classmethod
    def _prepare(cls, config: Config, dataset: Dataset, model: Model, plan: Plan | None, *,
                 proved: bool = False) -> Job:
        """Cut the model and prepare the schedule, which another process has ``proved`` or proves at the same time."""
        to_plan, parallel, training = config.parallel.to_plan, config.parallel.standing_in, config.training
        cut = parallel.cut
        if isinstance(cut.stages, int):
            cut = replace(cut, stages=model.balanced(cut.stages))
        execution = Execution(executor=parallel.executor, compile=training.compile)
        schedule = prepare_schedule(model, cut, config.order, config.microbatches, execution,
                                    needs_norms=training.needs_norms, zero1=parallel.zero1, proved=proved)
        config = config.with_parallel(update_every=None if schedule.flush else schedule.update_every)
        if "partition" not in to_plan:
            config = config.with_parallel(partition=cut.partition)
        return cls(config, dataset, model, cut, schedule, plan)

    def with_plan(self, plan: Plan, *, proved: bool = False) -> Job:
        """Return this job with the partition, schedule and microbatches of a plan.

        Raises:
            UserError: the plan is for another model, or its numbers do not fit the batch.
        """
        plan.check_fits(len(self.model))
        parallel, training = self.config.parallel, self.config.training
        followed = parallel.following(plan, self.schedule.placement)
        microbatches = plan.microbatches or self.config.microbatches
        if self.config.dataset.batch_size % microbatches:
            raise UserError(f"the plan cuts a batch into {microbatches} microbatches, which do not divide its "
                            f"{self.config.dataset.batch_size} samples",
                            hint="change dataset.batch_size, or plan again")
        late = {} if followed.asynchronous else {"delay_correction": "none", "delay_correction_strength": 1.0}
        config = self.config.with_parallel(followed).model_copy(update={
            "training": training.model_copy(update={"num_microbatches": microbatches, **late})})
        return replace(self._prepare(config, self.dataset, self.model, plan, proved=proved),
                       steps_done=self.steps_done, samples_done=self.samples_done)

    def keep_plan(self, folder: Path) -> None:
        """Write the plan that the job follows, if any, into the run folder; also its profile, if it is cached."""
        if self.plan is None:
            return
        self.plan.save(folder / PLAN)
        if self.plan.profile is not None:
            profile = cached(self.plan.profile, self.config.dataset.cache_directory, lambda line: None)
            if profile is not None and profile.identity.model == model_digest(self):
                self.with_correction(profile).save(folder / PROFILE)

    def keep_files(self, folder: Path) -> None:
        """Copy into the run folder the tokenizer and what else it needs; write where it is started, with which data."""
        schedule = self.config.parallel.schedule
        sources = {TOKENIZER: self.tokenizer_path, MODEL_CONFIG: self.config.model.config_file,
                   SCHEDULE: Path(schedule) if CsvFile.is_path(schedule) else None}
        origin = {"folder": os.getcwd(), "host": socket.gethostname(), "run": os.path.abspath(folder),
                  **read_origin(folder), "data": self.data_facts}
        with os_errors(f"cannot copy into the run's folder '{folder}'", "make it writable, or make room"):
            for name, source in sources.items():
                if source is not None:
                    words = source.suffix == ".txt"  # which others read as a tokenizer.json
                    files.replace_text(folder / name, load_tokenizer(source).to_str() if words else source.read_bytes())
            files.replace_text(folder / ORIGIN, json.dumps(origin, indent=2) + "\n")

    @cached_property
    def data_facts(self) -> dict[str, Any]:
        """What a run keeps of its data, to say later what differs."""
        path = self.config.dataset.path
        return {"path": None if path is None else os.path.abspath(path),
                "training samples": self.dataset.samples("train"), "held-out samples": self.dataset.samples("test"),
                "tokens in the vocabulary": self.config.model.vocab_size, "fingerprint": self.fingerprint()}

    def with_correction(self, profile: Profile) -> Profile:
        """Return a profile that says whether this job extrapolates its steps, who steps, and whether an average follows
        the weights: that is not measured."""
        return replace(profile, extrapolates=self.config.training.extrapolation is not None,
                       zero1=self.config.parallel.zero1, averages=self.config.training.average is not None)

    @cached_property
    def base_model(self) -> Model:
        """The model without adapters."""
        section = self.config.model
        return family_named(section.name).factory(model_settings(section))

    @property
    def update(self) -> Update:
        """An update of the weights."""
        training = self.config.training
        return Update(self.optimizer, self.lr_policy(), training.grad_clip, training.on_nan == "skip",
                      self.config.parallel.zero1, training.per_token_loss, training.average)

    def description(self, device: torch.device | None) -> Description:
        """Return the whole description of the pipeline; only a rank has a device (:func:`device_of`)."""
        config, training, parallel = self.config, self.config.training, self.config.parallel
        return Description(self.cut, config.order, config.microbatches, self.update, training.computed,
                           parallel.transfers, Execution(device, parallel.executor, training.compile or False),
                           training.seed)

    @cached_property
    def advice(self) -> Advice:
        """Advice on its schedule."""
        return Advice(self.schedule, self.config.microbatches, self.config.dataset.batch_size)

    def _check_slices(self) -> None:
        """Refuse slices of sequences whose tokens read others than those before, or that ranks cannot share."""
        slices, parts = self.schedule.assignment.slices, self.config.parallel.tensor
        mixed = next((layer for layer in self.model.layers if layer.carried is None), None)
        if slices > 1 and mixed is not None:
            raise UserError(f"parallel.slices is {slices}, but layer '{mixed.name}' of the model "
                            f"'{self.config.model.name}' does not compute a token from those before it alone",
                            hint="set it to 1" + ("; or model.balance_weight to 0: that loss is of all tokens of a "
                                                  "microbatch" if BALANCE in mixed.outputs else ""))
        length = self.tensor_sizes.get("sequence_length", 0) if slices > 1 and parts > 1 else 0
        if length % (slices * parts):
            fit = [str(each) for each in range(1, length // parts + 1) if length % (each * parts) == 0]
            raise UserError(f"parallel.slices is {slices}, but {parts} ranks of tensor parallelism cannot share such "
                            f"slices of {length} tokens evenly", hint=f"set it to {' or '.join(fit)}, or "
                            f"sequence_length to a multiple of {slices * parts}")
        check_slices(self.model, self.description(None), slices)

    @property
    def processes(self) -> int:
        """Number of processes: ranks of the schedule, each so many as split a layer."""
        return self.schedule.ranks * self.config.parallel.tensor

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Processes of each stage: those that split the layers of its ranks."""
        parts = self.config.parallel.tensor
        return tuple(tuple(rank * parts + lane for rank in ranks for lane in range(parts))
                     for ranks in self.schedule.placement)

    def describe(self, rank: int) -> str:
        """Describe a process with its stages."""
        place, lane = divmod(rank, parts := self.config.parallel.tensor)
        text = self.schedule.describe(place)
        return text if parts == 1 else f"rank {rank} (lane {lane}, {text.partition('(')[2]}"

    def split_layers(self, device: torch.device) -> tuple[Model, DeviceMesh | None]:
        """Return the model as its processes build it, and the mesh of these, None where layers are whole.

        All processes call this once they have been joined.
        """
        if (parts := self.config.parallel.tensor) == 1:
            return self.model, None
        # The last dimension is of ranks with numbers that follow one another, which are on one host.
        mesh = init_device_mesh(device.type, (self.schedule.ranks, parts), mesh_dim_names=("pp", "tp"))
        between = Shard(1) if "sequence_length" in self.tensor_sizes else Replicate()
        return parallel(self.model, TensorMesh(mesh["tp"], between)), mesh

    @cached_property
    def tensor_sizes(self) -> Mapping[str, int]:
        """What the ranks share that split a layer, see :class:`~vpipe.app.families.registry.Family`.

        Raises:
            UserError: the family has no plans for it.
        """
        section = self.config.model
        if (sizes := family_named(section.name).tensor_sizes) is None:
            raise UserError(f"parallel.tensor is {self.config.parallel.tensor}, but the model '{section.name}' does "
                            "not say how its layers are split", hint="set it to 1, or register the model with "
                            "tensor_sizes, and give its modules a tensor_plan")
        return sizes(model_settings(section))

    @property
    def step_name(self) -> str:
        """Name a step of training: "update", or "step" if stages make different numbers of updates in it."""
        assignment = self.schedule.assignment
        updates = {assignment.per_update(stage) for stage in range(self.cut.count)}
        return "update" if updates == {assignment.per_step} else "step"

    @cached_property
    def epochs(self) -> Epochs:
        """The epochs of training."""
        config = self.config
        return Epochs(self.dataset, config.dataset.batch_size, config.microbatches, config.model.sequence_length,
                      partial(epoch_seed, _data_seed(config)))

    @cached_property
    def updates(self) -> int | None:
        """Steps at which the first limit that counts steps or epochs is reached; None if only a time limit ends it."""
        training, schedule, per_step = self.config.training, self.schedule, self.schedule.assignment.per_step
        limits = []
        if training.max_steps is not None:
            batch_steps = schedule.microbatches // per_step if not schedule.stream else 1  # a file ends with its batch
            limits.append(-(-max(0, training.max_steps - self.steps_done) // batch_steps) * batch_steps)
        if training.epochs is not None:
            done = self.epochs.microbatches_done(self.samples_done) if self.samples_done else 0
            microbatches = training.epochs * self.epochs.batches * self.config.microbatches
            limits.append(-(-max(0, microbatches - done) // schedule.assignment.step_microbatches))
        return self.steps_done + min(limits) if limits else None

    @property
    def step_size(self) -> tuple[int, int]:
        """Samples and tokens of a step of training, padding excluded; their mean where they differ."""
        return self.epochs.per_step(self.schedule.assignment.step_microbatches)

    def microbatch_samples(self, size: int) -> int:
        """Return the samples of a microbatch of the largest batch, where one of ``dataset.batch_size`` has ``size``."""
        if not isinstance(self.dataset, VaryingBatches):
            return size
        batch_size = self.config.dataset.batch_size
        return size * len(self.dataset.largest_batch(batch_size)[self.model.batch[0]]) // batch_size

    @property
    def learns_next_tokens(self) -> bool:
        """Whether the loss is the mean over tokens of the cross-entropy of the next one."""
        fields, read = self.dataset.fields, set(self.model.batch) - {"positions"}
        return read == {"input_ids", "labels"} and fields["labels"].shape == fields["input_ids"].shape

    @property
    def tokenizer_path(self) -> Path | None:
        """The ``tokenizer.json`` of the data; None where it has none."""
        return self.dataset.tokenizer_path if isinstance(self.dataset, Tokenized) else None

    @cached_property
    def held_out_text(self) -> HeldOutText | None:
        """What the loss of a model of next tokens compares with; None for other models, and without a text."""
        dataset = self.dataset
        reads_all = set(self.model.batch) == set(dataset.fields)
        return dataset.held_out_text if reads_all and isinstance(dataset, Comparable) else None

    def lr_policy(self) -> LearningRatePolicy:
        """Return the factor of ``training.learning_rate`` as a function of the step."""
        training, total = self.config.training, self.updates or 1
        return LearningRatePolicy(training.lr_policy, total, training.warmup_updates(total))

    @cached_property
    def optimizer(self) -> OptimizerSettings:
        """The settings from which a stage makes its optimizer."""
        training = self.config.training
        return OptimizerSettings(training.optimizer, training.learning_rate, weight_decay=training.weight_decay,
                                 momentum=training.momentum,
                                 matrices=sorted(hidden_matrices(self.model)) if training.optimizer == "muon" else None)

    def training_batches(self, fields: tuple[str, ...]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the batches of all epochs, each epoch in its own order; other fields are on the meta device.

        Begins with the batch that holds the first sample that is not done.
        """
        epochs, at = self.config.training.epochs, self.epochs.locate(self.samples_done)
        for epoch in count(at.epoch) if epochs is None else range(at.epoch, epochs):
            yield from self._epoch(epoch, fields, at.batch if epoch == at.epoch else 0)

    def _epoch(self, epoch: int, fields: tuple[str, ...], first: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """Return an epoch from batch ``first`` on; earlier ones are read only if the data set cannot skip them."""
        size, seed = self.config.dataset.batch_size, self.epochs.seed(epoch)
        batches = self.dataset.batches
        if "first" in signature(batches).parameters:
            return batches("train", size, fields=fields, seed=seed, first=first)
        return islice(batches("train", size, fields=fields, seed=seed), first, None)

    def fingerprint(self) -> str:
        """Return a short hash of the vocabulary's size, the numbers of samples and the first training batch.

        Every rank reads the data itself, so all hosts must have the same.
        """
        content = hashlib.sha256(repr((self.config.model.vocab_size, self.dataset.samples("train"),
                                       self.dataset.samples("test"))).encode())
        for name, values in sorted(next(self._epoch(0, tuple(self.model.batch))).items()):
            if name in self.model.batch:
                content.update(f"\0{name} {values.dtype} {tuple(values.shape)}\0".encode() + values.numpy().tobytes())
        return content.hexdigest()[:12]

    def evaluation_batches(self, fields: tuple[str, ...]) -> Iterator[Mapping[str, Tensor]]:
        """Return the first held-out batches, the same at every evaluation."""
        held_out = self.dataset.batches("test", self.config.dataset.batch_size, seed=0, fields=fields)
        return islice(held_out, self.config.training.evaluation_batches)


def _check_data(model: Model, dataset: Dataset, config: Config) -> None:
    name = config.dataset.name
    if config.dataset.max_tokens is not None and not isinstance(dataset, VaryingBatches):
        raise UserError(f"dataset.max_tokens is {config.dataset.max_tokens}, but all samples of the data set '{name}' "
                        "have equally many tokens", hint="leave it out, and set dataset.batch_size")
    if missing := [field for field in model.batch if field not in dataset.fields]:
        suitable = ("text", "synthetic") if "input_ids" in model.batch else family_named(config.model.name).datasets
        raise UserError(f"the model '{config.model.name}' reads {missing}, which the data set '{name}' does not hold "
                        f"(it holds {sorted(dataset.fields)})", hint="choose a data set made for this model"
                        + (f", such as {' or '.join(suitable)}" if suitable else ""))


def _data_seed(config: Config) -> int:
    return config.training.seed if config.dataset.seed is None else config.dataset.seed


def on_processors(config: Config) -> bool:
    """Return whether ranks on this host compute on its processors."""
    parallel = config.parallel
    return parallel.device == "cpu" or (not parallel.asks_for_gpus and accelerator.count() == 0)


def device_of(config: Config) -> torch.device:
    """Return the device of this rank and make it the current one.

    Raises:
        UserError: the device does not exist.
    """
    device = accelerator.choose(config.parallel.device, config.parallel.backend,
                                accelerator.Visible.here(RankEnvironment.local_rank() or 0))
    accelerator.make_current(device)
    return device


def check_plan(job: Job, warn: Callable[[str], None] = to_stderr) -> None:
    """Check that the plan of a job was made for it; warn where its predictions do not hold.

    Raises:
        UserError: the plan is for another model.
    """
    made_for = None if job.plan is None else job.plan.profiled
    if made_for is None:
        return
    here = model_digest(job)
    if made_for.get("model") != here:
        raise UserError(f"the plan is for another model: {made_for.get('model_name')} (digest {made_for.get('model')}) "
                        f"there, {model_name(job)} (digest {here}) here",
                        hint="make a plan for this model: vpipe plan CONFIG, or Pipeline.plan")
    wanted: dict[str, object] = {"microbatch_size": job.microbatch_samples(job.config.microbatch_size),
                                 "precision": job.config.training.precision, "tensor": job.config.parallel.tensor}
    if on_processors(job.config):  # only ranks know the name of a GPU
        wanted["device"] = accelerator.name_of(torch.device("cpu"))
    others = [f"{name.replace('_', ' ')} {made_for.get(name)}, not {value}" for name, value in wanted.items()
              if made_for.get(name) != value]
    if others:
        warn(f"warning: the plan was made for {' and '.join(others)}: its predictions do not hold here")


def model_name(job: Job) -> str:
    """Return the family and preset of a job's model."""
    model = job.config.model
    return model.name + (f" {model.preset}" if model.preset else "")


def model_digest(job: Job) -> str:
    """Return the digest of a job's model in the identity of a profile."""
    return job.model.digest(microbatch_of(job, job.config.microbatch_size))


def microbatch_of(job: Job, size: int) -> Mapping[str, Tensor]:
    """Return the first ``size`` training samples, repeated if a batch has fewer.

    Where batches differ, ``size`` is that of a batch with ``dataset.batch_size`` samples, and the samples are those
    of a microbatch of the largest batch.
    """
    dataset, batch_size = job.dataset, job.config.dataset.batch_size
    if isinstance(dataset, VaryingBatches):
        batch = dataset.largest_batch(batch_size)
        size = job.microbatch_samples(size)
    else:
        batch = next(job.training_batches(job.model.batch))
    return {name: batch[name][torch.arange(size) % len(batch[name])] for name in job.model.batch}


def new_run(job: Job) -> Path:
    """Make and lock the folder of a new run; write its config, its plan and what else it needs into it.

    Raises:
        UserError: see :func:`~vpipe.app.train.run_folder.make_run_folder` and :func:`check_room`.
    """
    config, saving = job.config, job.config.saving
    check_room(job, saving.directory or config.log_directory)
    folder = make_run_folder(config.log_directory, config.resolved_yaml(),
                             saving.directory if saving.makes_any else None)
    lock_run(folder)
    job.keep_files(folder)
    job.keep_plan(folder)
    return folder


def check_room(job: Job, folder: Path) -> None:
    """Refuse a run without room for a checkpoint on the disk of a folder; warn of one without room for all at once.

    A checkpoint has the weights, and in fp32 what the optimizer and others keep beside those that are trained.
    """
    saving, training, where = job.config.saving, job.config.training, folder
    if not saving.makes_any:
        return
    while not os.path.exists(where):  # or hidden from this user
        where = where.parent
    beside = 1 + (training.optimizer != "sgd") + (training.average is not None) + (training.extrapolation is not None)
    matrices = job.optimizer.matrices or ()  # of which muon keeps one tensor
    size = sum(tensor.nbytes + 4 * tensor.numel() * (beside - (name in matrices))
               * (job.config.model.lora is None or is_adapter(name)) for name, tensor in job.model.outline().items())
    several, free = saving.every_steps or saving.every_minutes, shutil.disk_usage(where).free
    most = max(1, (saving.keep or 1) + 1 - len(Checkpoints(folder).all())) if several else 1
    lack = f"of {size_text(size)}, but the disk of '{folder}' has {size_text(free)} free"
    if free < size:
        raise UserError(f"the run writes checkpoints {lack}",
                        hint="make room, or set checkpoint.directory to a folder on another disk")
    if free < most * size:
        to_stderr(f"warning: the run may hold {most} checkpoints {lack}: make room, or lower checkpoint.keep")
