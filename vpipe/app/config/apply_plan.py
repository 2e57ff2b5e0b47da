"""Apply a plan file to a config, and drop the keys of a run's config that derive from changed keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import lcm
from pathlib import Path
from typing import Any

from vpipe import Cut, Plan
from vpipe.app.config.parallel import OF_SCHEDULE, OF_STAGES, ParallelSection
from vpipe.app.config.yaml_tree import Keys, Tree, describe, read_yaml
from vpipe.errors import Problem, UserError
from vpipe.schedules import RegisteredSchedule

PLAN = ("parallel", "plan")

_RENAMED: dict[str, Keys] = {
    "recompute_ratio": ("parallel", "recompute"), "recompute_layers": ("parallel", "recompute"),
    "microbatches": ("training", "num_microbatches")}
TARGETS: dict[str, Keys] = {key: _RENAMED.get(key, ("parallel", key)) for key in Plan.KEYS
                            if key in _RENAMED or key in ParallelSection.model_fields}
"""Key of a plan -> key of a config. Layers take precedence over ratios, which are there for other readers."""

_IMPLIES: dict[str, tuple[Keys, ...]] = {
    "partition": tuple(("parallel", key) for key in OF_STAGES if key not in ("partition", "stage_to_rank_map")),
    "stage_to_rank_map": (("parallel", "data_parallel_size"), ("parallel", "chunks")),
    "schedule": (("parallel", "slices"),)}
"""Key of a plan -> keys of a config that it implies."""

STAGES, REPLICAS, RANKS = (("parallel", key) for key in (
    "model_parallel_size", "data_parallel_size", "stage_to_rank_map"))

_COMPRESS: Keys = ("parallel", "compress")
"""Key that may be a list with an entry per cut; a plan may have another number of cuts."""


_KEEP_ONE = "keep one of the two: leave the key out, or parallel.plan"


def apply_plan(tree: Tree, path: str, settings: Iterable[str] = ()) -> None:
    """Put the values of the plan file at ``path`` into a config.

    Args:
        settings: keys set on the command line. A plan named there replaces values of the config's file; one named in
            the file must agree with them. Any plan must agree with the other settings.

    Raises:
        UserError: the file is no plan, or the config contradicts it.
    """
    found, plan = read_plan(path)
    given = {tuple(key.split(".")) for key in settings}
    if PLAN in given:
        compress = tree.get(_COMPRESS)
        if isinstance(compress, list) and len(compress) != len(plan.partition) - 1 and _COMPRESS not in given:
            tree.drop(_COMPRESS)
        for key, keys in _planned_keys(found):
            for other in (keys, *_IMPLIES.get(key, ())):
                if other not in given:
                    tree.drop(other)
    if problems := list(contradictions(tree, found, plan, path)):
        raise UserError.all_of(problems)
    for key, keys in _planned_keys(found):
        tree.put(keys, found.at((key,)))


def drop_derived(tree: Tree, settings: Mapping[str, Any]) -> None:
    """Drop the keys of a run's config, which has every key, that derive from keys in ``settings``.

    Other minutes between checkpoints are measured anew.
    With another number of stages, partition and ranks are dropped; with another schedule, what only it takes.
    Between schedules without a flush an update that takes the whole batch does so still.
    """
    given = {key.removeprefix("parallel."): value for key, value in settings.items() if key.startswith("parallel.")}
    counts = [value if isinstance(value, int) else len(value)
              for name in ("model_parallel_size", "partition", "stage_to_rank_map")
              if isinstance(value := given.get(name), (int, list, dict))]
    dropped = set()
    if counts and counts[0] != tree.get(("parallel", "model_parallel_size")):
        dropped |= {*OF_STAGES}
        dropped |= {name for name in ("recompute", "compress") if isinstance(tree.get(("parallel", name)), list)}
    elif "partition" in given and isinstance(old := tree.get(("parallel", "recompute")), list):
        dropped |= {"recompute"} if any(isinstance(layers, list) for layers in old) else set()
    if "schedule" in given and given["schedule"] != tree.get(("parallel", "schedule")):
        dropped |= {*OF_SCHEDULE}
        both = [RegisteredSchedule.find(str(name)) for name in (tree.get(("parallel", "schedule")), given["schedule"])]
        if not any(registered is None or registered.flush for registered in both) and _updates_take_a_batch(tree):
            dropped -= {"update_every"}
    if "stage_to_rank_map" in given:
        dropped |= {*OF_STAGES} & {*OF_SCHEDULE}  # depends on the replicas of every stage, too
    if "data_parallel_size" in given:
        dropped |= {"stage_to_rank_map"}
    for name in dropped - given.keys():
        tree.drop(("parallel", name))
    if "checkpoint.every_minutes" in settings:
        tree.drop(("checkpoint", "every_steps"))  # one that is set, too, is put back


def drop_ranks(tree: Tree) -> None:
    """Drop the ranks of every stage that a file lists, for other replicas; as many stages stay."""
    ranks = tree.get(RANKS)
    if isinstance(ranks, dict) and tree.get(STAGES) is None:
        tree.put(STAGES, Tree.leaf(len(ranks), tree.places[RANKS]))
    tree.drop(RANKS)


def _updates_take_a_batch(tree: Tree) -> bool:
    """Return whether an update takes all microbatches of a batch, in a run's config."""
    every, replicas = tree.get(("parallel", "update_every")), tree.get(("parallel", "data_parallel_size"))
    if isinstance(ranks := tree.get(("parallel", "stage_to_rank_map")), dict):
        replicas = lcm(*map(len, ranks.values()))
    return bool(every and every * (replicas or 1) == tree.get(("training", "num_microbatches")))


def _planned_keys(found: Tree) -> Iterator[tuple[str, Keys]]:
    """Yield the keys of a plan that have a key of a config, and that key."""
    for key, keys in TARGETS.items():
        value = found.value.get(key)
        if (value or value is False) and (key != "recompute_ratio" or not found.value.get("recompute_layers")):
            yield key, keys


def read_plan(path: str) -> tuple[Tree, Plan]:
    """Read a plan file, with the places of its values. Raises UserError when it is no plan."""
    found = read_yaml(Path(path), Plan.MOST_BYTES, Plan.MOST_VALUES, "JSON")
    if found.problems:
        raise UserError.all_of(found.problems)
    return found, Plan.of_json(found.value, path)


def contradictions(tree: Tree, found: Tree, plan: Plan, path: str) -> Iterator[Problem]:
    """Yield the contradictions between a config and the plan file at ``path``; null and auto leave a key to the plan.
    """
    replicas, widths = tree.get(REPLICAS), list(map(len, plan.cut.placement or ()))
    if replicas is not None and any(width != plan.copies * replicas for width in widths):
        yield Problem(f"{tree.name(REPLICAS)} is {describe(replicas)}, but stage_to_rank_map in the plan '{path}' "
                      f"gives the stages {', '.join(map(str, widths))} ranks", _KEEP_ONE, tree.where(REPLICAS))
    for key, keys in _planned_keys(found):
        value = tree.get(keys)
        if value is None or value == "auto" or _same(key, value, found.value[key], plan):
            continue
        yield Problem(f"{tree.name(keys)} is {_shown(value)}, but {key} in the plan '{path}' is "
                      f"{_shown(found.value[key])}", _KEEP_ONE, tree.where(keys))


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, dict) else describe(value)


def _same(key: str, value: Any, planned: Any, plan: Plan) -> bool:
    if not key.startswith("recompute"):
        return bool(value == planned)
    try:
        return Cut(plan.partition, value).recomputed == plan.recomputed
    except (UserError, TypeError):
        return False
