"""Models, data sets and schedules of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from vpipe import Model, plugins
from vpipe.app.cli import main
from vpipe.app.data import registry as data_sets
from vpipe.app.families import registry as models
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup
from vpipe.profiling import RankGroup
from vpipe.schedules import registry as schedules

KINDS: dict[str, tuple[str, Callable[[str], Any], Callable[[], list[str]], str]] = {
    "vpipe.models": ("model", models.model_named, models.model_names,
                     "from vpipe.app.families.registry import register_model\n@register_model('{name}')\n"
                     "def made(settings):\n    return None\n"),
    "vpipe.datasets": ("data set", data_sets.dataset_named, data_sets.dataset_names,
                       "from vpipe.app.data.registry import register_dataset\n@register_dataset('{name}')\n"
                       "def made(settings):\n    return None\n"),
    "vpipe.schedules": ("schedule", schedules.RegisteredSchedule.named, schedules.RegisteredSchedule.names,
                        "from vpipe.schedules.registry import register_schedule\n"
                        "from vpipe.schedules.generators.gpipe import gpipe\n"
                        "@register_schedule('{name}', flush=True)\n"
                        "def made(rank, ranks, microbatches):\n    yield from gpipe(rank, ranks, microbatches)\n")}
"""Group -> what its things are called, how one is had, which names there are, the source of one."""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts packages where Python finds them, and takes back what they registered."""
    monkeypatch.syspath_prepend(tmp_path)
    for _, _, names, _ in KINDS.values():
        names()
    for room, store in ((models, "_families"), (data_sets, "_factories"), (schedules, "_REGISTERED")):
        monkeypatch.setattr(room, store, dict(getattr(room, store)))
    before = set(sys.modules)

    def installed(package: str, source: str, **groups: str) -> None:
        """``groups``: models="name = module"."""
        (tmp_path / f"{package}.py").write_text(source)
        information = tmp_path / f"{package}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(
            "".join(f"[vpipe.{group}]\n{entries}\n" for group, entries in groups.items()))
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / package)])  # as another environment has another

    yield installed
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize("group", KINDS)
def test_a_package_is_imported_when_what_it_adds_is_asked_for(group: str, install: Install) -> None:
    kind, named, names, source = KINDS[group]
    install("good", source.format(name="made_elsewhere"), **{group.removeprefix("vpipe."): "made_elsewhere = good"})
    install("broken", "import not_there", **{group.removeprefix("vpipe."): "hollow = broken\n"})
    install("silent", "", **{group.removeprefix("vpipe."): "unsaid = silent"})
    assert {"made_elsewhere", "hollow", "unsaid"} <= set(names())
    assert not {"good", "broken", "silent"} & set(sys.modules)
    assert named("made_elsewhere") is not None
    assert named("made_elsewhere") is not None
    assert not {"broken", "silent"} & set(sys.modules)
    for name, said in (
            ("hollow", f"error: the {kind} 'hollow' is in the package 'broken' (broken), which cannot be imported: "
             "ModuleNotFoundError: No module named 'not_there'\n"
             "hint: install what it lacks, or uninstall it: pip uninstall broken"),
            ("unsaid", f"error: the package 'silent' announces a {kind} 'unsaid', but importing silent registers none "
             "of that name\nhint: use the same name in its entry point and in the decorator")):
        with pytest.raises(UserError) as caught:
            named(name)
        assert str(caught.value) == said


@pytest.mark.parametrize("group", KINDS)
def test_a_name_that_two_have_is_refused_with_both(group: str, install: Install) -> None:
    kind, named, names, source = KINDS[group]
    own = {"vpipe.models": "bert", "vpipe.datasets": "synthetic", "vpipe.schedules": "1f1b"}[group]
    for package in ("first", "second"):
        install(package, source.format(name="twice"), **{group.removeprefix("vpipe."): f"twice = {package}"})
    install("third", source.format(name=own), **{group.removeprefix("vpipe."): f"{own} = third"})
    assert names().count("twice") == names().count(own) == 1
    for name, holders in (("twice", "the package 'first' (first) and the package 'second' (second)"),
                          (own, "vpipe itself and the package 'third' (third)")):
        with pytest.raises(UserError) as caught:
            named(name)
        assert str(caught.value) == (f"error: {holders} have a {kind} called '{name}'\n"
                                     "hint: uninstall one of them, or give one another name")
    assert not {"first", "second", "third"} & set(sys.modules)


def test_schedules_of_packages_are_drawn_and_compared(install: Install, capsys: pytest.CaptureFixture[str],
                                                      tmp_path: Path) -> None:
    source = KINDS["vpipe.schedules"][3]
    install("good", source.format(name="made_elsewhere"), schedules="made_elsewhere = good:made")
    install("broken", "1 / 0", schedules="hollow = broken")
    assert main(["schedule", "made_elsewhere", "--stages", "2", "--microbatches", "2", "--format", "csv"]) == 0
    assert main(["schedule", "--all", "--stages", "2", "--microbatches", "2"]) == 0
    out = capsys.readouterr().out
    assert "1F0" in out
    assert "which cannot be imported: ZeroDivisionError" in out
    planned = schedules.RegisteredSchedule.for_plans(flush=True)
    assert "made_elsewhere" in planned
    assert "hollow" not in planned
    assert main(["schedule", "hollow", "--stages", "2", "--microbatches", "2"]) == 2
    config = tmp_path / "c.yaml"
    config.write_text("model: {name: bert}\ndataset: {name: synthetic, batch_size: 4}\n"
                      "training: {learning_rate: 0.1, num_microbatches: 2}\n"
                      "parallel: {schedule: hollow, stage_to_rank_map: {0: [0], 1: [1]}}\n")
    assert main(["slurm", str(config), "--nodes", "1"]) == 2
    err = capsys.readouterr().err
    assert "error: parallel.schedule names no schedule: the schedule 'hollow' is in the package 'broken'" in err


def test_versions_are_those_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the path, such as vpipe's own on a machine where nothing can be installed, has none."""
    assert PluginGroup.versions_of(["torch", "no_such_package"]) == {"torch": version("torch")}
    monkeypatch.setattr(plugins, "version", Mock(side_effect=PackageNotFoundError))
    model = Model.sequential(nn.Sequential(nn.Linear(2, 2)), loss=nn.MSELoss())
    microbatch = {"input": torch.zeros(1, 2), "target": torch.zeros(1, 2)}
    [identity] = RankGroup("cpu").identify(model, [microbatch], model_name="own", optimizer="sgd")
    assert identity.vpipe == ""
