"""Launch a run on this host and over ssh on others: one attempt after the other."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from shlex import quote

from vpipe.app.config.config import Config
from vpipe.app.config.machines import parse_machine
from vpipe.app.errors import LastingError
from vpipe.app.launch import local
from vpipe.app.launch.local import Interrupted, StartNotice, StoppedRanks
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import check_gpus, hosts_of, ranks_here, ranks_of
from vpipe.app.launch.restart import Failure, fitted, give_up_reason, restart_point
from vpipe.app.launch.ssh import UnreachableError, connect, prepare
from vpipe.app.run_log import RunLog
from vpipe.app.train.resume import ResumePoint, nothing_left, prepare_run, run_config
from vpipe.app.train.run_folder import checkpoints_root, why_unsaved
from vpipe.checkpoint import Checkpoints
from vpipe.errors import Problem, RunError, UserError

PAUSE_S = 10.0
"""Time before hosts that could not be reached are tried again."""

STOP_S = 600.0
"""Time for ranks that are asked to stop: for a step or an evaluation that is under way, and the save."""


def run(config: Config, start: ResumePoint | None, restarts: int | None) -> Path | None:
    """Start the ranks, and after a failure start them again, from the newest checkpoint that is intact.

    A user's mistake, a failure that would come again and a signal end the run at once.

    Args:
        start: the run to resume, or the checkpoint to begin from; None for a new run.
        restarts: how often it may be started again; never when None.

    Returns:
        The folder of the run; None where nothing was left to train.

    Raises:
        VpipeError: the config, a host or the run is at fault.
        Interrupted: by a signal.
    """
    launched, allowed = _Run(config, start), restarts or 0
    failures: list[Failure] = []
    try:
        while True:
            try:
                launched.attempt()
                return launched.folder
            except Interrupted as signal:
                if not signal.saved:
                    launched.print_resume_command()
                raise
            except LastingError as error:
                raise launched.ended(error, None) from None
            except UnreachableError as error:
                if not failures:
                    raise
                what = error.problems[0].what
                failures.append(Failure(what, None, f"try {len(failures)}"))
                if give_up_reason(failures, allowed) is not None:
                    raise
                time.sleep(PAUSE_S)
            except UserError:
                if failures:
                    launched.print_resume_command()
                raise
            except RunError as error:
                if launched.folder is None:
                    raise
                what = error.located
                failures.append(launched.failure(what))
                if (why := give_up_reason(failures, allowed)) is not None:
                    raise launched.ended(error, why if allowed else None) from None
            launched.restart(f"attempt {len(failures) + 1} of {1 + allowed}", what)
    finally:
        if launched.folder is not None:
            print(f"run folder: {launched.folder}", flush=True)


class _Run:
    """The state of a run between its attempts; ``config`` as the user wrote it, ``folder`` None as long as it has none.
    """

    def __init__(self, config: Config, start: ResumePoint | None) -> None:
        self._config, self._start = config, start
        self.folder: Path | None = None
        self._restarted = False
        self._machines = config.machines  # of the attempt at hand
        self._planned: dict[tuple[str, ...] | None, Config] = {}  # by machines, with what was planned for them

    def attempt(self) -> None:
        """Start all ranks, here and on the other hosts, and wait for their end; an elastic run that was started again
        goes on without hosts that do not answer.
        """
        away: frozenset[str] = frozenset()  # logins of hosts that do not take part
        while True:
            try:
                return self._attempt(away)
            except UnreachableError as error:
                if not self._restarted:
                    raise
                if not self._config.elastic:
                    raise UnreachableError.because({
                        login: [Problem(problem.what, f"{problem.hint}; elastic: true goes on without it",
                                        problem.where) for problem in problems]
                        for login, problems in error.by_login.items()}) from None
                for problems in error.by_login.values():
                    print(f"elastic: going on without a host: {problems[0].what}", file=sys.stderr, flush=True)
                away |= error.by_login.keys()

    def _attempt(self, away: frozenset[str]) -> None:
        config = self._config
        if away:
            machines = tuple(text for text in config.machines or ()
                             if (entry := parse_machine(text)) and entry[0] not in away)
            config = fitted(config, len(machines)).model_copy(update={"machines": machines})
        config = self._planned.get(config.machines, config)
        hosts = hosts_of(config)
        free_port(config.parallel.master_port)  # refuses early; preparing data may take minutes
        if config.parallel.asks_for_gpus:  # else torch is not needed yet
            check_gpus(config, range(ranks_of(config)) if hosts is None else hosts.on(None).values())
        remotes = [] if hosts is None else connect(hosts, config.launch, container=bool(config.container))
        try:
            # torch is slow to import: only when the config is worth it.
            from vpipe.app.train.job import Job, new_run
            from vpipe.app.train.summary import headline

            job, start = Job.from_config(config), self._start
            config = job.config
            if start is not None and (done := nothing_left(start, job)) is not None:
                return print(done, flush=True)
            checkpoint = None if start is None else start.checkpoint
            here = ranks_here(config, hosts, job.processes, "train", *([] if checkpoint is None else [str(checkpoint)]))
            if remotes:
                prepare(remotes, config.resolved_yaml(), here)
            known, self.folder = self.folder, new_run(job) if start is None else prepare_run(start, job)
            self._machines = config.machines
            if known is None:
                print(f"run folder: {self.folder}")
            print(headline(job) + (f" on {1 + len(remotes)} hosts" if remotes else ""), flush=True)
            local.run_ranks(here, self.folder, lambda rank: job.describe(rank) if hosts is None else
                            hosts.described(rank, job.describe(rank)), remotes, STOP_S,
                            StartNotice(self.folder, here.world, checkpoint).update,
                            StoppedRanks(job.config.parallel.timeout_s))
        finally:
            local.close_all(remotes)

    def failure(self, what: str) -> Failure:
        """Return the failure that ended the attempt."""
        assert self.folder is not None
        checkpoint = None if self._start is None else self._start.checkpoint
        return Failure(what, RunLog(self.folder).last_step(), "" if checkpoint is None else checkpoint.name)

    def restart(self, attempt: str, what: str) -> None:
        """Prepare another attempt; arguments as in :func:`~vpipe.app.launch.restart.restart_point`."""
        assert self.folder is not None
        planned = run_config(self.folder)
        if planned.machines == self._machines:
            self._planned[self._machines] = planned
        if self._config.parallel.update_every is None:  # so that fewer ranks may keep the samples of an update
            self._config = self._config.with_parallel(update_every=planned.parallel.update_every)
        self._start, self._restarted = restart_point(self.folder, self._start, attempt, what), True

    def ended(self, error: RunError, why: str | None) -> RunError:
        """Return the last failure, with how to resume.

        Args:
            why: no attempt follows; None where none was allowed.
        """
        hints = [error.hint, *([] if why is None else [f"not started again: {why}"])]
        if self.folder is not None and "checkpoint" not in error.hint:
            hints += [self._resume_hint(self.folder)]
        error.hint = "; ".join(hints)
        return error

    def print_resume_command(self) -> None:
        """Print the command that resumes a run which was ended in the middle."""
        if self.folder is not None:
            print(self._resume_hint(self.folder), file=sys.stderr, flush=True)

    def _resume_hint(self, folder: Path) -> str:
        newest = Checkpoints(checkpoints_root(self._config, folder)).newest()
        if newest is not None:
            return f"go on from {newest.name} with: vpipe train --resume {quote(str(folder))}"
        return f"no checkpoint was made: {why_unsaved(self._config, folder)}"
