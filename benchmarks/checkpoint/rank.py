"""One rank of the pipeline that is saved: turns of every way to save, and streams that drain or do not."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from ways import WAYS, Way

from vpipe import Execution, Pipeline, Transfers
from vpipe.app.families.registry import ModelSettings, family_named

BATCH, LENGTH, WORDS, PREDICTIONS, MICROBATCHES = 8, 64, 8192, 8, 4
BEFORE, AFTER = 3, 6
"""Steps before and after a save."""

STREAM, DRAINS_EVERY = 24, 4
"""Steps of a stream without a flush, and between two drains of it."""


@dataclass(frozen=True)
class Turn:
    """What a rank saw of one save.

    Attributes:
        way: a name of :data:`WAYS`.
        step_s: the median of the steps before it.
        pause_s: for how long it did not train.
        save_s: until the checkpoint was complete.
        held_up_s: by how much the steps after it took longer: the writing takes from the cores, too.
        load_s: to read its part again, from the disk.
        bytes: of its part.
    """

    way: str
    step_s: float
    pause_s: float
    save_s: float
    held_up_s: float
    load_s: float
    bytes: int


def batches() -> Iterator[dict[str, Tensor]]:
    """BERT batches of random words."""
    random = torch.Generator().manual_seed(0)

    def words(*shape: int) -> Tensor:
        return torch.randint(5, WORDS, shape, generator=random)

    while True:
        yield {"input_ids": words(BATCH, LENGTH), "segment_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64),
               "input_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64), "masked_lm_ids": words(BATCH, PREDICTIONS),
               "masked_lm_positions": torch.arange(1, 1 + PREDICTIONS).expand(BATCH, -1).contiguous(),
               "next_sentence_labels": torch.randint(2, (BATCH,), generator=random)}


def pipeline(schedule: str) -> Pipeline:
    """Four blocks of 768 in two stages, with AdamW."""
    model = family_named("bert").factory(ModelSettings(vocab_size=WORDS, num_layers=4, hidden_size=768, num_heads=12,
                                                       sequence_length=LENGTH))
    return Pipeline(model, partial(torch.optim.AdamW, lr=1e-4, fused=True), stages=2, schedule=schedule,
                    microbatches=MICROBATCHES, transfers=Transfers(timeout_s=300), execution=Execution(device="cpu"))


def saves(folder: Path, turns: int) -> list[Turn]:
    """Turns of all ways, which take turns; the first of each, which takes memory anew, is left out."""
    pipe = pipeline("1f1b")
    ways = {name: make(folder / name) for name, make in WAYS.items()}
    steps, number, seen = pipe.train(batches()), count(1), []
    for turn in range(turns + 1):
        for name in sorted(ways, key=lambda name: (list(ways).index(name) + turn) % len(ways)):
            if dist.get_rank() == 0:
                print(f"turn {turn} of {turns}: {name}", file=sys.stderr, flush=True)
            made = one_save(pipe, steps, name, ways[name], next(number))
            seen += [made] if turn else []
    return seen


def one_save(pipe: Pipeline, steps: Iterator[object], name: str, way: Way, number: int) -> Turn:
    """Some steps, a save, some steps meanwhile; then the checkpoint is read again."""
    step_s = median(timed(steps) for _ in range(BEFORE))
    dist.barrier()
    began = time.perf_counter()
    tensors = pipe.engine.checkpoint_state()
    way.save(number, tensors)
    pause_s = time.perf_counter() - began
    after = 0.0 if way.pauses else sum(timed(steps) - step_s for _ in range(AFTER))
    save_s = way.ended() - began
    dist.barrier()
    forget_files(way.root)
    dist.barrier()
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    began = time.perf_counter()
    way.load(into)
    load_s = time.perf_counter() - began
    dist.barrier()
    if dist.get_rank() == 0:
        way.remove_older()
    dist.barrier()
    return Turn(name, step_s, pause_s, save_s, after, load_s, sum(tensor.nbytes for tensor in tensors.values()))


def timed(steps: Iterator[object]) -> float:
    """Seconds of the next step."""
    began = time.perf_counter()
    next(steps)
    return time.perf_counter() - began


def forget_files(root: Path) -> None:
    """Have the system read them from the disk again."""
    for path in root.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def streams(turns: int) -> list[tuple[float, float]]:
    """Seconds of ``STREAM`` steps under PipeDream without a drain, and with one every ``DRAINS_EVERY``."""
    pipe, data = pipeline("pipedream"), batches()

    def stream_s(drains: bool) -> float:
        dist.barrier()
        began = time.perf_counter()
        at = pipe.engine.training.position.steps
        ends = [*range(at + DRAINS_EVERY, at + STREAM, DRAINS_EVERY)] if drains else []
        for step in pipe.engine.training.train(islice(data, STREAM // MICROBATCHES),
                                      pauses=lambda done: next((end for end in ends if end > done), None)):
            if step.index + 1 in ends:
                pipe.engine.training.drain()
        return time.perf_counter() - began

    stream_s(drains=True)
    seen = []
    for turn in range(turns):
        if dist.get_rank() == 0:
            print(f"turn {turn + 1} of {turns}: drains", file=sys.stderr, flush=True)
        first = stream_s(drains=bool(turn % 2))
        second = stream_s(drains=not turn % 2)
        seen.append((second, first) if turn % 2 else (first, second))
    return seen


def main(folder: Path, turns: int) -> None:
    """Measure, and write it down for the process that started this one."""
    torch.set_num_threads(1)
    measured = {"saves": [asdict(turn) for turn in saves(folder, turns)], "drains": streams(turns)}
    Path(os.environ["THROUGHPUT_OUT"]).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
