"""One rank of a run whose processes torchrun or srun started: no launcher, the ranks agree among themselves."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.config.config import Config
from vpipe.distributed.environment import HOST, RankEnvironment
from vpipe.distributed.network import check_interfaces, interface_towards
from vpipe.distributed.signals import LAST_WORDS_S, Stopped, end_as_decided, listen, stopped_status
from vpipe.errors import RunError, VpipeError, counted
from vpipe.launch.checks import check_gpus, ranks_of
from vpipe.launch.conclusion import Conclusion
from vpipe.launch.container import enter
from vpipe.launch.elastic import fitted, other_updates
from vpipe.launch.failure_report import told, write_report
from vpipe.launch.local import GRACE_S
from vpipe.launch.rank_env import interface_variables
from vpipe.launch.rank_main import do, keep_memory, speaks
from vpipe.launch.rendezvous import Meeting
from vpipe.launch.restart import Starter
from vpipe.train.job import Job
from vpipe.train.loop import train
from vpipe.train.resume import Start
from vpipe.train.run_folder import CONFIG
from vpipe.train.summary import headline

log = logging.getLogger("vpipe")


def train_together(member: RankEnvironment, config: Config | VpipeError, start: Start | None = None,
                   restarts: int | None = None) -> None:
    """Be the rank that ``member`` says; rank 0 speaks for all.

    Args:
        config: or what is wrong with it.
        start: the run to go on with, or the checkpoint to begin from; None for a new run. A starter that starts the
            ranks anew finds its run again, which goes before it.
        restarts: after how many failures nothing more is tried; None leaves that to the starter.

    Raises:
        VpipeError: what this rank has to say of a failure.
        SystemExit: another rank says it; or a signal ended the training, with a status on rank 0 that tells which.
    """
    listen(LAST_WORDS_S)
    try:
        _train(member, config, start, restarts)
    finally:
        end_as_decided()


def _train(member: RankEnvironment, config: Config | VpipeError, start: Start | None, restarts: int | None) -> None:
    os.environ.update(member.variables)
    job, data, error, resolved = None, "", None, ""
    if isinstance(config, VpipeError):
        error = config
    else:
        try:
            enter(config, [] if start is None else start.folders)
        except VpipeError as wrong:
            error = wrong
    try:
        meeting = Meeting(member)
    except VpipeError as apart:
        raise error or apart from None  # a config that cannot be read may be why they look elsewhere
    if error is None:
        assert isinstance(config, Config), "else there is an error"
        resolved = config.resolved_yaml()
        try:
            config = _for_ranks(config, member)
            _check_here(member, config)
            job = Job.from_config(config)
            data = job.fingerprint()
        except VpipeError as wrong:
            error = wrong
        except Exception as defect:
            error = RunError(f"{type(defect).__name__}: {defect}", hint="this is a defect of vpipe or of a package it "
                             "loads", rank=member.rank)

    def conclude(agents: Sequence[str]) -> str:
        assert job is not None, "all ranks have one"
        return Conclusion.of(member, job, start, restarts, agents, resolved).text

    agreement = meeting.settle(error, data, conclude)
    assert job is not None, "else it did not settle"
    concluded = Conclusion(**json.loads(agreement.conclusion))
    if concluded.nothing_left is not None:
        if member.rank == 0:
            print(concluded.nothing_left, flush=True)
        return meeting.end()
    job = concluded.job(job)
    folder, hosts = _folder(Path(concluded.folder), job), len(set(agreement.hosts))
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
    stopped: list[Stopped | None] = [None]

    def work() -> None:
        if job.config.launch.keep_memory:
            log.info(keep_memory())
        stopped[0] = train(job, folder, None if concluded.checkpoint is None else Path(concluded.checkpoint))

    failure = do(folder, member.rank, work)
    if failure is not None:
        report = write_report(folder, member.rank, failure)
        raise _spoken(failure, report, folder, member, meeting, job.describe)
    if member.rank == 0:
        if stopped[0] is None:
            Starter.end(folder)
        print(f"run folder: {folder}", flush=True)
    if status := stopped_status(member.rank, stopped[0]):
        raise SystemExit(status)


def _for_ranks(config: Config, member: RankEnvironment) -> Config:
    """The config, for as many ranks as there are.

    Raises:
        UserError: they are not those of the schedule, and the config does not let that change.
    """
    ranks = ranks_of(config)
    if member.ranks == ranks or not config.elastic:
        member.check(ranks)
        return config
    if member.rank == 0:
        print(f"elastic: {member.starter} started {counted(member.ranks, 'process')}; the config has "
              f"{counted(ranks, 'rank')}, and is cut anew", file=sys.stderr, flush=True)
    fit = fitted(config, member.ranks)
    if member.rank == 0 and (change := other_updates(config, fit)) is not None:
        print(f"elastic: {change}", file=sys.stderr, flush=True)
    return fit


def _check_here(member: RankEnvironment, config: Config) -> None:
    """Refuse a GPU or a network interface that is not here."""
    check_gpus(config, [member.device], started_by_others=True)
    if (interfaces := config.parallel.interface or os.environ.get("GLOO_SOCKET_IFNAME")) is not None:
        check_interfaces(interfaces)


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


def _spoken(failure: VpipeError, mine: Mapping[str, Any], folder: Path, member: RankEnvironment, meeting: Meeting,
            describe: Callable[[int], str]) -> BaseException:
    """The failure, if this rank is the one to tell it; else an end in silence.

    A rank that found the cause tells it at once. One that lost another gives that one, or who lost it too, time to
    speak first.
    """
    if meeting.cause_is_said(GRACE_S if mine["blames_peer"] else 0.0):
        return SystemExit(failure.exit_status)
    if not mine["blames_peer"]:
        meeting.found_cause()
    if not speaks(folder, member.rank, member.ranks):
        return SystemExit(failure.exit_status)
    return told(mine, describe, folder)
