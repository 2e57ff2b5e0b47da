"""Validate a tree with pydantic: return a frozen section, or all mistakes at once.

Pydantic finds wrong types and unknown keys; a section's ``mistakes`` are the rules across keys. Both become a
:class:`~vpipe.errors.Problem` with the key as the user spelled it, the numbers, a remedy and ``file:line:column``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from vpipe.config.yaml_tree import Keys, Tree, describe
from vpipe.errors import Problem, UserError, nearest


@dataclass(frozen=True)
class Mistake:
    """A mistake in the value of ``keys`` (from the section's root), as a predicate: "must be ..."."""

    keys: Keys
    predicate: str
    hint: str


def unavailable(key: str, asks: str, hint: str) -> Mistake:
    """Return the mistake of a value that needs a feature which this version does not have."""
    return Mistake((key,), f"asks for {asks}, which is not available in this version", hint)


class MistakesError(ValueError):
    """Raised by a validator: one or several mistakes."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("; ".join(f"{'.'.join(map(str, m.keys))} {m.predicate}" for m in self.mistakes))


CHECKED = {"checked": True}
"""Validation context of values that were validated before: the rules of sections are not checked again."""


class Section(BaseModel):
    """A frozen group of keys: unknown keys are errors, and values are not converted to other types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def mistakes(self) -> Iterator[Mistake]:
        """Yield mistakes across the keys of this section; each key is valid by itself."""
        yield from ()

    @model_validator(mode="after")
    def _rules(self, info: ValidationInfo) -> Self:
        if info.context is CHECKED:
            return self
        if found := list(self.mistakes()):
            raise MistakesError(found)
        return self


S = TypeVar("S", bound=Section)


def validated(kind: type[S], tree: Tree) -> S:
    """Return ``tree`` as a section; raise one :class:`UserError` with all mistakes."""
    section, problems = checked(kind, tree)
    if section is None:
        raise UserError.all_of(problems)
    return section


def checked(kind: type[S], tree: Tree) -> tuple[S | None, list[Problem]]:
    """Return ``tree`` as a section and no problem, or None and all problems in the order of the file."""
    try:
        section = kind.model_validate(tree.value)
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
        case "extra_forbidden":
            yield keys, Problem(f"unknown key '{name}'", _instead(kind, keys), tree.places[keys].key)
        case "missing":
            yield keys, Problem(f"the key '{name}' is missing", f"add {described}", where)
        case "literal_error":
            known = _choices(info)
            yield keys, Problem(f"{name} must be {context['expected']}, got {describe(details['input'])}",
                                nearest(str(details["input"]), known), where)
        case other:
            must = _must(other, context) or f"be right ({details['msg']})"
            yield keys, Problem(f"{name} must {must}, got {describe(details['input'])}", described, where)


def _must(error: str, context: Mapping[str, Any]) -> str | None:
    """Describe what a value must do, for an error type of pydantic."""
    match error:
        case "int_type" | "int_from_float":
            return "be a whole number"
        case "float_type":
            return "be a number"
        case "finite_number":
            return "be finite"
        case "bool_type":
            return "be true or false"
        case "string_type" | "path_type":
            return "be text"
        case "string_too_short" | "too_short":
            return "not be empty"
        case "dict_type" | "model_type":
            return "be keys with values"
        case "tuple_type":
            return "be a list"
        case "greater_than":
            return f"be above {_plain(context['gt'])}"
        case "greater_than_equal":
            return f"be at least {_plain(context['ge'])}"
        case "less_than":
            return f"be below {_plain(context['lt'])}"
        case "less_than_equal":
            return f"be at most {_plain(context['le'])}"
    return None


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
    """Return the hint for an unknown key: a similar key of the same section or of another."""
    parent = kind if len(keys) == 1 else section_of(field_at(kind, keys[:-1]) or FieldInfo())
    siblings: Sequence[str] = list(parent.model_fields) if parent else []
    elsewhere = {key: f"{name}.{key}" for name, info in kind.model_fields.items()
                 for section in [section_of(info)] if section for key in section.model_fields}
    word = _leaf(keys)
    if word in elsewhere:
        return f"did you mean '{elsewhere[word]}'?"
    if not get_close_matches(word, siblings, n=1, cutoff=0.6):
        for close in get_close_matches(word, elsewhere, n=1, cutoff=0.8):
            return f"did you mean '{elsewhere[close]}'?"
    return nearest(word, siblings)


def _leaf(keys: Keys) -> str:
    return str(next((key for key in reversed(keys) if isinstance(key, str)), "value"))
