"""Run one rank, whatever started it.

vpipe's own launcher, on this host or over ssh, runs ``python -m vpipe.app.launch.rank_main FOLDER TASK``: it has
checked the config and made the run's folder. Under torchrun and srun ``vpipe train`` calls :func:`train_rank`: there
rank 0 reads and checks the config and makes the folder, and hands both out. All describe the job by RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

The tasks: ``train``, with the folder of a checkpoint to resume, if any; ``verify N``: record N updates; ``profile``,
with sizes of microbatches.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from vpipe.app import signals
from vpipe.app.config.config import Config, parse_resolved
from vpipe.app.errors import StartError
from vpipe.app.imports import import_files, imported_files
from vpipe.app.launch.container import enter
from vpipe.app.launch.failure_report import reported_error, write_report
from vpipe.app.launch.network import interface_towards
from vpipe.app.launch.rank_env import check_gpus, check_neighbours, interface_variables, keep_memory_for, ranks_of
from vpipe.app.launch.restart import Attempt, Starter, fitted
from vpipe.app.progress import accept_any_text
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.resume import ResumePoint, nothing_left
from vpipe.app.train.run_folder import CONFIG, log_path
from vpipe.app.train.summary import headline
from vpipe.distributed import Host, RankEnvironment, exchange, watch
from vpipe.errors import Problem, RunError, UserError, VpipeError, counted

REPORTED_S = 2.0
"""Time for the rank that reports a failure to end first: torchrun ends all ranks when one has ended."""

T = TypeVar("T")

log = logging.getLogger("vpipe")


def main(folder: Path, task: str, *arguments: str) -> int:
    """Do a task that the launcher has prepared in ``folder``; a failure is written there for it.

    Returns:
        The exit status; of the first rank, when a signal ended the training, one that tells which
        (:func:`~vpipe.app.signals.status_after`).
    """
    accept_any_text()
    signals.handle_signals()
    _follow_launcher()
    rank = int(os.environ["RANK"])

    def work() -> signals.Stopped | None:
        import_files(imported_files())
        config = parse_resolved((folder / CONFIG).read_text())
        keep_memory_for(config)
        if task == "verify":
            from vpipe.app.verify import record_rank  # which no training needs

            record_rank(Job.from_config(config, checked=True), folder, int(arguments[0]))
        elif task == "profile":
            from vpipe.app.train.planning import profile_rank  # the same

            profile_rank(Job.from_config(config, checked=True), folder, arguments)
        if task != "train":
            return None
        environment = RankEnvironment.parse(os.environ)
        assert environment is not None, "the launcher has described it"
        startup, start = _Startup(environment), ResumePoint(folder, Path(*arguments)) if arguments else None
        return train(startup.agree(config, start), folder, start)

    stopped, failure = _run_logged(work, folder, rank)
    if failure is not None:
        write_report(folder, rank, failure)
    signals.ignore_signals()
    return failure.exit_status if failure is not None else signals.stopped_status(rank, stopped)


def train_rank(rank: RankEnvironment, config: Config | VpipeError | None, start: ResumePoint | None = None,
               restarts: int | None = None) -> None:
    """Train as one of the ranks that torchrun or srun started; one of them reports for all.

    Args:
        config: or what is wrong with it. None on a rank other than 0 where nothing in it is needed to meet rank 0.
        start: the run to resume, or the checkpoint to begin from; None for a new run. A starter that starts the
            ranks again finds its run again, which goes before it.
        restarts: after how many failures no attempt follows; None leaves that to the starter.

    Raises:
        VpipeError: a failure that this rank reports.
        SystemExit: another rank reports it; or a signal ended the training, with a status on rank 0 that tells which.
    """
    signals.handle_signals(signals.REPORT_S)
    try:
        _train_started(rank, config, start, restarts)
    except VpipeError as error:
        if error.brief is None:
            raise
        time.sleep(REPORTED_S)
        raise SystemExit(error.exit_status) from None
    finally:
        signals.ignore_signals()


def _train_started(rank: RankEnvironment, config: Config | VpipeError | None, start: ResumePoint | None,
                   restarts: int | None) -> None:
    os.environ.update(rank.variables)
    watch.report = _print_if_reporter
    error = config if isinstance(config, VpipeError) else None
    if isinstance(config, Config) and config.container:
        try:
            enter(config, () if start is None else (start.folder, start.checkpoint))
        except VpipeError as wrong:
            error = wrong
    startup = _Startup(rank, error)
    hosts = startup.exchange({"host": rank.host, "agent": rank.agent, "source": Host(rank.address).source})
    several = len({host["host"] for host in hosts}) > 1
    attempts: list[Attempt] = []

    def prepare() -> dict[str, Any]:
        assert isinstance(config, Config), "else there is an error"
        check_neighbours(config, [host["host"] for host in hosts])
        attempt = Attempt.find(rank, Job.from_config(_for_ranks(config, rank)), start, restarts,
                               list(dict.fromkeys(host["agent"] for host in hosts)), config.resolved_yaml())
        attempts.append(attempt)
        point = attempt.start
        checkpoint = None if point is None or point.checkpoint is None else str(point.checkpoint)
        return {"config": attempt.job.config.resolved_yaml(), "checkpoint": checkpoint,
                "done": None if point is None else nothing_left(point, attempt.job)}

    with watch.activity.during("preparing the run"):
        prepared = startup.from_rank_0(prepare)
    if prepared["done"] is not None:
        if rank.rank == 0:
            print(prepared["done"], flush=True)
        return
    point = None if prepared["checkpoint"] is None else ResumePoint(None, Path(prepared["checkpoint"]))
    job: Job | Config = parse_resolved(prepared["config"])
    if attempts:
        job, point = attempts[0].job, attempts[0].start
    job = startup.agree(job, point, several)
    folder = _folder_here(Path(startup.from_rank_0(lambda: str(attempts[0].begin()))), job)
    os.environ.update({RankEnvironment.HOST: rank.host} if several else {})
    _choose_interface(job.config, address_towards(rank, [host["source"] for host in hosts]))
    if rank.rank == 0:
        print(f"run folder: {folder}\n{headline(job)}, started by {rank.starter}"
              + (f" on {len({host['host'] for host in hosts})} hosts" if several else "")
              + ("; machines is not used" if job.config.machines else ""), flush=True)

    def work() -> signals.Stopped | None:
        keep_memory_for(job.config)
        return train(job, folder, point)

    stopped, failure = _run_logged(work, folder, rank.rank)
    if failure is not None:
        report = write_report(folder, rank.rank, failure)
        if watch.watchdog is not None and not watch.watchdog.is_reporter:
            time.sleep(REPORTED_S)
            raise SystemExit(failure.exit_status)
        raise reported_error(report)
    if rank.rank == 0:
        if stopped is None and (record := Starter.read(folder)) is not None:
            replace(record, ended=True).write(folder)
        print(f"run folder: {folder}", flush=True)
    if status := signals.stopped_status(rank.rank, stopped):
        raise SystemExit(status)


# -- before the training -------------------------------------------------------------------------------------------


class _Startup:
    """The agreement of all ranks before they train; they watch one another meanwhile.

    Args:
        error: why this rank cannot train, for the others.
    """

    def __init__(self, rank: RankEnvironment, error: VpipeError | None = None) -> None:
        self._rank, self._error = rank, error
        try:
            self._exchange = exchange()
        except VpipeError as apart:
            raise error or apart from None  # a config that cannot be read may be why they look elsewhere

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank."""
        return self._exchange.all_gather(value, "waiting for all ranks")

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Return on every rank what rank 0 makes; raise its error on rank 0 and SystemExit on the others."""
        made, error = (self._attempt(make) if self._rank.rank == 0 else (None, None))
        status, value = self.exchange([0 if error is None else error.exit_status, made])[0]
        if status:
            raise error or SystemExit(status)
        found: T = value
        return found

    def agree(self, job: Job | Config, start: ResumePoint | None, several_hosts: bool | None = None) -> Job:
        """Build this rank's job, check its host, and agree with the others that all can train.

        Args:
            job: of rank 0, or its config, with which the other ranks make the same.
            start: whose checkpoint must be readable here.
            several_hosts: whether the ranks are on several; None leaves that to the launcher's environment.

        Raises:
            VpipeError: on rank 0, all that is wrong on any rank; SystemExit on the others.
        """
        launched = several_hosts is None

        def check() -> tuple[Job, str]:
            config = job if isinstance(job, Config) else job.config
            check_gpus(config, [self._rank.device], started_by_others=not launched)
            if interfaces := config.parallel.interface or os.environ.get("GLOO_SOCKET_IFNAME"):
                Host.check_interfaces(interfaces)
            own = Job.from_config(job, checked=True) if isinstance(job, Config) else job
            # On one host all ranks read the same files.
            return own, own.fingerprint() if several_hosts or (launched and RankEnvironment.HOST in os.environ) else ""

        with watch.activity.during("opening the data"):
            found, error = self._attempt(check)
            if error is None and start is not None:
                _, error = self._attempt(lambda: start.manifest)
        problems = [[problem.what, problem.hint, problem.where] for problem in _problems(error)]
        states = self.exchange({"host": self._rank.host, "data": found[1] if found else "",
                                "status": error.exit_status if error else 0, "problems": problems})
        if (wrong := combined_error(states)) is not None:
            raise wrong if self._rank.rank == 0 else SystemExit(wrong.exit_status)
        assert found is not None, "no rank found anything wrong"
        return found[0]

    def _attempt(self, make: Callable[[], T]) -> tuple[T | None, VpipeError | None]:
        """Return what is made, or why not."""
        if self._error is not None:
            return None, self._error
        try:
            return make(), None
        except VpipeError as error:
            return None, error
        except Exception as defect:
            return None, RunError(f"{type(defect).__name__}: {defect}", rank=self._rank.rank,
                                  hint="this is a defect of vpipe or of a package it loads")


def _problems(error: VpipeError | None) -> Sequence[Problem]:
    if isinstance(error, RunError):
        return [Problem(error.located, error.hint)]
    return error.problems if isinstance(error, UserError) else ()


def combined_error(states: Sequence[Mapping[str, Any]]) -> VpipeError | None:
    """Return all that the ranks found wrong as one error: each thing once, with the ranks that met it if not all did.

    Args:
        states: by rank, see :meth:`_Startup.agree`.
    """
    found: dict[tuple[str, str, str | None], list[int]] = {}
    for rank, state in enumerate(states):
        for what, hint, where in state["problems"]:
            found.setdefault((what, hint, where), []).append(rank)
    problems = [Problem(what + (f" ({_named(ranks, states)})" if len(ranks) < len(states) else ""), hint, where)
                for (what, hint, where), ranks in found.items()]
    if not problems:  # but for ranks that read other data than others: they would train, and learn nothing
        by_data: dict[str, list[int]] = {}
        for rank, state in enumerate(states):
            by_data.setdefault(state["data"], []).append(rank)
        what = "; ".join(f"{_named(ranks, states)} read {data}" for data, ranks in by_data.items())
        return None if len(by_data) < 2 else StartError(
            f"the ranks do not read the same data: {what} (a hash of the vocabulary's size, the numbers of samples and "
            "the first batch)", hint="copy the same files, or the prepared data (dataset.cache_directory), to all "
            "hosts")
    if all(state["status"] in (0, UserError.exit_status) for state in states):
        return StartError.all_of(problems)
    first, *more = problems
    return RunError(first.what + (f" ({first.where})" if first.where else ""),
                    hint="\n".join([first.hint, *map(str, more)]))


def _named(ranks: Sequence[int], states: Sequence[Mapping[str, Any]]) -> str:
    on = sorted({str(states[rank]["host"]) for rank in ranks})
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(on)}"


def address_towards(rank: RankEnvironment, sources: Sequence[str | None]) -> str:
    """Return an address on the route to the other hosts: rank 0's, or another rank's where that means this very host,
    as on systems that give a host's own name a loopback address.

    Args:
        sources: by rank, its address on the route to rank 0; None if there is no route.
    """
    if not (sources[rank.rank] or "").startswith("127."):
        return rank.address
    return next((source for source in sources if source is not None and not source.startswith("127.")), rank.address)


def _for_ranks(config: Config, rank: RankEnvironment) -> Config:
    """Return the config for as many ranks as there are. Raises UserError if they differ and it is not elastic."""
    ranks = ranks_of(config)
    if rank.ranks == ranks or not config.elastic:
        rank.check(ranks, config.parallel.tensor)
        return config
    print(f"elastic: {rank.starter} started {counted(rank.ranks, 'process')}; the config has "
          f"{counted(ranks, 'rank')}, and is partitioned again", file=sys.stderr, flush=True)
    return fitted(config, rank.ranks)


def _choose_interface(config: Config, address: str) -> None:
    """Let gloo and nccl use the config's network interface, or the one on the route to the other hosts."""
    interface = chosen = config.parallel.interface
    if chosen is None and interface_variables("", found=True):  # else the starter's script may know better
        interface = interface_towards(address)
    if interface is not None:
        os.environ.update(interface_variables(interface, found=chosen is None))


def _folder_here(folder: Path, job: Job) -> Path:
    """Make the run's folder on this host, unless this host sees the one that rank 0 has made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CONFIG).exists():
            (folder / CONFIG).write_text(job.config.resolved_yaml())
    except OSError as error:
        raise RunError(f"cannot make the run's folder '{folder}' on this host: {error.strerror}",
                       hint="set log_directory to a folder that can be made and written on all hosts") from None
    return folder


def _run_logged(work: Callable[[], T], folder: Path, rank: int) -> tuple[T | None, VpipeError | None]:
    """Do a rank's work, with its log in ``folder``; return its result, or the error if it failed."""
    logging.basicConfig(handlers=[RankLog(log_path(folder, rank))], level=logging.INFO,
                        format="%(asctime)s %(levelname)s %(message)s")

    def ended(error: RunError) -> None:
        log.error("rank %d is ended in the middle of its work: %s", rank, error)
        write_report(folder, rank, error)
        if signals.PARENT_PIPE not in os.environ:  # no launcher reads the report
            _print_if_reporter(error)

    watch.report = ended
    try:
        result = work()
    except Exception as raised:
        log.exception("rank %d failed", rank)
        failure = error = RunError.for_want_of_descriptors(raised, rank) or raised
        if not isinstance(failure, VpipeError):
            what = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
            failure = RunError(what, rank=rank, hint="fix what raised it")
            failure.__cause__ = error
        watch.failed(failure)
        return None, failure
    log.info("rank %d has ended", rank)
    return result, None


def _print_if_reporter(error: RunError) -> None:
    if error.brief is None:
        print(error, file=sys.stderr, flush=True)


class RankLog(logging.FileHandler):
    """The log of a rank. When the disk is full it warns once, and training goes on."""

    _warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Warn that a line could not be written; the next one tries again."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True
            with suppress(OSError):
                print(f"warning: cannot write '{self.baseFilename}': {error.strerror}", file=sys.stderr, flush=True)


def _follow_launcher() -> None:
    """End at once when the launcher is gone, whatever this process waits for; handle the signals that it passes on."""
    pipe, folder = os.environ.get(signals.PARENT_PIPE), os.environ.get(RankEnvironment.MEETING)
    if pipe is None:
        return

    def wait() -> None:
        while number := os.read(int(pipe), 1):  # of a signal; nothing when the other end is closed
            signals.handle_signal(number[0])
        if folder:
            shutil.rmtree(folder, ignore_errors=True)  # the launcher would have
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
