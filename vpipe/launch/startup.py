"""Agree with all ranks before the training: every rank can train, and all read the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vpipe.distributed.environment import RankEnvironment
from vpipe.distributed.fault import WatchdogTiming
from vpipe.distributed.network import source_towards_name
from vpipe.errors import Problem, RunError, StartError, UserError, VpipeError

JOIN_S = 120.0
"""For all processes to be started."""

SILENT_S = 60.0
"""Without a sign of life from a rank that starts. Preparing a large text takes minutes, in which it gives signs."""


def starting_timing(timeout_s: float) -> WatchdogTiming:
    """Return the watchdog's timing until all ranks begin to train."""
    usual = WatchdogTiming.from_timeout(timeout_s)
    return WatchdogTiming(usual.beat_s, max(SILENT_S, usual.silent_s), usual.grace_s, usual.long_s, JOIN_S)


def rank_state(rank: RankEnvironment, error: VpipeError | None, data: str) -> dict[str, Any]:
    """Return what the others must know of a rank that has looked at the config.

    Args:
        error: why it cannot train.
        data: the fingerprint of its data.
    """
    problems: list[list[str | None]] = []
    if isinstance(error, UserError):
        problems = [[problem.what, problem.hint, problem.where] for problem in error.problems]
    elif isinstance(error, RunError):
        problems = [[error.located, error.hint, None]]
    return {"host": rank.host, "agent": rank.agent, "data": data, "source": source_towards_name(rank.address),
            "status": error.exit_status if error else 0, "problems": problems}


def combined_error(states: Sequence[Mapping[str, Any]]) -> VpipeError | None:
    """Return all that the ranks found wrong as one error: each thing once, with the ranks that met it if not all did.

    Args:
        states: by rank, see :func:`rank_state`.
    """
    found: dict[tuple[str, str, str | None], list[int]] = {}
    for rank, state in enumerate(states):
        for what, hint, where in state["problems"]:
            found.setdefault((what, hint, where), []).append(rank)
    problems = [Problem(what + (f" ({_named(ranks, states)})" if len(ranks) < len(states) else ""), hint, where)
                for (what, hint, where), ranks in found.items()]
    if not problems:
        return _different_data(states)
    if all(state["status"] in (0, UserError.exit_status) for state in states):
        return StartError.all_of(problems)
    first, *more = problems
    return RunError(first.what + (f" ({first.where})" if first.where else ""),
                    hint="\n".join([first.hint, *map(str, more)]))


def _different_data(states: Sequence[Mapping[str, Any]]) -> UserError | None:
    """Refuse ranks that read other data than others: they would train, and learn nothing."""
    by_data: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        by_data.setdefault(state["data"], []).append(rank)
    if len(by_data) < 2:
        return None
    what = "; ".join(f"{_named(ranks, states)} read {data}" for data, ranks in by_data.items())
    return StartError(f"the ranks do not read the same data: {what} (a hash of the vocabulary's size, the numbers of "
                     "samples and the first batch)", hint="copy the same files, or the prepared data "
                     "(dataset.cache_directory), to all hosts")


def _named(ranks: Sequence[int], states: Sequence[Mapping[str, Any]]) -> str:
    on = sorted({str(states[rank]["host"]) for rank in ranks})
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(on)}"


def address_towards(rank: RankEnvironment, states: Sequence[Mapping[str, Any]]) -> str:
    """Return an address on the route to the other hosts: rank 0's, or where that means this very host, another rank's.

    Many systems give a host's own name a loopback address.
    """
    sources = [state["source"] for state in states]
    if not (sources[rank.rank] or "").startswith("127."):
        return rank.address
    return next((source for source in sources if source is not None and not source.startswith("127.")), rank.address)
