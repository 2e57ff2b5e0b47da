"""Turn the children of an ``nn.Sequential`` into layers: copies with their ties, the last one with the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.arguments import Arguments, shown
from vpipe.errors import UserError

Loss = Callable[[Tensor, Tensor], Tensor]


class WithLoss(nn.Module):
    """The last child of a sequential model followed by its loss; returns that and the child's output.

    Shares the child's tables, so that parameters keep the names they have in the ``nn.Sequential``. A loss that is a
    module is a submodule: it moves to the device and changes its mode with the child. Its tensors are not in the
    state, which is that of the ``nn.Sequential``. The loss is computed in fp32 at least.
    """

    _vpipe_child: nn.Module
    _vpipe_loss: Loss

    def __init__(self, child: nn.Module, loss: Loss) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = child._parameters, child._buffers, dict(child._modules)
        self.__dict__.update(_vpipe_child=child, _vpipe_loss=loss)  # names that no module of the child's has
        if isinstance(loss, nn.Module):
            self._vpipe_loss_name = "loss"
            while hasattr(child, self._vpipe_loss_name):
                self._vpipe_loss_name += "_"
            self._modules[self._vpipe_loss_name] = loss
            self.register_state_dict_post_hook(_leave_out_loss)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(_leave_loss_alone)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the child's attributes on the child, which may keep a list of its parameters, as ``nn.LSTM`` does."""
        child = self.__dict__.get("_vpipe_child")
        if child is None or not any(name in table for table in (child._parameters, child._buffers, child._modules)):
            super().__setattr__(name, value)
            return
        setattr(child, name, value)
        if name in child._modules:
            self._modules[name] = value

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules and, without duplicates, the child, which has a mode of its own."""
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if remove_duplicate:
            yield prefix, self._vpipe_child

    def train(self, mode: bool = True) -> WithLoss:
        super().train(mode)
        self._vpipe_child.train(mode)
        return self

    def forward(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = self._vpipe_child(hidden)
        return self._vpipe_loss(_at_least_fp32(output), _at_least_fp32(target)), output


def is_mean_of_labels(loss: object) -> bool:
    """Return whether a module is a loss of torch's that is divided by the weights of its labels."""
    return type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss) and loss.reduction == "mean"  # type: ignore[attr-defined]


def loss_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a layer's loss that must be saved beside its state, by name."""
    if not isinstance(module, WithLoss) or not isinstance(loss := module._vpipe_loss, nn.Module):
        return {}
    state = loss.state_dict()
    return {name: buffer for name, buffer in loss.named_buffers() if name in state}


def rounded_module(module: nn.Module) -> nn.Module:
    """Return the part of a layer's module that a reduced precision rounds: all but the loss of a sequential model."""
    return module._vpipe_child if isinstance(module, WithLoss) else module


def copy_module(module: nn.Module, loss: Loss | None = None) -> nn.Module:
    """Copy a module, with its loss, and with the hooks and attributes of its parameters, which torch leaves out."""
    memo: dict[int, Any] = {}
    try:
        made = copy.deepcopy(module if loss is None else WithLoss(module, loss), memo)
    except RuntimeError as error:
        raise UserError(f"a child of the nn.Sequential, {type(module).__name__}, cannot be copied: "
                        f"{str(error).splitlines()[0]}",
                        hint="write a Layer whose build function makes it; for weight_norm and spectral_norm use those "
                             "of torch.nn.utils.parametrizations") from error
    for parameter in module.parameters():
        twin = memo[id(parameter)]
        twin.__dict__.update(copy.deepcopy(parameter.__dict__, memo))
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, hooks):
                setattr(twin, hooks, copy.deepcopy(getattr(parameter, hooks), memo))
    return made


def shared_parameters(children: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """Return the ties of every child: its trainable parameters that an earlier child has too -> their place there."""
    first: dict[int, tuple[str, str]] = {}  # the child that has it, and where
    ties: dict[str, dict[str, str]] = {name: {} for name in children}
    for name, child in children.items():
        for own, parameter in child.named_parameters(remove_duplicate=False):
            owner, target = first.setdefault(id(parameter), (name, own))
            if owner != name and parameter.requires_grad:
                ties[name][own] = f"{owner}.{target}"
    return ties


def shared_modules(children: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """Return the modules with buffers in every child that an earlier child holds as well, for ``Layer.shared``."""
    first: dict[int, tuple[str, str]] = {}  # the child that has it, and where
    shared: dict[str, dict[str, str]] = {name: {} for name in children}
    for name, child in children.items():
        mine = shared[name]
        for path, module in child.named_modules(remove_duplicate=False):
            owner, target = first.setdefault(id(module), (name, f"{name}.{path}" if path else name))
            if owner != name and any(True for _ in module.buffers()) and not any(
                    not above or path.startswith(f"{above}.") for above in mine):
                mine[path] = target
    return shared


def put_module(layer: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Put a module where a layer keeps the one at ``path``, which may be empty; return the layer's module then."""
    if path:
        parent, _, name = path.rpartition(".")
        setattr(layer.get_submodule(parent), name, module)
        return layer
    return WithLoss(module, layer._vpipe_loss) if isinstance(layer, WithLoss) else module


def check_sequential(modules: object, loss: object) -> None:
    """Raise UserError for no plain ``nn.Sequential``, which does more than call its children in order, or no loss."""
    given = Arguments()
    if not isinstance(modules, nn.Sequential):
        given.refuse(f"Model.sequential is given {shown(modules)}, not an nn.Sequential",
                     "write another module as layers: Model([Layer('embed', lambda: Embed(), ...), ...], batch=...)"
                     if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList)
                     else "write Model.sequential(nn.Sequential(*modules), loss)")
    elif type(modules).forward is not nn.Sequential.forward or "forward" in vars(modules):
        given.refuse(f"{type(modules).__name__} has a forward of its own, which layers would not carry out",
                     "write what it does as layers: Model([Layer(...), ...], batch=...)")
    elif modules._forward_hooks or modules._forward_pre_hooks or modules._backward_hooks or (
            modules._backward_pre_hooks):
        given.refuse("the nn.Sequential has hooks of its own, which layers would not carry out",
                     "register them on its children")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        given.refuse("the loss has parameters to train", "make it the last child, or write a Layer for it")
    elif isinstance(loss, type):
        given.refuse(f"the loss is {shown(loss)}", f"give what it makes: {loss.__name__}()")
    else:
        given.function("the loss", loss, 2, "give what computes a loss from output and target, such as "
                                            "nn.CrossEntropyLoss()")
    given.check()


def check_unchanged(modules: nn.Sequential, children: Mapping[str, nn.Module], ties: object, shared: object) -> None:
    """Refuse other children, or other ties between them, than when layers were made of them; weights may be others."""
    same = [child for child in modules._modules.values() if child is not None] == list(children.values())
    if not same or shared_parameters(children) != ties or shared_modules(children) != shared:
        raise UserError("the nn.Sequential has other children, or other ties between them, than when Model.sequential "
                        "was called", hint="change it first, then make the model: Model.sequential(modules, loss)")


def check_children(modules: nn.Sequential, children: Mapping[str, nn.Module], loss: Loss) -> None:
    """Raise UserError for children whose copies would not be trained as they are.

    A function that is not copied (a lambda in a child, its forward, the loss) uses a module or a tensor of the
    ``nn.Sequential``: it would go on using the original.
    """
    originals = {id(part) for part in chain(modules.modules(), modules.parameters(), modules.buffers())}

    def uses_originals(value: object) -> bool:
        return any(id(part) in originals for found in _captured_objects(value)
                   for part in (found.modules() if isinstance(found, nn.Module) else (found,)))

    for name, child in children.items():
        for path, module in child.named_modules(prefix=name):
            for where, value in _settings(module):
                if uses_originals(value):
                    raise UserError(f"'{path}' ({type(module).__name__}) has a function in '{where}' that holds a "
                                    "module or a tensor of the nn.Sequential: its copy would use the original's",
                                    hint="let it use self alone, as a method, or write a Layer whose build function "
                                         "makes the module")
    parts = loss.modules() if isinstance(loss, nn.Module) else ()
    if uses_originals(loss) or any(uses_originals(value) for part in parts for _, value in _settings(part)):
        raise UserError("the loss holds a module or a tensor of the nn.Sequential, which is copied: it would use the "
                        "original's, which are not trained",
                        hint="compute it from output and target alone; the optimizer decays weights")


def _settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield a module's attributes and the methods of its class, but for torch's, by name."""
    yield from ((name, value) for name, value in vars(module).items()
                if name not in ("_modules", "_parameters", "_buffers"))
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            yield from vars(kind).items()


def _captured_objects(value: object) -> Iterator[object]:
    """Yield the objects that functions among a value refer to: copying a module copies neither."""
    seen: set[int] = set()
    waiting: list[tuple[object, FunctionType | None]] = [(value, None)]
    while waiting:
        one, function = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        held: Iterable[object] = ()
        if isinstance(one, FunctionType):
            if function is None or function.__globals__ is one.__globals__:  # not all that its module imports
                function, held = one, _closure_objects(one)
        elif isinstance(one, dict):
            held = one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            held = one
        elif function is not None:
            yield one
        waiting += [(further, function) for further in held]


def _closure_objects(function: FunctionType) -> Iterator[object]:
    """Yield the objects that a function closes over, defaults to, or finds among the globals."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # still empty
            continue
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)


def _leave_out_loss(module: WithLoss, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}{module._vpipe_loss_name}.")]:
        del state[name]


def _leave_loss_alone(module: WithLoss, state: dict[str, Any], prefix: str, *_: object) -> None:
    loss = module._vpipe_loss
    assert isinstance(loss, nn.Module), "only then is this a hook"
    loss.state_dict(destination=state, prefix=f"{prefix}{module._vpipe_loss_name}.")


def _at_least_fp32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
