"""The parameters of a stage's layers: its own, and those it borrows from other stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.model.layer import check_alike, kind_of, parameter_of, set_parameter
from vpipe.runtime.replaced import replace_parameter
from vpipe.runtime.weights import Slot, Weights, has_hooks


def share_ties(modules: Mapping[int, nn.Module], names: Mapping[int, str],
               ties: Mapping[int, Mapping[str, str]]) -> None:
    """Make tied parameters one object where both layers are in the stage.

    Args:
        modules: by layer number.
        names: of the layers.
        ties: per layer, own parameter -> the other layer's, ``"<layer>.<parameter>"``.

    Raises:
        UserError: one does not exist, or they are of different shapes or dtypes; a parameter has hooks, and the one
            that takes its place has none.
    """
    at = {name: i for i, name in names.items()}
    for i, tied in ties.items():
        for own, target in tied.items():
            owner = next((name for name in at if target.startswith(name + ".")), None)
            if owner is None:
                parameter_of(names[i], modules[i], own)
            else:
                shared = parameter_of(owner, modules[at[owner]], target[len(owner) + 1:])
                before = parameter_of(names[i], modules[i], own)
                check_alike({f"{names[i]}.{own}": kind_of(before), target: kind_of(shared)})
                set_parameter(modules[i], own, shared)
                if before is not shared:
                    if has_hooks(before) and not has_hooks(shared):
                        raise UserError(f"'{names[i]}.{own}' has hooks, but '{target}' takes its place: they are tied",
                                        hint=f"register the hooks on '{target}'")
                    replace_parameter(before, f"{names[i]}.{own}")


def check_apart(stages: Iterable[tuple[Mapping[int, nn.Module], Mapping[int, str]]]) -> None:
    """Refuse stages of one process that share parameters, as they could not in processes of their own.

    Args:
        stages: of each the modules and the names of its layers, by their numbers; before parameters are replaced.

    Raises:
        UserError: one that is trained is in a layer of another stage, or of another rank, too.
    """
    seen: dict[int, str] = {}
    for modules, names in stages:
        mine = {id(parameter): f"{names[i]}.{name}" for i, module in modules.items()
                for name, parameter in module.named_parameters() if parameter.requires_grad}
        for shared in mine.keys() & seen:
            raise UserError(f"'{mine[shared]}' and '{seen[shared]}' are one parameter, but on different stages or "
                            "ranks, where each is trained by itself",
                            hint="let every build function make a module of its own, and tie them: "
                                 "Layer(..., ties={...})")
        seen |= mine


def collect(modules: Mapping[int, nn.Module], names: Mapping[int, str], borrowed: Mapping[str, tuple[int, str]],
            unrounded: Mapping[int, Tensor] | None = None) -> tuple[Weights, dict[int, Weights]]:
    """Own trainable parameters, and those borrowed from other stages (by owner), with the slots that hold them.

    Args:
        modules, names: see :func:`share_ties`.
        borrowed: see :class:`~vpipe.model.split.StageSpec`.
        unrounded: of rounded parameters, what they were before, by their ids.

    Raises:
        UserError: a tied parameter is frozen.
    """
    first: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    slots: dict[str, list[Slot]] = {}
    for i, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            full = f"{names[i]}.{name}"
            if not parameter.requires_grad:
                if full in borrowed:
                    raise UserError(f"'{full}' is tied to '{borrowed[full][1]}' but frozen",
                                    hint="let it require a gradient, or leave out the tie")
                continue
            path, _, leaf = name.rpartition(".")
            canonical = first.setdefault(id(parameter), full)
            parameters.setdefault(canonical, parameter)
            slots.setdefault(canonical, []).append((module.get_submodule(path), leaf))
    lent: dict[int, dict[str, nn.Parameter]] = {}
    lent_slots: dict[int, dict[str, list[Slot]]] = {}
    for own, (owner, target) in borrowed.items():
        if own not in parameters:
            continue  # shares its place with a name already seen
        # Several parameters here may be tied to the same one there: they are one value.
        lent.setdefault(owner, {}).setdefault(target, parameters.pop(own))
        lent_slots.setdefault(owner, {}).setdefault(target, []).extend(slots.pop(own))
    masters = None if unrounded is None else {
        name: unrounded[id(p)] if id(p) in unrounded else p.data.clone() for name, p in parameters.items()}
    return (Weights(parameters, slots, masters),
            {owner: Weights(lent[owner], lent_slots[owner]) for owner in sorted(lent)})
