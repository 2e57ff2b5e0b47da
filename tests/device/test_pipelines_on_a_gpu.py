"""Pipelines of one process on a CUDA GPU: the same bits each time, near the processor's, and the host waits for the GPU
as often as for the late device (pipeline_checks.py)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pipeline_checks
import pytest
import torch
from models import rich_batches, untied_model
from oracles import pipeline_of

from vpipe import accelerator
from vpipe.schedules import registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = pipeline_checks.SCHEDULES | pipeline_checks.SINGLE
WAITS = {name: wanted for name, wanted in pipeline_checks.WAITS.items() if "device" not in wanted[1]}
GPU = "cuda:0"
NEAR = {"fp32": 1e-3}
"""Relative differences of losses; 0.03 in reduced precision. Weights are not compared: an optimizer such as Adam makes
a whole step of the last bit of a gradient near zero."""


@pytest.fixture(autouse=True)
def fixed_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that add in a fixed order, and schedules with OFFLOAD and FETCH."""
    for name, recipe in pipeline_checks.offloading_schedules().items():
        monkeypatch.setitem(registry._REGISTERED, name, recipe)
    accelerator.add_in_fixed_order(torch.device(GPU))
    yield
    torch.use_deterministic_algorithms(False)
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(True)


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_pipeline_on_a_gpu(name: str) -> None:
    wanted = replace(CASES[name], skips=False)  # which updates are skipped depends on the last bits of fp16
    first, again = pipeline_checks.run_of(wanted, GPU), pipeline_checks.run_of(wanted, GPU)
    assert not (apart := pipeline_checks.differences(again, first)), apart
    if wanted.other != pipeline_checks.OWN_NUMBERS:
        expected = pipeline_checks.losses_of(pipeline_checks.run_of(wanted, "cpu"))
        near = NEAR.get(wanted.words.get("precision", "fp32"), 0.03)
        assert pipeline_checks.losses_of(first) == pytest.approx(expected, rel=near, nan_ok=True)


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_for_a_gpu_as_for_the_late_device(name: str) -> None:
    """torch warns of each operation for which the host waits."""
    (words, each), batches = WAITS[name], rich_batches(8, 8)
    pipe = pipeline_of(untied_model, device=GPU, **{**pipeline_checks.CUT, **words})
    list(pipe.train(batches[:4]))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # itself warns that it is a prototype
        try:
            steps = list(pipe.train(batches[4:]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in found if "synchronizing CUDA operation" in str(one.message)]
    assert len(waits) / len(steps) == sum(each.values()), sorted(set(waits))
