"""Real ranks on two hosts, behind stand-ins for ssh and apptainer: what they compute, what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fork_server
import pytest
from small_run import check_updates, losses, only_run, oracle, write_config
from test_run_ends import FORKED, put_program

from vpipe.app.cli import main
from vpipe.app.config import machines as hosts
from vpipe.app.config.config import load_config
from vpipe.app.launch import container
from vpipe.app.train.job import Job

pytestmark = pytest.mark.jobs

SSH = '#!/bin/bash\nexec bash -c "${@: -1}"\n'
APPTAINER = """\
#!/bin/bash
echo "$RANK: $*" >> "$RECORD"
while [ "${1%.sif}" = "$1" ]; do shift; done
[ "$2" = python3 ] || exit 9
exec "$PYTHON" -S "$FORK_SERVER" "${@:3}"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, on ``hostA``."""
    for name, text in (("ssh", SSH), ("apptainer", APPTAINER), ("forked-python", FORKED)):
        put_program(tmp_path / "bin" / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("FORK_SERVER", fork_server.__file__)
    monkeypatch.setenv(fork_server.ADDRESS, fork_server.address())
    for name in container.INSIDE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hosts.Host, "is_this", property(lambda host: host.name == "hostA"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_on_two_hosts_in_containers(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(here)
    (here / "image.sif").write_text("")
    settings = ["machines=[hostA:0, hostB:0]", "parallel.master_address=127.0.0.1", "container=image.sif"]
    assert main(["train", str(config), *(part for text in settings for part in ("--set", text))]) == 0
    out, err = capfd.readouterr()
    run = only_run(here / "runs")
    assert out.splitlines()[:2] == [f"run folder: {run}", "bert: 5 layers in 2 stages [3, 2], schedule 1f1b, one "
                                    "process per stage on 2 hosts"]
    assert "error" not in out + err
    job = Job.from_config(load_config(config))
    check_updates(run, 4)
    assert losses(run) == oracle(job, 4).losses
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "origin.json", "rank0.log",
                                                          "rank1.log", "rank_times.jsonl", "run.json", "summary.csv"]
    assert "stages [1]" in (run / "rank1.log").read_text()
    assert "rank 1 has ended" in (run / "rank1.log").read_text()
    started = sorted((here / "record").read_text().splitlines())
    assert [line.split()[0] for line in started] == ["0:", "1:"]
    assert started[0].endswith(f"{here / 'image.sif'} python3 -m vpipe.app.launch.rank_main {run} train")
    assert "vpipe.app.launch.rank_main /" in started[1]
    assert started[1].endswith(" train")


@pytest.mark.usefixtures("forked")
def test_data_that_only_the_first_host_has(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = write_config(here)
    (here / "elsewhere").mkdir()
    (here / "sizes.json").write_text('{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}')
    settings = ["machines=[hostA:0, hostB:0]", "parallel.master_address=127.0.0.1", "model.config_file=sizes.json",
                "model.preset=null", f"launch.directory={here / 'elsewhere'}",
                f"launch.python={here / 'bin' / 'forked-python'}"]
    assert main(["train", str(config), *(part for text in settings for part in ("--set", text))]) == 2
    out, err = capfd.readouterr()
    run = only_run(here / "runs")
    assert err.splitlines()[-2:] == [
        "error: model.config_file names 'sizes.json', but there is no such file (rank 1 on hostB)",
        "hint: it is a JSON file such as bert_config.json, from the current folder"]
    assert out.splitlines()[-1] == f"run folder: {run}"
