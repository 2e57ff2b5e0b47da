"""The command line of a container, and when there is none. test_hosts.py has ranks behind a stand-in for apptainer."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from small_run import write_config

import vpipe
from vpipe.app.config.config import Config, load_config
from vpipe.app.launch import container as module
from vpipe.app.launch.container import Container, enter
from vpipe.app.launch.rank_env import HostRanks
from vpipe.errors import UserError

PACKAGE = Path(vpipe.__file__).parents[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with an image; programs are found in ``bin``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    for name in module.INSIDE:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "image.sif").write_text("")
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(here: Path, name: str) -> Path:
    path = here / "bin" / name
    path.touch()
    path.chmod(0o755)
    return path


def load(folder: Path, **changes: object) -> Config:
    return load_config(write_config(folder, **changes), ["container=image.sif"])


def binds(command: list[str]) -> list[str]:
    return [word for before, word in pairwise(command) if before == "--bind"]


@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_command_of_a_rank_in_a_container(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("vpipe.app.launch.container.NVIDIA", here / "nowhere")
    found = program(here, name)
    config = load(here, dataset__name="text", dataset__path="/data/text", dataset__cache_directory=str(here / "cache"))
    ranks = HostRanks.alone(2, 1234, threads=1, container=Container.from_config(config))
    command = ranks.command("/scratch/run")
    assert command[:3] == [str(found), "exec", "--bind"]
    assert binds(command) == sorted(map(str, [here, "/data/text", "/scratch/run", PACKAGE]))  # the cache is in here
    assert command[-8:] == ["--pwd", str(here), str(here / "image.sif"), "python3", "-m", "vpipe.app.launch.rank_main",
                            "/scratch/run", "train"]
    assert "--nv" not in command
    environment = ranks.environment(1)
    assert (environment["RANK"], environment["PYTHONPATH"]) == ("1", f"{PACKAGE}:/mine")


def test_a_checkpoint_elsewhere_is_seen_inside(here: Path) -> None:
    """The one to go on from, and the folder for those of the run, which is made."""
    program(here, "apptainer")
    kept = here.parent / "kept"
    container = Container.from_config(load(here, checkpoint__at_end=True, checkpoint__directory=str(kept)))
    ranks = HostRanks.alone(2, 1234, 1, ("train", "/old/run/checkpoints/step-40"), container=container)
    assert {str(kept), "/old/run/checkpoints/step-40"} <= set(binds(ranks.command("/scratch/run")))
    assert kept.is_dir()


@pytest.mark.parametrize(("keys", "driver", "let_in"), [
    ({"parallel__backend": "nccl"}, False, True), ({"parallel__device": "cuda:1"}, False, True), ({}, True, True),
    ({}, False, False), ({"parallel__backend": "gloo"}, True, True), ({"parallel__device": "cpu"}, True, False)])
def test_gpus_are_let_in_where_ranks_compute_on_them(keys: dict[str, str], driver: bool, let_in: bool, here: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.app.launch.container.NVIDIA", here if driver else here / "none")
    program(here, "apptainer")
    container = Container.from_config(load(here, **keys))
    assert container is not None
    assert ("--nv" in container.wrapped(["python3"])) == let_in


def test_apptainer_goes_before_its_old_name(here: Path) -> None:
    program(here, "singularity")
    newer = program(here, "apptainer")
    container = Container.from_config(load(here))
    assert container is not None
    assert container.program == str(newer)


def test_missing_containers_are_refused(here: Path) -> None:
    with pytest.raises(UserError, match=r"container is 'image\.sif', but neither apptainer nor singularity is on the "
                                        r"path\nhint: install one of them"):
        Container.from_config(load(here))
    program(here, "apptainer")
    (here / "image.sif").unlink()
    with pytest.raises(UserError, match=re.escape("container names the image 'image.sif', but there is no such file\n"
                                                  f"hint: copy it to {here / 'image.sif'}")):
        Container.from_config(load(here))
    (here / "image.sif").write_text("")
    container = Container.from_config(load(here, dataset__name="text", dataset__path="/a:b"))
    with pytest.raises(UserError, match="'/a:b' cannot be bound into a container: it holds a comma or a colon"):
        HostRanks.alone(1, 1, 1, container=container).command("/run")


def test_no_container_is_asked_for(here: Path) -> None:
    config = load_config(write_config(here))
    assert Container.from_config(config) is None
    enter(config)


def test_a_process_of_torchrun_starts_anew_inside(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(here, "apptainer")
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    elsewhere = here.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "c.yaml").write_text("")
    monkeypatch.setattr("sys.argv", ["/bin/vpipe", "train", "../elsewhere/c.yaml"])
    enter(load(here), [Path("/old/run")])
    [(name, command, environment)] = started
    assert name == str(here / "bin" / "apptainer")
    assert command[-6:] == [str(here / "image.sif"), "python3", "-m", "vpipe", "train", "../elsewhere/c.yaml"]
    assert str(elsewhere) in binds(command)  # where the config is read once more, with what it names
    assert "/old/run" in binds(command)
    monkeypatch.setenv(module.INSIDE[-1], environment[module.INSIDE[-1]])
    enter(load(here))  # and not once more
    assert len(started) == 1
    assert Container.from_config(load(here)) is None  # nor are the ranks of a launcher inside
