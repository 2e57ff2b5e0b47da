"""Check ``model.options``, the keys of a model family of the user's own, as the keys of vpipe are checked.

The family gives a frozen dataclass (``register_model(..., options=...)``). A section with the same fields checks them.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, create_model
from pydantic import Field as Key

from vpipe.app.config.validation import FilePath, Section, as_tuple, checked
from vpipe.app.config.yaml_tree import Place, Tree
from vpipe.errors import Problem, UserError, VpipeError, nearest

OPTIONS = ("model", "options")

_PLAIN = (int, float, bool, str, type(None))
_BOUNDS = ("gt", "ge", "lt", "le")


def option_problems(tree: Tree) -> list[Problem]:
    """Return what is wrong with the ``model.options`` of a config, each with its place; none where there are none."""
    given, name = tree.get(OPTIONS), tree.get(("model", "name"))
    if not isinstance(given, dict) or not isinstance(name, str):
        return []  # nothing to check, or refused as every key is
    from vpipe.app.families.registry import family_named  # which needs torch: only where a config has options

    at = ("model", "name")
    try:
        kind, at = family_named(name).options, OPTIONS
        if kind is not None and (problems := checked(section_of_options(kind), tree.at(OPTIONS))[1]):
            return problems
        make_options(kind, given, name)
    except UserError as error:
        return [Problem(problem.what, problem.hint, problem.where or tree.where(at)) for problem in error.problems]
    return []


def make_options(kind: type[Any] | None, given: Mapping[str, Any] | None, name: str) -> object:
    """Return a family's options, an instance of its dataclass; None for a family that has none.

    Raises:
        UserError: a value is wrong, or is given for a family without options.
    """
    if kind is None:
        if given is None:
            return None
        raise UserError(f"model.options is given, but the model '{name}' has no options", hint="leave it out; "
                        "a family of your own has those of register_model(options=...)")
    try:
        section = section_of_options(kind).model_validate(dict(given or {}))
    except ValueError as error:  # of a config that another version of the family made
        raise UserError(f"model.options does not fit the model '{name}': {error}", hint="set model.options anew") \
            from None
    try:
        return kind(**{name: getattr(section, name) for name in type(section).model_fields})
    except VpipeError:
        raise
    except Exception as error:  # of __post_init__
        raise UserError(f"the model's options are refused: {error if str(error) else type(error).__name__}",
                        hint=f"{kind.__name__}.__post_init__ of its family says so") from None


def all_options(options: object) -> dict[str, Any]:
    """Return every option and its value, as a config has it."""
    section = section_of_options(type(options))
    values = {name: getattr(options, name) for name in section.model_fields}
    return section.model_construct(None, **values).model_dump(mode="json")


def section_of_options(kind: type[Any]) -> type[Section]:
    """Return a section with the fields of a dataclass.

    Raises:
        UserError: a field has a name, a type or a default that no key of a config has, or metadata of another kind.
    """
    try:
        hints = get_type_hints(kind)
    except Exception as error:
        raise UserError(f"the types of {kind.__qualname__} cannot be found: {type(error).__name__}: {error}",
                        hint="define it, and the names in its types, at the top level of a module") from None
    own = [one for one in fields(kind) if one.init]
    for one in own:
        if one.name.startswith("_") or hasattr(Section, one.name):
            raise UserError(f"{kind.__qualname__}.{one.name} cannot be a key of a config, whose class uses that name",
                            hint="give it another name")
    keys: dict[str, Any] = {one.name: (_annotation(kind, one, hints[one.name]), _key(kind, one)) for one in own}
    section: type[Section] = create_model(kind.__name__, __base__=Section, **keys)
    _, problems = checked(section, Tree({}, {(): Place("", "", "")}))
    if problems:
        raise UserError(f"a default of {kind.__qualname__} would be refused: {problems[0].what}",
                        hint="give it a default of its type, within its bounds")
    return section


def _key(kind: type[Any], one: Field[Any]) -> Any:
    for word in one.metadata:
        if word not in ("help", *_BOUNDS):
            raise UserError(f"{kind.__qualname__}.{one.name} has the metadata {word!r}",
                            hint=nearest(str(word), ["help", *_BOUNDS]))
    about: dict[str, Any] = {bound: limit for bound, limit in one.metadata.items() if bound != "help"}
    about |= {"default": one.default} if one.default_factory is MISSING else {"default_factory": one.default_factory}
    about["description"] = one.metadata.get("help", f"an option of {kind.__name__}")
    return Key(validate_default=True, **about)


def _annotation(kind: type[Any], one: Field[Any], annotation: Any) -> Any:
    """Return the type of a key for that of a field."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN or origin is Literal:
        return annotation
    if annotation is Path:
        return FilePath
    if origin in (Union, types.UnionType) and len(parts) == 2 and type(None) in parts:
        return _annotation(kind, one, parts[parts[0] is type(None)]) | None
    if origin is tuple:
        inner = tuple(part if part is Ellipsis else _annotation(kind, one, part) for part in parts)
        return Annotated[tuple[inner], BeforeValidator(as_tuple)]  # type: ignore[valid-type]
    raise UserError(f"{kind.__qualname__}.{one.name} is of the type {annotation}, which no key of a config has",
                    hint="use int, float, bool, str, Path, Literal[...], tuple[..., ...], or one of them | None")
