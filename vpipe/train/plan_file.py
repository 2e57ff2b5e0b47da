"""A plan file in a config: what it says, put where the config would have said it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vpipe.errors import Problem, UserError
from vpipe.plan.plan import Plan
from vpipe.plan.recompute import Recompute, recomputed_layers
from vpipe.train.yaml_file import Keys, Tree, describe, read_json

PLAN = ("parallel", "plan")

_TARGETS: dict[str, Keys] = {
    "partition": ("parallel", "partition"), "recompute_ratio": ("parallel", "recompute"),
    "recompute_layers": ("parallel", "recompute"), "stage_to_rank_map": ("parallel", "stage_to_rank_map"),
    "schedule": ("parallel", "schedule"), "update_every": ("parallel", "update_every"),
    "microbatches": ("training", "num_microbatches")}
"""Key of a plan -> key of a config. Layers go before the ratios, which are there for other readers."""

_FOLLOWS: dict[str, tuple[Keys, ...]] = {
    "partition": (("parallel", "model_parallel_size"), ("parallel", "warmup_depth")),
    "stage_to_rank_map": (("parallel", "data_parallel_size"), ("parallel", "chunks"))}
"""What a key of a plan says by the way."""


_COMPRESS: Keys = ("parallel", "compress")
"""May be a list with an entry per cut, of which a plan may have another number."""


def put_plan(tree: Tree, settings: Iterable[str] = ()) -> None:
    """Put what the plan file that ``tree`` names says into it.

    Args:
        settings: the keys set on the command line. A plan named there goes before what the config's file says; one
            named in the file must agree with it, and with the command line any must.

    Raises:
        UserError: the file is no plan, or the config contradicts it.
    """
    path = tree.get(PLAN)
    if not isinstance(path, str):
        return  # there is none, or it is refused as no path
    found = read_json(Path(path))
    if found.problems:
        raise UserError.all_of(found.problems)
    plan = Plan.of_json(found.value, path)
    given = {tuple(key.split(".")) for key in settings}
    if PLAN in given:
        compress = tree.get(_COMPRESS)
        if isinstance(compress, list) and len(compress) != len(plan.partition) - 1 and _COMPRESS not in given:
            tree.drop(_COMPRESS)
        for key, keys in said(found):
            for other in (keys, *_FOLLOWS.get(key, ())):
                if other not in given:
                    tree.drop(other)
    problems = list(_contradictions(tree, found, plan, path))
    if problems:
        raise UserError.all_of(problems)
    for key, keys in said(found):
        tree.put(keys, found.at((key,)))


def said(found: Tree) -> Iterator[tuple[str, Keys]]:
    """The keys of a plan that a config has, too, and what it calls them."""
    for key, keys in _TARGETS.items():
        if found.value.get(key) and (key != "recompute_ratio" or not found.value.get("recompute_layers")):
            yield key, keys


def _contradictions(tree: Tree, found: Tree, plan: Plan, path: str) -> Iterator[Problem]:
    """Where a config says something else than its plan."""
    for key, keys in said(found):
        value = tree.get(keys)
        if value is None or value == "auto" or _same(key, value, found.value[key], plan):
            continue
        yield Problem(f"{tree.name(keys)} is {_shown(value)}, but {key} in the plan '{path}' is "
                      f"{_shown(found.value[key])}", "keep one of the two: leave the key out, or parallel.plan",
                      tree.where(keys))


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, dict) else describe(value)


def _same(key: str, value: Any, planned: Any, plan: Plan) -> bool:
    if not key.startswith("recompute"):
        return bool(value == planned)
    try:
        recompute: Recompute = value
        return recomputed_layers(recompute, plan.partition) == plan.recomputed
    except (UserError, TypeError):
        return False
