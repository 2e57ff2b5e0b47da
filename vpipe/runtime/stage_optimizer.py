"""Make the torch optimizers of a stage by the user's factory, check them, and step them.

A parameter is stepped by at most one optimizer. A parameter of no optimizer is not trained: its gradient is dropped,
and counts in no norm. With several optimizers every parameter must be in one of them.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from math import nan
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer

from vpipe import accelerator
from vpipe.errors import Problem, UserError, VpipeError, counted
from vpipe.runtime.sharded_tensors import is_sharded, local
from vpipe.runtime.weight_versions import sample
from vpipe.torch_private import hooks_after_steps, hooks_before_steps

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer | None] | None
"""Result of an optimizer factory: an optimizer, a list of them, or None where nothing is to be trained."""

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], Optimizers]
"""Named parameters of a stage -> its optimizers."""

Numbers = Mapping[str, Sequence[str]]
"""Name of a number beside the state of parameters -> its values in words, of all groups."""

_Numbers = dict[str, list[tuple[Any, int]]]

_PLAIN = frozenset((type(None), bool, int, float, str, tuple, list))

RATES = ("lr", "initial_lr")
"""Entries of a parameter group that follow from the run's arguments, unless the user or a scheduler changes them."""

_WRAPPER = Optimizer.profile_hook_step(Optimizer.step).__code__
"""The code that torch puts around the ``step`` of every class of optimizers: hooks, and a label for its profiler."""

ALONE_HINT = ("choose an optimizer that steps each parameter by its own gradients, clip with grad_clip=..., which is "
              "of all stages, or leave out stages and zero1")

_LIST_HINT = "return a torch.optim.Optimizer, or a list of them: [Muon(matrices), AdamW(others)]"


class StageOptimizer:
    """The optimizers of one stage; :meth:`build` checks them.

    Args:
        optimizers: in the order in which they step.
        parameters: of the stage, by name.

    Attributes:
        of_parameter: by the name of a parameter, the optimizer that steps it and the number of its group there.
        untrained: positions of the parameters that no optimizer steps here.
        written: names of the numbers beside the state of parameters that a step has changed.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizers, self.parameters = tuple(optimizers), parameters
        place = {id(parameter): (optimizer, number) for optimizer in optimizers
                 for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
        self.of_parameter = {name: place[id(p)] for name, p in parameters.items() if id(p) in place}
        self.untrained = [i for i, name in enumerate(parameters) if name not in self.of_parameter]
        self._first_rates = [_mark(group.get("lr")) for group in self.groups]
        self._fixed_rates: list[Any] | None = None  # that count until the pipeline is empty
        self._first_numbers = self._numbers()
        self._partial = False  # steps some of the parameters, as replicas step the others
        self.written: set[str] = set()

    def own(self, names: Collection[str]) -> None:
        """Step these parameters only, and keep no state of others; the parameter groups stay, also empty ones."""
        self._partial = True
        others = {id(self.parameters[name]): self.parameters[name] for name in self.of_parameter if name not in names}
        for group in self.groups:
            group["params"] = [p for p in group["params"] if id(p) not in others]
        for optimizer in self.optimizers:
            for parameter in others.values():
                optimizer.state.pop(parameter, None)
        self.untrained = [i for i, name in enumerate(self.parameters)
                          if name not in self.of_parameter or name not in names]

    @classmethod
    def build(cls, make: MakeOptimizer, parameters: Mapping[str, nn.Parameter], stage: int) -> StageOptimizer:
        """Call a factory, and check the optimizers that it returns.

        Raises:
            UserError: it fails; or the optimizers would not train each of the stage's parameters once, or would keep
                state where no checkpoint finds it.
        """
        try:
            made = make(parameters)
        except VpipeError:
            raise
        except Exception as error:
            raise UserError(f"the optimizer of stage {stage} cannot be made: {type(error).__name__}: {error}",
                            hint=_failure_hint(error, parameters)) from error
        entries: Sequence[object] = made if isinstance(made, (list, tuple)) else [made]
        if problems := [problem for each in entries if each is not None for problem in _kind_problems(each, stage)]:
            raise UserError.all_of(problems)
        optimizers = [each for each in entries if isinstance(each, Optimizer)]
        if problems := list(_share_problems(optimizers, parameters, stage)):
            raise UserError.all_of(problems)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if group.get("foreach", ...) is None and len(set(map(is_sharded, group["params"]))) > 1:
                group["foreach"] = False  # on GPUs torch would put both kinds into one list, which it cannot
        return cls(optimizers, parameters)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors in the state of the optimizers."""
        return [value for optimizer in self.optimizers for state in optimizer.state.values()
                for value in state.values() if isinstance(value, Tensor)]

    def step(self) -> None:
        """Step every optimizer, and note the numbers that it changes beside the state of parameters.

        Raises:
            UserError: one that steps some of the stage's parameters may depend on the others.
        """
        before = None if all(map(is_of_torch, self.optimizers)) else self._numbers()
        for optimizer in self.optimizers:
            if self._partial and (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
                raise UserError(f"{type(optimizer).__name__} has hooks around its step, which would see the parameters "
                                "of one replica only", hint="leave out zero1, or the hooks")
            _step(optimizer)
        if before is not None:
            self.written.update(_changed(before, self._numbers()))

    def mark(self) -> Callable[[], bool]:
        """Return a function that tells whether anything was changed since; if not, it drops state that is new."""
        def marks() -> dict[object, object]:
            found: dict[object, object] = {} if all(map(is_of_torch, self.optimizers)) else {"": self._numbers()}
            for optimizer in self.optimizers:
                look = _mark_of(optimizer)
                found |= {id(p): look(p) for group in optimizer.param_groups for p in group["params"]}
                for p, state in optimizer.state.items():
                    for key, value in state.items() if isinstance(state, Mapping) else [("", state)]:
                        found[id(p), key] = look(value)
            return found

        def changed() -> bool:
            now = marks()
            if any(now.get(key) != mark for key, mark in before.items()):
                return True
            for p, state in (each for optimizer in self.optimizers for each in optimizer.state.items()):
                for key in [key for key in state if (id(p), key) not in before]:
                    del state[key]
            return False

        before = marks()
        return changed

    def numbers(self) -> Numbers:
        """Return the numbers beside the state of parameters, in words. To read one that is on a GPU waits for it."""
        return {name: [str(value.item() if isinstance(value, Tensor) else value) for value, _ in values]
                for name, values in self._numbers().items()}

    def step_at_rate(self, factor: float, step: Callable[[], None]) -> None:
        """Call ``step`` with learning rates multiplied by ``factor``; after it they are the user's or a scheduler's.

        Raises:
            UserError: a group has no learning rate, or an optimizer changes its own.
        """
        if factor == 1 and self._fixed_rates is None:
            step()
            return
        groups = self.groups
        held = [(group, group["lr"], rate * factor) for group, rate in zip(groups, self._rates(), strict=True)
                if group.get("lr") is not None]
        if factor != 1 and len(held) < len(groups):
            raise UserError(f"the learning rate is to be multiplied by {factor:g}, but a parameter group of the "
                            "optimizer has none", hint="give it a learning rate, or leave learning_rate_factor out")
        try:
            for group, _, rate in held:
                group["lr"] = rate
            step()
            for group, _, rate in held:
                if group["lr"] is not rate or getattr(rate, "_version", False):
                    raise UserError("an optimizer changes the learning rate of its parameter groups as it steps, which "
                                    "vpipe puts back", hint="choose one that does not, or a schedule with a flush and "
                                                            "no learning_rate_factor")
        finally:
            for group, before, _ in held:
                group["lr"] = before

    def fix_rates(self) -> None:
        """Step at the present learning rates until the next call."""
        self._fixed_rates = [rate.clone() if isinstance(rate := group.get("lr"), Tensor) else rate
                             for group in self.groups]

    @property
    def learning_rate(self) -> float | None:
        """Return that of the first parameter group; None where nothing is trained."""
        rate = next(iter(self._rates()), None)
        return None if rate is None else float(rate)

    def _rates(self) -> list[Any]:
        return [group.get("lr") for group in self.groups] if self._fixed_rates is None else self._fixed_rates

    def options(self) -> list[dict[str, Any]]:
        """Return the other entries of the parameter groups, to compare: a tensor by identity and version."""
        groups = [{**group, "params": None} for group in self.groups]
        return [group if _PLAIN.issuperset(map(type, group.values())) else
                {key: _mark(value) for key, value in group.items()} for group in groups]

    def _numbers(self) -> _Numbers:
        """Return the numbers in parameter groups, of which those of a class have one name, and attributes.

        Of a tensor with its version, since to read it would synchronize a GPU.
        """
        found: _Numbers = defaultdict(list)
        for optimizer in self.optimizers:
            for where, place in (*(("of the parameter groups", group) for group in optimizer.param_groups),
                                 ("among the attributes", vars(optimizer))):
                for key, value in place.items():
                    if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1):
                        found[f"'{key}' {where} of {type(optimizer).__name__}"].append(
                            (value, getattr(value, "_version", 0)))
        return found

    def check_state(self) -> None:
        """Refuse state that an optimizer does not keep per parameter: no checkpoint would hold it.

        Raises:
            UserError: there is some.
        """
        hint = "choose an optimizer that keeps its state per parameter"
        known = set(map(id, self.parameters.values()))
        for optimizer in self.optimizers:
            for key, state in optimizer.state.items():
                if id(key) not in known and state:
                    raise UserError(f"{type(optimizer).__name__} keeps state that is of no parameter of its stage, but "
                                    f"of {type(key).__name__} {key!r}"[:200], hint=hint)
        for name in _changed(self._first_numbers, self._numbers()):
            if not name.startswith(("'lr' of", "'initial_lr' of")):
                raise UserError(f"{name} has changed since the start, which a checkpoint does not hold", hint=hint)

    @property
    def rescheduled(self) -> bool:
        """Return whether a learning rate was changed since the start, or a scheduler of torch's changes one.

        Raises:
            UserError: there are more or fewer parameter groups.
        """
        if len(self.groups) != len(self._first_rates):
            raise UserError(f"an optimizer has {len(self.groups)} parameter groups, but had {len(self._first_rates)} "
                            "when the pipeline was made", hint="let the factory make all of them")
        return any("initial_lr" in group or _mark(group.get("lr")) != first
                   for group, first in zip(self.groups, self._first_rates, strict=True))


def check_rescheduled(optimizers: Sequence[StageOptimizer]) -> None:
    """Refuse changed learning rates of exactly one of several optimizers of this process.

    A script that keeps only the optimizer that its factory made last would train otherwise under torchrun.
    """
    training = [each for each in optimizers if each.optimizers]
    if len(training) > 1 and sum(each.rescheduled for each in training) == 1:
        raise UserError(f"the learning rate of one optimizer was changed, but the factory made {len(training)} of them "
                        "in this process: one per stage",
                        hint="keep all optimizers that the factory makes and change each of them, or use "
                             "learning_rate_factor=lambda step: ...")


def _changed(before: _Numbers, now: _Numbers) -> list[str]:
    return [name for name, values in now.items() if values != before.get(name)]


def check_equal(numbers: Mapping[str, Numbers], written: Collection[str]) -> None:
    """Refuse numbers that optimizers have written as they stepped, if they differ between stages.

    A stage may have fewer parameter groups than another: its values must be among those of the other.

    Args:
        numbers: :meth:`StageOptimizer.numbers` of every stage, by its name; all have made as many steps.
        written: names of those that a step has changed on any stage.
    """
    for name in written:
        of_stage = {stage: set(own[name]) for stage, own in numbers.items() if name in own}
        most = max(of_stage, key=lambda stage: len(of_stage[stage]))
        for stage, values in of_stage.items():
            if other := sorted(values - of_stage[most]):
                raise UserError(f"{name} is {first_of(sorted(of_stage[most] - values))} on {most} and "
                                f"{first_of(other)} on {stage}: an optimizer sees one stage, or a part of it",
                                hint=ALONE_HINT)


def is_joint(optimizer: Optimizer) -> bool:
    """Return whether gradients of one parameter change how others are stepped, as a norm over all does.

    A copy of the optimizer shows it, by three steps of small parameters, without hooks. False where the copy fails, or
    where a step may change more than the copy, since the optimizer holds objects other than functions and parameters.
    """
    copied = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "step")}
    step_of_class: Any = type(optimizer).step
    if any(hasattr(each, "__dict__") and id(each) not in copied and not isinstance(each, (FunctionType, type))
           for each in _values_within(own, set())):
        return False

    @accelerator.seeded(0)
    def stepped(factor: float) -> list[Tensor]:
        """Return every other parameter after three steps; ``factor``: of the gradients of the rest."""
        small = {key: nn.Parameter(torch.ones([min(n, 4) for n in p.shape], dtype=p.dtype, device=p.device))
                 for key, p in copied.items()}
        copy = object.__new__(type(optimizer))
        vars(copy).update(deepcopy(own, dict(small)), state=defaultdict(dict))
        chosen = [p for group in copy.param_groups for p in group["params"]]
        for group in copy.param_groups:
            group["lr"] = 0.1  # it may be 0 before a warm-up
        for step in range(3):
            for i, p in enumerate(chosen):
                p.grad = torch.randn_like(p) * factor ** (i % 2 * step)
            step_of_class.__wrapped__(copy)
        return chosen[::2]

    with warnings.catch_warnings(action="ignore"), suppress(Exception):
        return not all(map(partial(torch.allclose, equal_nan=True), stepped(1.0), stepped(100.0)))
    return False


@accelerator.seeded(0)
def stepped_without_gradients(own: StageOptimizer) -> StageOptimizer:
    """Return a copy with the state that optimizers have after a step with gradients of 0, in that state's memory alone.

    A step on the device meta shows the shapes, a step of parameters with one number the values, which are then equal.
    Optimizers that cannot make these two steps make one with copies of the parameters.

    Raises:
        UserError: they cannot make such a step.
    """
    def stepped(like: Callable[[Tensor], Tensor]) -> StageOptimizer:
        parameters = {name: nn.Parameter(like(p.detach())) for name, p in own.parameters.items()}
        made = [object.__new__(type(optimizer)) for optimizer in own.optimizers]
        for copy, optimizer in zip(made, own.optimizers, strict=True):
            kept = {name: {} if name.endswith("_hooks") else value for name, value in vars(optimizer).items()
                    if name not in ("state", "step")}
            instead = {id(p): parameters[name] for name, p in own.parameters.items()}
            vars(copy).update(deepcopy(kept, instead), state=defaultdict(dict))
            for group in copy.param_groups:
                group.pop("initial_lr", None)  # of a scheduler
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
                    group |= {"fused": False} if p.is_meta and group.get("fused") else {}
            step: Any = type(copy).step
            step.__wrapped__(copy)
            copy.state.default_factory = None
        return StageOptimizer(made, parameters)

    with warnings.catch_warnings(action="ignore"), suppress(Exception):
        found, small = stepped(partial(torch.empty_like, device="meta")), stepped(lambda p: p.new_zeros([1] * p.dim()))
        for name, (optimizer, _) in found.of_parameter.items():
            state, (of_small, _) = optimizer.state.get(found.parameters[name], {}), small.of_parameter[name]
            for key, value in state.items():
                one = of_small.state[small.parameters[name]][key]
                if isinstance(value, Tensor):
                    state[key] = torch.full_like(value, one.flatten()[0].item(), dtype=one.dtype, device=one.device)
        return found
    try:
        return stepped(torch.clone)
    except Exception as error:
        raise UserError(f"optimizers of {counted(len(own.parameters), 'parameter')} cannot make a step with gradients "
                        f"of 0, which shows their state before the first update: {type(error).__name__}: {error}",
                        hint="ask for the sharded state after the first update") from error


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether this is one of torch's, which step each parameter by its own gradients and state."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _mark_of(optimizer: Optimizer) -> Callable[[object], object]:
    """Return what marks a value that an optimizer's step may change: of a tensor the version, and unless torch's own
    operations alone change it, some values; NaN, which equals nothing, where these cannot be seen at once."""
    counts = is_of_torch(optimizer) and not ("step" in vars(optimizer) or optimizer._optimizer_step_pre_hooks or (
        hooks_before_steps) or any(group.get("fused") for group in optimizer.param_groups))

    def mark(value: object) -> object:
        if not isinstance(value, Tensor):
            return value if value is None or type(value) in (bool, int, float) else nan
        if counts:
            return value._version
        values = sample(local(value)) if value.layout is torch.strided else b""
        return (value._version, values) if values else nan
    return mark


def _step(optimizer: Optimizer) -> None:
    """Step an optimizer; without torch's wrapper where that has nothing to do: it takes longer than a small step."""
    step: Any = type(optimizer).step
    if ("step" in vars(optimizer) or getattr(step, "__code__", None) is not _WRAPPER  # a scheduler's, or a user's
            or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
            or hooks_before_steps or hooks_after_steps or profiler._is_profiler_enabled):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


def _mark(value: object) -> object:
    """Return a value to compare; of a tensor identity and version, since to read it would synchronize a GPU."""
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _failure_hint(error: Exception, parameters: Mapping[str, nn.Parameter]) -> str:
    if isinstance(error, ValueError) and "empty parameter list" in str(error):
        return ("a stage may have no parameters of a kind: leave that optimizer out there, such as "
                "[Muon(matrices)] * bool(matrices) + [AdamW(others)] * bool(others)")
    shapes = first_of([str(list(p.shape)) for p in parameters.values()], 4)
    return (f"it is called once per stage, with the list of the stage's parameters: here "
            f"{counted(len(parameters), 'tensor')} of shape {shapes}")


def _values_within(value: object, seen: set[int]) -> Iterator[object]:
    """Yield the values in mappings, lists and tuples of any class, however deep."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
    if items is None:
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for item in items:
            yield from _values_within(item, seen)


def _kind_problems(made: object, stage: int) -> Iterator[Problem]:
    """Yield the problems of an entry that is no optimizer, or one that vpipe cannot step or save."""
    kind = type(made).__name__
    if not isinstance(made, Optimizer):
        yield Problem(f"the optimizer of stage {stage} is of the kind {kind}, which is no torch.optim.Optimizer",
                      _LIST_HINT)
        return
    inner = next((found for found in _values_within(vars(made), set()) if isinstance(found, Optimizer)
                  and found.state is not made.state), None)
    if inner is not None:
        yield Problem(f"the optimizer {kind} of stage {stage} wraps {type(inner).__name__}, whose state is not its own "
                      "and would not be saved", _LIST_HINT)
    try:
        inspect.signature(type(made).step).bind(made)
    except TypeError:
        yield Problem(f"the optimizer {kind} of stage {stage} needs a closure that computes the loss again, which a "
                      "pipeline does not have", "choose an optimizer whose step() takes no arguments")


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first names in words."""
    return f"{', '.join(names[:most])}{', ...' * (len(names) > most)}"


def _share_problems(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter],
                    stage: int) -> Iterator[Problem]:
    """Yield the parameters of several optimizers, of none, or of another stage."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    first: dict[str, str] = {}  # parameter -> its first optimizer
    twice: list[str] = []
    strange: list[str] = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            how = next((how for how in ("foreach", "fused") if group.get(how)), None)
            if how and 0 < (sharded := sum(map(is_sharded, group["params"]))) < len(group["params"]):
                yield Problem(f"{kind} of stage {stage} has {sharded} DTensors and "
                              f"{counted(len(group['params']) - sharded, 'plain tensor')} in a parameter group with "
                              f"{how}=True, by which torch steps lists of one kind", f"leave {how} out, or give it "
                              "two parameter groups: isinstance(p, DTensor) tells them apart")
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    strange.append(str(list(parameter.shape)))
                elif name in first:
                    twice.append(f"'{name}' ({first[name]} and {kind})")
                else:
                    first[name] = kind
    if twice:
        yield Problem(f"{counted(len(twice), 'parameter')} of stage {stage} given to two optimizers: {first_of(twice)}",
                      "give every parameter to one of them")
    if strange:
        yield Problem(f"the optimizer of stage {stage} has {counted(len(strange), 'tensor')} that are no parameters of "
                      f"this stage, of shape {first_of(strange)}",
                      "make it of the parameters that the factory is given, a new one for every stage: "
                      "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)")
    elif len(optimizers) > 1 and (left := [f"'{name}' {list(p.shape)}" for name, p in parameters.items()
                                           if name not in first]):
        yield Problem(f"{counted(len(left), 'parameter')} of stage {stage} in none of its {len(optimizers)} "
                      f"optimizers: {first_of(left)}",
                      "give every parameter to one of them; one that is not to be trained gets "
                      "requires_grad_(False) where its layer is built")
