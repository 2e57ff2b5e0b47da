"""Another user, on the hosts of a run and beside them, connects to all that listens: nobody answers, and it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import VPIPE, Host, Hosts, until
from small_run import only_run, write_config

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # of a busy machine
STRANGER = [sys.executable, Path(__file__).with_name("stranger.py")]
SSH = "22"


class Attacked:
    """A long run that is attacked when its ranks are at work."""

    def __init__(self, starter: str, folder: Path, hosts: Hosts) -> None:
        self.folder, self.hosts, self.runs = folder, hosts, folder / "own"
        config = write_config(folder, parallel__model_parallel_size=2, training__max_steps=None,
                              training__max_minutes=3.0, checkpoint__every_steps=5, checkpoint__keep=2,
                              checkpoint__directory=str(folder / "checkpoints"), parallel__timeout_s=20)
        config.write_text(config.read_text().replace(f"{folder}/runs", str(self.runs)))
        if starter == "ssh":
            config.write_text("machines: [host0:0, host1:0]\n" + config.read_text())
        command = {"torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "vpipe",
                                "train", config]}.get(starter, [VPIPE, "train", config])
        addresses = ["127.0.0.1", "::1", hosts[0].address, hosts[1].address, *["forge"][:starter == "torchrun"]]
        with (folder / "out").open("wb") as out:
            self.process = hosts[0].popen(command, cwd=folder, stdout=out, stderr=out)
        until(lambda: len(list(self.runs_of(hosts[0]).glob("*/metrics.jsonl"))) == 1 or self.process.poll() is not None,
              240, "training")
        assert self.process.poll() is None, (folder / "out").read_text()
        self.run = only_run(self.runs_of(hosts[0]))
        self.strangers = [self.attack(host, "0", 15, addresses) for host in hosts[:2 if starter == "ssh" else 1]]

    def runs_of(self, host: Host) -> Path:
        return host.path(self.runs)

    def attack(self, host: Host, whom: str, seconds: float, addresses: list[str]
               ) -> tuple[Path, subprocess.Popen[bytes]]:
        report = self.folder / f"{host.name}.json"
        return report, host.popen([*STRANGER, report, whom, seconds, *addresses], stdin=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL)

    def found(self) -> list[dict[str, Any]]:
        """What the strangers reached."""
        for _, stranger in self.strangers:
            stranger.communicate(timeout=90)
            assert stranger.returncode == 0, "it reports"
        return [json.loads(report.read_text()) for report, _ in self.strangers]

    @property
    def updates(self) -> int:
        return (self.run / "metrics.jsonl").read_text().count('"loss"')

    def goes_on(self) -> None:
        """It trains and saves, and stops when its own user asks for it."""
        before = self.updates
        until(lambda: self.updates > before + 10, 60, "more updates")
        said = (self.folder / "out").read_text()
        assert not {"error", "Traceback", "forged", "warning"} & set(said.replace(":", " ").split())
        os.kill(min(self.hosts[0].find(RANK="0")), signal.SIGTERM)
        self.process.wait(60)
        assert list(self.folder.glob(f"checkpoints/{self.run.name}/step-*"))


@pytest.mark.parametrize("starter", ["vpipe", "ssh"])
def test_nobody_answers_another_user(starter: str, hosts: Hosts, tmp_path: Path) -> None:
    run = Attacked(starter, tmp_path, hosts)
    if starter == "ssh":
        ports = ":".join(str(int(line.split()[1].rpartition(":")[2], 16)) for table in ("tcp", "tcp6") for line in
                         Path(f"/proc/{hosts[0].first}/net/{table}").read_text().splitlines()[1:]
                         if line.split()[3] == "0A")
        run.strangers.append(run.attack(hosts[2], f"0:{ports}", 2, [hosts[0].address]))
    for found in run.found():
        assert found["uid"] == 65534
        assert {name for name, answer in found["now"].items() if answer or not name.isdecimal()} <= {SSH}
    run.goes_on()


def test_values_of_a_stranger_in_torchruns_store_have_no_effect(hosts: Hosts, tmp_path: Path) -> None:
    run = Attacked("torchrun", tmp_path, hosts)
    [found] = run.found()
    assert any(found["forged"].values())  # that store is open, as docs/faults.md says
    run.goes_on()
