"""Define the keys of a config, and load the config of a run from a file and the command line.

The description of a field gives its meaning and unit. A key whose feature does not exist is accepted with its neutral
value only, so that no value that a user writes is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf, lcm
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from vpipe import Execution, Order, Precision
from vpipe.app.command_line import OptionSetting
from vpipe.app.config.apply_plan import PLAN, apply_plan, drop_derived, drop_ranks
from vpipe.app.config.formats import check_form, formats_of
from vpipe.app.config.machines import machine_mistakes
from vpipe.app.config.options import OPTIONS, option_problems
from vpipe.app.config.origin import find_files
from vpipe.app.config.parallel import ParallelSection, used_codecs
from vpipe.app.config.shipped import find_config
from vpipe.app.config.unread import unread_problems
from vpipe.app.config.validation import (
    CHECKED,
    MOST_SAMPLES,
    MOST_STEPS,
    FilePath,
    Mistake,
    MistakesError,
    Name,
    Section,
    Texts,
    validated,
)
from vpipe.app.config.yaml_tree import Tree, describe, parse, read_yaml, write
from vpipe.app.families import LARGEST_SIZE, ModelKeys, Size
from vpipe.app.metric_formulas import enough_microbatches
from vpipe.errors import UserError, counted
from vpipe.schedules import CsvFile, RegisteredSchedule, Schedule

DEEPEST = 8
"""Largest number of names in a key of ``--set``; keys of a config have at most four."""


def _scale(value: Any) -> Any:
    if value == "dynamic":
        return value
    if type(value) not in (int, float) or not 0 < value < inf:
        raise MistakesError(Mistake((), f"must be a number above 0, or dynamic, got {describe(value)}",
                                    "loss_scale: by what fp16 multiplies the loss, such as 1024; dynamic finds it"))
    return float(value)


def _compile(value: Any) -> Any:
    if not isinstance(value, bool | str) or value == "":
        raise MistakesError(Mistake((), f"must be true, false or the name of a backend, got {describe(value)}",
                                    "compile: true for inductor, or a backend of torch.compile, such as aot_eager"))
    return value


Absolute = Annotated[FilePath, AfterValidator(lambda path: Path(os.path.abspath(path)))]
LossScale = Annotated[float | Literal["dynamic"], BeforeValidator(_scale)]
Compile = Annotated[bool | str, BeforeValidator(_compile)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


def _nearest_multiples(what: str, size: int, divisor: int) -> str:
    """Return ``the nearest sizes are 8 and 12``: the multiples of ``divisor`` around ``size``, which is none."""
    low = size // divisor * divisor
    return f"the nearest {what}s are {low} and {low + divisor}" if low else f"the nearest {what} is {divisor}"


class LoraSection(Section):
    """Adapters, which are trained instead of the model's weights."""

    rank: Size = Field(description="rows of A and columns of B: (alpha / rank) B A is added to a frozen weight")
    alpha: float = Field(gt=0, description="rank times the factor of B A; twice the rank is usual")
    targets: Texts | None = Field(None, description=(
        "names of linear modules of the family that get adapters, such as query, value, qkv, up or down; null takes "
        "all in front of the head"))
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of the input of an adapter")

    def mistakes(self) -> Iterator[Mistake]:
        if self.targets == ():
            yield Mistake(("targets",), "is empty: nothing would be trained",
                          "name linear modules, such as [query, value], or leave it out: all get adapters")


class _Family:
    """The keys of a model in front of those that its factory reads."""

    name: Name = Field(description="model family, such as bert, gpt, llama, mistral, mixtral, qwen2, qwen3, "
                      "qwen3_moe or translation")
    preset: str | None = Field(None, description=(
        "named sizes of the family: for bert tiny, mini, small, medium, base or large; for gpt small, medium, large, "
        "xl or cpm; for llama 15m, 110m, 135m, 360m, 1b, 7b, 13b, 3.2-1b, 3.2-3b or 3.1-8b; for mistral 7b or nemo; "
        "for mixtral 8x7b; "
        "for qwen2 (2.5) 0.5b, 1.5b, 3b, 7b, 14b, 32b or 72b; for qwen3 0.6b, 1.7b, 4b, 8b, 14b or 32b; for "
        "qwen3_moe 30b-a3b or 235b-a22b; for translation tiny, small, base or big"))


class ModelSection(Section, ModelKeys, _Family):  # type: ignore[misc]  # mypy cannot tell that it is frozen
    """The model. Sizes given here override those of ``preset`` or ``config_file``."""

    sequence_length: Size = Field(128, description="tokens per sample")
    vocab_size: int = Field(-1, ge=-1, le=LARGEST_SIZE, description=(
        "tokens in the vocabulary; -1 takes the number from config_file, else from the data set"))
    config_file: FilePath | None = Field(None, description=(
        "Hugging Face config with the sizes, such as bert_config.json, relative to the current folder"))
    lora: LoraSection | None = Field(None, description=(
        "adapters that are trained alone, by peft; null trains all weights"))
    options: dict[str, Any] | None = Field(None, description=(
        "keys of a family of your own, as given to register_model; null takes their defaults"))

    def mistakes(self) -> Iterator[Mistake]:
        if self.vocab_size == 0:
            yield Mistake(("vocab_size",), "is 0", "give the number of tokens, or -1 to ask the data set")
        if self.preset and self.config_file:
            yield Mistake(("preset",), f"is '{self.preset}', but the sizes also come from the config_file "
                                       f"'{self.config_file}'", "keep one of the two")
        if self.hidden_size and self.num_heads and self.hidden_size % self.num_heads and not self.config_file:
            yield Mistake(("hidden_size",), f"is {self.hidden_size}, which {self.num_heads} heads do not divide",
                          _nearest_multiples("size", self.hidden_size, self.num_heads))


class DatasetSection(Section):
    """The data."""

    name: Name = Field(description=(
        "registered data set, such as text, code_search_net, bert_hdf5, huggingface, pairs or synthetic"))
    path: FilePath | None = Field(None, description="file or folder of the data, relative to the current folder")
    batch_size: int = Field(ge=1, le=MOST_SAMPLES, description=(
        "samples per batch, which is split into num_microbatches microbatches; with a flush, one update per batch"))
    max_tokens: int | None = Field(None, ge=1, le=10**12, description=(
        "largest batch of pairs, samples times the longest side, padding included; a batch then has any multiple of "
        "batch_size samples; null: exactly batch_size"))
    language: Name | None = Field(None, description=(
        "without a path, language of the text that the data set text finds on this machine, as catalogues of programs "
        "name languages, such as zh_CN; null takes English prose"))
    source_language: Name | None = Field(None, description=(
        "language that pairs are translated from, where a data set has several; null takes the data set's first"))
    target_language: Name | None = Field(None, description=(
        "language that pairs are translated into; null: the other one, of catalogues the one with the most messages"))
    num_workers: int = Field(0, ge=0, le=1024, description=(
        "batches that a thread prepares ahead on each rank that reads data; 0 prepares each batch when needed"))
    samples: int | None = Field(None, ge=1, le=10**12, description=(
        "largest number of training samples; a synthetic data set makes exactly as many, with null 1024 or 8 batches"))
    tokenizer: FilePath | None = Field(None, description=(
        "tokenizer.json for text, such as that of imported weights, relative to the current folder; null trains one "
        "on the data"))
    cache_directory: FilePath | None = Field(None, description=(
        "folder for prepared data and tokenizers; null takes ~/.cache/vpipe"))
    seed: Seed | None = Field(None, description="seed of the sample order and of masking; null takes training.seed")


class TrainingSection(Section):
    """The length of the training, and its updates.

    A run ends at the first of ``epochs``, ``max_steps`` and ``max_minutes`` that it reaches; one that is
    null does not count, and the data repeat as often as needed. With none of the three it is one epoch.
    """

    learning_rate: float = Field(gt=0, description="learning rate after the warm-up, such as 1e-3")
    epochs: Steps | None = Field(None, description=(
        "stop after this many passes over the data; 1 when neither max_steps nor max_minutes is given"))
    max_steps: Steps | None = Field(None, description="stop after this many steps")
    max_minutes: float | None = Field(None, gt=0, le=MOST_STEPS, description="stop after this many minutes of training")
    num_microbatches: int | None = Field(None, ge=1, le=Schedule.MOST_MICROBATCHES, description=(
        "microbatches per batch; must divide dataset.batch_size; null takes, with a flush, the fewest with a bubble "
        "below 15 %, without one as many as stages, times replicas, and then an update takes the whole batch"))
    optimizer: Literal["sgd", "adam", "adamw", "nadam", "lamb", "muon"] = Field("adamw", description=(
        "optimizer; muon steps the matrices of hidden layers, and AdamW the other parameters at the same "
        "learning rate"))
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    lr_policy: Literal["constant", "step", "polynomial", "cosine"] = Field("constant", description=(
        "learning rate after the warm-up: constant; step divides it by 10 after each third of the updates; polynomial "
        "(a straight line) and cosine fall to 0 at the last update"))
    warmup_steps: float = Field(0, ge=0, le=MOST_STEPS, description=(
        "steps over which the learning rate rises from 0; a value below 1 is a share of all steps of the run"))
    weight_decay: float = Field(0.0, ge=0, description=(
        "decoupled weight decay, or an L2 term in the gradient (sgd, adam); not applied to biases and norms"))
    grad_clip: float | None = Field(None, gt=0, description="largest norm of the gradient over all stages")
    per_token_loss: bool = Field(False, description=(
        "whether the loss of an update is the mean over all labels of its microbatches, instead of the mean of each "
        "microbatch's mean"))
    average: float | None = Field(None, gt=0, lt=1, description=(
        "decay of an exponential moving average that follows the weights, such as 0.999, and is evaluated and saved "
        "beside them; null keeps none"))
    on_nan: Literal["stop", "skip"] = Field("stop", description=(
        "reaction to a loss or gradient that is not finite: stop ends the run; skip leaves the update out, with a "
        "flush on all stages, without one on the stage concerned"))
    delay_correction: Literal["none", "extrapolate"] = Field("none", description=(
        "correction of late gradients without a flush; extrapolate continues every step of the optimizer over the mean "
        "delay of its stage, in updates"))
    delay_correction_strength: float = Field(1.0, gt=0, description=(
        "share of the mean delay, or a multiple, over which extrapolate continues"))
    precision: Precision.Name = Field("fp32", description=(
        "arithmetic of the layers; bf16 and fp16 use autocast, bf16_pure also rounds the weights and keeps fp32 "
        "master weights"))
    loss_scale: LossScale = Field("dynamic", description=(
        "factor of the loss in fp16; dynamic finds the factor while training, under a schedule with a flush, and skips "
        "updates that overflow"))
    seed: Seed = Field(0, description="seed of initial weights and dropout")
    evaluate_every: Steps | None = Field(None, description="steps between evaluations; the run always ends with one")
    evaluation_batches: Steps = Field(8, description="batches per evaluation")
    patience: Steps | None = Field(None, description=(
        "evaluations in a row without a lower loss than the best one before, after which the run ends; null ends none"))
    compile: Compile = Field(False, description=(
        "compile every layer with torch.compile: true for inductor, or the name of another backend, such as aot_eager; "
        "schedules that split the backward are refused"))
    profile_iteration: Steps | None = Field(None, description=(
        "update to record with torch's profiler on every rank, counted from 1 as in the progress lines"))
    sample_prompts: Texts = Field((), description=(
        "texts that the model continues at the end of the run, with its weights before and after the training; for "
        "BERT, texts with [MASK] for words to fill in"))
    exit_after_profile: bool = Field(False, description="end the run normally after profile_iteration")
    print_frequency: Steps = Field(10, description=(
        "updates between two progress lines in the ranks' logs, and on a screen without a progress bar"))
    threads: int = Field(1, ge=1, le=1024, description="CPU threads per rank")

    @property
    def needs_norms(self) -> bool:
        """Return whether stages exchange the norms of their gradients, under a schedule with a flush."""
        return self.grad_clip is not None or self.on_nan == "skip" or self.computed.scaled

    @property
    def computed(self) -> Precision:
        """The precision that layers compute in."""
        return Precision(self.precision, None if self.loss_scale == "dynamic" else self.loss_scale)

    @property
    def extrapolation(self) -> float | None:
        """Return the strength of the correction of late gradients; None where they are not corrected."""
        return None if self.delay_correction == "none" else self.delay_correction_strength

    def warmup_updates(self, total: int) -> int:
        """Return the updates of the warm-up in a run of ``total`` updates."""
        return int(self.warmup_steps * total if self.warmup_steps < 1 else self.warmup_steps)

    def resolved(self) -> Self:
        """Return this section with one epoch, where there is no other limit."""
        limited = any(limit is not None for limit in (self.epochs, self.max_steps, self.max_minutes))
        return self if limited else self.model_copy(update={"epochs": 1})

    def mistakes(self) -> Iterator[Mistake]:
        endless = self.epochs is None and self.max_steps is None
        remedy = "give max_steps or epochs as well; the run still ends at the first limit it reaches"
        if endless and self.lr_policy != "constant":
            yield Mistake(("lr_policy",), f"is {self.lr_policy}, which depends on the number of updates, but "
                                          "max_minutes alone does not give it", remedy)
        if 0 < self.warmup_steps < 1 and endless:
            yield Mistake(("warmup_steps",), f"is {self.warmup_steps}, a share of all updates, but max_minutes "
                                             "alone does not give their number", remedy)
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            yield Mistake(("warmup_steps",), f"is {self.warmup_steps}", "give whole updates, or a share below 1")
        if self.loss_scale != "dynamic" and self.precision != "fp16":
            yield Mistake(("loss_scale",), f"is {self.loss_scale:g}, but the precision is {self.precision}",
                          "only fp16 scales its loss: leave it out, or set precision: fp16")


class LaunchSection(Section):
    """The start of ranks, above all those on other hosts."""

    ssh_options: Texts = Field((), description=(
        "options for ssh, such as [-p, '2222', -i, /home/me/.ssh/cluster]; ssh never asks for a password"))
    python: Name | None = Field(None, description="Python on the other hosts; null takes the path of this one")
    directory: Name | None = Field(None, description=(
        "folder on the other hosts that paths are relative to; null takes the path of this one"))
    keep_memory: bool = Field(True, description=(
        "keep freed memory for the next tensors of a rank, on every host whose C library is glibc"))


class CheckpointSection(Section):
    """The checkpoints of a run."""

    every_steps: Steps | None = Field(None, description=(
        "steps between two checkpoints; null: as many as every_minutes take, which the run measures, and writes into "
        "its own config.yaml"))
    every_minutes: float | None = Field(10.0, gt=0, le=MOST_STEPS, description=(
        "minutes between two checkpoints, where every_steps is null; null writes none before the end"))
    keep: int | None = Field(3, ge=1, le=MOST_STEPS, description="number of newest checkpoints to keep; null keeps all")
    keep_best: bool = Field(True, description=(
        "write a checkpoint after every evaluation with the lowest loss so far, and keep the best beside the newest"))
    at_end: bool = Field(True, description="write a checkpoint at the end of the run, and when a signal stops it")
    directory: Absolute | None = Field(None, description=(
        "parent folder of the runs' checkpoint folders, on a disk that all hosts see; null writes checkpoints into "
        "the run folder"))

    @property
    def makes_any(self) -> bool:
        """Return whether a run writes any checkpoint."""
        return self.at_end or bool(self.every_steps or self.every_minutes)


class MetricsSection(Section):
    """The metrics of a run beside ``metrics.jsonl``."""

    peak_tflops: float | None = Field(None, gt=0, le=10**9, description=(
        "peak of one device in 10^12 operations per second, for MFU and HFU; null takes a table of GPUs, else "
        "measures the peak"))
    rank_times_every: Steps | None = Field(None, description=(
        "updates between two reports of the time and the traffic of each rank, on the screen and in logs; null for "
        "none there"))
    tensorboard: bool = Field(False, description="write TensorBoard events into the run folder")
    wandb: Literal["offline", "online"] | None = Field(None, description=(
        "log the run with Weights & Biases: offline writes files into the run folder, online uploads them; null does "
        "neither"))


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
    def order(self) -> Order:
        """The schedule; a stand-in where it is planned."""
        parallel = self.parallel.standing_in
        return Order.of(parallel.schedule, parallel.chunks, slices=parallel.slices, update_every=parallel.update_every,
                        warmup=parallel.depths, delay_correction=self.training.extrapolation)

    @property
    def microbatches(self) -> int:
        """Microbatches per batch."""
        assert self.training.num_microbatches is not None, "resolved() counts them"
        return self.training.num_microbatches

    @property
    def microbatch_size(self) -> int:
        """Samples per microbatch."""
        return self.dataset.batch_size // self.microbatches

    def resolved(self) -> Self:
        """Return this config with a number for ``training.num_microbatches: null``.

        With a flush it takes as many as a bubble of less than 15 % needs, or all samples of a batch of fewer.
        Without one a batch is then an update, and every replica takes at least as many microbatches of it as it
        starts before its first backward ends; so the mean delay is less than one update. Up to twice as many are taken
        where fewer do not divide the batch. A smaller batch is cut into single samples.
        """
        if self.training.num_microbatches is not None:
            return self
        parallel, samples = self.parallel, self.dataset.batch_size
        microbatches, every = 1, parallel.update_every
        if CsvFile.is_path(parallel.schedule):
            microbatches = max(1, CsvFile.read(parallel.schedule).schedule.microbatches // parallel.slices)
        elif parallel.asynchronous:
            # What divides an update on all stages: their replicas, and update_every.
            unit = lcm(*parallel.widths) * (parallel.update_every or 1)
            least = RegisteredSchedule.named(parallel.schedule).update_every(parallel.in_flight)
            fewest = -(-max(parallel.in_flight, least) * lcm(*parallel.widths) // unit) * unit
            fitting = [count for count in range(fewest, 2 * fewest + 1, unit) if samples % count == 0]
            if not fitting and (samples > fewest or samples % unit):
                raise MistakesError(Mistake(
                    ("dataset", "batch_size"),
                    f"is {samples}, which cannot be cut evenly into {fewest} to {2 * fewest} microbatches"
                    + (f", a multiple of {unit}" if unit > 1 else "")
                    + f", as {parallel.schedule} has them where training.num_microbatches is not given",
                    _nearest_multiples("batch size", samples, fewest) + "; or give training.num_microbatches"))
            microbatches = fitting[0] if fitting else samples
            every = every or microbatches // lcm(*parallel.widths)
        else:
            with suppress(UserError, KeyError):  # what does not fit is said elsewhere
                microbatches = enough_microbatches(self.order, parallel.standing_in.cut, samples)
        training = self.training.model_copy(update={"num_microbatches": microbatches})
        return self.model_copy(update={"training": training}).with_parallel(update_every=every)

    def mistakes(self) -> Iterator[Mistake]:
        if self.machines is not None:
            yield from machine_mistakes(self.machines)
        samples, microbatches = self.dataset.batch_size, self.microbatches
        if samples % microbatches:
            yield Mistake(("dataset", "batch_size"),
                          f"is {samples}, which the {microbatches} microbatches of training.num_microbatches do not "
                          "divide", _nearest_multiples("batch size", samples, microbatches))
        every, flush = self.parallel.update_every or microbatches, not self.parallel.asynchronous
        if flush and every != microbatches:
            yield Mistake(("parallel", "update_every"), f"is {every}, but the schedule {self.parallel.schedule} "
                          f"updates once per batch of {counted(microbatches, 'microbatch')}", "leave it out")
        elif microbatches % every:
            divisors = ", ".join(str(k) for k in range(1, microbatches + 1) if microbatches % k == 0)
            yield Mistake(("parallel", "update_every"),
                          f"is {every}, which does not divide the {microbatches} microbatches of a batch",
                          f"use one of {divisors}, or make training.num_microbatches a multiple of {every}")
        if self.training.extrapolation is not None and not self.parallel.asynchronous:
            yield Mistake(("training", "delay_correction"), f"is {self.training.delay_correction}, but under the "
                          f"schedule {self.parallel.schedule} no gradient is late: it has a flush",
                          "set it to none, or choose a schedule without a flush, such as pipedream")

        for key, what, hint in self.training.computed.refused(used_codecs(self.parallel.compress),
                                                              not self.parallel.asynchronous):
            yield Mistake(("training" if key == "loss_scale" else "parallel", key), what, hint)

        if self.parallel.tensor > 1:
            if self.training.compile:
                yield Mistake(("training", "compile"), f"is {self.training.compile}, but parallel.tensor is "
                              f"{self.parallel.tensor}, and split layers are not compiled", "set it to false")
            if self.model.lora is not None:
                yield Mistake(("model", "lora"), f"is given, but parallel.tensor is {self.parallel.tensor}, and split "
                              "layers get no adapters", "set parallel.tensor to 1, or leave it out")
            if self.elastic:
                yield Mistake(("elastic",), f"is true, but parallel.tensor is {self.parallel.tensor}: what is left of "
                              "a host cannot split a layer", "set it to false")
        if self.trace and (why := Execution(executor=self.parallel.executor).no_timeline) is not None:
            yield Mistake(("trace",), f"is true, but {why[0]}", why[1])

    def with_parallel(self, parallel: ParallelSection | None = None, **changes: object) -> Self:
        """Return this config with another section ``parallel``, or other values of it, which are not validated."""
        return self.model_copy(update={"parallel": (parallel or self.parallel).model_copy(update=changes)})

    def saving_every(self, steps: int | None) -> Self:
        """Return this config with a number of steps between two checkpoints."""
        return self.model_copy(update={"checkpoint": self.saving.model_copy(update={"every_steps": steps})})

    def resolved_yaml(self) -> str:
        """Return this config as native YAML with every key; loading it gives an equal config."""
        return write(self.model_dump(mode="json"))


def load_config(path: Path, overrides: Sequence[str] = (), *, resolved: bool = False,
                started: bool | None = False) -> Config:
    """Load the config in the file at ``path``; a path that does not exist may name a shipped config.

    Args:
        overrides: values of ``--set``, such as ``training.learning_rate=3e-4``; of a file in another form
            (:mod:`vpipe.app.config.formats`) its own keys, too.
        resolved: the file is the config of a run, which has every key; keys that derive from an overridden key are
            derived anew. Its paths are found from any folder (:func:`~vpipe.app.config.origin.find_files`).
        started: whether torchrun or srun start the ranks, and not ``vpipe train``; None if either may.

    Raises:
        UserError: all mistakes in the files and on the command line.
    """
    tree = config_tree(path, overrides, resolved=resolved)
    others = option_problems(tree) if isinstance(tree.get(OPTIONS), dict) else []
    given = {_setting(text)[0] for text in overrides} if resolved else None
    with suppress(ValidationError):  # else what is wrong with its keys comes first
        others += unread_problems(Config.model_validate(tree.value, context=CHECKED), tree, given, started)
    return validated(Config, tree, others)


def config_tree(path: Path, overrides: Sequence[str] = (), *, resolved: bool = False) -> Tree:
    """Return the native keys of a config before they are validated; see :func:`load_config`."""
    file = find_config(path)
    tree = read_yaml(file)
    settings = [_setting(text) for text in overrides]
    formats = formats_of(tree, [key for key, _ in settings], Config)
    for form in formats:
        if form.recognises(tree):
            for key, part in settings:
                if key in form.keys:
                    tree.put((key,), part)
            settings = [(key, part) for key, part in settings if key not in form.keys]
            tree = form.to_native(tree, file.parent, shipped=file != path)
    check_form(tree)
    if resolved:
        find_files(tree, file.parent)
    if resolved and tree.get(("model", "lora", "targets")) == []:
        tree.drop(("model", "lora", "targets"))  # it meant all once
    if resolved and settings:
        drop_derived(tree, {key: part.value for key, part in settings})
    for key, part in settings:
        tree.put(tuple(key.split(".")), part)
    given = {key for key, _ in settings}
    for form in formats:
        form.replace_keys(tree, given)
    if "parallel.data_parallel_size" in given and "parallel.stage_to_rank_map" not in given:
        drop_ranks(tree)
    if isinstance(plan := tree.get(PLAN), str):
        apply_plan(tree, plan, given)
    return tree


def parse_resolved(text: str) -> Config:
    """Parse the YAML of the config of a job that another process has made; its rules are not checked again."""
    return Config.model_validate(parse(text, "", "config").value, context=CHECKED)


def config_row(config: Config) -> dict[str, Any]:
    """Return every key of a config by its path, such as ``training.learning_rate``, in order."""
    complete = config.model_copy(update={"checkpoint": config.saving})  # so that every row has the same columns
    return dict(flatten(complete.model_dump(mode="json")))


def flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a section by its path, and its value."""
    for key, value in section.items():
        if isinstance(value, dict) and key not in ("stage_to_rank_map", "options", "lora"):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _setting(text: str) -> tuple[str, Tree]:
    """Parse the ``key=value`` of a ``--set``; the value is YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    name, where = (text.option, text.option) if isinstance(text, OptionSetting) else (key, f"--set {key}")
    if not equals or not all(parts := key.split(".")) or len(parts) > DEEPEST:
        raise UserError(f"{describe(text)} does not set a key", where=where,
                        hint="write --set training.learning_rate=3e-4")
    return key, parse(value, name, where)
