"""Which device a rank computes on, and what carries tensors between ranks."""

from __future__ import annotations

import re

import pytest
import torch

from vpipe import accelerator
from vpipe.accelerator import Visible, choose
from vpipe.distributed.device import DeviceMap, RankDevice, check_backend, choose_backend, visible_here
from vpipe.errors import UserError

CPU = RankDevice("a", "cpu")


def gpu(index: int, uuid: str, host: str = "a", *, nccl: bool = True) -> RankDevice:
    return RankDevice(host, f"cuda:{index}", uuid, nccl)


@pytest.mark.parametrize(("wanted", "there", "where"), [
    (None, Visible(0, 3), "cpu"), ("cpu", Visible(2, 1), "cpu"), (torch.device("cpu"), Visible(0), "cpu"),
    (None, Visible(1), "cuda:0"), (None, Visible(4, 3), "cuda:3"), ("cuda", Visible(4, 3), "cuda:3"),
    (torch.device("cuda"), Visible(4, 3), "cuda:3"),
    (None, Visible(2, 3), "cuda:1"), ("cuda", Visible(1, 3), "cuda:0"),  # shared, or the only one that is shown
    ("cuda", Visible(4, 1, current=2), "cuda:2"), (None, Visible(4, 1, current=2), "cuda:2"),  # the program chose it
    ("cuda:3", Visible(4, 1, current=2), "cuda:3"), (torch.device("cuda", 0), Visible(4, 1), "cuda:0")])
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_rank_has_a_definite_device(wanted: torch.device | str | None, there: Visible, where: str,
                                      backend: str | None) -> None:
    assert choose(wanted, backend, there) == torch.device(where)


@pytest.mark.parametrize(("wanted", "backend", "there", "what", "hint"), [
    ("cuda", None, Visible(0), "device is cuda, but this process sees no GPU", "leave device out, or set it to cpu"),
    ("cuda:1", None, Visible(0), "device is cuda:1, but this process sees no GPU", "or set it to cpu"),
    ("cuda:9", None, Visible(2), "device is cuda:9, but this process sees 2 GPUs, cuda:0 to cuda:1",
     "CUDA_VISIBLE_DEVICES"),
    ("cuda:1", "gloo", Visible(1), "sees 1 GPU, cuda:0", "write one of these, or cuda"),
    ("gpu", None, Visible(2), "device is 'gpu', which names no device", "write cpu, cuda (the GPU of this rank)"),
    ("", None, Visible(2), "device is '', which names no device", "such as cuda:1"),
    (0, None, Visible(2), "device is 0, which names no device", "such as cuda:1"),
    ("mps", None, Visible(0), "device is mps: this torch computes on cpu and cuda only", "write cpu"),
    ("xpu:0", None, Visible(0), "device is xpu:0: this torch computes on", "write cpu"),
    ("meta", None, Visible(0), "device is meta: this torch computes on", "write cpu"),
    (None, "nccl", Visible(0), "backend nccl, but this machine has no GPU", "use backend: gloo"),
    ("cpu", "nccl", Visible(2), "device is cpu, but nccl carries tensors of GPUs only", "use backend: gloo"),
    (None, "nccl", Visible(2, 3), "needs a GPU per rank: GPU 3 is wanted, but this host has 2 GPUs, counted from 0",
     "start fewer ranks here")])
def test_devices_that_are_not_there(wanted: object, backend: str | None, there: Visible, what: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(wanted, backend, there)  # type: ignore[arg-type]
    [problem] = caught.value.problems
    assert what in problem.what, problem.what
    assert hint in problem.hint


def test_under_nccl_the_only_gpu_that_a_rank_is_shown_is_its_own() -> None:
    assert choose(None, "nccl", Visible(1, 3)) == torch.device("cuda:0")
    assert choose(None, "nccl", Visible(8, 9, is_rank=True)) == torch.device("cuda:1"), "of the second host"


def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(device: torch.device) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(UserError, match=r"^error: cuda:1 cannot be used: CUDA error: all CUDA-capable devices are busy "
                                        r"or unavailable\nhint: nvidia-smi"):
        accelerator.make_current(torch.device("cuda:1"))
    accelerator.make_current(torch.device("cpu"))


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID", "RANK"])
def test_the_environment_says_the_number_of_a_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("LOCAL_RANK", "SLURM_LOCALID", "RANK"):
        monkeypatch.delenv(other, raising=False)
    assert visible_here() == Visible(0, 0, is_rank=True)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv(name, "5")
    assert visible_here() == Visible(0, 5, is_rank=name == "RANK")
    monkeypatch.setenv(name, "x")
    with pytest.raises(UserError, match=f"set {name} to 'x'"):
        visible_here()


@pytest.mark.parametrize(("current", "chosen"), [(0, None), (2, 2)])
def test_the_program_may_have_chosen_a_gpu(current: int, chosen: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    assert visible_here().current == chosen


SHARED = [gpu(0, "x"), gpu(1, "y"), gpu(0, "x")]
APART = [gpu(0, "x"), gpu(0, "y"), gpu(0, "z", "b")]
MIXED = [gpu(0, "x"), RankDevice("b", "cpu"), RankDevice("b", "cpu")]


@pytest.mark.parametrize(("devices", "backend", "reason"), [
    ([CPU, CPU], "gloo", ""), (APART, "nccl", ""),
    (SHARED, "gloo", "ranks 0, 2 on a share cuda:0"), (MIXED, "gloo", "ranks 1, 2 on b compute on cpu"),
    ([gpu(0, "x"), gpu(1, "y", nccl=False)], "gloo", "the torch of rank 1 has no nccl")])
def test_nccl_is_for_ranks_with_a_gpu_each(devices: list[RankDevice], backend: str, reason: str) -> None:
    """Unasked, gloo is taken where nccl cannot be; asked for, that is refused."""
    assert choose_backend(None, devices) == (backend, reason)
    assert choose_backend("gloo", devices) == ("gloo", "")
    if backend == "nccl":
        assert choose_backend("nccl", devices) == ("nccl", "")
    else:
        with pytest.raises(UserError, match=re.escape(f"backend nccl needs a GPU per rank, but {reason}")) as caught:
            choose_backend("nccl", devices)
        assert "use backend: gloo, under which ranks may share a GPU, start fewer ranks, or" in str(caught.value)


@pytest.mark.parametrize(("carriers", "devices", "backend"), [
    ("cpu:gloo", [CPU, CPU], "gloo"), ("cpu:gloo", APART, "gloo"), ("cpu:gloo,cuda:gloo", SHARED, "gloo"),
    ("cpu:gloo,cuda:nccl", APART, "nccl"), ("cuda:nccl", APART, "nccl"), ("cpu:gloo,cuda:nccl", [CPU, CPU], "gloo"),
    ("cuda:nccl", [CPU, CPU], "gloo"), ("cpu:mine,cuda:other", APART, "other"), ("cpu:mine", [CPU, CPU], "mine")])
def test_a_group_that_is_there_carries_tensors_as_it_was_made(carriers: str, devices: list[RankDevice],
                                                              backend: str) -> None:
    assert check_backend(None, carriers, devices) == backend
    if backend in ("gloo", "nccl"):
        assert check_backend(backend, carriers, devices) == backend


@pytest.mark.parametrize(("wanted", "carriers", "devices", "what", "hint"), [
    ("nccl", "cpu:gloo,cuda:gloo", APART, "backend is nccl, but the process group, which is there already, carries "
     "these tensors by gloo (its backends are cpu:gloo,cuda:gloo)", 'init_process_group("cpu:gloo,cuda:nccl")'),
    ("gloo", "cuda:nccl", APART, "backend is gloo, but the process group", 'init_process_group("gloo")'),
    (None, "cpu:gloo,cuda:nccl", SHARED, "carries tensors of GPUs by nccl, which needs a GPU per rank, but ranks 0, 2 "
     "on a share cuda:0", 'make the group, or the first Pipeline, with gloo'),
    (None, "cuda:nccl", MIXED, "but ranks 1, 2 on b compute on cpu", 'or make the group')])
def test_a_group_that_cannot_carry_them(wanted: str | None, carriers: str, devices: list[RankDevice], what: str,
                                        hint: str) -> None:
    with pytest.raises(UserError) as caught:
        check_backend(wanted, carriers, devices)
    [problem] = caught.value.problems
    assert what in problem.what
    assert hint in problem.hint


def test_a_run_says_in_a_line_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(DeviceMap(0, (CPU,), "gloo")) == "computing on cpu (no GPU is visible)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("vpipe.accelerator.name_of", lambda device: "NVIDIA H100")
    assert str(DeviceMap(1, (CPU, CPU), "gloo")) == "computing on cpu, gloo between ranks"
    assert DeviceMap(1, (CPU, CPU), "gloo").line(True) == "computing on cpu, shared memory and gloo between ranks"
    assert DeviceMap(1, tuple(SHARED), "gloo").line(True) == str(DeviceMap(1, tuple(SHARED), "gloo"))
    assert str(DeviceMap(1, tuple(SHARED), "gloo")) == "computing on cuda:0, cuda:1 (NVIDIA H100), gloo between ranks"
    assert str(DeviceMap(0, tuple(APART), "nccl")) == ("computing on 3 GPUs of 2 hosts (NVIDIA H100), nccl between "
                                                       "ranks")
    assert str(DeviceMap(1, tuple(MIXED), "gloo")) == "computing on 1 GPU of 2 hosts and cpu, gloo between ranks"
