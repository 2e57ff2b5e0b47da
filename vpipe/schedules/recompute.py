"""Early recompute: dropped activations are made again while the gradient is still on its way."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from vpipe.schedules.action import RETURNS, Action, Op


def with_recompute(program: Iterator[Action], stages: Collection[int]) -> Iterator[Action]:
    """The program with an R right before every backward (B or I) of ``stages`` that has none yet.

    A backward waits for its gradient where a rank has to wait; an R before it needs no gradient and fills
    that time. Any earlier place would hold the activations of one more microbatch.
    """
    done: set[tuple[int, int]] = set()
    for action in program:
        key = action.stage, action.microbatch
        if action.op is Op.RECOMPUTE:
            done.add(key)
        elif action.op in RETURNS and action.stage in stages and key not in done:
            yield Action(Op.RECOMPUTE, *key)
        yield action
