"""The wheel, installed: vpipe trains by the name of a config from an empty folder, without its repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with vpipe's wheel, and torch and the others from where this Python has them."""
    folder = tmp_path_factory.mktemp("installed")
    source, wheels, environment = folder / "source", folder / "wheels", folder / "venv"
    for name in ("vpipe", "configs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "build_wheel.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, cwd=source)
    shutil.rmtree(source)
    venv.create(environment, with_pip=False)
    [wheel] = wheels.iterdir()
    run(*pip, "--python", environment, "install", "--no-deps", wheel, cwd=folder)
    [packages] = environment.glob("lib/python3*/site-packages")
    # A folder that a .pth file names has no say in its own .pth files: an editable vpipe in it is not seen.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin" / "vpipe"


def test_the_package_is_the_installed_one(installed: Path, tmp_path: Path) -> None:
    python = installed.with_name("python")
    found = Path(run(python, "-c", "import vpipe; print(vpipe.__file__)", cwd=tmp_path).strip())
    assert found.is_relative_to(installed.parents[1])


def test_configs_and_help(installed: Path, tmp_path: Path) -> None:
    assert "gpt_small " in run(installed, "configs", cwd=tmp_path)
    assert "vpipe train" in run(installed, "train", "bert_mini_4stage", "--help", cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "synthetic"), [("bert_mini_4stage", "dataset.name=synthetic"),
                                                 ("bert_4vpipe_tiny", "synthetic_data=true")])
def test_two_updates_by_name_in_an_empty_folder(installed: Path, tmp_path: Path, name: str, synthetic: str) -> None:
    out = run(installed, "train", name, "--set", synthetic, "--set", "training.max_steps=2", "--set",
              "dataset.cache_directory=cache", cwd=tmp_path)
    assert "2 updates in " in out
    assert {path.name for path in tmp_path.iterdir()} <= {"output", "cache"}
    [run_folder] = (tmp_path / "output").iterdir()
    assert (run_folder / "metrics.jsonl").stat().st_size
