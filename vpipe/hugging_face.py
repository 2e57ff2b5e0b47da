"""Take models of ``transformers`` into a pipeline and back, and put the adapters of ``peft`` into layers.

The first layer runs the forward of a class up to the last block, and sends what blocks are given: hidden states, masks,
rotary tables. The last layer runs the same forward, in which the blocks have answered: masks, scales and losses are the
class's own. Adapters are small trained matrices beside frozen weights (LoRA: Hu et al. 2021, arXiv:2106.09685).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from vpipe import Layer, Model
from vpipe.errors import Problem, UserError, counted

__all__ = ["from_transformers", "to_transformers", "with_adapters"]

Fields = Mapping[str, Tensor]


def from_transformers(model: Any, batch: Fields | None = None) -> Model:
    """Return a model of ``transformers`` as layers: ``embed``, its blocks, ``head``. A pipeline trains copies of them.

    The head writes what the class returns, such as ``logits``, beside ``loss``. Class and layers compute two samples
    of the example, and must agree to the last bit.

    Args:
        model: of a class with one list of blocks and a loss, such as ``LlamaForCausalLM``, with its weights.
        batch: an example [B, ...] by the names of the class's arguments; ``input_ids`` and ``labels`` when None.

    Raises:
        UserError: the class does more than what is before its blocks, the blocks, and what is after them.
    """
    name = type(model).__name__
    if not hasattr(type(model), "base_model_prefix"):  # which every PreTrainedModel has
        raise UserError(f"from_transformers is given {name}, not a model of transformers",
                        hint="give LlamaForCausalLM.from_pretrained(folder); adapters come after: with_adapters(...)")
    remedy = "write its layers, about thirty lines: docs/jobs.md#a-class-of-transformers"
    if batch is None:
        remedy = f"give an example like the batches, from_transformers(model, batch); or {remedy}"
        ids = torch.arange(16).view(2, 8) % getattr(model.config, "vocab_size", 1)
        batch = {"input_ids": ids, "labels": ids}
    known, modes = signature(type(model).forward).parameters, {part: part.training for part in model.modules()}
    if not {"labels"} <= batch.keys() <= known.keys():
        raise UserError(f"{name} takes {', '.join([*known][1:])}; the example has {', '.join(batch)}",
                        hint="take a class with a loss, and name what a batch has, with labels, as the class does")
    if any(getattr(part, "gradient_checkpointing", False) for part in modes):
        raise UserError(f"{name} checkpoints its blocks itself",
                        hint="call its gradient_checkpointing_disable(); a pipeline recomputes: Cut(4, recompute=1)")
    try:
        with torch.no_grad():
            found = _cut(model.eval(), {field: values[[0, -1]].to(model.device) for field, values in batch.items()})
            found.unread = frozenset(known.keys() - batch.keys())
            return found
    except Exception as error:
        raise UserError(f"{name} cannot be cut between its blocks: {type(error).__name__}: {error}",
                        hint=remedy) from error
    finally:
        for part, mode in modes.items():
            part.training = mode


def to_transformers(state: Fields, model: Any) -> Any:
    """Load a pipeline's ``state_dict()`` into the model that it was made of, and return this: to ``save_pretrained``.

    Where the pipeline has adapters, give the model into which ``peft`` has put the same. Raises UserError, before a
    weight changes, for other names or shapes.
    """
    own = model.state_dict()
    found = {re.sub(r"^(embed|head)\.", "", name): value for name, value in state.items()}
    loaded = {own[name].data_ptr() for name in own.keys() & found.keys()}
    found |= {name: value for name, value in own.items() if name not in found and value.data_ptr() in loaded}  # tied
    there, here = ({(name, value.shape) for name, value in weights.items()} for weights in (found, own))
    if there != here:
        raise UserError(f"the weights of the pipeline and of {type(model).__name__} differ: '{min(there ^ here)[0]}'",
                        hint="give pipe.state_dict() and the model that the layers are of; for adapters call "
                             "peft.inject_adapter_in_model(config, model) first")
    model.load_state_dict(found)
    return model


_RUN: ContextVar[tuple[Tensor | None, list[Any]]] = ContextVar("the output of the blocks; else what they are given")


class _ReachedError(Exception):
    """The last block is called."""


class _Elsewhere(nn.Module):
    """Stands for a module that is in another layer."""

    def __init__(self, module: nn.Module, last: bool) -> None:
        super().__init__()
        self.__dict__ |= {name: value for name, value in vars(module).items() if name not in dir(self)}
        self.last = last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, given = _RUN.get()
        if hidden is None:
            given.append((args, kwargs))
            if self.last:
                raise _ReachedError
        return args[0] if hidden is None else hidden


def _run(module: nn.Module, fields: Fields, hidden: Tensor | None = None) -> Any:
    """Return what the forward of a class returns when its blocks return ``hidden``; for None what they are given."""
    given: list[Any] = []
    token = _RUN.set((hidden, given))
    try:
        return type(module).forward(module, **fields)
    except _ReachedError:
        return given
    finally:
        _RUN.reset(token)


Leaves = Sequence[tuple[str, Any]]
"""What blocks are given: of a tensor the name, and whether it may be None; of a constant "" and the value."""


def _with_mask(fields: Fields) -> Fields:
    """Return the fields with a mask that masks, for a class leaves out one that does not."""
    return {**fields, "attention_mask": torch.ones_like(fields["input_ids"]).tril()}


def _embed(module: nn.Module, names: Sequence[str], leaves: Leaves, *values: Tensor) -> Any:
    def sent(fields: Fields) -> dict[str, Any]:
        given = tree_leaves(_run(module, fields))
        found = {name: value for (name, _), value in zip(leaves, given, strict=True) if name}
        if not all(value is found[name] if name else value == constant
                   for (name, constant), value in zip(leaves, given, strict=True)):
            raise UserError(f"{type(module).__name__} calls its blocks otherwise for this batch than for the example",
                            hint="give from_transformers an example like the batches: from_transformers(model, batch)")
        return found

    fields = dict(zip(names, values, strict=True))
    made = sent(fields)
    if any(value is None for value in made.values()):  # zeros stand for None; shapes must not depend on values
        like = sent(_with_mask(fields)) if "attention_mask" in fields else dict.fromkeys(made, made["h"].new_empty(0))
        made = {name: torch.zeros_like(like[name]) if value is None else value for name, value in made.items()}
    return tuple(made.values()) if len(made) > 1 else made["h"]


def _block(module: nn.Module, names: Sequence[str], leaves: Leaves, spec: Any, *values: Tensor) -> Any:
    # Zeros stand for None, see _embed.
    tensors = dict(zip(names, values, strict=True))
    args, kwargs = tree_unflatten([other if not name else None if other and not tensors[name].any() else tensors[name]
                                   for name, other in leaves], spec)
    return type(module).forward(module, *args, **kwargs)


def _head(module: nn.Module, names: Sequence[str], outputs: Sequence[str], hidden: Tensor, *values: Tensor) -> Any:
    found = _run(module, dict(zip(names[1:], values, strict=True)), hidden)
    return tuple(found[name] for name in outputs)


def _built(part: nn.Module, forward: Callable[..., Any], *settings: object) -> nn.Module:
    """Copy a part of a model, with a forward of its own; without values where layers are built on the meta device."""
    meta = torch.get_default_device().type == "meta"
    made = deepcopy(part, {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                           for p in part.parameters() if meta}).train()
    made.forward = partial(forward, made, *settings)
    return made


def _cut(model: Any, batch: Fields) -> Model:
    """Return the layers of a model in evaluation mode, compared with the model by a batch."""
    path, blocks = max(((path, part) for path, part in model.named_modules() if isinstance(part, nn.ModuleList)),
                       key=lambda item: sum(p.numel() for p in item[1].parameters()))
    above = [model.get_submodule(".".join(path.split(".")[:depth])) for depth in range(path.count(".") + 1)]
    parts = [part for outer in above for part in outer.children() if part not in (*above, blocks)]
    if model.config.is_encoder_decoder or getattr(model.config, "layerdrop", 0) or any(
            [*outer.parameters(recurse=False)] for outer in above):
        raise ValueError("it has an encoder and a decoder, skips blocks at random, or has weights beside its modules")

    def around(*elsewhere: nn.Module, last: nn.Module = blocks[-1]) -> Any:
        """Return the model without its blocks and these parts; the other parts are the model's own."""
        stubs = {id(part): _Elsewhere(part, part is last) for part in (*blocks, *elsewhere)}
        made = deepcopy(model, {id(part): part for part in parts} | stubs)
        made.config.use_cache, made.config.return_dict = False, True
        return made

    known = signature(type(model.base_model).forward).parameters
    fields = {name: values for name, values in batch.items() if name in known}
    bare = {name: values for name, values in fields.items() if name != "attention_mask"}
    first = [_run(around(part, last=part), bare) for part in parts]  # ends when the part is called
    before = [part for part, given in zip(parts, first, strict=True) if isinstance(given, list) and len(given) == 1]
    calls = [tree_flatten_with_path(call)
             for call in _run(around(), _with_mask(fields) if "attention_mask" in known else fields)]
    names, leaves = {id(calls[0][0][0][1]): "h"}, [list[Any]() for _ in calls]
    for (call, _), own, unmasked in zip(calls, leaves, _run(around(), bare), strict=True):
        for (place, leaf), other in zip(call, tree_leaves(unmasked), strict=True):
            name = ".".join([*re.findall(r"[a-z]\w+", keystr(place)), str(len(names))])
            own.append((names.setdefault(id(leaf), name), other is None) if isinstance(leaf, Tensor) else ("", leaf))
    expected = model(**batch, **dict.fromkeys({"use_cache"} & signature(type(model).forward).parameters.keys(), False))
    outputs = [name for name, value in expected.items() if isinstance(value, Tensor)]
    rows: list[Any] = [
        ("embed", around(*({*parts} - {*before})), _embed, ([*fields], [leaf for own in leaves for leaf in own]),
         [*names.values()]),
        *((f"{path}.{number}", block, _block, ([*dict.fromkeys(name for name, _ in own if name)], own, spec), ["h"])
          for number, (block, own, (_, spec)) in enumerate(zip(blocks, leaves, calls, strict=True))),
        ("head", around(*before), _head, (["h", *batch], outputs), outputs)]
    owners: dict[int, tuple[str, str]] = {}
    layers, tensors = [], dict(batch)
    for name, part, forward, settings, writes in rows:
        ties = {own: ".".join(owner) for own, weight in part.named_parameters(remove_duplicate=False)
                if (owner := owners.setdefault(id(weight), (name, own)))[0] != name and weight.requires_grad}
        layers.append(Layer(name, partial(_built, part, forward, *settings), settings[0], writes, ties))
        made = layers[-1].build().eval()
        written = made(*(tensors[field] for field in settings[0]))
        tensors |= zip(writes, written if isinstance(written, tuple) else (written,), strict=True)
    for name in outputs:
        if not torch.equal(tensors[name].nan_to_num(), expected[name].nan_to_num()):
            raise ValueError(f"its layers give another '{name}' than the class")
    # Where a label of the first token alone makes the loss a mean of none, the class shifts labels.
    tokens = batch.keys() - fields.keys() == {"labels"} and not batch["labels"].is_floating_point()
    tensors["labels"] = F.pad(batch["labels"][..., :1] * 0, (0, batch["labels"].shape[-1] - 1), value=Model.NO_LABEL)
    shifts = tokens and made(*(tensors[field] for field in settings[0]))[0].isnan()
    found = Model(layers, [*batch], "labels" if tokens else None, (
        lambda labels: F.pad(labels[:, 1:] != Model.NO_LABEL, (1, 0))) if shifts else None)
    found.exact = frozenset(batch.keys() - fields.keys())
    return found


def with_adapters(model: Model, config: Any) -> Model:
    """Return a model with the adapters of a ``peft.LoraConfig`` in its layers, and all other weights frozen.

    ``target_modules`` are names of modules, or ends of them, below ``<layer>.``. Raises UserError where one is in no
    layer or has a tied weight, or more than adapters is trained.
    """
    targets = getattr(config, "target_modules", None)
    if not targets or targets == "all-linear":
        raise UserError(f"the adapters' config, a {type(config).__name__}, does not list its target_modules",
                        hint="give a LoraConfig of peft with names of modules: LoraConfig(r=8, target_modules="
                             "['q_proj', 'v_proj'])")
    if config.modules_to_save or getattr(config, "bias", "none") != "none":
        raise UserError("the adapters' config trains other weights, too (bias, modules_to_save)",
                        hint="leave them out: all but the adapters is frozen")
    # As peft has it: a pattern must match all of a name; a word is a name or its end.
    patterns = {targets: targets} if isinstance(targets, str) else {
        target: rf"(.*\.)?{re.escape(target)}" for target in sorted(targets)}

    def matching(path: str) -> set[str]:
        return {target for target, pattern in patterns.items() if re.fullmatch(pattern, path)}

    problems = [Problem(f"the adapters' targets match '{one}', whose weight is tied",
                        "leave it out: the weight is in two places, and an adapter would be in one of them")
                for one in sorted({name.rpartition(".")[0] for tie in model.ties.items() for name in tie})
                if matching(one)]
    modules = {layer.name: layer.without_values() for layer in model.layers}
    paths = {f"{name}.{path}".rstrip("."): part for name, module in modules.items() if module is not None
             for path, part in module.named_modules()}
    missing = [target for target in patterns if not any(target in matching(path) for path in paths)]
    if missing and None not in modules.values():  # one that reads values when it is built has no names yet
        linear = sorted({path.rpartition(".")[2] for path, part in paths.items() if isinstance(part, nn.Linear)})
        problems.append(Problem(f"no module has the name of {counted(len(missing), 'target')} of the adapters: "
                                f"{', '.join(map(repr, missing))}", f"the linear modules are {', '.join(linear)}"))
    if problems:
        raise UserError.all_of(problems)
    made = copy(model)
    made.layers = tuple(replace(layer, build=partial(_adapted, layer, config)) for layer in model.layers)
    return made


def _adapted(layer: Layer, config: Any) -> nn.Module:
    from peft import inject_adapter_in_model
    from peft.utils.error import NoMatchingPeftModuleError

    # Under its whole name: targets may name a layer, patterns of peft its number, and a layer may be a target itself.
    *outer, last = layer.name.split(".")
    whole = inner = nn.Module()
    for word in outer:
        inner._modules[word] = inner = nn.Module()
    inner.add_module(last, layer.make())
    try:
        inject_adapter_in_model(deepcopy(config), whole)  # peft writes into it
    except NoMatchingPeftModuleError:
        whole.requires_grad_(False)
    return inner.get_submodule(last)
