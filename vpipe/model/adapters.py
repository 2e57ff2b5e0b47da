"""Put the adapters of ``peft`` into layers: small trained matrices beside frozen weights (LoRA: Hu et al. 2021,
arXiv:2106.09685).

``peft`` is imported where a layer is built, so that nothing else needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from vpipe.arguments import shown
from vpipe.errors import Problem, UserError, counted
from vpipe.model.layer import Layer


def adapted(layers: Sequence[Layer], ties: Mapping[str, str], config: Any) -> list[Layer]:
    """Return the layers with adapters in the modules that ``config``, a ``peft.LoraConfig``, targets, all else frozen.

    Args:
        ties: of the model, see :attr:`vpipe.Model.ties`.

    Raises:
        UserError: ``peft`` is missing, a target is in no layer or has a tied weight, or more than adapters is trained.
    """
    if find_spec("peft") is None:
        raise UserError("adapters are asked for, but the package 'peft' is not installed",
                        hint="pip install 'vpipe[lora]'")
    targets = getattr(config, "target_modules", None)
    if not targets or targets == "all-linear":
        raise UserError(f"the adapters' config is {shown(config)}, which does not list its target_modules",
                        hint="give a LoraConfig of peft with names of modules: LoraConfig(r=8, target_modules="
                             "['q_proj', 'v_proj'])")
    if config.modules_to_save or getattr(config, "bias", "none") != "none":
        raise UserError("the adapters' config trains other weights, too (bias, modules_to_save)",
                        hint="leave them out: all but the adapters is frozen")
    each = [re.compile(targets)] if isinstance(targets, str) else sorted(targets)
    if problems := list(_problems(layers, ties, each)):
        raise UserError.all_of(problems)
    return [replace(layer, build=partial(_build, layer, config)) for layer in layers]


def _problems(layers: Sequence[Layer], ties: Mapping[str, str],
              targets: Sequence[str | re.Pattern[str]]) -> Iterator[Problem]:
    for one in sorted({name.rpartition(".")[0] for tie in ties.items() for name in tie}):
        if any(_matches(one, target) for target in targets):
            yield Problem(f"the adapters' targets match '{one}', whose weight is tied",
                          "leave it out: the weight is in two places, and an adapter would be in one of them")
    modules = {layer.name: layer.without_values() for layer in layers}
    if any(module is None for module in modules.values()):  # it reads values: its names are not known yet
        return
    paths = {f"{name}.{path}".rstrip("."): part for name, module in modules.items() if module is not None
             for path, part in module.named_modules()}
    missing = [target for target in targets if not any(_matches(path, target) for path in paths)]
    if missing:
        linear = sorted({path.rpartition(".")[2] for path, part in paths.items() if isinstance(part, nn.Linear)})
        names = ", ".join(repr(target if isinstance(target, str) else target.pattern) for target in missing)
        yield Problem(f"no module has the name of {counted(len(missing), 'target')} of the adapters: {names}",
                      f"the linear modules are {', '.join(linear)}")


def _matches(path: str, target: str | re.Pattern[str]) -> bool:
    """Return what ``peft`` makes of a name and a target: the same name, or its end; a pattern must match all of it."""
    return f".{path}".endswith(f".{target}") if isinstance(target, str) else target.fullmatch(path) is not None


def _build(layer: Layer, config: Any) -> nn.Module:
    from peft import inject_adapter_in_model
    from peft.utils.error import NoMatchingPeftModuleError

    module = layer.build()
    if not isinstance(module, nn.Module):
        return module  # Layer.make refuses it
    # Under its whole name: targets may name a layer, patterns of peft its number, and a layer may be a target itself.
    *outer, last = layer.name.split(".")
    whole = inner = nn.Module()
    for word in outer:
        inner._modules[word] = child = nn.Module()
        inner = child
    inner._modules[last] = module
    try:
        inject_adapter_in_model(deepcopy(config), whole)  # peft writes into it
    except NoMatchingPeftModuleError:
        module.requires_grad_(False)
    found = inner._modules[last]
    assert found is not None, "peft replaces modules"
    return found
