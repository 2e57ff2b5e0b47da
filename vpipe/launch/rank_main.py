"""Run one rank, whatever started it.

vpipe's own launcher, on this host or over ssh, runs ``python -m vpipe.launch.rank_main FOLDER TASK``: it has checked
the config and made the run's folder. Under torchrun and srun ``vpipe train`` calls :func:`train_rank`: rank 0 makes the
folder, once all ranks have found that they can train. All describe the job by RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT; then all do the same.

The tasks: ``train``, with the folder of a checkpoint to go on from, if any; ``verify N``: record N updates;
``compare``, with the arguments of :func:`vpipe.compare.run.run_comparison`; ``profile``, with sizes of microbatches.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vpipe.config.config import Config, load_resolved
from vpipe.distributed.environment import HOST, PARENT_PIPE, RankEnvironment
from vpipe.distributed.init import meet
from vpipe.distributed.network import check_interfaces, interface_towards
from vpipe.distributed.rendezvous import Rendezvous
from vpipe.distributed.signals import REPORT_S, Stopped, handle_signal, handle_signals, ignore_signals, stopped_status
from vpipe.distributed.watchdog import activity, report_failure, report_to
from vpipe.errors import RunError, VpipeError, counted
from vpipe.launch.checks import check_gpus, ranks_of
from vpipe.launch.container import enter
from vpipe.launch.failure_report import reported_error, write_report
from vpipe.launch.rank_env import interface_variables, keep_memory
from vpipe.launch.restart import Starter, fitted, other_updates
from vpipe.launch.startup import Conclusion, address_towards, combined_error, rank_state, starting_timing
from vpipe.train.job import Job, headline
from vpipe.train.loop import train
from vpipe.train.resume import ResumePoint
from vpipe.train.run_folder import CONFIG, log_path

REPORTED_S = 2.0
"""For the rank that reports a failure to end first: torchrun ends all ranks when one has ended."""

log = logging.getLogger("vpipe")


def main(folder: Path, task: str, *arguments: str) -> int:
    """Do a task that the launcher has prepared in ``folder``; a failure is written down there for it.

    Returns:
        The exit status; of the first rank, when a signal ended the training in good order, one that tells which
        (:func:`~vpipe.distributed.signals.status_after`).
    """
    handle_signals()
    _follow_launcher()
    rank = int(os.environ["RANK"])
    stopped: list[Stopped | None] = [None]

    def work() -> None:
        config = load_resolved(folder / CONFIG)
        _keep_memory(config)
        if task == "train":
            environment = RankEnvironment.parse(os.environ)
            assert environment is not None, "the launcher has described it"
            stopped[0] = train(_meet_and_check(environment, config, launched=True).job, folder, *map(Path, arguments))
            return
        job = Job.from_config(config, checked=True)
        if task == "verify":
            from vpipe.verify.differences import record_rank

            record_rank(job, folder, int(arguments[0]))
        elif task == "compare":
            from vpipe.compare.run import run_comparison

            run_comparison(job, folder, arguments)
        else:
            assert task == "profile", task
            from vpipe.train.planning import profile_rank

            profile_rank(job, folder, arguments)

    failure = _run_logged(work, folder, rank)
    if failure is not None:
        write_report(folder, rank, failure)
    ignore_signals()
    return failure.exit_status if failure is not None else stopped_status(rank, stopped[0])


def train_rank(rank: RankEnvironment, config: Config | VpipeError, start: ResumePoint | None = None,
               restarts: int | None = None) -> None:
    """Train as one of the ranks that torchrun or srun started; one of them reports for all.

    Args:
        config: or what is wrong with it.
        start: the run to go on with, or the checkpoint to begin from; None for a new run. A starter that starts the
            ranks anew finds its run again, which goes before it.
        restarts: after how many failures nothing more is tried; None leaves that to the starter.

    Raises:
        VpipeError: a failure that this rank reports.
        SystemExit: another rank reports it; or a signal ended the training, with a status on rank 0 that tells which.
    """
    handle_signals(REPORT_S)
    try:
        _train_started(rank, config, start, restarts)
    except VpipeError as error:
        if error.brief is None:
            raise
        time.sleep(REPORTED_S)
        raise SystemExit(error.exit_status) from None
    finally:
        ignore_signals()


def _train_started(rank: RankEnvironment, config: Config | VpipeError, start: ResumePoint | None,
                   restarts: int | None) -> None:
    os.environ.update(rank.variables)
    report_to(_print_if_reporter)
    ranks = _meet_and_check(rank, config, start)
    job, states = ranks.job, ranks.states

    def conclude() -> Conclusion:
        agents = list(dict.fromkeys(state["agent"] for state in states))
        return Conclusion.make(rank, job, start, restarts, agents, ranks.config)

    concluded = _conclude(ranks, conclude)
    if concluded.nothing_left is not None:
        if rank.rank == 0:
            print(concluded.nothing_left, flush=True)
        return
    job = concluded.job(job)
    hosts = len({state["host"] for state in states})
    folder = _folder_here(Path(concluded.folder), job)
    os.environ.update({HOST: rank.host} if hosts > 1 else {})
    _choose_interface(job.config, address_towards(rank, states))
    if rank.rank == 0:
        print(f"run folder: {folder}\n{headline(job)}, started by {rank.starter}"
              + (f" on {hosts} hosts" if hosts > 1 else ""), flush=True)
    stopped: list[Stopped | None] = [None]

    def work() -> None:
        _keep_memory(job.config)
        stopped[0] = train(job, folder, None if concluded.checkpoint is None else Path(concluded.checkpoint))

    failure = _run_logged(work, folder, rank.rank)
    if failure is not None:
        report = write_report(folder, rank.rank, failure)
        if ranks.rendezvous is not None and not ranks.rendezvous.watchdog.is_reporter:
            time.sleep(REPORTED_S)
            raise SystemExit(failure.exit_status)
        raise reported_error(report, job.describe, folder)
    if rank.rank == 0:
        if stopped[0] is None:
            Starter.end(folder)
        print(f"run folder: {folder}", flush=True)
    if status := stopped_status(rank.rank, stopped[0]):
        raise SystemExit(status)


@dataclass(frozen=True)
class _ReadyRanks:
    """The ranks of a run, which all can train.

    Attributes:
        rendezvous: None of a rank that is alone.
        states: by rank, see :func:`~vpipe.launch.startup.rank_state`.
        config: as YAML, before it was fitted to the ranks that there are.
    """

    rendezvous: Rendezvous | None
    job: Job
    states: Sequence[Mapping[str, Any]]
    config: str

    def exchange(self, name: str, value: Any) -> list[Any]:
        """See :meth:`~vpipe.distributed.rendezvous.Rendezvous.exchange`."""
        return [value] if self.rendezvous is None else self.rendezvous.exchange(name, value)


def _meet_and_check(rank: RankEnvironment, config: Config | VpipeError, start: ResumePoint | None = None, *,
                    launched: bool = False) -> _ReadyRanks:
    """Meet the other ranks; open the data and check this host while the ranks watch one another.

    Args:
        launched: by vpipe's own launcher: the config is that of its job.

    Raises:
        VpipeError: on rank 0, all that is wrong on any rank; on another, why it met nobody.
        SystemExit: on the others.
    """
    error = config if isinstance(config, VpipeError) else None
    if isinstance(config, Config):
        try:
            enter(config, [] if start is None else start.folders)
        except VpipeError as wrong:
            error = wrong
    rendezvous = None
    if rank.ranks > 1:
        try:
            rendezvous = meet(starting_timing(config.parallel.timeout_s if isinstance(config, Config) else 60.0))
        except VpipeError as apart:
            raise error or apart from None  # a config that cannot be read may be why they look elsewhere
    job, data, written = None, "", ""
    if error is None:
        assert isinstance(config, Config), "else there is an error"
        written = config.resolved_yaml()
        try:
            with activity.during("opening the data"):
                config = config if launched else _for_ranks(config, rank)
                check_gpus(config, [rank.device], started_by_others=not launched)
                if interfaces := config.parallel.interface or os.environ.get("GLOO_SOCKET_IFNAME"):
                    check_interfaces(interfaces)
                job = Job.from_config(config, checked=launched, proved=rank.rank > 0)
                if not launched or HOST in os.environ:  # else all ranks read the files of one host
                    data = job.fingerprint()
        except VpipeError as wrong:
            error = wrong
        except Exception as defect:
            error = RunError(f"{type(defect).__name__}: {defect}", hint="this is a defect of vpipe or of a package it "
                             "loads", rank=rank.rank)
    state = rank_state(rank, error, data)
    states = [state] if rendezvous is None else rendezvous.exchange("state", state)
    found = combined_error(states)
    if found is not None:
        raise found if rank.rank == 0 else SystemExit(found.exit_status)
    assert job is not None, "no rank found anything wrong"
    return _ReadyRanks(rendezvous, job, states, written)


def _conclude(ranks: _ReadyRanks, conclude: Callable[[], Conclusion]) -> Conclusion:
    """Return what rank 0 concludes, on every rank.

    Raises:
        VpipeError: on rank 0, why it cannot.
        SystemExit: on the others.
    """
    answer: dict[str, Any] = {}
    error = None
    if ranks.rendezvous is None or ranks.rendezvous.rank == 0:
        try:
            answer = {"concluded": asdict(conclude())}
        except VpipeError as own:
            error, answer = own, {"status": own.exit_status}
    answer = ranks.exchange("conclusion", answer)[0]
    if "status" in answer:
        raise error or SystemExit(answer["status"])
    return Conclusion(**answer["concluded"])


def _for_ranks(config: Config, rank: RankEnvironment) -> Config:
    """Return the config for as many ranks as there are.

    Raises:
        UserError: they are not those of the schedule, and the config does not let that change.
    """
    ranks = ranks_of(config)
    if rank.ranks == ranks or not config.elastic:
        rank.check(ranks)
        return config
    fit = fitted(config, rank.ranks)
    if rank.rank == 0:
        print(f"elastic: {rank.starter} started {counted(rank.ranks, 'process')}; the config has "
              f"{counted(ranks, 'rank')}, and is cut anew", file=sys.stderr, flush=True)
        if (change := other_updates(config, fit)) is not None:
            print(f"elastic: {change}", file=sys.stderr, flush=True)
    return fit


def _choose_interface(config: Config, address: str) -> None:
    """Let gloo and nccl use the config's network interface, or the one that leads to the other hosts."""
    interface = config.parallel.interface
    if interface is not None:
        os.environ.update(interface_variables(interface))
    elif not interface_variables("").keys() <= os.environ.keys():  # the starter's script may know better
        found = interface_towards(address)
        for name, value in interface_variables(found).items() if found is not None else ():
            os.environ.setdefault(name, value)


def _folder_here(folder: Path, job: Job) -> Path:
    """Make the run's folder on this host, unless rank 0 has made it there, too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CONFIG).exists():
            (folder / CONFIG).write_text(job.config.resolved_yaml())
    except OSError as error:
        raise RunError(f"cannot make the run's folder '{folder}' on this host: {error.strerror}",
                       hint="set log_directory to a folder that can be made and written on all hosts") from None
    return folder


def _keep_memory(config: Config) -> None:
    if config.launch.keep_memory:
        log.info(keep_memory())


def _run_logged(work: Callable[[], None], folder: Path, rank: int) -> VpipeError | None:
    """Do a rank's work, with its log in ``folder``; return why it failed."""
    logging.basicConfig(handlers=[RankLog(log_path(folder, rank))], level=logging.INFO,
                        format="%(asctime)s %(levelname)s %(message)s")

    def ended(error: RunError) -> None:
        log.error("rank %d is ended in the middle of its work: %s", rank, error)
        write_report(folder, rank, error)
        if PARENT_PIPE not in os.environ:  # no launcher reads the report
            _print_if_reporter(error)

    report_to(ended)
    try:
        work()
    except Exception as error:
        log.exception("rank %d failed", rank)
        report_failure(error)
        if isinstance(error, VpipeError):
            return error
        what = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        failure = RunError(what, rank=rank, hint="mend what raised it")
        failure.__cause__ = error
        return failure
    log.info("rank %d has ended", rank)
    return None


def _print_if_reporter(error: RunError) -> None:
    if error.brief is None:
        print(error, file=sys.stderr, flush=True)


class RankLog(logging.FileHandler):
    """The log of a rank: a file that says once that it cannot be written, the disk being full; training goes on."""

    _warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Called where a line could not be written, which is tried again with the next one."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True
            with suppress(OSError):
                print(f"warning: cannot write '{self.baseFilename}': {error.strerror}", file=sys.stderr, flush=True)


def _follow_launcher() -> None:
    """End at once when the launcher is gone, whatever this process is waiting for; leave off when it passes a signal
    on."""
    pipe = os.environ.get(PARENT_PIPE)
    if pipe is None:
        return

    def wait() -> None:
        while number := os.read(int(pipe), 1):  # of a signal; nothing when the other end is closed
            handle_signal(number[0])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
