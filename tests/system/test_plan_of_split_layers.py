"""``vpipe plan`` measures layers whole and split, splits them where whole ones do not fit, and the run follows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_run import check_updates, only_run, write_config

from vpipe import Plan
from vpipe.app.cli import main

pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.long
@pytest.mark.timeout(400)  # of a busy machine
def test_a_plan_that_splits_layers_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages hold unequal parts of the layers, two halves of every layer equal ones."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    config = write_config(tmp_path, training__optimizer="sgd", training__num_microbatches=1, training__max_steps=2,
                          dataset__batch_size=1, model__vocab_size=1 << 17,  # beside Python and torch
                          dataset__cache_directory=str(tmp_path / "cache"))
    needed = []
    for tensor in (1, 2):
        words = ["--ranks", "2", "--memory", "1KiB", "--set", f"parallel.tensor={tensor}"]
        assert main(["plan", str(config), *words]) == 2
        needed += re.findall(r"hint: allow ([\d.]+) MiB or more", capfd.readouterr().err)
    whole, halves = map(float, needed)
    assert halves < whole
    path = str(tmp_path / "plan.json")
    assert main(["plan", str(config), "--memory", f"{halves}MiB", "-o", path]) == 0
    out, err = capfd.readouterr()
    assert "measuring" not in err, "the cache has both"
    assert f"\ntensor 1: no plan fits into {halves:g} MiB per rank; allow {whole:g} MiB or more" in out
    assert Plan.load(path).tensor == 2
    assert main(["train", str(config), "--set", f"parallel.plan={path}"]) == 0
    run = only_run(tmp_path / "runs")
    assert len(list(run.glob("rank*.log"))) == 2
    check_updates(run, 2)
