"""Other hosts behind a stand-in for ssh on the path, which records its arguments and executes, or refuses as ssh does.

The ranks are stand-ins, too; tests/app/launch/test_hosts.py has real ones.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import fork_server
import pytest
from small_run import write_config
from stand_in_host import command as stand_in_command
from test_run_ends import alive, put_program, until

from vpipe.app.cli import main
from vpipe.app.config import machines as hosts_module
from vpipe.app.config.config import Config, load_config
from vpipe.app.config.machines import Hosts
from vpipe.app.launch import local
from vpipe.app.launch import ssh as ssh_module
from vpipe.app.launch.local import Interrupted, close_all, run_ranks
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import HostRanks, ranks_here
from vpipe.app.launch.remote_agent import decoded, encoded
from vpipe.app.launch.ssh import Remote, connect, hello_s, prepare, ssh_command
from vpipe.distributed.fault import Fault
from vpipe.errors import RunError, UserError

SSH = """\
#!/bin/bash
printf '%s\\0' "$@" >> "$RECORD/$$"
login=${@: -2:1}
echo "Welcome to $login"
case $login in
  closed) echo "me@closed: Permission denied (publickey,password)." >&2; exit 255;;
  down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255;;
  stranger) echo "Host key verification failed." >&2; exit 255;;
esac
echo $$ > "$RECORD/$login.pid"
exec bash -c "${@: -1}"
"""
RANK_WRITES = """\
print(f"this is {rank}")
os.makedirs(f"{folder}/trace", exist_ok=True)
open(f"{folder}/trace/rank{rank}.jsonl", "w").write("[]" * 1_500_000)
"""
RANK_FAILS = """\
time.sleep(0.5)
text = {"rank": rank, "time": time.time(), "starting": False, "blames": False, "fault": None,
        "reporter": True, "lasting": False, "frames": "",
        "problems": [[f"broke on {os.environ['VPIPE_HOST']}", f"the log is in {folder}/rank{rank}.log", None]]}
open(f"{folder}/rank{rank}.failure.json", "w").write(json.dumps(text))
sys.exit(1)
"""
RANK_STAYS = "print('stays', flush=True); time.sleep(60)"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The first host, ``hostA``; ssh is a stand-in."""
    record = tmp_path / "record"
    record.mkdir()
    stand_in = Path(__file__).with_name("stand_in_host.py")
    for name, text in (("ssh", SSH),
                       ("stand-in-python", f"#!/bin/sh\nexec {sys.executable} -S {fork_server.__file__} {stand_in}\n"),
                       ("started-python", f"#!/bin/sh\nexec {sys.executable} {stand_in}\n")):
        put_program(tmp_path / "bin" / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(record))
    monkeypatch.setenv(fork_server.ADDRESS, fork_server.address())
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(hosts_module.Host, "is_this", property(lambda host: host.name == "hostA"))
    monkeypatch.setattr(local, "GRACE_S", 0.6)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    until(lambda: not any(alive(int(file.read_text())) for file in record.glob("*.pid")), 20, "ssh has ended")


def load(here: Path, *machines: str, **launch: object) -> Config:
    """``python`` on the other hosts: agents from the fork server, behind a process that ssh has started."""
    settings = {"python": str(here / "bin" / "stand-in-python"), **launch}
    return load_config(write_config(here, parallel__model_parallel_size=len(machines)), [
        f"machines=[{', '.join(machines)}]", "parallel.master_address=127.0.0.1",
        *(f"launch.{key}={value}" for key, value in settings.items())])


class Run:
    """A run of stand-ins in this process: ``RANK_STAYS`` here, the program of ``STAND_IN_RANK`` there."""

    def __init__(self, here: Path, monkeypatch: pytest.MonkeyPatch, there: str, mine: str = RANK_STAYS,
                 machines: tuple[str, ...] = ("hostA:0", "hostB:0"), **launch: object) -> None:
        self.folder = here / "run"
        self.folder.mkdir()
        self._config = load(here, *machines, **launch)
        self._patch = monkeypatch
        monkeypatch.setenv("STAND_IN_RANK", there)
        monkeypatch.setattr(HostRanks, "command", stand_in_command)
        self._mine = mine
        self.remotes: list[Remote] = []

    def go(self) -> None:
        hosts = Hosts.from_machines(self._config.machines or ())
        mine = ranks_here(self._config, hosts, len(hosts.logins), "train")
        self.remotes = connect(hosts, self._config.launch, container=False)
        try:
            prepare(self.remotes, self._config.resolved_yaml(), mine)
            self._patch.setenv("STAND_IN_RANK", self._mine)  # of this host, from now on
            run_ranks(mine, self.folder, lambda rank: hosts.described(rank, f"rank {rank} (stage {rank})"),
                      self.remotes)
        finally:
            close_all(self.remotes)

    def fails(self) -> RunError:
        with pytest.raises(RunError) as caught:
            self.go()
        return caught.value

    def when(self, file: str, do: Callable[[], None]) -> threading.Thread:
        """Do it once a file of the run's folder has something in it."""

        def wait() -> None:
            until(lambda: (self.folder / file).exists() and (self.folder / file).stat().st_size > 0, 60, file)
            do()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


def remaining() -> list[int]:
    """Stand-ins for ranks that run, whatever started them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"STAND_IN_RANK" in (process / "cmdline").read_bytes() and \
                    f"RECORD={os.environ['RECORD']}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


pytestmark = [pytest.mark.jobs, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")]


def test_the_command(here: Path) -> None:
    config = load(here, "hostA:0", "me@hostB:0", ssh_options="[-p, '22 22']", directory="it's here", python="/p y")
    command = ssh_command("me@hostB", config.launch)
    assert command[:6] == ["ssh", "-T", "-o", "BatchMode=yes", "-p", "22 22"]
    assert "ConnectTimeout=10" in command
    assert command[-2] == "me@hostB"
    words = shlex.split(command[-1])
    assert words[:3] == ["exec", "sh", "-c"]
    assert shlex.split(words[3]) == ["cd", "it's here", "||", "exit", "96;", "exec", "/p y", "-m",
                                     "vpipe.app.launch.remote_agent"]


def test_messages_among_what_a_shell_prints() -> None:
    assert decoded(encoded(end=True)) == {"end": True}
    for line in (b"Welcome\n", b"vpipe: {\n", b"vpipe: []\n", b"vpipe: \xff\n", b""):
        assert decoded(line) is None


def test_every_refusal_at_once_with_host_and_remedy(here: Path, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(here, parallel__model_parallel_size=4)
    assert main(["train", str(config), "--set", "machines=['hostA:0', 'closed:0', 'down:0', 'stranger:0']"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: host closed does not let ssh in: me@closed: Permission denied (publickey,password).",
        "hint: vpipe never asks for a password: let a key in (ssh-copy-id), or name one in launch.ssh_options; "
        "try ssh -o BatchMode=yes closed true",
        "error: host down cannot be reached: ssh: connect to host down port 22: Connection refused",
        "hint: look whether it is up and the name is right; try ssh -o BatchMode=yes down true",
        "error: host stranger is not known to ssh: Host key verification failed.",
        "hint: look at its key and accept it once: ssh stranger"]
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("launch", "what", "hint"), [
    ({"python": "/no/python"}, "host hostB has no Python at '/no/python': ", "set launch.python to the Python there"),
    ({"directory": "/no/folder"}, "host hostB has no folder '/no/folder'", "make it, or set launch.directory"),
    ({"python": "{here}/bin/bare"}, "host hostB has no vpipe for '{here}/bin/bare': ", "install vpipe there"),
    ({"python": "{here}/bin/older"}, "host hostB has vpipe 0.0.1 (files 0), but this host 0.", "install the same"),
    ({"python": "/bin/false"}, "host hostB: the launcher there ended with exit status 1: it printed nothing", "try "),
])
def test_a_host_that_cannot_run_vpipe(here: Path, launch: dict[str, str], what: str, hint: str) -> None:
    for name, text in (("bare", f"exec {sys.executable} -S -I \"$@\""),
                       ("older", "echo 'vpipe: {\"hello\": {\"vpipe\": \"0.0.1 (files 0)\"}}'; read beat")):
        put_program(here / "bin" / name, f"#!/bin/sh\n{text}\n")
    config = load(here, "hostA:0", "hostB:0", **{key: value.format(here=here) for key, value in launch.items()})
    with pytest.raises(UserError) as caught:
        connect(Hosts.from_machines(config.machines or ()), config.launch, container=False)
    problem = caught.value.problems[0]
    assert problem.what.startswith(what.format(here=here))
    assert problem.hint.startswith(hint)


def test_a_host_that_does_not_reach_the_first(here: Path) -> None:
    config = load(here, "hostA:0", "hostB:0")
    hosts = Hosts.from_machines(config.machines or ())
    remotes = connect(hosts, config.launch, container=False)
    wrong = HostRanks(hosts.on(None), 2, "127.0.0.1", free_port(None), "lo", 1)
    remotes[0].send_run(config.resolved_yaml(), wrong)  # where nobody listens
    [problem] = remotes[0].problems("ready", 60.0)
    close_all(remotes)
    assert problem.what.startswith(f"host hostB: cannot reach 127.0.0.1 port {wrong.port}, where the ranks meet: ")
    assert problem.hint.startswith("let the firewalls pass it")


@pytest.mark.parametrize("options", [["-oConnectTimeout=50"], ["-o", "ConnectTimeout=50"], ["-o", "connecttimeout 50"]])
def test_a_longer_time_to_connect_is_waited_for(here: Path, options: list[str]) -> None:
    launch = load(here, "hostA:0", "hostB:0").launch
    assert hello_s(launch) == 30
    assert hello_s(launch.model_copy(update={"ssh_options": tuple(options)})) == 70


def test_a_host_that_falls_silent_before_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ssh has ended, too, but something holds its output open, as a shared connection may."""
    monkeypatch.setattr(ssh_module, "READY_S", 1.0)
    monkeypatch.setattr(ssh_module, "GRACE_S", 0.3)
    monkeypatch.setattr(Remote, "differs", lambda remote, container: [])
    quiet = here / "bin" / "quiet"
    put_program(quiet, "#!/bin/sh\necho 'vpipe: {\"hello\": {}}'; sleep 60 & echo $! > \"$RECORD/holder\"\n")
    config = load(here, "hostA:0", "hostB:0", python=str(quiet))
    hosts = Hosts.from_machines(config.machines or ())
    remotes = connect(hosts, config.launch, container=False)
    mine = ranks_here(config, hosts, 2, "train")
    try:
        with pytest.raises(UserError, match="host hostB did not say 'ready' within 1 s\nhint: look whether it is up"):
            prepare(remotes, config.resolved_yaml(), mine)
        close_all(remotes)
    finally:
        os.kill(int((here / "record" / "holder").read_text()), signal.SIGKILL)
        close_all(remotes)  # which closes its pipes, too, now that no thread is in them


@pytest.mark.parametrize("alive", [False, True])
def test_an_agent_ends_when_its_launcher_falls_silent(here: Path, alive: bool) -> None:
    """As after a cut, which neither sshd nor the agent would notice: its input stays open."""
    program = here / "agent.py"
    program.write_text("import sys\nfrom vpipe.app.launch import remote_agent as agent\nagent.SILENT_S = 0.8\n"
                       "sys.exit(agent.main())\n")
    with fork_server.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert b"hello" in agent.stdout.readline()
        for _ in range(8 if alive else 0):  # for twice as long
            time.sleep(0.2)
            agent.stdin.write(encoded(alive=True))
            agent.stdin.flush()
            assert agent.poll() is None
        assert agent.wait(20) == 1
    assert not list((here / "temporary").iterdir())


def test_a_launcher_that_is_busy_sends_signs_of_life(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_module, "ALIVE_S", 0.05)
    config = load(here, "hostA:0", "hostB:0")
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(Remote, "_send", lambda remote, **message: sent.append(message))
    remotes = connect(Hosts.from_machines(config.machines or ()), config.launch, container=False)
    until(lambda: sent.count({"alive": True}) > 2, 20, "signs of life")
    monkeypatch.undo()
    close_all(remotes)


def test_a_host_without_room(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps its agent from starting a rank is said, and it ends in good order."""
    config = load(here, "hostA:0", "hostB:0", python=str(here / "bin" / "full"))
    full = here / "bin" / "full"
    put_program(full, f"#!/bin/sh\nulimit -f 1\nexec {sys.executable} {Path(__file__).with_name('stand_in_host.py')}\n")
    hosts = Hosts.from_machines(config.machines or ())
    remotes = connect(hosts, config.launch, container=False)
    mine = ranks_here(config, hosts, 2, "train")
    try:
        with pytest.raises(UserError, match=r"host hostB: cannot start a rank there: .*File too large"):
            prepare(remotes, config.resolved_yaml(), mine)
    finally:
        close_all(remotes)
    assert remotes[0]._ssh.returncode == 2  # not SIGABRT


def test_no_ssh_on_the_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    config = load(here, "hostA:0", "hostB:0")
    with pytest.raises(UserError, match="there is no ssh on the path, by which 'hostB' would be reached\nhint: in"):
        connect(Hosts.from_machines(config.machines or ()), config.launch, container=False)


def test_all_that_ranks_write_comes_to_the_first_host(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(here, monkeypatch, RANK_WRITES, mine="pass", machines=("hostA:0", "hostB:1", "hostC:0", "hostB:0"))
    run.go()
    assert sorted(str(path.relative_to(run.folder)) for path in run.folder.rglob("rank*")) == sorted(
        [*(f"rank{rank}.log" for rank in (1, 2, 3)), *(f"trace/rank{rank}.jsonl" for rank in (1, 2, 3))])
    assert (run.folder / "rank3.log").read_text() == "this is 3\n"
    assert (run.folder / "trace" / "rank3.jsonl").read_text() == "[]" * 1_500_000  # in several messages
    assert not list((here / "temporary").iterdir())  # nothing is left there
    assert not remaining()


def test_another_host_appends_to_files_of_its_ranks_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_module, "MOST_BYTES", 8)
    remote = object.__new__(Remote)
    remote._folder, remote._devices, remote._received = here / "run", {1: 0, 2: 1}, Counter()
    (here / "outside").write_text("mine")
    for folder in ("run/trace", "elsewhere"):
        (here / folder).mkdir(parents=True)
    (here / "run" / "rank2.log").symlink_to(here / "outside")
    (here / "run" / "profiler_a").symlink_to(here / "elsewhere")
    before = sorted(here.rglob("*"))
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/step-1/rank1.safetensors", "rank0.log", "rank2.log",
                 "../rank1.log", "/rank1.log", "new/rank1.log", "profiler_a/rank1/rank1.json", "rank1.log/x",
                 "rank١.log", ""):
        remote._append(name, b"put")
    assert sorted(here.rglob("*")) == before
    assert (here / "outside").read_text() == "mine"
    for data in (b"first ", b"in", b" too much"):
        remote._append("rank1.log", data)
    assert (here / "run" / "rank1.log").read_text() == "first in"


@pytest.mark.parametrize("mine", [RANK_STAYS, "pass"], ids=["while-others-run", "when-others-have-ended"])
def test_a_failure_elsewhere_ends_all_and_names_its_host(here: Path, monkeypatch: pytest.MonkeyPatch,
                                                         mine: str) -> None:
    run = Run(here, monkeypatch, RANK_FAILS, mine)
    assert str(run.fails()) == f"error: broke on hostB\nhint: the log is in {run.folder}/rank1.log"
    assert not remaining()


def test_a_rank_killed_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(here, monkeypatch, "print('last words', flush=True); os.kill(os.getpid(), 9)")
    assert str(run.fails()) == (
        "error: rank 1 (stage 1) on hostB died without a message, killed by signal 9 (SIGKILL)\nhint: "
        f"{Fault.ended(1).hint}; log: {run.folder}/rank1.log")
    assert (run.folder / "rank1.log").read_text() == "last words\n"
    assert not remaining()


def test_a_failure_here_ends_those_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(here, monkeypatch, RANK_STAYS, mine=(
        "while not os.path.exists(f'{folder}/rank1.log'): time.sleep(0.01)\nsys.exit(3)"))
    assert str(run.fails()).startswith("error: rank 0 (stage 0) on hostA died without a message, with exit status 3\n")
    assert (run.folder / "rank1.log").read_text() == "stays\n"
    assert not remaining()


def test_a_lost_connection(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a launcher killed there, whose ranks see the end of their input."""
    run = Run(here, monkeypatch, RANK_STAYS, python=here / "bin" / "started-python")
    thread = run.when("rank1.log", lambda: os.kill(int((here / "record" / "hostB.pid").read_text()), signal.SIGKILL))
    assert str(run.fails()).startswith(
        "error: rank 1 (stage 1) on hostB died without a message, as ssh to hostB ended with exit status -9\nhint: ")
    thread.join()
    until(lambda: not remaining(), 20, "the ranks of hostB have ended")


def test_a_request_to_end(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(here, monkeypatch, RANK_STAYS)
    thread = run.when("rank1.log", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="SIGTERM"):
        run.go()
    thread.join()
    assert not remaining()
