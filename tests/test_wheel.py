"""What a wheel holds: the package, the configs of the repository, the licence; and the papers of a release agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the repository, without network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("vpipe", "configs", "tests/app/config"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "build_wheel.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in source.glob("vpipe/extras/*/configs/*/"):  # made there by those who try a config
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / "tokenizer.json").write_text("{}")
    build = "import setuptools.build_meta; setuptools.build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [path] = source.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {"vpipe", f"vpipe-{PROJECT['version']}.dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vpipe").rglob("*.py") if "tests" not in path.parts}
    assert not [name for name in names if "/tests/" in name]
    templates = {str(path.relative_to(ROOT)) for kind in ("html", "css", "js", "svg")
                 for path in (ROOT / "vpipe" / "app" / "report").glob(f"*.{kind}")}
    assert "vpipe/app/report/page.html" in templates
    assert modules | templates | {"vpipe/py.typed"} <= names


def test_it_holds_the_configs_and_their_files(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if "/configs/" in name}
    own = {f"vpipe/{path.relative_to(ROOT)}" for path in (ROOT / "configs").glob("*.y*ml")}
    of_extras = {str(path.relative_to(ROOT)) for path in ROOT.glob("vpipe/extras/*/configs/**/*")
                 if path.is_file() and "data" not in path.parts}
    assert held == own | of_extras
    assert wheel.read("vpipe/configs/gpt_small.yaml") == (ROOT / "configs" / "gpt_small.yaml").read_bytes()


def test_its_licence_is_apache_2(wheel: zipfile.ZipFile) -> None:
    folder = f"vpipe-{PROJECT['version']}.dist-info"
    assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0\n" in wheel.read(f"{folder}/METADATA").decode()
    assert "Apache License\n                           Version 2.0, January 2004\n" in (ROOT / "LICENSE").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[:2] == ["Unreleased", PROJECT["version"]]


def test_ci_runs_what_people_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"run": ".ci/run"} in workflow["jobs"]["run"]["steps"]
