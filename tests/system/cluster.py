"""A SLURM of one's own: munged, slurmctld and a slurmd per host, on namespaced hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts import SETTLE_S, Host, Hosts, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo")

# Nothing resolves the names of the nodes, as on many clusters: only NodeAddr says where they are.
SLURM_CONF = """\
ClusterName=vpipe
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 MaxTime=60 State=UP
"""


class Cluster:
    """Nodes ``n1``, ``n2`` ... on the hosts, with 4 processors each, whatever the machine has; the head is on the
    first host. It ends with the hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.head: Host = hosts[0]
        self.folder = folder
        settings = folder / "etc"
        for place in (settings, folder / "state"):
            place.mkdir(parents=True)
        nodes = "\n".join(f"NodeName=n{i} NodeHostname={host.name} NodeAddr={host.address} CPUs=4 RealMemory=1000"
                          for i, host in enumerate(hosts, 1))
        (settings / "slurm.conf").write_text(SLURM_CONF.format(head=self.head.name, address=self.head.address,
                                                               folder=folder, nodes=nodes))
        key = folder / "munge" / "key"
        key.parent.mkdir(mode=0o700)
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for host in hosts:
            host.bind(settings, Path("/etc/slurm"))
            host.run(["mkdir", "--mode", "755", "/run/munge"], check=True)
            state = [f"--{kind}-file={folder}/munge/{host.name}.{kind}" for kind in ("log", "seed", "pid")]
            self._daemon(host, ["munged", "--foreground", "--force", f"--key-file={key}", *state])
            until(lambda host=host: host.run(["munge", "-n"]).returncode == 0, SETTLE_S, "munged")  # type: ignore[misc]
        self._daemon(self.head, ["slurmctld", "-D"])
        for i, host in enumerate(hosts, 1):
            self._daemon(host, ["slurmd", "-D", "-N", f"n{i}"])
        until(lambda: self.head.run(["sinfo", "--noheader", "--format", "%D %t"]).stdout.split() ==
              [str(len(hosts)), "idle"], 30, "all nodes are idle")

    def command(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command on the head, where users log in."""
        return self.head.run(words, **options)

    def shown(self, job: int) -> Mapping[str, str]:
        """What SLURM says of a job."""
        text = self.command("scontrol", "--oneliner", "show", "job", str(job)).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job: int) -> str:
        """Such as PENDING, RUNNING, COMPLETED, FAILED, CANCELLED."""
        return self.shown(job)["JobState"]

    def wait(self, job: int, seconds: float) -> str:
        """The job's last state."""
        try:
            until(lambda: self.state(job) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), seconds,
                  f"job {job} has ended")
        except AssertionError as error:
            shown = self.shown(job)
            output = Path(shown["StdOut"])
            left = {host.name: sorted(host.processes().values()) for host in self.hosts}
            raise AssertionError(f"{error}: {shown}\n{left}\n{output.read_text() if output.exists() else ''}") from None
        return self.state(job)

    def _daemon(self, host: Host, command: Sequence[str]) -> None:
        with (self.folder / f"{host.name}-{command[0]}.out").open("wb") as output:
            host.popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
