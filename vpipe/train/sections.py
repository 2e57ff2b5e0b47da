"""The sections of a config, one class each; every field says what it means and in which unit.

A key whose feature does not exist yet is accepted with its neutral value only: any other value is
refused by the section's ``mistakes``, so nothing a user writes is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vpipe.errors import UserError, nearest
from vpipe.schedules.arrange import has_flush, is_file
from vpipe.schedules.registry import recipe_named, schedule_names
from vpipe.schedules.size import Placement
from vpipe.train.validation import Mistake, MistakesError, Section, unavailable
from vpipe.train.yaml_file import describe


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layers_or_auto(value: Any) -> Any:
    hint = "partition: the number of layers of each stage such as [3, 2, 2, 2], or auto"
    if value == "auto":
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise MistakesError([Mistake((), f"must be a list of whole numbers or auto, got {describe(value)}", hint)])
    wrong = [Mistake((i,), f"must be a whole number of at least 1, got {describe(layers)}", hint)
             for i, layers in enumerate(value) if type(layers) is not int or layers < 1]
    if wrong:
        raise MistakesError(wrong)
    return tuple(value)


def _ratios(value: Any) -> Any:
    hint = "recompute: the share of a stage's layers to recompute, counted from its end: 0..1, or a list per stage"
    several = isinstance(value, (list, tuple))
    if value == "auto":
        raise MistakesError([Mistake((), "asks for ratios from the planner, which is not available in this version",
                                     "give a number from 0 to 1, or a list with one per stage")])
    ratios = list(value) if several else [value]
    wrong = [Mistake((i,) if several else (), f"must be a number from 0 to 1, got {describe(ratio)}", hint)
             for i, ratio in enumerate(ratios) if type(ratio) not in (int, float) or not 0 <= ratio <= 1]
    if wrong:
        raise MistakesError(wrong)
    return tuple(map(float, ratios)) if several else float(value)


def _codecs(value: Any) -> Any:
    several = isinstance(value, (list, tuple))
    wrong = [Mistake((i,) if several else (), f"must be none, bf16 or int8, got {describe(name)}",
                     "compress: how tensors travel between stages: one word, or a list with one per cut")
             for i, name in enumerate(value if several else [value]) if name not in get_args(Codec)]
    if wrong:
        raise MistakesError(wrong)
    return _as_tuple(value)


def _no_trace(value: bool) -> bool:
    if value:
        raise MistakesError([Mistake((), "asks for the timeline of the run, which is not available in this version",
                                     "set it to false")])
    return value


Ints = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Layers = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_as_tuple), Field(min_length=1)]
Codec = Literal["none", "bf16", "int8"]
Codecs = Annotated[Codec | tuple[Codec, ...], BeforeValidator(_codecs)]
Ratios = Annotated[float | tuple[float, ...], BeforeValidator(_ratios)]
FilePath = Annotated[Path, Field(strict=False)]
Trace = Annotated[bool, AfterValidator(_no_trace)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class ModelSection(Section):
    """What is trained. Sizes written here go before those of ``preset`` or ``config_file``."""

    name: str = Field(min_length=1, description="family of the model, such as bert")
    preset: str | None = Field(None, description="named sizes of the family; for bert tiny, mini, small, medium, "
                                                 "base or large")
    hidden_size: int | None = Field(None, ge=1, description="width of a layer's output, in features")
    num_layers: int | None = Field(None, ge=1, description="number of transformer blocks; each is cut into two layers")
    num_heads: int | None = Field(None, ge=1, description="attention heads per block; must divide hidden_size")
    sequence_length: int = Field(128, ge=1, description="tokens per sample")
    vocab_size: int = Field(-1, ge=-1, description="tokens in the vocabulary; -1 takes it from config_file, else from "
                                                   "the data set")
    dropout: float | None = Field(None, ge=0, lt=1, description="share of activations dropped in training; null keeps "
                                                                "the family's own")
    tie_weights: bool = Field(True, description="whether the output layer shares the weights of the word embeddings")
    config_file: FilePath | None = Field(None, description="path of a Hugging Face config such as bert_config.json "
                                                           "that gives the sizes, from the current folder")

    def mistakes(self) -> Iterator[Mistake]:
        if self.vocab_size == 0:
            yield Mistake(("vocab_size",), "is 0", "give the number of tokens, or -1 to ask the data set")
        if self.preset and self.config_file:
            yield Mistake(("preset",), f"is '{self.preset}', but the sizes also come from the config_file "
                                       f"'{self.config_file}'", "keep one of the two")
        if self.hidden_size and self.num_heads and self.hidden_size % self.num_heads:
            low, high = neighbours(self.hidden_size, self.num_heads)
            yield Mistake(("hidden_size",), f"is {self.hidden_size}, which {self.num_heads} heads do not divide",
                          f"the nearest sizes are {low} and {high}" if low else f"the nearest size is {high}")


class DatasetSection(Section):
    """What it is trained on."""

    name: str = Field(min_length=1, description="registered data set, such as text, bert_hdf5 or synthetic")
    path: FilePath | None = Field(None, description="file or folder of the data, from the current folder")
    batch_size: int = Field(ge=1, description="samples per batch, which is cut into num_microbatches microbatches; "
                                              "with a flush one update per batch")
    num_workers: int = Field(0, ge=0, description="threads that prepare batches ahead on each reading rank; 0 prepares "
                                                  "them in the training loop")
    samples: int | None = Field(None, ge=1, description="training samples: at most so many; a synthetic data set "
                                                             "makes exactly so many")
    cache_directory: FilePath | None = Field(None, description="folder for prepared data and tokenizers; null "
                                                               "takes ~/.cache/vpipe")
    seed: Seed | None = Field(None, description="seed of the order and of masking; null takes training.seed")

    def mistakes(self) -> Iterator[Mistake]:
        if self.num_workers:
            yield unavailable("num_workers", f"{self.num_workers} threads that prepare batches ahead", "set it to 0")


class TrainingSection(Section):
    """How long and with which updates.

    A run ends at the first of ``epochs``, ``max_steps`` and ``max_minutes`` that it reaches; one that is
    null does not count, and the data repeat as often as needed. With none of the three it is one epoch.
    """

    learning_rate: float = Field(gt=0, description="learning rate after the warm-up, such as 1e-3")
    epochs: int | None = Field(None, ge=1, description="stop after so many passes over the data; 1 when neither "
                                                       "max_steps nor max_minutes is given")
    max_steps: int | None = Field(None, ge=1, description="stop after so many steps")
    max_minutes: float | None = Field(None, gt=0, description="stop after so many minutes of training")
    num_microbatches: int = Field(1, ge=1, description="microbatches per batch; must divide dataset.batch_size")
    optimizer: Literal["sgd", "adam", "adamw", "lamb"] = Field("adamw", description="rule of an update")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    lr_policy: Literal["constant", "step", "polynomial", "cosine"] = Field(
        "constant", description="learning rate after the warm-up: constant; step: divided by 10 after each third of "
                                "the updates; polynomial (a straight line) or cosine: falling to 0 at the last update")
    warmup_steps: float = Field(0, ge=0, description="steps over which the learning rate rises from 0; a value below "
                                                     "1 is the share of all steps of the run")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay (adamw, lamb), or L2 term in the "
                                                           "gradient (sgd, adam); never of biases and norms")
    grad_clip: float | None = Field(None, gt=0, description="largest norm of the gradient over all stages")
    seed: Seed = Field(0, description="seed of initial weights and dropout")
    evaluate_every: int | None = Field(None, ge=1, description="steps between evaluations; there is always one at "
                                                               "the end")
    evaluation_batches: int = Field(8, ge=1, description="batches per evaluation")
    profile_iteration: int | None = Field(None, ge=1, description="update that the profiler records")
    exit_after_profile: bool = Field(False, description="whether the run ends after profile_iteration")
    print_frequency: int = Field(10, ge=1, description="updates between two lines of progress in the ranks' logs, and "
                                                       "on the screen where it is no terminal with a progress bar")
    threads: int = Field(1, ge=1, description="CPU threads per rank")

    def warmup_updates(self, total: int) -> int:
        """The updates of the warm-up in a run of ``total`` updates."""
        return int(self.warmup_steps * total if self.warmup_steps < 1 else self.warmup_steps)

    @model_validator(mode="before")
    @classmethod
    def _one_epoch(cls, data: Any) -> Any:
        limits = ("epochs", "max_steps", "max_minutes")
        if isinstance(data, dict) and all(data.get(key) is None for key in limits):
            return {**data, "epochs": 1}
        return data

    def mistakes(self) -> Iterator[Mistake]:
        endless = self.epochs is None and self.max_steps is None
        remedy = "give max_steps or epochs as well; the run still ends at the first limit it reaches"
        if endless and self.lr_policy != "constant":
            yield Mistake(("lr_policy",), f"is {self.lr_policy}, which depends on the number of updates, but "
                                          "max_minutes alone does not tell it", remedy)
        if 0 < self.warmup_steps < 1 and endless:
            yield Mistake(("warmup_steps",), f"is {self.warmup_steps}, a share of all updates, but max_minutes "
                                             "alone does not tell their number", remedy)
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            yield Mistake(("warmup_steps",), f"is {self.warmup_steps}", "give whole updates, or a share below 1")
        if self.momentum != 0.9 and self.optimizer != "sgd":
            yield Mistake(("momentum",), f"is {self.momentum}, but the optimizer is {self.optimizer}",
                          "momentum belongs to sgd: leave it out, or set optimizer: sgd")
        if self.profile_iteration is not None:
            yield unavailable("profile_iteration", f"a profile of update {self.profile_iteration}", "leave it out")
        if self.exit_after_profile:
            yield unavailable("exit_after_profile", "an end after the profile", "set it to false")


class ParallelSection(Section):
    """How the model is cut into stages, and in which order their work is done."""

    model_parallel_size: int = Field(ge=1, description="number of stages; may be left out when partition or "
                                                       "stage_to_rank_map tells it")
    data_parallel_size: int = Field(1, ge=1, description="replicas of the whole pipeline, where "
                                                      "stage_to_rank_map does not give the ranks of each stage")
    schedule: str = Field("1f1b", min_length=1, description="order of forwards, backwards and updates, such as "
                                                            "gpipe, 1f1b or pipedream; or a CSV file of actions, from "
                                                            "the current folder")
    chunks: int | None = Field(None, ge=1, description="stages per rank, for schedules that may have any number of "
                                                       "them (interleaved, looped_bfs, hanayo); null takes the "
                                                       "schedule's own")
    scheduler: Literal["naive", "async_threaded"] | None = Field(
        None, description="OurGPipe's name for schedule gpipe with this executor")
    use_orion_scheduler: bool = Field(False, description="whether Orion shares a GPU between microbatches")
    executor: Literal["overlapped", "naive", "async_threaded"] = Field(
        "overlapped", description="how a rank does its actions; overlapped sends and receives during compute")
    partition: Annotated[tuple[int, ...] | Literal["auto"], BeforeValidator(_layers_or_auto)] = Field(
        "auto", description="layers per stage; auto balances the stages by their parameters")
    recompute: Ratios = Field(0.0, description="share of a stage's layers, counted from its end, whose activations are "
                                               "recomputed in backward; one number, or a list per stage")
    update_every: int | None = Field(None, ge=1, description="microbatches per update of an asynchronous schedule, "
                                                             "and per rank of a stage; null takes the fewest that it "
                                                             "can have")
    stage_to_rank_map: dict[str, Ints] | None = Field(None, description='ranks of each stage, such as {"0": [0, 1], '
                                                                        '"1": [2]}: with several, microbatch i goes to '
                                                                        'replica i mod their number; null places them '
                                                                        'as the schedule does')
    backend: Literal["gloo", "nccl"] = Field("gloo", description="what carries tensors between ranks")
    master_port: int | None = Field(None, ge=1, le=65535, description="TCP port where ranks meet; null takes a free "
                                                                      "one")
    master_address: str | None = Field(None, min_length=1, description="name or address of the first rank's host, as "
                                                                       "the others reach it; null finds it")
    interface: str | None = Field(None, min_length=1, description="network interface between ranks, such as eth0; null "
                                                                  "takes the one on the route to the first rank's host")
    compress: Codecs = Field("none", description="how activations and gradients travel between stages on different "
                                                 "ranks: none as they are, bf16 in half the bytes of fp32, int8 in a "
                                                 "quarter; one word, or a list with one per cut")
    compress_rounding: Literal["nearest", "stochastic"] = Field("nearest", description="rounding of int8")
    compress_feedback: bool = Field(True, description="whether what compressing a gradient lost is added to the next "
                                                      "microbatch's")
    timeout_s: float = Field(60.0, gt=0, description="seconds a rank waits for another before the run fails")
    warmup_depth: Ints | None = Field(None, description="forwards of a rank of each stage before its first backward; "
                                                        "null takes (ranks of this and later stages - 1) // ranks of "
                                                        "this stage")

    @property
    def recompute_ratios(self) -> tuple[float, ...]:
        """The recompute ratio of each stage."""
        several = isinstance(self.recompute, tuple)
        return self.recompute if several else (self.recompute,) * self.model_parallel_size  # type: ignore[return-value]

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule updates without a flush."""
        return not has_flush(self.schedule)

    @property
    def placement(self) -> Placement | None:
        """Ranks per stage, where the config says them."""
        ranks = self.stage_to_rank_map
        return None if ranks is None else tuple(ranks[str(stage)] for stage in range(len(ranks)))

    @model_validator(mode="before")
    @classmethod
    def _count_stages(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("model_parallel_size") is not None:
            return data
        data = {key: value for key, value in data.items() if key != "model_parallel_size"}
        for tells in (data.get("partition"), data.get("stage_to_rank_map")):
            if isinstance(tells, (list, tuple, dict)) and tells:
                return {**data, "model_parallel_size": len(tells)}
        return data

    def mistakes(self) -> Iterator[Mistake]:
        yield from self._unavailable()
        stages = self.model_parallel_size
        for key, entries in (("partition", self.partition), ("recompute", self.recompute),
                             ("warmup_depth", self.warmup_depth)):
            if isinstance(entries, tuple) and len(entries) != stages:
                yield Mistake((key,), f"has {_count(entries)} for {stages} stages", "give one entry per stage")
        yield from self._compression()
        if self.stage_to_rank_map is not None:
            yield from self._placement(self.stage_to_rank_map)
            if self.data_parallel_size > 1 and any(len(own) != self.data_parallel_size
                                                   for own in self.stage_to_rank_map.values()):
                yield Mistake(("data_parallel_size",), f"is {self.data_parallel_size}, but stage_to_rank_map gives the "
                              f"stages {', '.join(str(len(own)) for own in self.stage_to_rank_map.values())} ranks",
                              "leave it out: the map says it")
        yield from self._schedule()
        named = self.stage_to_rank_map or {}
        widths = [len(named.get(str(stage), ())) or self.data_parallel_size for stage in range(stages)]
        depths = tuple((sum(widths[stage:]) - 1) // width for stage, width in enumerate(widths))
        if self.warmup_depth and len(self.warmup_depth) == stages and self.warmup_depth != depths:
            yield unavailable("warmup_depth", f"the depths {list(self.warmup_depth)} where these stages have "
                              f"{list(depths)} by themselves", "leave it out")

    def _compression(self) -> Iterator[Mistake]:
        cuts = self.model_parallel_size - 1
        if isinstance(self.compress, tuple) and len(self.compress) != cuts:
            yield Mistake(("compress",), f"has {_count(self.compress)} for the {cuts} cuts between "
                          f"{self.model_parallel_size} stages", "give one word, or one entry per cut")
        used = self.compress if isinstance(self.compress, tuple) else (self.compress,)
        if self.compress_rounding != "nearest" and "int8" not in used:
            yield Mistake(("compress_rounding",), f"is {self.compress_rounding}, but nothing is sent as int8",
                          "leave it out, or set compress: int8")

    def _schedule(self) -> Iterator[Mistake]:
        if not is_file(self.schedule) and self.schedule not in schedule_names():
            yield Mistake(("schedule",), f"is '{self.schedule}', which is no schedule of this version",
                          nearest(self.schedule, schedule_names()))
            return
        try:
            flush = has_flush(self.schedule)
        except UserError as error:  # of a file
            [problem] = error.problems
            place = f" ({problem.where})" if problem.where else ""
            yield Mistake(("schedule",), f"names no schedule: {problem.what}{place}", problem.hint)
            return
        if (self.update_every or 1) > 1 and flush:
            yield Mistake(("update_every",), f"is {self.update_every}, but the schedule {self.schedule} updates once "
                          "per batch", "leave it out; training.num_microbatches says how many microbatches a batch has")

    def _unavailable(self) -> Iterator[Mistake]:
        if self.use_orion_scheduler:
            yield unavailable("use_orion_scheduler", "the Orion scheduler", "set it to false")
        if self.scheduler:
            yield unavailable("scheduler", f"the executor {self.scheduler}", "leave it out and write schedule: gpipe, "
                              "which runs with the executor overlapped and gives the same losses")
        if self.executor != "overlapped":
            yield unavailable("executor", f"the executor {self.executor}", "use overlapped: it gives the same losses")

    def _one_stage_per_rank(self) -> bool:
        if self.schedule not in schedule_names():
            return False  # a file, or a name that is refused anyway
        recipe = recipe_named(self.schedule)
        return recipe.chunks == 1 and not recipe.any_chunks

    def _placement(self, ranks: dict[str, tuple[int, ...]]) -> Iterator[Mistake]:
        key, stages = "stage_to_rank_map", self.model_parallel_size
        expected = [str(stage) for stage in range(stages)]
        if set(ranks) != set(expected):
            yield Mistake((key,), f"names the stages {', '.join(sorted(ranks)) or 'none'}; there are {stages}: "
                                  f"{', '.join(expected)}",
                                  "name each stage once, as \"0\", \"1\", ..., or correct model_parallel_size")
            return
        places = [(stage, i, rank) for stage in expected for i, rank in enumerate(ranks[stage])]
        highest = max((rank for _, _, rank in places), default=0)
        hint = f"give each stage ranks of its own: {len(places)} of them are numbered 0 to {len(places) - 1}"
        held: dict[int, str] = {}
        for stage in expected:
            if not ranks[stage]:
                yield Mistake((key, stage), f"puts stage {stage} on no rank", "give the stage a rank, or several")
        for stage, _, rank in places:
            other = held.setdefault(rank, stage)
            if rank < 0:
                yield Mistake((key, stage), f"puts stage {stage} on rank {rank}", hint)
            elif ranks[stage].count(rank) > 1:
                yield Mistake((key, stage), f"names rank {rank} twice for stage {stage}", hint)
                return
            elif other != stage and (self._one_stage_per_rank() or ranks[other] != ranks[stage]):
                yield Mistake((key, stage), f"puts stage {stage} on rank {rank}, where stage {other} is already; "
                              + (f"{self.schedule} holds one stage on each rank" if self._one_stage_per_rank() else
                                 f"stage {other} has ranks {list(ranks[other])}, stage {stage} {list(ranks[stage])}"),
                              f"{hint}, or choose a schedule with several stages per rank, such as interleaved"
                              if self._one_stage_per_rank() else
                              "let the two share all of their ranks, in the same order, or none")
        if missing := sorted(set(range(highest + 1)) - {rank for _, _, rank in places}):
            yield Mistake((key,), f"names ranks up to {highest}, but never rank {missing[0]}",
                          "number the ranks from 0 without a gap")


def neighbours(size: int, divisor: int) -> tuple[int, int]:
    """The nearest multiples of ``divisor`` below and above ``size``, which is none itself."""
    low = size // divisor * divisor
    return low, low + divisor


def _count(entries: tuple[object, ...]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


class LaunchSection(Section):
    """How the ranks of other hosts are started."""

    ssh_options: Texts = Field((), description="options for ssh, such as [-p, '2222', -i, /home/me/.ssh/cluster]; ssh "
                                               "is never let ask for a password")
    python: str | None = Field(None, min_length=1, description="Python on the other hosts; null takes the path of this "
                                                               "one")
    directory: str | None = Field(None, min_length=1, description="folder on the other hosts from which paths are "
                                                                  "taken; null takes the path of this one")


class CheckpointSection(Section):
    """When the state of a run is written."""

    every_steps: int | None = Field(None, ge=1, description="updates between two checkpoints")
    keep: int | None = Field(None, ge=1, description="checkpoints kept; the oldest are removed")

    def mistakes(self) -> Iterator[Mistake]:
        if self.every_steps is not None:
            yield unavailable("every_steps", f"a checkpoint every {self.every_steps} updates", "leave it out")
        if self.keep is not None:
            yield unavailable("keep", f"{self.keep} checkpoints", "leave it out")
