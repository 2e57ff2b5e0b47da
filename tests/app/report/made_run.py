"""A run's folder without a run: recorded actions made by a little simulation with uneven durations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vpipe.schedules.builder import build
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.rewrites import freeze

MS = 1e-3
TIMES = {Op.FORWARD: 10 * MS, Op.BACKWARD: 20 * MS, Op.INPUT: 10 * MS, Op.WEIGHT: 10 * MS, Op.RECOMPUTE: 9 * MS,
         Op.STEP: 3 * MS}
LATENCY_S, SEND_S, GAP_S = 0.4 * MS, 0.1 * MS, 0.05 * MS
Took = Callable[[int, Action], float]


def make_run(folder: Path, name: str = "1f1b", ranks: int = 4, microbatches: int = 8, updates: int = 6,
             took: Took | None = None, evaluation: bool = False, offsets: tuple[float, ...] = (),
             done: int = 0, frozen: int = 0, slices: int = 1) -> Path:
    """Write a run of ``updates`` steps; ``took`` says what an action takes on a rank, a little noise when left out.

    ``done``: steps of earlier attempts, from which it counts on. ``frozen``: stages in front that train nothing.
    """
    noise = random.Random(0)
    took = took or (lambda rank, action: TIMES[action.op] * (1 + 0.1 * noise.random() + (0.1 * rank)))
    recipe = RegisteredSchedule.named(name)
    placement = recipe.layout(ranks, recipe.chunks)
    total = microbatches * slices if recipe.flush else updates
    schedule = freeze(build(name, placement, total // slices, None if recipe.flush else 1, slices=slices), frozen)
    programs = [[Action(action.op, action.stage, action.microbatch + turn * (1 if action.op is Op.STEP else total))
                 for turn in range(updates if recipe.flush else 1) for action in program]
                for program in schedule.programs]
    stages = len(placement)
    (folder / "trace").mkdir(parents=True)
    header = {"format": 1, "host": "host-a", "placement": placement, "schedule": name, "flush": recipe.flush,
              "microbatches": microbatches if recipe.flush else 1, "update_every": microbatches if recipe.flush else 1,
              "partition": [3] * stages, "recomputed": [[]] * stages, "samples_per_step": 32,
              **({} if slices == 1 else {"slices": slices})}
    per_step = total if recipe.flush else 1
    programs = [[Action(action.op, action.stage, action.microbatch + done * (1 if action.op is Op.STEP else per_step))
                 for action in program] for program in programs]
    for rank, lines in enumerate(_lines(programs, placement, took, evaluation)):
        mine = {str(stage): 4_000_000 for stage, own in enumerate(placement) if rank in own}
        offset = offsets[rank] if offsets else 0.0
        own = {**header, "rank": rank, "clock_offset_s": offset, "weight_bytes": mine, "static_bytes": mine}
        moved = [[line[0], line[1] - offset, line[2] - offset, *line[3:]] if isinstance(line, list)
                 else {"evaluation": [second - offset for second in line["evaluation"]]} for line in lines]
        start, end = {"clock": [-offset, offset]}, {"clock": [1e3 - offset, offset]}
        (folder / "trace" / f"rank{rank}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in (own, start, *moved, end)))
    write_metrics(folder, updates)
    return folder


def write_metrics(folder: Path, updates: int, summary: Mapping[str, Any] | None = None) -> None:
    lines: list[dict[str, Any]] = []
    for step in range(updates):
        lines.append({"step": step, "loss": 4 * 0.99**step, "learning_rate": 1e-3, "time_s": 0.3 * (step + 1),
                      "step_s": 0.3, "samples_per_s": 20.0, "tokens_per_s": 4000.0 + step % 7, "mfu": 0.5, "hfu": 0.5})
    lines.append({"step": updates - 1, "evaluation_loss": 4 * 0.99**updates, "time_s": 0.3 * updates})
    lines.append({"step": updates - 1, "summary": summary or {"steps": updates}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lines(programs: list[list[Action]], placement: Any, took: Took, evaluation: bool) -> list[list[Any]]:
    """The record of every rank: each action as soon as its rank and its input are there."""
    ended: dict[tuple[bool, int, int], tuple[float, int]] = {}  # of forwards, else of what returns a gradient
    lines: list[list[Any]] = [[] for _ in programs]
    now, cursors, held = [0.0] * len(programs), [0] * len(programs), [0] * len(programs)
    last = len(placement) - 1
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while cursors[rank] < len(program):
                action = program[cursors[rank]]
                op, stage, index = action.op, action.stage, action.microbatch
                start = arrives = now[rank] + GAP_S
                source = (True, stage - 1, index) if op is Op.FORWARD and stage else (
                    (False, stage + 1, index) if op.returns and stage < last else None)
                if source is not None:
                    if source not in ended:
                        break
                    end, peer = ended[source]
                    arrives = max(start, end if peer == rank else end + SEND_S + LATENCY_S)
                end = arrives + took(rank, action)
                if op is Op.FORWARD or op.returns:
                    ended[op is Op.FORWARD, stage, index] = end, rank
                held[rank] += 1_000_000 * ((op is Op.FORWARD) - (op.returns))
                lines[rank].append([str(action), start, end, arrives - start, held[rank], 1])
                to = stage + 1 if op is Op.FORWARD else stage - 1 if op.returns else -1
                if 0 <= to <= last and rank not in placement[to]:
                    send = Action(Op.SEND_F if op is Op.FORWARD else Op.SEND_B, stage, index)
                    lines[rank].append([str(send), end, end + SEND_S, 0.0, held[rank], 1])
                    end += SEND_S
                now[rank], cursors[rank], moved = end, cursors[rank] + 1, True
    if evaluation:  # after the third update
        begins = max(line[2] for own in lines for line in own if "STEP2" in line[0])
        for own in lines:
            middle = next(at for at, line in enumerate(own) if "STEP2" in line[0]) + 1
            for line in own[middle:]:
                line[1], line[2] = line[1] + 5.0, line[2] + 5.0
            own.insert(middle, {"evaluation": [begins, begins + 4.5]})
    return lines
