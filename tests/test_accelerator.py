"""What a device lacks is asked for: torch's module for processors, which has nearly nothing, stands in for it."""

from __future__ import annotations

import pytest
import torch

from vpipe import accelerator

BARE = torch.device("xpu:0")


def test_functions_that_a_device_lacks_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "module_of", lambda device: torch.cpu)
    assert not accelerator.counts_memory(BARE)
    assert (accelerator.uuid_of(BARE), accelerator.name_of(BARE)) == ("xpu:0", "xpu")
    assert accelerator.total_bytes(BARE) == accelerator.free_bytes(BARE) == 0
    accelerator.make_current(BARE)


def test_a_processor_has_its_name_and_the_memory_of_its_host() -> None:
    cpu = torch.device("cpu")
    accelerator.synchronize(cpu)
    accelerator.make_current(cpu)
    assert accelerator.name_of(cpu) != "cpu"
    assert 0 < accelerator.free_bytes(cpu) <= accelerator.total_bytes(cpu)


def test_on_a_gpu_kernels_add_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attention all but the plain form are left out: where torch only warns, their backwards add in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    kernels = ("flash", "mem_efficient", "cudnn")
    try:
        accelerator.add_in_fixed_order(torch.device("cuda:0"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not any(getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels)
    finally:
        torch.use_deterministic_algorithms(False)
        for kernel in kernels:
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(True)


def test_a_torch_without_devices_has_none() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    assert (accelerator.kind(), accelerator.count(), accelerator.is_started()) == (accelerator.USUAL, 0, False)
    accelerator.seed_all(0)


@pytest.mark.parametrize(("kind", "backend", "group"), [
    ("cuda", "nccl", "cpu:gloo,cuda:nccl"), ("xpu", "xccl", "cpu:gloo,xpu:xccl"), ("npu", "hccl", "cpu:gloo,npu:hccl"),
    ("mps", "gloo", "gloo")])
def test_a_kind_has_its_backend_and_gloo_for_the_host(kind: str, backend: str, group: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "kind", lambda: kind)
    assert accelerator.collectives() == backend
    assert accelerator.carriers(backend) == group
    assert accelerator.carriers("gloo") == "gloo"


def test_modules_are_initialised_under_a_seed_and_the_caller_s_state_stays() -> None:
    before = torch.random.get_rng_state()
    with accelerator.seeded(3):
        drawn = torch.rand(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))
