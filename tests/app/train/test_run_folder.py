"""The folder of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vpipe.app.train.run_folder import make_run_folder
from vpipe.errors import UserError


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [make_run_folder(tmp_path / "new" / "runs", f"n: {i}\n") for i in range(4)]
    assert len(set(folders)) == 4
    for i, folder in enumerate(folders):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(\.\d)?", folder.name)
        assert folder.parent == tmp_path / "new" / "runs"
        assert (folder / "config.yaml").read_text() == f"n: {i}\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(UserError, match=f"cannot make the run's folder in '{path}'"):
            make_run_folder(path, "")
