"""Launch a run on this host and over ssh on others: one attempt after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from vpipe.checkpoint.directory import Checkpoints
from vpipe.config.config import Config
from vpipe.config.machines import Hosts, Machine
from vpipe.distributed.network import free_port
from vpipe.errors import LastingError, Problem, RunError, UserError
from vpipe.launch import local
from vpipe.launch.local import Interrupted, StartNotice, StoppedRanks
from vpipe.launch.rank_env import check_gpus, hosts_of, ranks_here, ranks_of
from vpipe.launch.restart import Failure, fitted, give_up_reason, restart_point
from vpipe.launch.ssh import Remote, UnreachableError, connect, prepare
from vpipe.train.run_folder import checkpoints_root, last_step, why_unsaved

if TYPE_CHECKING:
    from vpipe.train.resume import ResumePoint

PAUSE_S = 10.0
"""Before hosts that could not be reached are tried again."""

STOP_S = 600.0
"""For ranks that are asked to leave off: a step, or an evaluation, that is under way, and the save."""


def run(config: Config, start: ResumePoint | None, restarts: int | None) -> None:
    """Start the ranks, and after a failure start them again, from the newest checkpoint that is intact.

    A user's mistake, a failure that would come again and a signal end the run at once.

    Args:
        start: the run to go on with, or the checkpoint to begin from; None for a new run.
        restarts: how often it may be started again; never when None.

    Raises:
        VpipeError: the config, a host or the run is at fault.
        Interrupted: by a signal.
    """
    launched, allowed = _Run(config, start), restarts or 0
    failures: list[Failure] = []
    try:
        while True:
            try:
                return launched.attempt()
            except Interrupted as signal:
                if not signal.saved:
                    launched.print_resume_command()
                raise
            except LastingError as error:
                raise launched.ended(error, None) from None
            except UnreachableError as error:
                if not failures:
                    raise
                said = error.problems[0].what
                failures.append(Failure(said, None, f"try {len(failures)}"))
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
                said = error.located
                failures.append(launched.failure(said))
                if (why := give_up_reason(failures, allowed)) is not None:
                    raise launched.ended(error, why if allowed else None) from None
            launched.restart(f"attempt {len(failures) + 1} of {1 + allowed}", said)
    finally:
        if launched.folder is not None:
            print(f"run folder: {launched.folder}", flush=True)


class _Run:
    """The state of a run between its attempts.

    Args:
        config: as the user wrote it.

    Attributes:
        folder: of the run; None as long as it has none.
    """

    def __init__(self, config: Config, start: ResumePoint | None) -> None:
        self._config, self._start = config, start
        self.folder: Path | None = None
        self._restarted = False
        self._machines = config.machines  # of the attempt at hand
        self._arranged: dict[tuple[str, ...] | None, Config] = {}  # by machines, with what was planned for them

    def attempt(self) -> None:
        """Start all ranks, here and on the other hosts, and wait for their end.

        Raises:
            UnreachableError: hosts do not answer.
            VpipeError: the config, a host or the run is at fault.
            Interrupted: by a signal.
        """
        away: frozenset[str] = frozenset()
        while True:
            try:
                return self._attempt(away)
            except UnreachableError as error:
                away |= self._left_out(error)

    def _attempt(self, away: frozenset[str]) -> None:
        """See :meth:`attempt`.

        Args:
            away: logins of hosts that do not take part.
        """
        config, hosts, remotes = self._connected(away)
        try:
            # torch is slow to import: only when the config is worth it.
            from vpipe.train.job import Job, headline, new_run
            from vpipe.train.resume import nothing_left, prepare_run

            job = Job.from_config(config)
            config = job.config
            start = self._start
            if start is not None and (done := nothing_left(start, job)) is not None:
                return print(done, flush=True)
            checkpoint = None if start is None else start.checkpoint
            here = replace(ranks_here(config, hosts, job.schedule.ranks, free_port(config.parallel.master_port)),
                           task=("train", *([] if checkpoint is None else [str(checkpoint)])))
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

    def _connected(self, away: frozenset[str]) -> tuple[Config, Hosts | None, list[Remote]]:
        """Return the config with the hosts that take part, and the launchers of the others."""
        config = self._config if not away else _without(self._config, away)
        config = self._arranged.get(config.machines, config)
        hosts = hosts_of(config)
        free_port(config.parallel.master_port)  # refuses early; preparing data may take minutes
        if config.parallel.asks_for_gpus:  # else torch is not needed yet
            check_gpus(config, range(ranks_of(config)) if hosts is None else hosts.on(None).values())
        if hosts is None:
            return config, None, []
        return config, hosts, connect(hosts, config.launch, container=bool(config.container))

    def _left_out(self, error: UnreachableError) -> frozenset[str]:
        """Return the hosts that cannot take part, if the run may go on without them.

        Raises:
            UnreachableError: it may not.
        """
        if not self._restarted:
            raise error
        if not self._config.elastic:
            raise UnreachableError.because({
                login: [Problem(problem.what, f"{problem.hint}; elastic: true goes on without it", problem.where)
                        for problem in problems] for login, problems in error.by_login.items()}) from None
        for problems in error.by_login.values():
            print(f"elastic: going on without a host: {problems[0].what}", file=sys.stderr, flush=True)
        return frozenset(error.by_login)

    def failure(self, what: str) -> Failure:
        """Return the failure that ended the attempt."""
        assert self.folder is not None
        checkpoint = None if self._start is None else self._start.checkpoint
        return Failure(what, last_step(self.folder), "" if checkpoint is None else checkpoint.name)

    def restart(self, attempt: str, what: str) -> None:
        """Prepare another attempt, and print so.

        Args:
            attempt: ``attempt 2 of 4``.
            what: failed.
        """
        from vpipe.train.resume import run_config

        assert self.folder is not None
        arranged = run_config(self.folder)
        if arranged.machines == self._machines:
            self._arranged[self._machines] = arranged
        if self._config.parallel.update_every is None:  # so that fewer ranks may keep the samples of an update
            self._config = self._config.with_parallel(update_every=arranged.parallel.update_every)
        self._start, self._restarted = restart_point(self.folder, self._start, attempt, what), True

    def ended(self, error: RunError, why: str | None) -> RunError:
        """Return the last failure, with how to go on.

        Args:
            why: nothing is started again; None where nobody asked for that.
        """
        hints = [error.hint, *([] if why is None else [f"not started again: {why}"])]
        if self.folder is not None and "checkpoint" not in error.hint:
            hints += [self._resume_hint(self.folder)]
        error.hint = "; ".join(hints)
        return error

    def print_resume_command(self) -> None:
        """Print from where a run that was ended in the middle may go on."""
        if self.folder is not None:
            print(self._resume_hint(self.folder), file=sys.stderr, flush=True)

    def _resume_hint(self, folder: Path) -> str:
        newest = self._newest
        if newest is not None:
            return f"go on from {newest.name} with: vpipe train --resume {quote(str(folder))}"
        return f"no checkpoint was made: {why_unsaved(self._config, folder)}"

    @property
    def _newest(self) -> Path | None:
        if self.folder is None:
            return None
        return Checkpoints(checkpoints_root(self._config, self.folder)).newest()


def _without(config: Config, away: Set[str]) -> Config:
    """Return the config for the hosts that are not away."""
    there = tuple(text for text in config.machines or () if (entry := Machine.parse(text)) and entry.login not in away)
    return fitted(config, len(there)).model_copy(update={"machines": there})
