"""Read YAML and JSON files into plain values that keep their positions in the file.

Every config error names ``file:line:column``. So the text is composed into nodes, which have positions, and a
:class:`Tree` keeps the position of a value that moves into another tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vpipe import files
from vpipe.errors import Problem, UserError

MOST_BYTES = 1 << 19
"""Limit of a config, or of a JSON file that it names: a second of reading."""

MOST_VALUES = 20_000
"""Limit of the keys and values of such a file, with what aliases repeat: half a second of reading."""

DEEPEST = 50
"""Limit of mappings and lists inside each other."""

MOST_DIGITS = 100
"""Limit of a whole number: Python does not print those with very many digits."""

Keys = tuple[str | int, ...]
"""Path from the root of a tree to a value: ``("parallel", "partition", 2)``."""

_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_SURROGATE = re.compile("[\ud800-\udfff]")  # stands for no character, so it cannot be written
_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
_PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _TooManyError(Exception):
    """The text has more keys and values than :data:`MOST_VALUES`."""


class _Loader(yaml.SafeLoader):
    """Reads ``1e-4`` as a number, and leaves dates and numbers to base 60 (``4:30``) as text: as YAML 1.2 does."""

    def __init__(self, stream: str, most_values: int) -> None:
        super().__init__(stream)
        self.values_left, self.depth = most_values, 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the tag of a value that has none."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return self.DEFAULT_SCALAR_TAG if kind is yaml.ScalarNode and tag in _NUMBERS and ":" in value else tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a key or a value, within the limits of number and depth."""
        self.values_left -= 1
        if self.values_left < 0:
            raise _TooManyError
        self.depth += 1
        if self.depth > DEEPEST:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads back unchanged; lists on one line."""


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in _kind.yaml_implicit_resolvers.items()}
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence(
    "tag:yaml.org,2002:seq", items, flow_style=True))


@dataclass(frozen=True)
class Place:
    """The user's name of a value (``training.epochs``), and the positions of its key and of the value."""

    name: str
    key: str
    value: str


@dataclass
class Tree:
    """Plain values (dict, list, scalars), the place of each, and the problems found while reading them."""

    value: Any
    places: dict[Keys, Place]
    problems: list[Problem] = field(default_factory=list)

    @classmethod
    def leaf(cls, value: object, place: Place) -> Tree:
        """Return a tree of one value that has one place."""
        return cls(value, {(): place})

    def at(self, keys: Keys) -> Tree:
        """Return the part of this tree at ``keys``, which must exist, with its places."""
        size = len(keys)
        places = {found[size:]: place for found, place in self.places.items() if found[:size] == keys}
        return Tree(self.get(keys), places)

    def put(self, keys: Keys, part: Tree) -> None:
        """Set ``part`` at ``keys``, replacing what was there; missing mappings are created."""
        root, node = part.places[()], self.value
        for depth, key in enumerate(keys[:-1], 1):
            if not isinstance(node.get(key), dict):
                self._forget(keys[:depth])
                node[key] = {}
                self.places[keys[:depth]] = Place(dotted("", keys[:depth]), root.key, root.value)
            node = node[key]
        self._forget(keys)
        node[keys[-1]] = part.value
        self.places.update({(*keys, *below): place for below, place in part.places.items()})
        self.problems += part.problems

    def get(self, keys: Keys) -> Any:
        """Return the value at ``keys``; None if there is none."""
        value = self.value
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                return None
            value = value[key]
        return value

    def drop(self, keys: Keys) -> None:
        """Remove the value at ``keys``, if there is one."""
        around = self.get(keys[:-1])
        if isinstance(around, dict) and keys[-1] in around:
            del around[keys[-1]]
            self._forget(keys)

    def known(self, keys: Keys) -> Keys:
        """Return ``keys``, or those of the nearest mapping or list around it that has a place."""
        while keys not in self.places:
            keys = keys[:-1]
        return keys

    def name(self, keys: Keys) -> str:
        """Return the user's name of the value at ``keys``; an absent key is named after its parent."""
        known = self.known(keys)
        return dotted(self.places[known].name, keys[len(known):])

    def where(self, keys: Keys) -> str:
        """Return the position of the value at ``keys``, or of the mapping that lacks it."""
        known = self.known(keys)
        return self.places[known].value if known == keys else self.places[known].key

    def _forget(self, keys: Keys) -> None:
        size = len(keys)
        self.places = {found: place for found, place in self.places.items() if found[:size] != keys}


def dotted(name: str, keys: Keys) -> str:
    """Return ``name`` followed by ``keys``: ``parallel.partition[2]``."""
    for key in keys:
        name = f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}" if name else key
    return name


def parse(text: str, name: str, where: str) -> Tree:
    """Parse a piece of YAML from the command line; ``where`` names its option, the place of every value."""
    return _compose(text, name, "YAML", lambda mark: where, where)


def write(values: dict[str, Any]) -> str:
    """Return ``values`` as YAML with keys in order; reading it gives the same values.

    Text beyond ASCII is escaped: PyYAML's unescaped form loses line breaks such as U+0085.
    """
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)


def read_yaml(path: Path, most_bytes: int = MOST_BYTES, most_values: int = MOST_VALUES, language: str = "YAML") -> Tree:
    """Read the file at ``path``, which must hold a mapping; ``language``: YAML, or JSON, read as YAML for positions."""
    try:
        text = files.read_bounded(path, most_bytes, "a config, or a JSON file that it names,").decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'", hint="check the path; relative paths start at the current folder",
                        where=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the file '{path}' cannot be read: {error}", hint="give a readable UTF-8 text file",
                        where=str(path)) from None
    if language == "JSON":  # YAML refuses tabs between tokens, and no JSON string has a bare one
        text = text.replace("\t", " ")
    start = f"{path}:1:1"
    tree = _compose(text, "", language, lambda mark: f"{path}:{mark.line + 1}:{mark.column + 1}", start, most_values)
    if tree.value is None:
        raise UserError("the file is empty", hint="write keys and values into it; vpipe configs lists examples",
                        where=start)
    if not isinstance(tree.value, dict):
        raise UserError(f"the file holds {describe(tree.value)}, not keys with values",
                        hint='write {"key": value, ...}' if language == "JSON" else
                        "write `key: value` lines; vpipe configs lists examples", where=tree.places[()].value)
    return tree


def _compose(text: str, name: str, language: str, where: Callable[[yaml.Mark], str], start: str,
             most_values: int = MOST_VALUES) -> Tree:
    """Compose a text; ``start`` is the position of all of it."""
    try:
        loader = _Loader(text, most_values)
        node = loader.get_single_node()
        if node is None:
            return Tree.leaf(None, Place(name, start, start))
        builder = _Builder(loader, where, most_values)
        value = builder.build(node, (), Place(name, start, where(node.start_mark)))
    except yaml.MarkedYAMLError as error:
        place = where(error.problem_mark) if error.problem_mark else start
        raise UserError(f"the {language} cannot be read: {error.problem or error.context}",
                        hint="check this place and the line before it: brackets, quotes, a space after each colon",
                        where=place) from None
    except yaml.YAMLError as error:
        raise UserError(f"the {language} cannot be read: {str(error).splitlines()[0]}",
                        hint="remove the character, or write it as an escape in double quotes", where=start) from None
    except _TooManyError:
        raise UserError(f"the {language} has more than {most_values:,} keys and values, what aliases repeat included",
                        hint="check that it is the right file; a config has some hundred", where=start) from None
    except RecursionError:
        raise UserError(f"the {language} cannot be read: lists or mappings are nested too deeply",
                        hint="a config has at most four levels", where=start) from None
    return Tree(value, builder.places, builder.problems)


class _Builder:
    """Turns nodes into plain values, and collects places and problems."""

    def __init__(self, loader: _Loader, where: Callable[[yaml.Mark], str], most_values: int) -> None:
        self.loader, self.where = loader, where
        self.places: dict[Keys, Place] = {}
        self.problems: list[Problem] = []
        self._open: list[yaml.Node] = []
        self._values_left = most_values

    def build(self, node: yaml.Node, keys: Keys, place: Place) -> Any:
        self.places[keys] = place
        self._values_left -= 1  # counted again: an alias is composed once, and stands for values as often as it is used
        if self._values_left < 0:
            raise _TooManyError
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        if any(node is outer for outer in self._open):
            return self._problem("an alias leads into itself", "write the values out", place.value)
        if node.tag not in _PLAIN_TAGS:
            return self._problem(f"the tag '{node.tag}' is not understood", "write plain keys, lists and values",
                                 place.value)
        self._open.append(node)
        value = self._mapping(node, keys) if isinstance(node, yaml.MappingNode) else self._sequence(node, keys)
        self._open.pop()
        return value

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        try:
            value = self.loader.construct_object(node)
        except (yaml.MarkedYAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else (
                str(error) if isinstance(error, ValueError) else f"it is no {node.tag}")
            return self._problem(f"a value cannot be read: {reason}", "write plain text or a number", place.value)
        if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            return self._problem(f"a whole number has more than {MOST_DIGITS} digits", "write a smaller number",
                                 place.value)
        if isinstance(value, str) and _SURROGATE.search(value):
            return self._problem("a text holds half of a surrogate pair", "write the character itself", place.value)
        return value

    def _sequence(self, node: yaml.Node, keys: Keys) -> list[Any]:
        name, places = self.places[keys].name, [self.where(item.start_mark) for item in node.value]
        return [self.build(item, (*keys, i), Place(dotted(name, (i,)), place, place))
                for i, (item, place) in enumerate(zip(node.value, places, strict=True))]

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.where(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem("a key is not plain text", "write `key: value`", place)
                continue
            key = str(key_node.value)
            if _SURROGATE.search(key):
                self._problem("a key holds half of a surrogate pair", "write the character itself", place)
                continue
            name = dotted(self.places[keys].name, (key,))
            if key in values:
                first = self.places[(*keys, key)].key
                self._problem(f"the key '{name}' is given twice, first at {first}", "remove one of the two", place)
                continue
            values[key] = self.build(value_node, (*keys, key), Place(name, place, self.where(value_node.start_mark)))
        return values

    def _problem(self, what: str, hint: str, where: str) -> None:
        self.problems.append(Problem(what, hint, where))


def describe(value: object) -> str:
    """Return a value as an error shows it, in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        shown = f"[{', '.join(map(describe, value))}]"
        return shown if len(shown) <= 60 else f"a list of {len(value)}"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
