"""Convert a flat VPipe config and its two JSON files into a native config.

Values keep their places, so a later error still points into the flat file or the JSON.

``sync_mode: asp`` is the schedule pipedream: a batch is one minibatch of ``batch_size`` samples and one
microbatch, and is one update. ``bsp`` is a flush after 32 minibatches: a native batch is 32 microbatches
of ``batch_size`` samples. ``macrobatch: true`` (asp only) updates once per as many minibatches as there are
stages: a native batch then has that many microbatches. Weights are stashed as ever; the two
versions that VPipe kept here are not copied, because only some depths got equal ones in forward and backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from vpipe.app.config.config import Config
from vpipe.app.config.formats import MAIN_SECTIONS, ConfigAddition
from vpipe.app.config.machines import machine_mistakes
from vpipe.app.config.validation import (
    MOST_SAMPLES,
    MOST_STEPS,
    FilePath,
    Ints,
    Mistake,
    Section,
    Texts,
    as_tuple,
    check_entries,
    checked,
    is_share,
)
from vpipe.app.config.yaml_tree import Place, Tree, read_yaml
from vpipe.errors import Problem, UserError
from vpipe.schedules import RegisteredSchedule

MINIBATCHES_PER_FLUSH = 32
WARMUP_SHARE = 0.2
"""Share of the steps over which VPipe warms up."""

Layers = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(as_tuple), Field(min_length=1)]


def _ratios(value: Any) -> Any:
    valid = check_entries(value, is_share, "a number from 0 to 1", (
        "recompute: the share of a stage's layers to recompute, counted from its end: 0..1, or a list per stage"))
    return tuple(map(float, valid)) if isinstance(valid, tuple) else float(valid)


Ratios = Annotated[float | tuple[float, ...], BeforeValidator(_ratios)]
J = TypeVar("J", bound=Section)
SAME_MEANING = {
    "learning_rate": "training.learning_rate", "weight_decay": "training.weight_decay", "epochs": "training.epochs",
    "print_frequency": "training.print_frequency", "distributed_backend": "parallel.backend", "machines": "machines",
    "trace": "trace"}


class FlatConfig(Section):
    """The keys of the flat form. Paths are relative to ``directory``."""

    directory: FilePath = Field(description=(
        "folder of the model's files, relative to this file's folder or the current one"))
    partition: FilePath = Field(description='JSON file such as {"partition": [3, 2], "recompute_ratio": [0.3, 0]}')
    config_file: FilePath = Field(description="JSON file with module_to_stage_map and stage_to_rank_map")
    sync_mode: Literal["asp", "bsp"] = Field(description=(
        "asp: an update after every minibatch (pipedream); bsp: an update after a flush of 32 minibatches"))
    model_type: Literal["bert", "translation"] = Field(description="model family")
    batch_size: int = Field(ge=1, le=MOST_SAMPLES // MINIBATCHES_PER_FLUSH, description=(
        "samples per minibatch, which passes the pipeline in one piece"))
    learning_rate: float = Field(gt=0, description="learning rate after the warm-up, such as 0.03")
    epochs: int = Field(1, ge=1, le=MOST_STEPS, description="passes over the data")
    learning_rate_policy: Literal["step", "polynomial", "cosine"] = Field("polynomial", description=(
        "step divides by 10 after each third of the updates; polynomial and cosine warm up over the first fifth of "
        "the updates, then fall to 0"))
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; not applied to biases and norms")
    module: str | None = Field(None, description=(
        "VPipe's folder of generated stages, such as vgpus=4; not read, since model_type and partition replace it"))
    machines: Texts | None = Field(None, description="host:gpu of each rank, such as localhost:0")
    distributed_backend: Literal["gloo", "nccl"] | None = Field(None, description=(
        "communication between ranks, which compute on the GPUs of machines, else on processors; null takes nccl "
        "where every rank has a GPU of its own, else gloo"))
    data_dir: FilePath | None = Field(None, description=(
        "folder of HDF5 shards, required for bert without synthetic_data; for translation file or folder of "
        "tab-separated pairs, null takes the pairs in the message catalogues of this machine"))
    synthetic_data: bool = Field(False, description="random batches instead of those in data_dir")
    log_directory: FilePath = Field(Path("output"), description="parent folder of the run folders")
    schedule: str | None = Field(None, min_length=1, description="schedule in place of sync_mode's own")
    recompute: bool = Field(False, description="recompute all layers, whatever recompute_ratio gives")
    macrobatch: bool = Field(False, description="update after as many minibatches as there are stages")
    print_frequency: int = Field(10, ge=1, le=MOST_STEPS, description="updates between two progress lines")
    verbose_frequency: int = Field(0, ge=0, le=MOST_STEPS, description=(
        "updates between two reports of the time and the traffic of each rank; 0 for none"))
    container: str | None = Field(None, description="container image for the ranks, run with apptainer or singularity")
    compress_activations: bool = Field(False, description="send activations and their gradients between stages as bf16")
    compress_in_gpu: bool = Field(False, description="compress on the GPU; tensors on a GPU always are")
    trace: bool = Field(False, description="write the timeline of the run")

    def mistakes(self) -> Iterator[Mistake]:
        if self.compress_in_gpu and not self.compress_activations:
            yield Mistake(("compress_in_gpu",), "is true, but compress_activations is false", "set both, or neither")
        if self.machines is not None:
            yield from machine_mistakes(self.machines)
        if _contradicts(self.schedule, self.sync_mode):
            other, kind = ("bsp", "with") if self.sync_mode == "asp" else ("asp", "without")
            yield Mistake(("schedule",), f"is {self.schedule}, which updates {kind} a flush, but sync_mode is "
                                         f"{self.sync_mode}", f"write sync_mode: {other}, or leave schedule out")
        if self.macrobatch and self.sync_mode == "bsp":
            yield Mistake(("macrobatch",), f"is true, but sync_mode bsp takes {MINIBATCHES_PER_FLUSH} minibatches per "
                                           "update already", "set it to false, or write sync_mode: asp")
        if self.data_dir is None and not self.synthetic_data and self.model_type == "bert":
            yield Mistake(("data_dir",), "is missing", "name the folder of HDF5 shards, or set synthetic_data: true")


class PartitionFile(Section):
    """The JSON file that ``partition`` names."""

    partition: Layers = Field(description="layers per stage, such as [12, 13, 13, 11]")
    recompute_ratio: Ratios = Field(0.0, description="share of each stage's layers to recompute, from its end")
    recompute_layers: tuple[Ints, ...] | None = Field(None, strict=False, description=(
        "per stage the layers to recompute, by their numbers in the model, such as [[0, 2], []]; recompute_ratio is "
        "then their share, for VPipe"))
    stage_to_rank_map: dict[str, Ints] | None = Field(None, description="ranks of each stage; as in config_file")
    schedule: str | None = Field(None, description="name of the schedule")
    microbatches: int | None = Field(None, ge=1, description="microbatches per batch")
    update_every: int | None = Field(None, ge=1, description=(
        "microbatches per update of an asynchronous schedule, and per rank of a stage"))
    warmup_depth: Ints | None = Field(None, description="forwards of each stage before its first backward")
    predictions: dict[str, Any] | None = Field(None, description=(
        "predictions of vpipe plan for a step and for each stage"))
    profile: str | None = Field(None, description="digest of the profile that the plan was made from")
    profiled: dict[str, Any] | None = Field(None, description="what that profile was measured of, and where")


class RankFile(Section):
    """The JSON file that ``config_file`` names."""

    module_to_stage_map: Ints = Field(description="stage of each module; the last entry is the loss: [0, 1, 2, 3, 3]")
    stage_to_rank_map: dict[str, Ints] = Field(description='ranks of each stage, such as {"0": [0], "1": [1]}')
    stage_to_depth_map: dict[str, int] | None = Field(None, description=(
        'forwards of each stage before its first backward, as parallel.warmup_depth: {"0": 1, "1": 0}'))


def _contradicts(schedule: str | None, sync_mode: str) -> bool:
    """Return whether a registered schedule contradicts ``sync_mode``."""
    registered = None if schedule is None else RegisteredSchedule.find(schedule)
    return registered is not None and registered.flush != (sync_mode == "bsp")


class VPipeFlat(ConfigAddition):
    """The flat form; a file in it may have those native sections for which it has no keys of its own."""

    keys = frozenset(FlatConfig.model_fields) - {"container", "log_directory", "trace"}

    def recognises(self, tree: Tree) -> bool:
        """Return whether a file has keys of the flat form, and none of the sections that they stand for."""
        given = {*tree.value}
        return not given.isdisjoint(self.keys - Config.model_fields.keys()) and given.isdisjoint(MAIN_SECTIONS)

    def to_native(self, tree: Tree, folder: Path, *, shipped: bool) -> Tree:
        """Return the flat ``tree`` of a file in ``folder`` as the tree of a native config.

        Native sections such as ``checkpoint`` and ``metrics``, for which the flat form has no keys, stay as they are.
        """
        passed = {key: tree.at((key,)) for key in Config.model_fields
                  if key in tree.value and key not in FlatConfig.model_fields}
        for key in passed:
            tree.drop((key,))
        flat, problems = checked(FlatConfig, tree)
        if flat is None:
            raise UserError.all_of(problems)
        base = _directory(flat, tree, folder)
        users = Path.cwd() if shipped else base
        layers, partition, more = _json(PartitionFile, tree, "partition", base / flat.partition)
        ranks, placement, others = _json(RankFile, tree, "config_file", base / flat.config_file)
        problems = [*more, *others]
        if layers and ranks:
            problems += _contradictions(flat, layers, ranks, tree, partition, placement)
        every = passed["metrics"].get(("rank_times_every",)) if "metrics" in passed else None
        if None not in (every, tree.get(("verbose_frequency",))) and flat.verbose_frequency != every:
            problems.append(Problem(f"verbose_frequency is {flat.verbose_frequency}, but metrics.rank_times_every, "
                                    f"which means the same, is {every}", "keep one of the two",
                                    tree.where(("verbose_frequency",))))
        if layers is None or ranks is None or problems:
            raise UserError.all_of(problems)

        native = Tree({}, {(): tree.places[()]})

        def put(target: str, part: Tree) -> None:
            native.put(tuple(target.split(".")), part)

        def derived(target: str, key: str, value: object) -> None:
            put(target, Tree.leaf(value, Place(tree.name((key,)), tree.where((key,)), tree.where((key,)))))

        for key, part in passed.items():
            put(key, part)
        for key, target in SAME_MEANING.items():
            if key in tree.value:
                put(target, tree.at((key,)))
        derived("log_directory", "log_directory", str(users / flat.log_directory))
        if flat.container:
            derived("container", "container",
                    flat.container if "://" in flat.container else str(users / flat.container))
        _put_model_and_data(flat, base, users, derived)
        _put_updates(flat, len(layers.partition), derived)
        put("parallel.partition", partition.at(("partition",)))
        if partition.value.keys() - {"partition", "recompute_ratio"}:
            if layers.schedule and not flat.schedule:
                put("parallel.schedule", partition.at(("schedule",)))
            if layers.microbatches:
                put("training.num_microbatches", partition.at(("microbatches",)))
            if layers.update_every:
                put("parallel.update_every", partition.at(("update_every",)))
            if layers.warmup_depth and ranks.stage_to_depth_map is None:
                put("parallel.warmup_depth", partition.at(("warmup_depth",)))
            derived("parallel.plan", "partition", str(base / flat.partition))
        if flat.verbose_frequency and isinstance(native.value.get("metrics", {}), dict):
            put("metrics.rank_times_every", tree.at(("verbose_frequency",)))
        if flat.compress_activations:
            derived("parallel.compress", "compress_activations", "bf16")
        if flat.recompute:
            derived("parallel.recompute", "recompute", 1.0)
        elif layers.recompute_layers is not None:
            put("parallel.recompute", partition.at(("recompute_layers",)))
        elif "recompute_ratio" in partition.value:
            put("parallel.recompute", partition.at(("recompute_ratio",)))
        put("parallel.stage_to_rank_map", placement.at(("stage_to_rank_map",)))
        if ranks.stage_to_depth_map is not None:
            depths = ranks.stage_to_depth_map
            place = placement.places[("stage_to_depth_map",)]
            put("parallel.warmup_depth", Tree.leaf([depths[stage] for stage in sorted(depths, key=int)], place))
        return native


def _put_model_and_data(flat: FlatConfig, base: Path, users: Path, put: Callable[[str, str, object], None]) -> None:
    put("model.name", "model_type", flat.model_type)
    sizes = base / f"{flat.model_type}_config.json"
    preset, dataset = {"bert": ("large", "bert_hdf5"), "translation": ("base", "pairs")}[flat.model_type]
    if os.path.exists(sizes):
        put("model.config_file", "directory", str(sizes))
    else:
        put("model.preset", "directory", preset)
    put("dataset.name", "synthetic_data", "synthetic" if flat.synthetic_data else dataset)
    if not flat.synthetic_data and flat.data_dir is not None:
        put("dataset.path", "data_dir", str(users / flat.data_dir))


def _put_updates(flat: FlatConfig, stages: int, put: Callable[[str, str, object], None]) -> None:
    asp = flat.sync_mode == "asp"
    every = stages if flat.macrobatch else 1
    microbatches = every if asp else MINIBATCHES_PER_FLUSH
    put("dataset.batch_size", "batch_size", flat.batch_size * microbatches)
    put("training.num_microbatches", "sync_mode", microbatches)
    put("training.optimizer", "model_type", "lamb" if flat.model_type == "bert" else "adamw")
    put("training.lr_policy", "learning_rate_policy", flat.learning_rate_policy)
    if flat.learning_rate_policy != "step":
        put("training.warmup_steps", "learning_rate_policy", WARMUP_SHARE)
    default = RegisteredSchedule.DEFAULT_ASYNCHRONOUS if asp else RegisteredSchedule.DEFAULT
    put("parallel.schedule", "schedule" if flat.schedule else "sync_mode", flat.schedule or default)
    if asp:
        put("parallel.update_every", "macrobatch", every)


def _directory(flat: FlatConfig, tree: Tree, folder: Path) -> Path:
    """Return the absolute path of ``directory``: beside the config file, else (as in VPipe) in the current folder."""
    candidates = [Path(os.path.abspath(place / flat.directory)) for place in (folder, Path())]
    for candidate in candidates:
        if os.path.isdir(candidate):
            return candidate
    looked = " and ".join(dict.fromkeys(f"'{candidate}'" for candidate in candidates))
    raise UserError(f"there is no directory '{flat.directory}'",
                    hint=f"looked for {looked}: a path starts at this file's folder, or the current one; vpipe "
                         "configs NAME -o FOLDER copies a config that comes with vpipe, with its directory",
                    where=tree.where(("directory",)))


def _json(kind: type[J], tree: Tree, key: str, path: Path) -> tuple[J | None, Tree, list[Problem]]:
    """Read the JSON file that ``key`` names; return it as a section and as a tree, with its problems."""
    if not os.path.isfile(path):
        problem = Problem(f"{key} names '{tree.value[key]}', but there is no file '{path}'",
                          "the path is taken from directory", tree.where((key,)))
        return None, tree, [problem]
    try:
        found = read_yaml(path, language="JSON")
    except UserError as error:
        return None, tree, list(error.problems)
    section, problems = checked(kind, found)
    return section, found, problems


def _contradictions(flat: FlatConfig, layers: PartitionFile, ranks: RankFile, tree: Tree, partition: Tree,
                    placement: Tree) -> Iterator[Problem]:
    """Yield the contradictions between the flat file and its JSON files."""
    stages, entries = len(layers.partition), ranks.module_to_stage_map
    named = sorted(set(entries))
    hint = f"with one module per stage and the loss it is {[*range(stages), stages - 1]}"

    def wrong(what: str) -> Problem:
        return Problem(f"module_to_stage_map {what}", hint, placement.where(("module_to_stage_map",)))

    if any(later < earlier for earlier, later in pairwise(entries)):
        yield wrong(f"is {list(entries)}, which goes back to an earlier stage")
    elif len(named) != stages:
        yield wrong(f"names {len(named)} stages, but the partition has {stages}: {list(layers.partition)}")
    elif named != list(range(stages)) or len(entries) != stages + 1 or entries[-1] != entries[-2]:
        yield wrong(f"is {list(entries)}; {stages} stages need {stages + 1} entries, one per stage and the loss")
    if _contradicts(layers.schedule, flat.sync_mode):
        other, kind = ("bsp", "with") if flat.sync_mode == "asp" else ("asp", "without")
        yield Problem(f"schedule is {layers.schedule}, which updates {kind} a flush, but sync_mode is "
                      f"{flat.sync_mode}", f"write sync_mode: {other}, or plan for {flat.sync_mode}",
                      partition.where(("schedule",)))
    count = sum(map(len, ranks.stage_to_rank_map.values()))
    if flat.machines is not None and len(flat.machines) != count:
        yield Problem(f"machines lists {len(flat.machines)}, but stage_to_rank_map has {count} ranks",
                      "give one host:gpu per rank", tree.where(("machines",)))
    depths = ranks.stage_to_depth_map
    if depths is not None and set(depths) != {str(stage) for stage in range(stages)}:
        yield Problem(f"stage_to_depth_map names the stages {', '.join(sorted(depths)) or 'none'}; there are {stages}",
                      "name each stage once, as \"0\", \"1\", ..., or leave it out",
                      placement.where(("stage_to_depth_map",)))
