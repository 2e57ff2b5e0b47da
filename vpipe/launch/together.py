"""One rank of a run whose processes torchrun or srun started: no launcher, the ranks agree among themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from vpipe.errors import RunError, UserError, VpipeError
from vpipe.launch.container import enter
from vpipe.launch.failure import as_error, read_report, write_report
from vpipe.launch.folder import CONFIG, make_run_folder
from vpipe.launch.last_words import take_time_to_speak
from vpipe.launch.local import GRACE_S, POLL_S
from vpipe.launch.machine import check_gpus, ranks_of
from vpipe.launch.meeting import Meeting
from vpipe.launch.member import Member
from vpipe.launch.network import interface_towards
from vpipe.launch.ranks import HOST, interface_variables
from vpipe.launch.worker import do
from vpipe.train.config import Config
from vpipe.train.job import Job
from vpipe.train.loop import train
from vpipe.train.report import headline


def train_together(member: Member, config: Config | VpipeError) -> None:
    """Be the rank that ``member`` says; rank 0 speaks for all.

    Args:
        config: or what is wrong with it.

    Raises:
        VpipeError: what this rank has to say of a failure.
        SystemExit: another rank says it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the starter ends all ranks, and says so
    if member.starter == "srun":
        take_time_to_speak()
    job, error = None, None
    if isinstance(config, VpipeError):
        meeting = Meeting(member)
        error = config
    else:
        os.environ.update(member.variables)
        enter(config)
        meeting = Meeting(member)
        try:
            member.check(ranks_of(config))
            check_gpus(config, [member.device])
            job = Job.of(config)
        except VpipeError as wrong:
            error = wrong
        except Exception as defect:
            error = RunError(f"{type(defect).__name__}: {defect}", hint="this is a defect of vpipe or of a package it "
                             "loads", rank=member.rank)

    def conclude() -> str:
        assert job is not None, "all ranks have one"
        return os.path.abspath(make_run_folder(job.config.log_directory, job.config.resolved_yaml()))

    agreement = meeting.settle(error, conclude)
    assert job is not None, "else it did not settle"
    folder, hosts = _folder(Path(agreement.conclusion), job), len(set(agreement.hosts))
    os.environ.update({HOST: member.host} if hosts > 1 else {})
    interface = job.config.parallel.interface
    if interface is not None or "GLOO_SOCKET_IFNAME" not in os.environ:  # the starter's script may know better
        os.environ.update(interface_variables(interface or interface_towards(agreement.towards(member))))
    if member.rank == 0:
        print(f"run folder: {folder}\n{headline(job)}, started by {member.starter}"
              + (f" on {hosts} hosts" if hosts > 1 else ""), flush=True)
    failure = do(folder, member.rank, lambda: train(job, folder))
    if failure is not None:
        write_report(folder, member.rank, failure)
        raise _spoken(failure, folder, member, meeting, job.describe)
    if member.rank == 0:
        print(f"run folder: {folder}", flush=True)


def _folder(folder: Path, job: Job) -> Path:
    """The run's folder on this host, which rank 0 has made if they share it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CONFIG).exists():
            (folder / CONFIG).write_text(job.config.resolved_yaml())
    except OSError as error:
        raise RunError(f"cannot make the run's folder '{folder}' on this host: {error.strerror}",
                       hint="set log_directory to a folder that can be made and written on all hosts") from None
    return folder


def _spoken(failure: VpipeError, folder: Path, member: Member, meeting: Meeting,
            describe: Callable[[int], str]) -> BaseException:
    """The failure, if this rank is the one to tell it; else an end in silence.

    A rank that found the cause tells it at once. One that lost another gives that one, or who lost it too, time to
    speak first.
    """
    mine = read_report(folder, member.rank)
    assert mine is not None, "just written"
    if mine["blames_peer"]:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if meeting.cause_is_said():
                return SystemExit(failure.exit_status)
            time.sleep(POLL_S)
    elif meeting.cause_is_said():
        return SystemExit(failure.exit_status)
    else:
        meeting.found_cause()
    reports = [report for rank in range(member.ranks) if (report := read_report(folder, rank)) is not None]
    first = min(reports, key=lambda report: (report["blames_peer"], report["time"]))
    if first["rank"] != member.rank:
        return SystemExit(failure.exit_status)
    return as_error(mine, describe) if isinstance(failure, UserError) else RunError(
        mine["problems"][0][0], hint=mine["problems"][0][1])
