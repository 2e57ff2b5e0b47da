"""Which ranks hold which stage: the map ``stage_to_rank_map``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from vpipe.config.validation import Mistake
from vpipe.schedules.registry import recipe_if_any
from vpipe.schedules.size import first_missing


def rank_map_mistakes(ranks: Mapping[str, tuple[int, ...]], stages: int, schedule: str) -> Iterator[Mistake]:
    """What is wrong with the map, for so many stages under a schedule, by its name, a file, or auto."""
    key = "stage_to_rank_map"
    expected = [str(stage) for stage in range(stages)]
    if set(ranks) != set(expected):
        yield Mistake((key,), f"names the stages {', '.join(sorted(ranks)) or 'none'}; there are {stages}: "
                              f"{', '.join(expected)}",
                              "name each stage once, as \"0\", \"1\", ..., or correct model_parallel_size")
        return
    places = [(stage, i, rank) for stage in expected for i, rank in enumerate(ranks[stage])]
    highest = max((rank for _, _, rank in places), default=0)
    hint = f"give each stage ranks of its own: {len(places)} of them are numbered 0 to {len(places) - 1}"
    held: dict[int, str] = {}
    twice = {(stage, rank) for stage in expected for rank, times in Counter(ranks[stage]).items() if times > 1}
    for stage in expected:
        if not ranks[stage]:
            yield Mistake((key, stage), f"puts stage {stage} on no rank", "give the stage a rank, or several")
    for stage, _, rank in places:
        other = held.setdefault(rank, stage)
        if rank < 0:
            yield Mistake((key, stage), f"puts stage {stage} on rank {rank}", hint)
        elif (stage, rank) in twice:
            yield Mistake((key, stage), f"names rank {rank} twice for stage {stage}", hint)
            return
        elif other != stage:
            both = f"puts stage {stage} on rank {rank}, where stage {other} is already; "
            if _one_stage_per_rank(schedule):
                yield Mistake((key, stage), f"{both}{schedule} holds one stage on each rank",
                              f"{hint}, or choose a schedule with several stages per rank, such as interleaved")
            elif ranks[other] != ranks[stage]:
                yield Mistake((key, stage), f"{both}stage {other} has ranks {list(ranks[other])}, stage {stage} "
                              f"{list(ranks[stage])}",
                              "let the two share all of their ranks, in the same order, or none")
    missing = first_missing(rank for _, _, rank in places)
    if missing < highest:
        yield Mistake((key,), f"names ranks up to {highest}, but never rank {missing}",
                      "number the ranks from 0 without a gap")


def _one_stage_per_rank(schedule: str) -> bool:
    if schedule == "auto":
        return True
    recipe = recipe_if_any(schedule)  # None of a file, or a name that is refused anyway
    return recipe is not None and recipe.chunks == 1 and not recipe.any_chunks
