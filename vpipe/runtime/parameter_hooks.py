"""Refuse hooks on parameters where torch would not call them with the whole gradient of a microbatch.

Autograd makes and adds it with a flush and whole backwards. Elsewhere it is made in parts, added without autograd, or
on leaves of another version than the one with the hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.errors import UserError
from vpipe.model.split import Ties
from vpipe.runtime.weight_versions import HOOKS
from vpipe.schedules.schedule import Schedule

if TYPE_CHECKING:
    from vpipe.runtime.stage import Stage


def check_hooks(stage: Stage, schedule: Schedule, ties: Ties,
                refused: tuple[str, str] | None) -> None:
    """Refuse hooks on parameters of a stage, also those of an optimizer's factory.

    Args:
        ties: between stages, of weights that are trained.
        refused: why the executor does not have them called, and what to do instead, if it does not.
    """
    own, number, width = stage.weights, stage.spec.index, len(schedule.placement[stage.spec.index])
    tied = {name for names in ties.get(number, {}).values() for name in names}
    remedy = "choose a schedule with a flush and whole backwards, such as gpipe or 1f1b"
    rules = [
        *((weights, names, HOOKS, "it is tied across two stages, of which neither has the whole gradient",
           "choose a partition with both layers in one stage")
          for weights, names in [(own, tied), *((weights, weights.names) for weights in stage.borrowed.values())]),
        (own, () if schedule.flush else own.names, HOOKS, f"'{schedule.name}' has no flush: gradients are added over "
         "several versions of a parameter", remedy),
        (own, own.names if schedule.split_backwards else (), HOOKS, f"'{schedule.name}' splits the backward: gradients "
         "of weights are made later, without autograd", remedy),
        (own, own.names if schedule.slices > 1 else (), HOOKS, "each slice of a microbatch has a backward of its own",
         "leave the slices out"),
        *([(own, own.names, HOOKS, *refused)] if refused is not None else []),
        (own, stage.summed_late, HOOKS, "it is used by recomputed layers and by others, which have backwards of their "
         "own", "recompute all layers that use it, with those between, or none"),
        (own, own.names if width > 1 else (), HOOKS[1:], f"the {width} replicas of stage {number} each add up a part "
         "of the gradients", "use register_hook, or give the stage one replica")]
    own.adopt_hooks()
    for weights, names, kinds, why, remedy in rules:
        if names and (found := [name for name in weights.hooked(kinds) if name in names]):
            which = " and ".join(map(repr, found[:2])) + ", ..." * (len(found) > 2)
            registered = "register_hook, " * (kinds is HOOKS) + "register_post_accumulate_grad_hook"
            raise UserError(f"hooks on {which} ({registered}) are not called here: {why}",
                            hint=f"{remedy}, or change gradients in the optimizer's step")
