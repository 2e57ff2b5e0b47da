"""docs/add-a-model.md is followed to the letter: its package is made of its blocks, and its commands train it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from small_run import losses, metrics

from vpipe.app.cli import main
from vpipe.app.data import registry as data_sets
from vpipe.app.families import registry as models
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.imports import IMPORTS

pytestmark = pytest.mark.jobs

PAGE = (Path(__file__).parents[1] / "docs" / "add-a-model.md").read_text()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the page, as if pip had installed it: found by Python, and what it announces by vpipe."""
    root = tmp_path / "letters"
    for language, name, content in re.findall(r"^```(toml|python|yaml)\n# (\S+)\n(.*?)^```$", PAGE,
                                              re.MULTILINE | re.DOTALL):
        assert name.endswith({"toml": ".toml", "python": ".py", "yaml": ".yaml"}[language])
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "letters" / "__init__.py").touch()
    tree = PAGE.partition("```\nletters/\n")[2].partition("```")[0]
    assert set(re.findall(r"[\w.]+\.\w+", tree)) == {path.name for path in root.rglob("*.*")}

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    information = root / f"{project['name']}-{project['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (information / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()))
    monkeypatch.syspath_prepend(root)
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(root)
    models.model_names(), data_sets.dataset_names()
    monkeypatch.setattr(models, "_families", dict(models._families))
    monkeypatch.setattr(data_sets, "_factories", dict(data_sets._factories))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "letters"]:
        del sys.modules[name]


@pytest.mark.usefixtures("forked")
def test_the_page_that_adds_a_model_and_a_data_set(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
                for line in block.splitlines() if line.startswith("vpipe ")]
    assert [command.split()[1] for command in commands] == ["train", "train", "verify"]
    assert "--import" in commands[0]  # as the next test has it
    for command in commands[1:]:
        assert main(shlex.split(command)[1:]) == 0, capfd.readouterr().err
    assert "equal: 2 steps give to the last bit the losses" in capfd.readouterr().out
    run = sorted((package / "output").iterdir())[0]
    assert len(losses(run)) == 2
    assert "mfu" in metrics(run)[0][0]
    assert "malloc keeps what is freed" in (run / "rank1.log").read_text()

    family = family_named("conv")
    assert family.options is not None
    settings = ModelSettings(vocab_size=70, hidden_size=32, num_layers=3, options=family.options())
    flops = family.flops
    assert flops is not None
    assert len(flops(settings)) == len(family.factory(settings)) == 8
    one_weight_each = sum(parameter.numel() for layer in family.factory(settings).layers[1:]
                          for parameter in layer.build().parameters())
    assert sum(flops(settings)) == 2 * one_weight_each


@pytest.mark.usefixtures("forked")
def test_the_files_of_the_page_without_a_package(package: Path, capfd: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing announces them, and the key of the family's own takes effect."""
    [information] = package.glob("*.dist-info")
    shutil.rmtree(information)
    monkeypatch.syspath_prepend(package / "elsewhere")  # else the names that were found stay known
    monkeypatch.setenv(IMPORTS, "[]")
    [command] = re.findall(r"^vpipe (train .* --import .*)$", PAGE, re.MULTILINE)
    assert main([*shlex.split(command), "--set", "model.options.reach=4"]) == 0, capfd.readouterr().err
    [run] = (package / "output").iterdir()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["options"] == {"reach": 4}
    for name in ("conv", "characters"):
        del sys.modules[name]
