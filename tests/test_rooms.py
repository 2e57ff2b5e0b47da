"""The arrows between the rooms of vpipe point one way."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from public_names import PAGES, faces, insides_imported, named_in, names_imported, public_names
from pydantic import BaseModel
from tier_sizes import lines_of_tiers

from vpipe import Asynchronous, Cut, Execution, Order, Pipeline, Plan, Precision, Transfers, Update, accelerator
from vpipe.accelerator import KINDS
from vpipe.app.config.config import Config
from vpipe.app.config.validation import section_of
from vpipe.description import Description

ROOT = Path(__file__).parent.parent / "vpipe"

LIBRARY, APPLICATION = "the library", "the application"
"""Tiers: library, testing, application, extras. See the first lines of their ``__init__.py``."""

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "lazy": {"errors"},
    "arguments": {"errors"},
    "accelerator": {"errors"},
    "torch_private": set(),
    "units": set(),
    "files": {"errors", "units"},
    "plugins": {"errors"},
    "description": {"accelerator", "errors", "arguments", "plugins"},
    "schedules": {"errors", "lazy", "files", "plugins", "description"},
    "model": {"accelerator", "errors", "arguments", "description"},
    "plan": {"errors", "lazy", "description", "arguments", "files", "units", "schedules"},
    "distributed": {"accelerator", "torch_private", "errors", "lazy"},
    "checkpoint": {"accelerator", "errors", "lazy", "plugins", "files", "model", "distributed"},
    "runtime": {"accelerator", "torch_private", "errors", "lazy", "description", "arguments", "schedules", "model",
                "checkpoint", "distributed"},
    "profiling": {"accelerator", "torch_private", "errors", "lazy", "description", "plugins", "model", "distributed",
                  "runtime", "plan"},
    "pipeline": {"errors", "arguments", "description", "schedules", "model", "distributed", "plan", "checkpoint",
                 "runtime", "profiling"},
    "__init__": {"lazy", "description", "model", "plan", "pipeline"},
    "testing": {LIBRARY},
    "hugging_face": {LIBRARY},
    "app.__init__": {"app.recorded_run"},
    "app.progress": set(),
    "app.sizes": {LIBRARY},
    "app.imports": {LIBRARY},
    "app.errors": {LIBRARY},
    "app.metric_formulas": {LIBRARY},
    "app.run_log": {LIBRARY},
    "app.command_line": {LIBRARY},
    "app.signals": {LIBRARY},
    "app.families": {LIBRARY, "hugging_face"},
    "app.weights": {LIBRARY, "app.families"},
    "app.data": {LIBRARY, "app.progress"},
    "app.visualize": {LIBRARY, "app.metric_formulas"},
    "app.report": {LIBRARY, "app.metric_formulas", "app.run_log", "app.sizes", "app.visualize"},
    "app.config": {LIBRARY, "app.command_line", "app.families", "app.data", "app.metric_formulas", "app.sizes"},
    "app.train": {LIBRARY, "app.errors", "app.metric_formulas", "app.progress", "app.families", "app.data",
                  "app.visualize", "app.config", "app.signals", "app.weights", "app.run_log"},
    "app.verify": {LIBRARY, "testing", "app.config", "app.train"},
    "app.recorded_run": {LIBRARY, "app.metric_formulas", "app.run_log", "app.train", "app.launch", "app.signals"},
    "app.launch": {LIBRARY, "app.errors", "app.progress", "app.config", "app.train", "app.verify", "app.signals",
                   "app.imports", "app.run_log"},
    "app.commands": {LIBRARY, "testing", "app.command_line", "app.metric_formulas", "app.progress", "app.families",
                     "app.data", "app.visualize", "app.report", "app.config", "app.train", "app.verify", "app.launch",
                     "app.weights", "app.imports", "app.sizes", "app.run_log", "app.errors"},
    "app.cli": {LIBRARY, "app.command_line", "app.progress", "app.launch", "app.commands", "app.weights",
                "app.imports"},
    "__main__": {"app.cli"},
    "extras.__init__": set(),
    **{f"extras.{folder.name}": {LIBRARY, APPLICATION} for folder in sorted((ROOT / "extras").iterdir())
       if (folder / "__init__.py").is_file()},
}
"""The rooms of vpipe, and what each may import of it."""


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Everything in a file, read once for all tests."""
    return tuple(ast.walk(ast.parse(file.read_text())))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The dotted names that a file imports, anywhere in it; ``from a import b`` counts as ``a.b``."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "vpipe imports absolutely"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(file: Path) -> str:
    """``schedules`` of the library, ``app.train`` of the application, ``extras.orion``."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2]) if parts[0] in ("app", "extras") else parts[0]


def tier_of(room: str) -> str:
    if room.startswith(("app.", "__main__", "hugging_face")):
        return APPLICATION
    return room if room.startswith("extras") or room == "testing" else LIBRARY


def rooms_imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The rooms of vpipe that a file imports; its public face, ``from vpipe import Model``, is ``__init__``."""
    rooms = set()
    for name in imported(nodes):
        first, _, rest = name.partition(".")
        if first == "vpipe":
            path = ROOT / rest.replace(".", "/")
            while not path.is_dir() and not path.with_suffix(".py").is_file():
                path = path.parent
            rooms.add("__init__" if path == ROOT else room_of(path))
    return rooms


FILES = sorted(file for file in ROOT.rglob("*.py") if "tests" not in file.parts[len(ROOT.parts):])
VIOLATIONS: dict[str, set[str]] = {}
"""What still imports what it may not, to be counted down to none."""


@pytest.mark.parametrize("room", sorted({room_of(file) for file in FILES}))
def test_the_files_of_a_room_import_only_what_it_may(room: str) -> None:
    assert room in MAY_IMPORT, f"say in {Path(__file__).name} what vpipe/{room} may import"
    for file in FILES:
        if room_of(file) == room:
            found = {other for other in rooms_imported(nodes(file)) - {room}
                     if not {other, tier_of(other)} & MAY_IMPORT[room]}
            assert found == VIOLATIONS.get(file.relative_to(ROOT).as_posix(), set()), file


STANDARD_LIBRARY_ALONE = {"errors", "schedules", "app.visualize", "distributed", "app.report"}
NEED_TORCH = {ROOT / "distributed" / name for name in ("device.py", "init.py", "lanes.py", "rendezvous.py", "store.py")}


def test_schedules_and_their_pictures_need_nothing_but_the_standard_library() -> None:
    for file in FILES:
        if (room_of(file) in STANDARD_LIBRARY_ALONE and file not in NEED_TORCH) or \
                file == ROOT / "app" / "commands" / "schedule.py":
            packages = {name.split(".")[0] for name in imported(nodes(file))}
            templates = {"jinja2"} if file == ROOT / "app" / "report" / "line_chart.py" else set()  # of reports
            assert packages <= sys.stdlib_module_names | {"vpipe"} | templates, file


def test_the_arrows_between_rooms_make_no_circle() -> None:
    assert set().union(*MAY_IMPORT.values()) <= {*MAY_IMPORT, LIBRARY, APPLICATION}
    TopologicalSorter(MAY_IMPORT).prepare()


BENCHMARKS = sorted(folder for folder in (ROOT.parent / "benchmarks").iterdir() if folder.is_dir())


@pytest.mark.parametrize("folder", [ROOT, *BENCHMARKS], ids=lambda folder: folder.name)
def test_no_files_import_each_other_in_a_circle(folder: Path) -> None:
    base = ROOT.parent if folder == ROOT else folder  # the files of a benchmark import each other by their names alone
    modules = {".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): file
               for file in sorted(folder.rglob("*.py"))}
    graph = {module: {name if name in modules else name.rpartition(".")[0] for name in imported(nodes(file))}
             & set(modules) - {module} for module, file in modules.items()}
    list(TopologicalSorter(graph).static_order())  # raises, and names the circle


def test_the_map_draws_the_arrows_that_follow_from_no_others() -> None:
    """Of folders, the classes of scripts and jobs, and the command; all else is small, or named below them."""
    picture = (ROOT.parent / "docs" / "architecture.svg").read_text()
    drawn = re.findall(r'<path id="([\w.]+)-([\w.]+)"', picture)
    rooms = {room for arrow in drawn for room in arrow}
    graph = {room: MAY_IMPORT[room] & rooms - {room} for room in rooms}

    def imported_by(room: str) -> set[str]:
        return graph[room].union(*map(imported_by, graph[room]))

    assert set(drawn) == {(room, to) for room in rooms for to in graph[room]
                          if not any(to in imported_by(other) for other in graph[room])}
    folders = {room for room in MAY_IMPORT if (ROOT / room.replace(".", "/")).is_dir()}
    assert rooms == {room for room in folders if not room.startswith("extras.")} | {"pipeline", "app.verify", "app.cli"}
    named = set(re.findall(r"[\w]+", re.sub(r"<style.*</style>", "", picture, flags=re.DOTALL)))
    assert {room.rpartition(".")[2] for room in folders} <= named


@pytest.mark.extras("legacy")
def test_the_files_that_the_map_names_exist() -> None:
    named = re.findall(r"`(?:vpipe/)?([a-z][\w/]*\.py)`", (ROOT.parent / "docs" / "architecture.md").read_text())
    here = [f"/{file.relative_to(ROOT)}" for file in FILES]
    assert [name for name in named if not name.startswith("tests/")
            and not any(file.endswith(f"/{name}") for file in here)] == []


MAY_NAME_KINDS = ("schedules/kinds.py", "schedules/lowering.py", "schedules/rewrites.py",
                  "schedules/generators/", "schedules/search/", "runtime/", "testing/strategies.py",
                  "extras/async_threaded/")
"""The table, what makes actions (generators, lowering, the search, a strategy), and what executes them."""


def test_the_kinds_of_actions_are_named_only_where_they_are_made_and_executed() -> None:
    """Everything else reads the rows of the table, so that a new kind is a new row."""
    for file in ROOT.rglob("*.py"):
        path = file.relative_to(ROOT).as_posix()
        if not path.startswith(MAY_NAME_KINDS):
            assert "Op" not in {node.id for node in nodes(file) if isinstance(node, ast.Name)}, path


def test_only_the_assignment_knows_which_replica_takes_a_microbatch() -> None:
    for file in ROOT.rglob("*.py"):
        found = re.findall(r"(?:microbatch|number|index|\[i|stage\)) % (?:len\(|[\w.]*width).*", file.read_text())
        assert not found or file.name == "assignment.py", (file, found)


def test_no_row_of_the_table_is_a_program() -> None:
    """An expression of a row has five lines at most."""
    for node in nodes(ROOT / "schedules/kinds.py"):
        if isinstance(node, ast.Lambda) or (isinstance(node, ast.FunctionDef) and [
                argument.arg for argument in node.args.args] == ["at", "s", "i", "rank"]):
            assert node.end_lineno - node.lineno < 5 + isinstance(node, ast.FunctionDef), ast.unparse(node)


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import torch.nn as nn\nfrom vpipe import Model\nif x:\n    from vpipe.errors import UserError\n" \
             "def f():\n    from vpipe import schedules\n    import vpipe.app.data.local_corpus"
    found = list(ast.walk(ast.parse(source)))
    assert imported(found) == {"torch.nn", "vpipe.Model", "vpipe.errors.UserError", "vpipe.schedules",
                               "vpipe.app.data.local_corpus"}
    assert rooms_imported(found) == {"__init__", "errors", "schedules", "app.data"}


MOST_PUBLIC_NAMES = 63


def test_what_stands_on_the_library_imports_its_public_names_alone() -> None:
    assert insides_imported() == [], "import public names; where one is missing, give the library one"


def test_the_public_names_are_few_and_are_there() -> None:
    names = public_names()
    assert len(names) <= MOST_PUBLIC_NAMES
    for name in names:
        module, _, own = name.rpartition(".")
        assert getattr(import_module(module), own) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_of_the_library_has_every_public_name(page: Path) -> None:
    assert named_in(page) == {face: sorted(names) for face, names in faces().items()}, \
        "run python tests/public_names.py, which writes them anew"


def test_imported_names_are_found_in_programs_and_pages() -> None:
    source = "import vpipe\nfrom vpipe import Model, Cut  # both\ndef f():\n    from vpipe.schedules import (\n" \
             "        Action,\n        build as made,\n    )\nimport vpipe.plan.plan as plan"
    assert names_imported(source) == {"vpipe", "vpipe.Model", "vpipe.Cut", "vpipe.schedules.Action",
                                      "vpipe.schedules.build", "vpipe.plan.plan"}


def test_importing_vpipe_loads_the_library_alone() -> None:
    code = ("import sys, vpipe\n"
            "vpipe.Pipeline\n"
            "print(*(name for name in sys.modules if name.startswith(('vpipe.app', 'vpipe.extras', 'vpipe.testing'))))")
    loaded = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert loaded.stdout.split() == []


def test_only_the_public_class_knows_its_engine() -> None:
    """What training, comparing and verifying lack in ``Pipeline``, users lack."""
    used = {str(path.relative_to(ROOT)) for path in FILES for node in nodes(path)
            if isinstance(node, ast.Attribute) and node.attr == "engine"}
    assert used == {"pipeline.py"}


PARTS = {Asynchronous, Cut, Description, Execution, Order, Plan, Precision, Transfers, Update}

BUDGETS = {"library": 29_894, "testing": 2_050, "application": 22_499, "extras": 5_886, "tests": 56_696,
           "vpipe": 60_329, "benchmarks": 8_400, "parameters of Pipeline": 9, "config keys": 105}
"""Ceilings, which fall; an issue alone may raise one: the most lines of every tier (tests/tier_sizes.py counts), and
the most that users have to learn."""


def test_a_feature_makes_room() -> None:
    def keys_of(section: type[BaseModel]) -> int:
        inner = map(section_of, section.model_fields.values())
        return sum(1 if found is None else keys_of(found) for found in inner)  # type: ignore[arg-type]

    now = {**lines_of_tiers(), "parameters of Pipeline": len(inspect.signature(Pipeline).parameters),
           "config keys": keys_of(Config)}
    now["vpipe"] = sum(now[tier] for tier in ("library", "testing", "application", "extras"))
    now["benchmarks"] = sum(file.read_text().count("\n") for file in (ROOT.parent / "benchmarks").rglob("*.py"))
    above = {what: f"{count:,} of {BUDGETS[what]:,}" for what, count in now.items() if count > BUDGETS[what]}
    assert not above, f"{above}: delete what nobody uses, do a job once, or take what is there for the new one"


def test_a_pipeline_is_described_by_few_parts_of_few_fields() -> None:
    assert all(kind.kind is not inspect.Parameter.VAR_KEYWORD for kind in
               inspect.signature(Pipeline).parameters.values())
    assert all(len(fields(part)) <= 8 for part in PARTS)
    names = Counter(field.name for part in PARTS - {Description, Order, Plan} for field in fields(part))
    assert set(names.values()) == {1}, "a value is set in one place"


@pytest.mark.extras("legacy")
def test_few_files_know_a_field_of_a_part() -> None:
    """The others pass the part: that of the schedule, the config's section, the plan."""
    knowing = {file.relative_to(ROOT).as_posix() for file in FILES if "warmup_depth" in file.read_text()}
    assert knowing == {"description/order.py", "app/config/parallel.py", "extras/legacy/vpipe_flat.py", "plan/plan.py",
                       "schedules/csv_format.py", "schedules/registry.py", "app/visualize/advice.py",
                       "app/visualize/summary.py"}


def test_one_file_names_kinds_of_devices() -> None:
    """All others ask it; they know that the processor is another thing, cpu."""
    for file in set(FILES) - {ROOT / "accelerator.py"}:
        for node in nodes(file):
            if isinstance(node, ast.Attribute):
                assert not (node.attr in KINDS or node.attr in {f"is_{kind}" for kind in KINDS}) or \
                    ast.unparse(node) == "torch.backends.mkldnn", f"{file}:{node.lineno}"
            elif isinstance(node, ast.Constant):
                assert node.value not in {*KINDS, *accelerator.VISIBILITY.values(), *accelerator.LISTED_BY.values()}, (
                    f"{file}:{node.lineno}")
            elif isinstance(node, ast.keyword):
                assert node.arg != "pin_memory", f"{file}:{node.value.lineno}"

