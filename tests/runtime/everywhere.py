"""Train here and on every rank of a world: all must tell the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jobs
import nccl_jobs
import pytest
from world import World

HARDEST = {"eager": False, "buffered": False}
"""Of nccl's rules those under which ranks wait most."""
OVER: Mapping[str, Mapping[str, bool] | None] = {"gloo": None, "nccl": HARDEST}


def over(*rows: tuple[str, dict[str, Any]]) -> pytest.MarkDecorator:
    """Parametrize ``rules`` and ``arguments`` by rows of what carries tensors, such as "gloo nccl", and arguments."""
    return pytest.mark.parametrize(("rules", "arguments"), [
        pytest.param(OVER[name], arguments, id="-".join([name, *map(str, arguments.values())]))
        for names, arguments in rows for name in names.split()])


def same_everywhere(world: World, rules: Mapping[str, bool] | None = None, *, job: Callable[..., Any] = jobs.train,
                    **arguments: Any) -> dict[str, Any]:
    """Train here and on every rank, over gloo or under rules of nccl. With replicas a stage has a learning rate of its
    own."""
    expected, placement = jobs.train_here(**arguments), arguments.get("placement")
    results = world.run(job, **arguments) if rules is None else world.run(
        nccl_jobs.under, run=f"{job.__module__}.{job.__name__}", **rules, **arguments)
    for rank, result in enumerate(results):
        assert without_rates(result) == without_rates(expected), f"rank {rank}"
        rates = [step[2] for step in result["steps"]]
        if placement is None:
            assert rates == [step[2] for step in expected["steps"]], f"rank {rank}"
        elif arguments["schedule"] == "pipedream":
            [width] = [len(ranks) for ranks in placement if rank in ranks]
            own = [3e-3 * (jobs.decay(step) * (width / len(placement[0]))) for step, *_ in result["steps"]]
            assert rates in (own, [None] * len(own)), f"rank {rank}"
    return expected


def without_rates(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"steps": [[index, loss, norm, stop] for index, loss, _, norm, stop in run["steps"]]}
