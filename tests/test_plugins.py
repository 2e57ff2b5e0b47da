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
from golden import refusal
from small_run import job_of
from torch import nn

from vpipe import Model, plugins
from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.data import registry as data_sets
from vpipe.app.families import registry as models
from vpipe.app.verify import batches_for_steps, references, run_in_process
from vpipe.description import Executor, execution
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup
from vpipe.profiling import RankGroup
from vpipe.runtime.build_workers import worker_class
from vpipe.schedules import registry as schedules
from vpipe.testing import compare

KINDS: dict[str, tuple[str, Callable[[str], Any], Callable[[], list[str]], str]] = {
    "vpipe.models": ("model", models.family_named, models.model_names,
                     "from vpipe.app.families.registry import register_model\n@register_model('{name}')\n"
                     "def made(settings):\n    return None\n"),
    "vpipe.datasets": ("data set", data_sets.dataset_named, data_sets.dataset_names,
                       "from vpipe.app.data.registry import register_dataset\n@register_dataset('{name}')\n"
                       "def made(settings):\n    return None\n"),
    "vpipe.executors": ("executor", Executor.named, Executor.names,
                        "from vpipe.description import Executor\n"
                        "Executor('{name}', 'vpipe.runtime:Worker').register()\n"),
    "vpipe.schedules": ("schedule", schedules.RegisteredSchedule.named, schedules.RegisteredSchedule.names,
                        "from vpipe.schedules.registry import register_schedule\n"
                        "from vpipe.schedules.generators.gpipe import gpipe\n"
                        "@register_schedule('{name}', flush=True, planned=True)\n"
                        "def made(rank, ranks, microbatches):\n    yield from gpipe(rank, ranks, microbatches)\n")}
"""Group -> what its things are called, how one is had, which names there are, the source of one."""

Install = Callable[..., None]


def one(kind: str) -> str:
    return f"an {kind}" if kind == "executor" else f"a {kind}"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts packages where Python finds them, and takes back what they registered."""
    monkeypatch.syspath_prepend(tmp_path)
    for _, _, names, _ in KINDS.values():
        names()
    for room, store in ((models, "_families"), (data_sets, "_factories"), (execution, "_EXECUTORS"),
                        (schedules, "_REGISTERED")):
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
            ("unsaid", f"error: the package 'silent' announces {one(kind)} 'unsaid', but importing silent registers "
             "none of that name\nhint: use the same name in its entry point and in the decorator")):
        assert refusal(named, name) == said


@pytest.mark.parametrize("group", KINDS)
def test_a_name_that_two_have_is_refused_with_both(group: str, install: Install) -> None:
    kind, named, names, source = KINDS[group]
    own = {"vpipe.models": "bert", "vpipe.datasets": "synthetic", "vpipe.executors": "naive",
           "vpipe.schedules": "1f1b"}[group]
    for package in ("first", "second"):
        install(package, source.format(name="twice"), **{group.removeprefix("vpipe."): f"twice = {package}"})
    install("third", source.format(name=own), **{group.removeprefix("vpipe."): f"{own} = third"})
    assert names().count("twice") == names().count(own) == 1
    for name, holders in (("twice", "the package 'first' (first) and the package 'second' (second)"),
                          (own, "vpipe itself and the package 'third' (third)")):
        assert refusal(named, name) == (
            f"error: {holders} have {one(kind)} called '{name}'\n"
            "hint: uninstall one of them, or give one another name")
    assert not {"first", "second", "third"} & set(sys.modules)


ASIDE = """
from concurrent.futures import ThreadPoolExecutor
from vpipe.runtime import Worker

class Aside(Worker):
    forwards = 0

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.thread = ThreadPoolExecutor(1)

    def compute(self, stage, microbatch, inputs):
        Aside.forwards += 1
        return self.thread.submit(super().compute, stage, microbatch, inputs).result()
"""
"""Workers whose forwards are computed in another thread."""


def test_an_executor_of_a_package_trains_the_bits_of_its_oracle(install: Install, tmp_path: Path) -> None:
    (tmp_path / "aside_worker.py").write_text(ASIDE)
    install("aside", "from vpipe.description import Executor\nExecutor('aside', 'aside_worker:Aside', "
            "refuses={'timeline': ('aside has none', 'do without')}).register()\n", executors="aside = aside")
    job = job_of(tmp_path, parallel__executor="aside")
    with pytest.raises(UserError, match="trace is true, but aside has none"):
        load_config(tmp_path / "c.yaml", ["trace=true"])
    assert "aside_worker" not in sys.modules, "a config is read without it, and without torch"
    batches = batches_for_steps(job, 2)
    exact, *_ = references(job, batches)
    assert all(difference.within(0) for difference in compare(run_in_process(job, batches), exact.trajectory))
    assert sys.modules["aside_worker"].Aside.forwards == 2 * 2 * 4


@pytest.mark.parametrize(("worker", "what", "hint"), [
    ("not_there:Aside", "cannot be found: No module named 'not_there'", "worker='module:class'"),
    ("vpipe:Model", "vpipe:Model, the class of the workers of the executor wrong, is no Worker", "derive it")])
def test_an_executor_without_workers_is_refused(worker: str, what: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        worker_class(Executor("wrong", worker))
    assert what in str(caught.value)
    assert hint in str(caught.value)


def test_schedules_of_packages_are_drawn_and_compared(install: Install, capsys: pytest.CaptureFixture[str],
                                                      tmp_path: Path) -> None:
    source = KINDS["vpipe.schedules"][3]
    install("good", source.format(name="made_elsewhere"), schedules="made_elsewhere = good:made")
    install("broken", "1 / 0", schedules="hollow = broken")
    assert main(["schedule", "made_elsewhere", "--ranks", "2", "--microbatches", "2", "--format", "csv"]) == 0
    assert main(["schedule", "--all", "--ranks", "2", "--microbatches", "2"]) == 0
    out = capsys.readouterr().out
    assert "1F0" in out
    assert "which cannot be imported: ZeroDivisionError" in out
    planned = schedules.RegisteredSchedule.for_plans(flush=True)
    assert "made_elsewhere" in planned
    assert "hollow" not in planned
    assert main(["schedule", "hollow", "--ranks", "2", "--microbatches", "2"]) == 2
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
