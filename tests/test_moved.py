"""An old import path is refused with the new one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from vpipe.errors import UserError
from vpipe.moved import MOVED
from vpipe.plugins import import_files


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_what_has_moved_is_refused_with_its_new_path(old: str, new: str) -> None:
    assert find_spec(new) is not None
    with pytest.raises(ModuleNotFoundError) as refused:
        import_module(old)
    assert str(refused.value) == f"{old} is {new} now"


def test_what_is_below_it_too() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^vpipe.train.loop is vpipe.app.train.loop now$"):
        import_module("vpipe.train.loop")
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
