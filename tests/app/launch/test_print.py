"""``vpipe launch --print``: what would run, as commands that a shell takes."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest
import yaml
from small_run import write_config

from vpipe.app.cli import main
from vpipe.app.config import machines as hosts
from vpipe.app.config.config import load_config
from vpipe.app.launch.ssh import ssh_command


@pytest.fixture(autouse=True)
def on_host_a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.Host, "is_this", property(lambda host: host.name == "hostA"))

    def started(*arguments: object, **more: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr("subprocess.Popen", started)


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *settings: str) -> tuple[list[str], str]:
    """The commands, and the config that they write before they start a rank."""
    config = write_config(folder)
    assert main(["launch", "--print", str(config), *(part for text in settings for part in ("--set", text))]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not (folder / "runs").exists()
    before, _, rest = out.partition("cat > \"$FOLDER/config.yaml\" <<'END'\n")
    text, _, after = rest.partition("END\n")
    return [*before.splitlines(), *after.splitlines()], text


def test_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands, config = printed(tmp_path, capsys, "parallel.master_port=23456")
    assert commands[0].startswith("# ranks 0, 1 here; ")
    assert commands[1] == ("# ranks compute on GPUs where there are any, else cpu; nccl where each has a GPU, else "
                           "gloo between them; vpipe train also gives the ranks a VPIPE_SECRET to know each other by")
    assert commands[2] == f"FOLDER={tmp_path}/runs/$(date +%Y-%m-%d_%H-%M-%S)"
    runs = {word for line in commands for word in shlex.split(line) if word.startswith("VPIPE_RUN=")}
    assert len(runs) == 1, "by which the ranks know each other"
    assert shlex.split(commands[5]) == [
        "RANK=1", "LOCAL_RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=23456", "OMP_NUM_THREADS=1",
        *runs, "GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo", sys.executable, "-m", "vpipe.app.launch.rank_main",
        "$FOLDER", "train", "&"]
    assert commands[6:] == ["wait"]
    assert yaml.safe_load(config)["parallel"]["master_port"] == 23456


def test_on_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["machines=[localhost:1, me@hostB:0]", "parallel.master_address=10.0.0.1", "parallel.interface=eth0",
                "launch.python=/opt/py thon", "launch.ssh_options=[-p, '22']"]
    commands, _ = printed(tmp_path, capsys, *settings)
    assert commands[0].startswith(f"# rank 0 here, on {socket.gethostname()}; ")
    assert commands[4].startswith("RANK=0 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 ")
    assert "GLOO_SOCKET_IFNAME=eth0" in commands[4]
    config = load_config(tmp_path / "c.yaml", settings)
    [ssh] = [line for line in commands if line.startswith("ssh ")]
    assert shlex.split(ssh) == ssh_command("me@hostB", config.launch)
    [rank] = [line for line in commands if line.startswith("RANK=1")]
    assert shlex.split(rank)[-7:] == ["VPIPE_HOST=hostB", "/opt/py thon", "-m", "vpipe.app.launch.rank_main", "$FOLDER",
                                      "train", "&"]


def test_ranks_that_split_layers_are_neighbours_on_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["parallel.tensor=2", "parallel.master_address=10.0.0.1", "parallel.interface=eth0"]
    commands, _ = printed(tmp_path, capsys, *settings,
                          "machines=[localhost:0, localhost:1, me@hostB:0, me@hostB:1]")
    assert [shlex.split(line)[:3] for line in commands if line.startswith("RANK=")] == [
        [f"RANK={rank}", f"LOCAL_RANK={rank % 2}", "WORLD_SIZE=4"] for rank in range(4)]
    config = write_config(tmp_path)
    assert main(["launch", "--print", str(config), "--set", "parallel.tensor=2", "--set",
                 "machines=[localhost:0, me@hostB:0, localhost:1, me@hostB:1]"]) == 2
    assert capsys.readouterr().err == (
        f"error: ranks 0 to 1 split every layer (parallel.tensor is 2), but are on 2 hosts: {socket.gethostname()}, "
        "hostB\nhint: give every host a multiple of 2 ranks, with numbers that follow one another\n")


def test_only_printing_is_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["launch", str(write_config(tmp_path))])
    assert caught.value.code == 2
    assert capsys.readouterr().err == ("error: the following arguments are required: --print\n"
                                       "hint: vpipe launch --help says how\n")
