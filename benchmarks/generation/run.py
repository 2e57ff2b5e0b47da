"""Compare caches with whole forwards, and ranks with one process; see the README beside this file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.launch.network import free_port
from vpipe.distributed import join_world
from vpipe.extras.generation.decoding import Chosen, Decoding, Request
from vpipe.extras.generation.pipelined_decoding import GenerationRank, in_flight
from vpipe.extras.generation.stage_decoder import DecoderModel, Pass, StageDecoder, decode
from vpipe.model.model import Model
from vpipe.model.split import balanced
from vpipe.runtime.transport.process_group import DistributedTransport

WINDOW, PROMPT = 1024, 32
REAL = {"n_layer": 8, "n_embd": 512, "n_head": 8}
EMULATED = {"n_layer": 16, "n_embd": 32, "n_head": 2}


class SleepingStage(StageDecoder):
    """A stage whose device takes ``pass_s`` for the whole model, whatever the layers here take themselves."""

    pass_s = 0.0
    share = 1.0

    def run(self, request: Request, slot: int, one: Pass, received: Sequence[Tensor]) -> list[Tensor]:
        until = time.perf_counter() + self.pass_s * self.share
        found = super().run(request, slot, one, received)
        time.sleep(max(0.0, until - time.perf_counter()))
        return found


def model_of(sizes: dict[str, int]) -> tuple[Model, list[float]]:
    """Return a GPT, and the operations of its layers per token."""
    settings = ModelSettings(8192, sequence_length=PROMPT, overrides={
        "n_positions": WINDOW, "initializer_range": 0.1, "activation_function": "gelu", **sizes})
    family = family_named("gpt")
    assert family.flops is not None
    return family.factory(settings), [float(number) for number in family.flops(settings)]


def requests_of(number: int, tokens: int, **decoding: Any) -> list[Request]:
    draw = torch.Generator().manual_seed(0)
    return [Request(tuple(torch.randint(8192, (PROMPT,), generator=draw).tolist()),
                    Decoding(tokens, 8192, seed=seed, **decoding)) for seed in range(number)]


def stage_of(case: dict[str, Any], rank: int) -> tuple[StageDecoder, int]:
    """Return the layers of a rank, and the number of ranks."""
    ranks, (model, costs) = case["ranks"], model_of(case["sizes"])
    layers = len(model)
    partition = balanced([1.0] * layers if case["pass_ms"] else costs, ranks)
    spec = model.split(partition)[rank].layers
    modules = torch.nn.ModuleDict()
    whole = model.materialize(0).eval()
    modules._modules.update({model.layers[number].name: whole[model.layers[number].name] for number in spec})
    stage = SleepingStage(DecoderModel(model), modules, WINDOW, spec)
    stage.pass_s, stage.share = case["pass_ms"] / 1e3, len(spec) / layers
    return stage, ranks


def run_system(case: dict[str, Any]) -> None:
    """Run a rank of a system; rank 0 generates whenever it reads a line, and prints tokens and seconds. Every rank
    prints its CPU seconds of a turn."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    stage, ranks = stage_of(case, rank)
    requests = requests_of(case["requests"], case["tokens"], **case["decoding"])
    transport = None
    if ranks > 1:
        join_world("gloo", 600.0, "cpu")
        transport = DistributedTransport(torch.device("cpu"), 600.0, in_flight(ranks, len(requests)),
                                         lambda rank: f"rank {rank}", buckets=0)

    def count(choices: Iterator[tuple[int, Chosen]]) -> None:
        began = time.perf_counter()
        number = sum(1 for _ in choices)
        print(number, time.perf_counter() - began, flush=True)

    for _ in range(case["turns"]):
        if rank == 0:
            sys.stdin.readline()
        began = time.process_time()
        if transport is None:
            count((number, chosen) for number, request in enumerate(requests) for chosen in decode(stage, request))
        else:
            here = GenerationRank(stage, transport, ranks, requests)
            if rank == 0:
                count(here.lead())
            else:
                here.follow()
            transport.finish()
        print(time.process_time() - began, flush=True)


class System:
    """The processes of a case."""

    def __init__(self, case: dict[str, Any]) -> None:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(None)),
                       "WORLD_SIZE": str(case["ranks"]), "OMP_NUM_THREADS": "1"}
        self._processes = [subprocess.Popen(
            [sys.executable, __file__, "--system", json.dumps(case)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(case["ranks"])]

    def turn(self) -> tuple[float, float]:
        """Generate once; return tokens per second, and CPU milliseconds per token of the busiest rank."""
        into = self._processes[0].stdin
        assert into is not None
        into.write("go\n")
        into.flush()
        tokens, seconds = self._read(0)
        return tokens / seconds, 1e3 * max(self._read(rank)[0] for rank in range(len(self._processes))) / tokens

    def _read(self, rank: int) -> list[float]:
        out = self._processes[rank].stdout
        assert out is not None
        return [float(word) for word in out.readline().split()]

    def end(self) -> None:
        for process in self._processes:
            process.wait()


def in_turns(cases: dict[str, dict[str, Any]], turns: int) -> None:
    """Print the tokens per second of each case, medians of as many turns; the first is the measure."""
    systems = {name: System({**case, "turns": turns + 1}) for name, case in cases.items()}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    busy: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name, system in systems.items():
            rate, cpu_ms = system.turn()
            if turn:  # the first warms up
                rates[name].append(rate)
                busy[name].append(cpu_ms)
    for system in systems.values():
        system.end()
    first = median(next(iter(rates.values())))
    for name, found in rates.items():
        spread = f"{min(found):,.1f} to {max(found):,.1f}"
        print(f"| {name} | {median(found):,.1f} ({spread}) | {median(found) / first:.2f} | {median(busy[name]):.2f} |",
              flush=True)


def cache(turns: int) -> None:
    """Print the tokens per second of one process with caches and with whole forwards, in turns."""
    torch.set_num_threads(1)
    model, _ = model_of(REAL)
    modules = model.materialize(0).eval()
    print("\n| tokens | cached | whole forwards | times |\n|---:|---:|---:|---:|")
    for tokens in (16, 64, 256):
        [request] = requests_of(1, tokens)
        rates: dict[bool, list[float]] = {True: [], False: []}
        texts = set()
        for _ in range(max(1, turns // 2)):
            for cached in rates:
                decoder = DecoderModel(model)
                decoder.cached = cached
                began = time.perf_counter()
                *_, last = decode(StageDecoder(decoder, modules, WINDOW), request)
                rates[cached].append(tokens / (time.perf_counter() - began))
                texts.add(str(last.texts))
        assert len(texts) == 1, "the same text"
        with_cache, without = median(rates[True]), median(rates[False])
        print(f"| {tokens} | {with_cache:.1f} | {without:.2f} | {with_cache / without:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("cache", "ranks", "emulated"))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    if options.system is not None:
        run_system(json.loads(options.system))
        return
    if options.only in (None, "cache"):
        cache(options.turns)
    head = "tokens/s: median (least to most) | times | CPU ms per token, busiest rank |\n|---|---:|---:|---:|"
    if options.only in (None, "ranks"):
        for requests, decoding in ((8, {}), (1, {}), (8, {"beams": 4})):
            case = {"sizes": REAL, "pass_ms": 0, "requests": requests, "tokens": 48, "decoding": decoding}
            what = f"{requests} request{'s' * (requests > 1)}" + (", 4 beams" if decoding else "")
            print(f"\n| {what} | {head}")
            in_turns({f"{ranks} rank{'s' * (ranks > 1)}": {**case, "ranks": ranks} for ranks in (1, 2)}, options.turns)
    if options.only in (None, "emulated"):
        for requests in (16, 4, 1):
            case = {"sizes": EMULATED, "pass_ms": 40, "requests": requests, "tokens": 20, "decoding": {}}
            print(f"\n| {requests} request{'s' * (requests > 1)}, 40 ms per pass | {head}")
            in_turns({f"{ranks} device{'s' * (ranks > 1)}": {**case, "ranks": ranks} for ranks in (1, 2, 4, 8)},
                     max(1, options.turns // 2))


if __name__ == "__main__":
    main()
