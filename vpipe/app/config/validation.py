"""Validate a tree with pydantic: return a frozen section, or all mistakes at once.

Pydantic finds wrong types and unknown keys; a section's ``mistakes`` are the rules across keys. Both become a
:class:`~vpipe.errors.Problem` with the key as the user spelled it, the numbers, a remedy and ``file:line:column``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo

from vpipe.app.config.yaml_tree import Keys, Tree, describe
from vpipe.errors import Problem, UserError, nearest

MOST_SAMPLES = 1 << 20
"""Largest batch."""

MOST_STEPS = 10**9
"""Largest number of steps or epochs."""


@dataclass(frozen=True)
class Mistake:
    """A mistake in the value of ``keys`` (from the section's root), as a predicate: "must be ..."."""

    keys: Keys
    predicate: str
    hint: str


class MistakesError(ValueError):
    """Raised by a validator: one or several mistakes."""

    def __init__(self, *mistakes: Mistake) -> None:
        self.mistakes = mistakes
        super().__init__("; ".join(f"{'.'.join(map(str, m.keys))} {m.predicate}" for m in mistakes))


def check_entries(value: Any, valid: Callable[[Any], bool], expected: str, hint: str) -> Any:
    """Return a value, or a list of values as a tuple; raise the mistakes in them."""
    several = isinstance(value, (list, tuple))
    wrong = [Mistake((i,) if several else (), f"must be {expected}, got {describe(entry)}", hint)
             for i, entry in enumerate(value if several else [value]) if not valid(entry)]
    if wrong:
        raise MistakesError(*wrong)
    return as_tuple(value)


def is_share(value: Any) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return type(value) in (int, float) and 0 <= value <= 1


def as_tuple(value: Any) -> Any:
    """Return a list as the tuple that a frozen section holds."""
    return tuple(value) if isinstance(value, list) else value


def _path(path: Path) -> Path:
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name or len(name) > 1024 or max(map(len, name.split(b"/"))) > 255:
        raise MistakesError(Mistake((), f"is {describe(str(path))}, which is no path of a file",
                                    "a path has 1,024 bytes at most, each name in it 255, and no character 0"))
    return path


Name = Annotated[str, Field(min_length=1)]
Ints = Annotated[tuple[int, ...], BeforeValidator(as_tuple)]
Texts = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
FilePath = Annotated[Path, Field(strict=False), AfterValidator(_path)]


CHECKED = {"checked": True}
"""Validation context of values that were validated before: the rules of sections are not checked again."""


class Section(BaseModel):
    """A frozen group of keys: unknown keys are errors, and values are not converted to other types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def resolved(self) -> Self:
        """Return this section with the values that follow from its other keys; each key is valid by itself.

        Raises:
            MistakesError: there is no such value.
        """
        return self

    def mistakes(self) -> Iterator[Mistake]:
        """Yield mistakes across the keys of this section, which is resolved."""
        yield from ()

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> Self:
        section = self.resolved()
        if info.context is not CHECKED and (found := list(section.mistakes())):
            raise MistakesError(*found)
        return section


S = TypeVar("S", bound=Section)


def validated(kind: type[S], tree: Tree, others: Sequence[Problem] = (), context: object = None) -> S:
    """Return ``tree`` as a section; raise one :class:`UserError` with all mistakes, and the ``others`` in it.

    Args:
        context: :data:`CHECKED` where only the values are checked, not the rules of sections.
    """
    section, problems = checked(kind, tree, context)
    if section is None or others:
        raise UserError.all_of([*problems, *others])
    return section


def checked(kind: type[S], tree: Tree, context: object = None) -> tuple[S | None, list[Problem]]:
    """Return ``tree`` as a section and no problem, or None and all problems in the order of the file."""
    try:
        section = kind.model_validate(tree.value, context=context)
    except ValidationError as error:
        order = {keys: i for i, keys in enumerate(tree.places)}
        found = [pair for details in error.errors(include_url=False) for pair in _problems(kind, tree, details)]
        found.sort(key=lambda pair: order[tree.known(pair[0])])
        return None, [*tree.problems, *(problem for _, problem in found)]
    return (None, tree.problems) if tree.problems else (section, [])


def _problems(kind: type[Section], tree: Tree, details: Any) -> Iterator[tuple[Keys, Problem]]:
    keys: Keys = details["loc"]
    context: Mapping[str, Any] = details.get("ctx", {})
    name, where = tree.name(keys), tree.where(keys)
    info = field_at(kind, keys)
    described = f"{_leaf(keys)}: {info.description}" if info else "give a value of this kind"
    match details["type"]:
        case "value_error" if isinstance(context["error"], MistakesError):
            for mistake in context["error"].mistakes:
                whole = (*keys, *mistake.keys)
                yield whole, Problem(f"{tree.name(whole)} {mistake.predicate}", mistake.hint, tree.where(whole))
        case "extra_forbidden" if name in UserError.retired:
            yield keys, Problem(f"{name} is no key any more", UserError.retired[name], tree.places[keys].key)
        case "extra_forbidden":
            yield keys, Problem(f"unknown key '{name}'", _instead(kind, keys), tree.places[keys].key)
        case "missing":
            yield keys, Problem(f"the key '{name}' is missing", f"add {described}", where)
        case "literal_error" if f"{name}={details['input']}" in UserError.retired:
            yield keys, Problem(f"{name} cannot be {describe(details['input'])} any more",
                                UserError.retired[f"{name}={details['input']}"], where)
        case "literal_error":
            known = _choices(info)
            yield keys, Problem(f"{name} must be {context['expected']}, got {describe(details['input'])}",
                                nearest(str(details["input"]), known), where)
        case other:
            bounds = {bound: _plain(context[bound]) for bound in ("gt", "ge", "lt", "le") if bound in context}
            must = _MUST[other].format(**bounds) if other in _MUST else f"be right ({details['msg']})"
            yield keys, Problem(f"{name} must {must}, got {describe(details['input'])}", described, where)


_MUST = {
    "int_type": "be a whole number", "int_from_float": "be a whole number", "float_type": "be a number",
    "finite_number": "be finite", "bool_type": "be true or false", "string_type": "be text", "path_type": "be text",
    "string_too_short": "not be empty", "too_short": "not be empty", "dict_type": "be keys with values",
    "model_type": "be keys with values", "tuple_type": "be a list", "greater_than": "be above {gt}",
    "greater_than_equal": "be at least {ge}", "less_than": "be below {lt}", "less_than_equal": "be at most {le}"}
"""What a value must do, by the error type of pydantic."""


def _plain(bound: float) -> str:
    """Return a bound as one writes it: pydantic gives that of a number that may have a fraction as ``1000000000.0``."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def field_at(kind: type[BaseModel], keys: Keys) -> FieldInfo | None:
    """Return the field at ``keys``; for an element of a list, the field of the list."""
    inner: type[BaseModel] | None = kind
    info = None
    for key in keys:
        if inner is None:
            break
        info = inner.model_fields.get(str(key))
        inner = section_of(info) if info else None
    return info


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, possibly as an option; None if it holds none."""
    for part in (info.annotation, *get_args(info.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _choices(info: FieldInfo | None) -> list[str]:
    """Return the values of a field that is a Literal, or a Literal or None."""
    annotation = info.annotation if info else None
    parts = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    return [str(value) for part in parts for value in get_args(part)]


def _instead(kind: type[Section], keys: Keys) -> str:
    """Return the hint for an unknown key: a similar key of the same section or of another, or one with these initials.
    """
    parent = kind if len(keys) == 1 else section_of(field_at(kind, keys[:-1]) or FieldInfo())
    siblings: Sequence[str] = list(parent.model_fields) if parent else []
    elsewhere = {word: f"{name}.{key}" for name, info in kind.model_fields.items()
                 for section in [section_of(info)] if section for key in section.model_fields
                 for word in ("".join(part[:1] for part in key.split("_")), key)}
    word = _leaf(keys)
    if word in elsewhere:
        return f"did you mean '{elsewhere[word]}'?"
    if not get_close_matches(word, siblings, n=1, cutoff=0.6):
        for close in get_close_matches(word, elsewhere, n=1, cutoff=0.8):
            return f"did you mean '{elsewhere[close]}'?"
    return nearest(word, siblings)


def _leaf(keys: Keys) -> str:
    return str(next((key for key in reversed(keys) if isinstance(key, str)), "value"))
