"""Write a schedule, prove it, see a broken one refused, and compare both with 1F1B: without torch.

    python examples/own_schedule.py [FILE.csv]

A schedule is a generator that yields the compute actions of one rank. vpipe adds the transfers, checks every rule of a
correct schedule, and simulates. With FILE.csv it is written in the format of PyTorch's own pipeline runtime.
"""

import sys
from dataclasses import replace
from pathlib import Path

from vpipe.errors import CheckError
from vpipe.schedules import Action, Costs, build, check, lower, register_schedule, simulate

RANKS, MICROBATCHES = 4, 8


# %% Eager 1F1B: 1F1B with twice the forwards ahead, so that a transfer has time while the rank computes. It promises
# how many microbatches a rank holds at most; the checker tests that, too.
@register_schedule("eager", flush=True,
                   peak_activations=lambda rank, size: min(2 * (size.ranks - rank) - 1, size.microbatches))
def eager(rank, ranks, microbatches):
    ahead = min(2 * (ranks - 1 - rank), microbatches)
    for microbatch in range(ahead):
        yield Action.forward(rank, microbatch)
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            yield Action.forward(rank, ahead + microbatch)
        yield Action.backward(rank, microbatch)
    yield Action.step(rank, 0)


# %% The actions of every rank, first as they are written, then with the transfers; and the proof.
schedule = build("eager", RANKS, MICROBATCHES)
print("rank 2:", *schedule.programs[2][:6], "...")
lowered = lower(schedule)
check(lowered)
print("with transfers:", *lowered.programs[2][:6], "...")

# %% A mistake: on rank 2 the first backward comes before the first forward. The error has the actions and the place.
first, *others = schedule.programs[2]
at = next(number for number, action in enumerate(others) if action == Action.backward(2, 0))
wrong = [others[at], first, *others[:at], *others[at + 1:]]
try:
    check(replace(schedule, programs=(*schedule.programs[:2], tuple(wrong), *schedule.programs[3:])))
except CheckError as error:
    print(str(error).splitlines()[0])

# %% Where transfers take half the time of a forward, more forwards ahead hide them, and cost memory.
costs = Costs.of_ranks(schedule.placement, forward_s=2, input_s=2, weight_s=2, transfer_s=1)
for name in ("1f1b", "eager"):
    timeline = simulate(lower(build(name, RANKS, MICROBATCHES)), costs)
    print(f"{name:>5}: {timeline.makespan_s} seconds, each rank idle for {timeline.bubble_s}, {timeline.peak_bytes[0]} "
          "microbatches in the memory of rank 0")

assert "torch" not in sys.modules
if len(sys.argv) > 1:
    Path(sys.argv[1]).write_text(schedule.to_torch_csv())
