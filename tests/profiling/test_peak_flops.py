"""What a run's devices can do: said, looked up, or measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vpipe.app.train import peak_flops as module
from vpipe.app.train.peak_flops import GPUS, PeakFlops, find_peak, known_tflops

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(("name", "kind", "tflops"), [
    ("NVIDIA H100 80GB HBM3", "bf16", 989.4), ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None), ("NVIDIA A100-SXM4-40GB", "tf32", 156.0),
    ("A100-SXM4-80GB", "fp16", 312.0), ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp32", None),
    ("Tesla V100-SXM2-16GB", "bf16", None), ("Tesla V100-SXM2-16GB", "fp16", 125.0), ("NVIDIA H200", "bf16", 989.4)])
def test_a_gpu_is_known_by_all_of_its_name(name: str, kind: str, tflops: float | None) -> None:
    assert known_tflops(name, kind) == tflops


def test_the_table_makes_sense() -> None:
    for gpu in GPUS:
        re.compile(gpu.name)
        found = [value for value in (gpu.fp32, gpu.tf32, gpu.bf16, gpu.fp16) if value is not None]
        assert found == sorted(found)  # fewer bits are no slower
        assert gpu.source


def test_the_table_is_the_one_of_the_docs() -> None:
    shown = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:7]]
             for line in (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().splitlines()
             if line.startswith("|")}
    for gpu in GPUS:
        assert shown[gpu.name.replace("|", ", ")] == [
            *("" if value is None else f"{value:g}" for value in (gpu.fp32, gpu.tf32, gpu.bf16, gpu.fp16)), gpu.source]


def test_the_users_peak_goes_before_the_measured_one() -> None:
    assert find_peak(CPU, torch.bfloat16, 2.5) == PeakFlops(2.5, 1, "bf16", "as metrics.peak_tflops says")


def test_a_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND_S", 0.005)
    found = find_peak(CPU, torch.float32, None)
    assert (found.devices, found.kind, found.source) == (1, "fp32", "measured")
    assert 1e-4 < found.tflops < 100


@pytest.mark.parametrize(("cores", "tflops"), [(2, 0.5), (3, 0.75), (8, 1.0)])
def test_ranks_that_are_more_than_cores_share_them(monkeypatch: pytest.MonkeyPatch, cores: int, tflops: float) -> None:
    now = iter(range(100))
    monkeypatch.setattr(module.accelerator, "clock_of", lambda device: module.thread_time)
    monkeypatch.setattr(module, "thread_time", lambda: next(now))
    monkeypatch.setattr(module, "_product", lambda device, dtype: (lambda: None, 10_000))  # one takes two ticks
    of_four_ranks(monkeypatch, cores)
    found = find_peak(CPU, torch.float32, None)
    assert (found.tflops, found.devices) == (tflops, 4)


class FourRanks:
    """Ranks 0 and 1 share a GPU; each says what rank 0 does, but for that."""

    ranks = ranks_per_host = 4
    cores: Callable[[], int]

    def all_gather(self, value: object) -> list[object]:
        return [[gpu, *value[1:]] for gpu in "aabc"] if isinstance(value, list) else [value] * 4


def of_four_ranks(monkeypatch: pytest.MonkeyPatch, cores: int = 4) -> None:
    group = FourRanks()
    group.cores = lambda: cores
    monkeypatch.setattr(module, "RankGroup", lambda device: group)


@pytest.mark.parametrize(("precision", "kind", "tflops"), [("highest", "fp32", 19.5), ("high", "tf32", 156.0)])
def test_a_gpu_that_ranks_share_counts_once(monkeypatch: pytest.MonkeyPatch, precision: str, kind: str,
                                            tflops: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    of_four_ranks(monkeypatch)
    found = find_peak(GPU, torch.float32, None)
    assert found == PeakFlops(tflops, 3, kind, "the data sheet of NVIDIA A100-SXM4-40GB")


def test_where_one_gpu_is_not_known_all_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H999")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(module, "_measured", lambda group, device, dtype: 6e12)
    of_four_ranks(monkeypatch)
    found = find_peak(GPU, torch.float16, None)
    assert found == PeakFlops(2.0, 3, "fp16", "measured")
