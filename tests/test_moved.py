"""An old import path is refused with the new one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from vpipe.app.imports import import_files
from vpipe.errors import UserError
from vpipe.moved import MOVED

EXTRAS = Path(__file__).parents[1] / "vpipe" / "extras"
BEFORE = (Path(__file__).parent / "fixtures" / "modules_before_the_tiers.txt").read_text().split()
"""The modules of vpipe before it had tiers: some user may import each."""


def test_each_old_module_is_there_or_refused_with_one_that_is() -> None:
    for old in BEFORE:
        try:
            found = find_spec(old)
        except ModuleNotFoundError as refused:
            name, _, new, _ = str(refused).split()
            assert name == old, f"{old}: add it to MOVED in vpipe/moved.py"
            if new.startswith("vpipe.extras.") and not (EXTRAS / new.split(".")[2]).exists():
                continue  # gone with its extra
            assert find_spec(new) is not None, f"{old} is said to be {new}: add it to MOVED in vpipe/moved.py"
        else:
            assert found is not None, f"{old}: add it to MOVED in vpipe/moved.py"


def test_no_row_is_about_a_module_that_never_was() -> None:
    assert set(MOVED) <= set(BEFORE)


def test_modules_that_never_existed_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'vpipe.nothing'$"):
        import_module("vpipe.nothing")


def test_a_file_of_a_user_is_told_its_remedy(tmp_path: Path) -> None:
    file = tmp_path / "an_old_model.py"
    file.write_text("\nfrom vpipe.model.registry import register_model\n")
    with pytest.raises(UserError) as refused:
        import_files([file])
    [problem] = refused.value.problems
    assert problem.what.endswith("vpipe.model.registry is vpipe.app.families.registry now")
    assert (problem.hint, problem.where) == ("change its import", f"{file}:2")
