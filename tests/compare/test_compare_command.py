"""The command: what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import write_config

from vpipe.cli import main


@pytest.mark.parametrize(("words", "machines", "said"), [
    (["--systems", "gpipe,pipdream"], None, "error: --systems names 'pipdream', which is no system\n"
                                            "hint: did you mean 'pipedream'?"),
    (["--systems", "gpipe", "--memory", "-1GiB"], None, "--memory is -1GiB"),
    (["--schedules", "1f1b,zbv"], None, "hint: did you mean 'zb_v'?"),
    (["--schedules", "1f1b", "-o", "nowhere/a.csv"], None, "error: cannot write 'nowhere/a.csv': it is in no folder"),
    ([], None, "takes --systems or --schedules, and there is neither"),
    (["--system", "gpipe", "--set", "training.learning_rat=1"], None, "did you mean 'learning_rate'?"),
    (["--systems", "gpipe"], ["localhost:0", "elsewhere:0"], "on this host alone, but machines names 1 more"),
])
def test_mistakes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str],
                              machines: list[str] | None, said: str) -> None:
    path = write_config(tmp_path)
    if machines:
        path.write_text(path.read_text() + f"machines: {machines}\n")
    assert main(["compare", str(path), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
SRUN = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize("command", [["compare", "--systems", "gpipe"], ["verify"]])
@pytest.mark.parametrize("environment", [TORCHRUN, SRUN])
def test_it_starts_its_ranks_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str],
                                    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*command, str(write_config(tmp_path))]) == 2
    said = capsys.readouterr().err
    assert f"vpipe {command[0]} is one of 2 processes of {'srun' if 'SLURM_JOB_ID' in environment else 'its'}" in said
    assert "hint: run it alone, without torchrun or srun" in said
