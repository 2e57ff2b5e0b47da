"""The Orion scheduler as a rank starts it: what is in its way, and what a launcher sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from vpipe.app.config.config import Config, load_config
from vpipe.app.launch.rank_env import ranks_here
from vpipe.description import Executor
from vpipe.errors import UserError
from vpipe.extras.orion import scheduler as orion
from vpipe.extras.orion.scheduler import Inactive, preload_variable, start, switched_on
from vpipe.plugins import PluginGroup

GPU = ("cuda", 0, 4)


class Library(orion.OrionScheduler):
    """Answers as the library would."""

    def __init__(self, preloaded: bool = True, status: int = 0) -> None:
        self._preloaded, self._status = preloaded, status

    is_preloaded = property(lambda self: self._preloaded)

    def start(self, num_clients: int, device_id: int = 0) -> int:
        return self._status

    def last_error(self) -> str:
        return "libcuda.so.1 is not there"


def test_a_rank_on_a_cpu_has_no_kernels() -> None:
    assert str(start("cpu", 0, 4)) == ("orion: inactive (ranks compute on cpu, which launches no kernels; "
                                       "compute on GPUs: parallel.device: cuda)")


def test_torch_has_32_streams() -> None:
    assert start("cuda", 0, 33) == Inactive("a rank has 33 microbatches, but torch 32 streams",
                                            "lower training.num_microbatches")


def test_the_library_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(orion, "LIBRARY", tmp_path / "libgpu_scheduler.so")
    orion.get_scheduler.cache_clear()
    assert start(*GPU) == Inactive(
        f"there is no {tmp_path}/libgpu_scheduler.so", "build it with make orion, then start with vpipe train alone, "
        f"or with LD_PRELOAD={tmp_path}/libgpu_scheduler.so before torchrun or srun")
    with pytest.raises(FileNotFoundError, match="Library not found: there"):
        orion.OrionScheduler("there")


@pytest.mark.parametrize(("library", "found"), [
    (Library(preloaded=False), "libgpu_scheduler.so is not preloaded; start with vpipe train alone, or with LD_PRELOAD="
     f"{orion.LIBRARY} before torchrun or srun"),
    (Library(status=-3), "libcuda.so.1 is not there; start it where nvidia-smi lists a GPU")])
def test_the_library_refuses(library: Library, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orion, "get_scheduler", lambda: library)
    assert str(start(*GPU)) == f"orion: inactive ({found})"


def test_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(orion, "get_scheduler", lambda: library)
    assert start(*GPU) is library


@pytest.mark.extras("async_threaded")
def test_the_launcher_preloads_what_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(orion, "LIBRARY", tmp_path / "libgpu_scheduler.so")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    config = load_config(Path("gpt_small_orion"))
    without = load_config(Path("gpt_small_orion"), ["parallel.use_orion_scheduler=false"])

    def environment(config: Config) -> dict[str, str]:
        return ranks_here(config, None, 1, "train").environment(0)

    assert "LD_PRELOAD" not in environment(config)
    orion.LIBRARY.touch()
    assert environment(config)["LD_PRELOAD"] == str(orion.LIBRARY)
    assert "LD_PRELOAD" not in environment(without)
    assert preload_variable({"LD_PRELOAD": "/malloc.so"}) == {"LD_PRELOAD": f"{orion.LIBRARY}:/malloc.so"}
    assert preload_variable({"LD_PRELOAD": "/elsewhere/libgpu_scheduler.so"}) == {}


def test_the_switch() -> None:
    assert [switched_on(variables) for variables in (
        {}, {"USE_ORION_SCHEDULER": "0"}, {"USE_ORION_SCHEDULER": "1"})] == [False, False, True]
    with pytest.raises(UserError, match="USE_ORION_SCHEDULER is 'yes' in the environment"):
        switched_on({"USE_ORION_SCHEDULER": "yes"})


@pytest.mark.extras("async_threaded")
def test_a_config_is_refused_where_orion_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.app.config.parallel.ADDITIONS", PluginGroup("vpipe.nothing", "nothing"))
    with pytest.raises(UserError) as refused:
        load_config(Path("gpt_small_orion"))
    [problem] = refused.value.problems
    assert problem.what == "parallel.use_orion_scheduler is true, but no package here adds Orion"
    assert problem.hint == "install vpipe with vpipe/extras/orion, or leave it out"


def test_where_no_executor_has_streams_of_its_own_the_remedy_is_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "names", lambda: ["naive", "overlapped"])
    with pytest.raises(UserError) as refused:
        load_config(Path("gpt_small_orion"), ["parallel.executor=naive"])
    [problem] = refused.value.problems
    assert problem.what == ("parallel.use_orion_scheduler is true, but the executor is naive, which has one stream for "
                            "all microbatches")
    assert problem.hint == "leave it out, or install vpipe with vpipe/extras/async_threaded"
