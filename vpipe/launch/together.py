"""One rank of a run whose processes torchrun or srun started: no launcher, the ranks agree among themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vpipe.errors import RunError, UserError, VpipeError
from vpipe.launch.container import enter
from vpipe.launch.failure import read_report, told, write_report
from vpipe.launch.folder import CONFIG, make_run_folder
from vpipe.launch.last_words import end_as_decided, take_time_to_speak
from vpipe.launch.local import GRACE_S
from vpipe.launch.machine import check_gpus, own_device, ranks_of
from vpipe.launch.meeting import Meeting
from vpipe.launch.member import Member
from vpipe.launch.network import check_interfaces, interface_towards
from vpipe.launch.ranks import interface_variables
from vpipe.launch.variables import HOST
from vpipe.launch.worker import do, speaks
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
    take_time_to_speak()
    try:
        _train(member, config)
    finally:
        end_as_decided()


def _train(member: Member, config: Config | VpipeError) -> None:
    os.environ.update(member.variables)
    job, data, error = None, "", None
    if isinstance(config, VpipeError):
        error = config
    else:
        try:
            enter(config)
        except VpipeError as wrong:
            error = wrong
    try:
        meeting = Meeting(member)
    except VpipeError as apart:
        raise error or apart from None  # a config that cannot be read may be why they look elsewhere
    if error is None:
        assert isinstance(config, Config), "else there is an error"
        try:
            member.check(ranks_of(config))
            member = _checked(member, config)
            job = Job.of(config)
            data = job.fingerprint()
        except VpipeError as wrong:
            error = wrong
        except Exception as defect:
            error = RunError(f"{type(defect).__name__}: {defect}", hint="this is a defect of vpipe or of a package it "
                             "loads", rank=member.rank)

    def conclude() -> str:
        assert job is not None, "all ranks have one"
        made = make_run_folder(job.config.log_directory, job.config.resolved_yaml())
        job.keep_plan(made)
        return os.path.abspath(made)

    agreement = meeting.settle(error, data, conclude)
    assert job is not None, "else it did not settle"
    folder, hosts = _folder(Path(agreement.conclusion), job), len(set(agreement.hosts))
    os.environ.update({HOST: member.host} if hosts > 1 else {})
    interface = job.config.parallel.interface
    if interface is not None:
        os.environ.update(interface_variables(interface))
    elif not interface_variables("").keys() <= os.environ.keys():  # the starter's script may know better
        found = interface_towards(agreement.towards(member))
        for name, value in interface_variables(found).items() if found is not None else ():
            os.environ.setdefault(name, value)
    if member.rank == 0:
        print(f"run folder: {folder}\n{headline(job)}, started by {member.starter}"
              + (f" on {hosts} hosts" if hosts > 1 else ""), flush=True)
    failure = do(folder, member.rank, lambda: train(job, folder))
    if failure is not None:
        write_report(folder, member.rank, failure)
        raise _spoken(failure, folder, member, meeting, job.describe)
    if member.rank == 0:
        print(f"run folder: {folder}", flush=True)


def _checked(member: Member, config: Config) -> Member:
    """The member with its GPU, if it and the network are here."""
    member = replace(member, device=own_device(config, member.device))
    os.environ.update(member.variables)
    check_gpus(config, [member.device])
    if (interfaces := config.parallel.interface or os.environ.get("GLOO_SOCKET_IFNAME")) is not None:
        check_interfaces(interfaces)
    return member


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
    if meeting.cause_is_said(GRACE_S if mine["blames_peer"] else 0.0):
        return SystemExit(failure.exit_status)
    if not mine["blames_peer"]:
        meeting.found_cause()
    if not speaks(folder, member.rank, member.ranks):
        return SystemExit(failure.exit_status)
    return told(mine, describe) if isinstance(failure, UserError) else RunError(
        mine["problems"][0][0], hint=mine["problems"][0][1])
