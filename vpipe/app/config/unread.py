"""Find keys that are set and that nothing reads: they would be ignored.

A key is set if its value is not the default. Most keys are read by every run, those of :data:`RULES` by some. Families
and data sets say which keys of ``model`` and ``dataset`` they read: ``reads`` of ``register_model`` and of
``register_dataset``, and tables for vpipe's own, so that a config is checked without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from vpipe.app import data, families
from vpipe.app.config.parallel import used_codecs
from vpipe.app.config.validation import Section
from vpipe.app.config.yaml_tree import Tree, describe
from vpipe.errors import Problem, UserError


@dataclass(frozen=True)
class Rule:
    """Keys that are not always read.

    Attributes:
        keys: by their paths.
        read: whether a config reads them; ``started``: whether torchrun or srun start the ranks, None if either may.
        but: what a config ``c`` is like that does not read them.
        remedy: by which it would.
    """

    keys: tuple[str, ...]
    read: Callable[[Any, bool | None], bool]
    but: str
    remedy: str


RULES = (
    Rule(("training.momentum",), lambda c, _: c.training.optimizer == "sgd",
         "the optimizer is {c.training.optimizer}", "set optimizer: sgd"),
    Rule(("training.delay_correction_strength",), lambda c, _: c.training.delay_correction != "none",
         "nothing is corrected", "set delay_correction: extrapolate"),
    Rule(("training.exit_after_profile",), lambda c, _: c.training.profile_iteration is not None,
         "no profile_iteration says which update is profiled", "set profile_iteration"),
    Rule(("parallel.compress_rounding",), lambda c, _: "int8" in used_codecs(c.parallel.compress),
         "nothing is sent as int8", "set compress: int8"),
    Rule(("parallel.orion_strict",), lambda c, _: c.parallel.use_orion_scheduler,
         "use_orion_scheduler is false", "set use_orion_scheduler: true"),
    Rule(("parallel.memory",), lambda c, _: bool(c.parallel.to_plan or c.parallel.plan or c.elastic),
         "nothing is auto", "set partition: auto; vpipe plan takes --memory"),
    Rule(("dataset.language",), lambda c, _: c.dataset.name != "text" or c.dataset.path is None,
         "the text is that of dataset.path", "leave dataset.path out"),
    Rule(("model.experts_per_token", "model.balance_weight"),
         lambda c, _: c.model.experts is not None or c.model.config_file is not None or
         c.model.name not in families.WITHOUT_EXPERTS, "the model has no experts", "set experts to their number"),
    Rule(("checkpoint.keep", "checkpoint.directory"), lambda c, _: c.saving.makes_any,
         "the run writes no checkpoint", "set at_end: true, or every_minutes"),
    Rule(("training.patience",), lambda c, _: c.training.evaluate_every is not None,
         "nothing is evaluated before the end", "set evaluate_every"),
    Rule(("launch.ssh_options", "launch.python", "launch.directory"),
         lambda c, started: c.machines is not None and not started,
         "no rank is started over ssh", "name the hosts as machines, for vpipe train alone"),
    Rule(("parallel.master_address", "elastic"), lambda c, started: started is not False or c.machines is not None,
         "all ranks are started on this host, by vpipe train",
         "name the hosts as machines, or start the ranks by torchrun or srun"))


def unread_problems(config: Section, tree: Tree, given: Collection[str] | None, started: bool | None) -> list[Problem]:
    """Return the keys of a valid config that are set and that nothing reads, each with its place.

    Args:
        tree: of the config.
        given: the only keys that the user has set; None for all.
        started: as in :class:`Rule`.
    """
    problems = []
    for rule in RULES:
        for key in rule.keys:
            if _is_set(config, key, given) and not rule.read(config, started):
                problems.append(_problem(tree, key, rule.but.format(c=config), rule.remedy))
    for section, kind, keys, own in (("model", "model", families.KEYS, families.READS),
                                     ("dataset", "data set", data.KEYS, data.READS)):
        name = getattr(config, section).name
        found = [f"{section}.{key}" for key in keys if _is_set(config, f"{section}.{key}", given)]
        try:
            read = () if not found else own[name] if name in own else _reads(section, name)
        except UserError as error:
            problems += [Problem(problem.what, problem.hint, problem.where or tree.where((section, "name")))
                         for problem in error.problems]
            continue
        for key in found:
            leaf = key.partition(".")[2]
            if leaf not in read:
                others = " or ".join(other for other, its in own.items() if leaf in its) or f"another {kind}"
                remedy = f"take {others}" if name in own else f"name it in register_{section}(reads=...)"
                problems.append(_problem(tree, key, f"the {kind} '{name}' does not read it", remedy))
    return problems


def _reads(section: str, name: str) -> Collection[str]:
    """Import a part of a package, and return the keys that it reads."""
    if section == "model":
        from vpipe.app.families.registry import family_named  # which needs torch

        return family_named(name).reads
    from vpipe.app.data.registry import keys_read

    return keys_read(name)


def _is_set(config: Section, key: str, given: Collection[str] | None) -> bool:
    path, _, leaf = key.rpartition(".")
    section = getattr(config, path) if path else config
    if section is None or (given is not None and key not in given):
        return False
    return bool(getattr(section, leaf) != type(section).model_fields[leaf].get_default(call_default_factory=True))


def _problem(tree: Tree, key: str, but: str, remedy: str) -> Problem:
    keys = tuple(key.split("."))
    return Problem(f"{tree.name(keys)} is {describe(tree.get(keys))}, but {but}", f"leave it out, or {remedy}",
                   tree.where(keys))
