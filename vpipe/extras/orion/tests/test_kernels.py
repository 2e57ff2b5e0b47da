"""Kernel profiles for the Orion library, from traces in the form of torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vpipe.app.cli import main
from vpipe.app.config.config import Config
from vpipe.errors import UserError
from vpipe.extras.orion.kernels import Bound, bound_of, kernel_csv, kernel_profiles, multiprocessors_needed

H100 = {"id": 0, "name": "NVIDIA H100", "warpSize": 32, "maxThreadsPerMultiprocessor": 2048,
        "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 233472, "numSms": 132}


def launch(name: str, us: float = 10, grid: int = 1, block: int = 256, registers: int = 32,
           shared: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 1, "dur": us, "pid": 0, "tid": 7, "args": {
        "device": 0, "context": 1, "stream": 7, "correlation": 3, "registers per thread": registers,
        "shared memory": shared, "blocks per SM": grid / 132, "warps per SM": 1.0, "grid": [grid, 1, 1],
        "block": [block, 1, 1], "est. achieved occupancy %": 10}}


def trace(path: Path, *events: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    other = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 3, "pid": 1, "tid": 1, "args": {}}
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [H100], "traceEvents": [other, *events]}))
    return path


@pytest.mark.parametrize(("sizes", "expected"), [
    ({"grid": 1}, 1),
    ({"grid": 8}, 1),  # 2,048 threads in 8 blocks of 256
    ({"grid": 9}, 2),
    ({"grid": 10_000}, 132),
    ({"grid": 64, "block": 1, "registers": 16}, 2),  # 32 blocks, however small
    ({"grid": 8, "registers": 128}, 4),  # 65,536 registers hold 2 blocks
    ({"grid": 8, "shared": 100_000}, 4),
    ({"grid": 3, "block": 1024, "registers": 0}, 2),
    ({"grid": 3, "shared": 300_000}, 3)])
def test_multiprocessors_that_hold_all_blocks(sizes: dict[str, int], expected: int) -> None:
    assert multiprocessors_needed(launch("any", **sizes)["args"], H100) == expected


@pytest.mark.parametrize(("name", "bound"), [
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
     Bound.COMPUTATION),
    ("nvjet_tst_128x64_64x6_2x1_v_bz_TNT", Bound.COMPUTATION),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64>(Params)", Bound.COMPUTATION),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)", Bound.COMPUTATION),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)", Bound.MEMORY),
    ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)", Bound.MEMORY),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(float const*)", Bound.MEMORY),
    ("void gemv2T_kernel_val<int, int, float>(float)", Bound.MEMORY),
    ("triton_per_fused_mean_0", Bound.MEMORY),
    ("my_kernel", Bound.UNKNOWN)])
def test_bound_by_name(name: str, bound: Bound) -> None:
    assert bound_of(name) is bound


def test_a_profiled_run_becomes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trace(run / "profiler_async_threaded" / "rank0" / "rank0.3.pt.trace.json", launch("a<1, 2>(int)", 3, grid=9),
          launch("a<1, 2>(int)", 5, grid=1), launch("a<1, 2>(int)", 4, grid=1))
    trace(run / "profiler_async_threaded" / "rank1" / "rank1.3.pt.trace.json", launch('my "gemm"', 20))
    out = tmp_path / "kernels.csv"
    assert main(["orion", "profile", str(run), "-o", str(out)]) == 0
    assert out.read_text() == ('Name,Profile,Memory_footprint,SM_usage,Duration\n"my ""gemm""",1,0,1,20000\n'
                               '"a<1, 2>(int)",-1,0,2,4000\n')
    assert capsys.readouterr().out == (
        f"{out}: 2 kernels of 2 ranks, 1 bound by computation, 0 by memory, 1 unknown\n"
        f"use it: ORION_KERNEL_INFO={out} vpipe train CONFIG\n")


def test_without_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["-o", str(tmp_path / "kernels.csv")]
    assert main(["orion", "profile", str(tmp_path), *out]) == 2
    assert f"the run '{tmp_path}' was not profiled" in capsys.readouterr().err
    file = trace(tmp_path / "profiler_1f1b" / "rank0" / "rank0.3.pt.trace.json")
    assert main(["orion", "profile", str(tmp_path), *out]) == 2
    assert "no kernel ran on a GPU in the profiles of" in capsys.readouterr().err
    file.write_text('{"traceEvents": [{"cat": "kernel"}]}')
    with pytest.raises(UserError, match=r"is no trace of torch's profiler: KeyError 'args'"):
        kernel_profiles([file])
    assert main(["orion", "profile", "gpt_small", "--set", "parallel.device=cpu", *out]) == 2
    assert "kernels run on GPUs, but the ranks of this config compute on processors here" in capsys.readouterr().err
    assert kernel_csv([]) == "Name,Profile,Memory_footprint,SM_usage,Duration\n"


@pytest.mark.extras("async_threaded")
def test_a_config_is_trained_until_an_update_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Config] = []

    def run(config: Config, start: None, restarts: None) -> Path:
        trained.append(config)
        trace(tmp_path / "profiler_async_threaded" / "rank0" / "rank0.3.pt.trace.json", launch("gemm"))
        return tmp_path

    monkeypatch.setattr("vpipe.app.launch.launcher.run", run)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    out = tmp_path / "kernels.csv"
    assert main(["orion", "profile", "gpt_small_orion", "--set", "training.num_microbatches=2", "-o", str(out)]) == 0
    [config] = trained
    assert (config.training.profile_iteration, config.training.exit_after_profile) == (3, True)
    assert not config.parallel.use_orion_scheduler
    assert config.training.num_microbatches == 2
    assert out.read_text().splitlines()[1:] == ["gemm,1,0,1,10000"]
