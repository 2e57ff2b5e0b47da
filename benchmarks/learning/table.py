"""Tables and verdicts from results.jsonl and costs.json.

python benchmarks/learning/table.py [--results FILE] [--picture learning.svg] [--emulated FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median, stdev

from arms import DEPTHS, LONGEST, SEEDS, SYNCHRONOUS, Arm, arms, contenders
from picture import draw
from results import RESULTS, Results, read
from times import block_costs, update_s
from training import PIPEDREAM

TIME_1F1B, TIME_BEST, GAP, ERROR = 0.75, 0.85, 0.005, 0.0035
"""The gates."""


def arm_table(results: Results, depth: int) -> Iterator[str]:
    """Yield a Markdown table of all arms on ``depth`` devices, those with the lowest loss at N first."""
    costs = block_costs()
    unit = (costs.forward_s + costs.backward_s) * 8 / depth
    target = results.targets[depth]
    yield "| arm | rate | loss at N | seeds | gap to synchronous | update | run of N | reaches L* at | time to L* |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    found = [(mean, arm) for arm in arms() if arm.depth == depth and (mean := results.loss(arm)) is not None]
    base = min((results.time_s(arm) for mean, arm in found if arm.synchronous and mean == target), default=1.0)
    for mean, arm in sorted(found, key=lambda pair: (pair[0], results.time_s(pair[1]))):
        runs, chosen = arm.setting.family.grid(results.losses), arm.setting.family.rate(results.losses)
        edge = "*" if chosen in (runs[0].learning_rate, runs[-1].learning_rate) else ""
        rate = arm.setting.rate(results.losses)
        if rate is None:
            rate = min((run for run in runs if run in results.losses), key=results.losses.__getitem__).learning_rate
            edge = "?"
        gaps, reached = results.gaps(arm), results.to_target_s(arm)
        gap = "" if arm.synchronous or not gaps else f"{100 * fmean(gaps):+.1f} %"
        length = results.length(arm)
        few = "" if arm in results.contenders else "~"
        longer = f"> {LONGEST} N" if arm.setting.core and not results.open(arm) else ""
        at = f"{few}{length:.2f} N" if length else longer
        yield (f"| {label(arm)} | {rate:g}{edge} | {mean:.4f} | {results.seeds(arm)} | {gap} | "
               f"{update_s(arm) / unit:.1f} | {results.time_s(arm) / base:.2f} | {at} | "
               f"{'' if reached is None else f'{reached / base:.2f}'} |")
    if missing := sum(arm.depth == depth for arm in arms()) - len(found):
        yield f"\n{missing} arms have no rows yet."


def label(arm: Arm) -> str:
    """The name of an arm in a table."""
    word, plus = "m" if arm.synchronous else "k", " + extrapolation" if arm.correction != "none" else ""
    count = f"1 (of {arm.batch} sequences)" if arm.every else arm.batch
    return f"{arm.schedule}, {word} = {count}, {arm.optimizer}{plus}"


def verdicts(results: Results) -> Iterator[str]:
    """Yield a line for each gate and depth."""
    for depth in DEPTHS:
        core = [arm for arm in arms() if arm.depth == depth and arm.setting.core]
        target, waiting = results.targets[depth], [arm for arm in core if results.open(arm)]
        yield f"\np = {depth}: L* = {'not known' if target is None else f'{target:.4f}'}\n"
        for name, limit, schedules in (("best 1F1B", TIME_1F1B, ("1f1b",)),
                                       ("best synchronous", TIME_BEST, SYNCHRONOUS)):
            found = _time_ratio(results, core, schedules)
            if found is None:
                yield f"- time, at most {limit} x the {name} arm's: **open**, runs are missing"
                continue
            ratio, mine, its = found
            verdict = "open" if waiting else "passed" if ratio <= limit else "failed"
            yield (f"- time, at most {limit} x the {name} arm's: **{verdict}**, {ratio:.3f} ({label(mine)} against "
                   f"{label(its)})" + "".join(_with_shorter_steps(results, core, schedules, limit))
                   + (f"; {len(waiting)} arms are not at L* yet" if waiting else ""))
        deciding = [] if target is None else contenders(results.losses, depth, update_s)
        for arm in core:
            gaps = [] if arm.synchronous else results.gaps(arm)
            if not gaps:
                continue
            mean = fmean(gaps)
            error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            passed = mean <= GAP and error <= ERROR
            verdict = "not among the two fastest" if arm not in deciding else \
                "open" if len(gaps) < SEEDS else "passed" if passed else "failed"
            yield (f"- gap of {label(arm)}, at most {100 * GAP:g} %, error at most {100 * ERROR:g} %: **{verdict}**, "
                   f"{100 * mean:+.2f} %, error {100 * error:.2f} %, {len(gaps)} of {SEEDS} seeds")


def _time_ratio(results: Results, core: list[Arm], schedules: Sequence[str],
                step: float = 1.0) -> tuple[float, Arm, Arm] | None:
    """Return the time to L* of the fastest arm without a flush over that of the fastest of ``schedules``; and both."""
    mine = _fastest(results, [arm for arm in core if not arm.synchronous], step)
    its = _fastest(results, [arm for arm in core if arm.schedule in schedules], step)
    return None if mine is None or its is None else (mine[0] / its[0], mine[1], its[1])


def _with_shorter_steps(results: Results, core: list[Arm], schedules: Sequence[str], limit: float) -> Iterator[str]:
    """Yield the ratio without optimizer steps; and of a gate that fails, up to which length of a step it passes."""
    def ratio(step: float) -> float:
        found = _time_ratio(results, core, schedules, step)
        return found[0] if found is not None else inf

    yield f"; without optimizer steps {ratio(0.0):.3f}"
    low, high = 0.0, 1.0
    if ratio(low) <= limit < ratio(high):
        while high - low > 0.05:
            middle = (low + high) / 2
            low, high = (middle, high) if ratio(middle) <= limit else (low, middle)
        costs = block_costs()
        microbatches = low * costs.step_s["muon"] / (costs.forward_s + costs.backward_s)
        yield f", passed where a step takes at most as long as {microbatches:.1f} microbatches"


def _fastest(results: Results, among: list[Arm], step: float = 1.0) -> tuple[float, Arm] | None:
    times = [(time, arm) for arm in among if (time := results.to_target_s(arm, step)) is not None]
    return min(times, key=lambda each: each[0], default=None)


def overheads(emulated: Path) -> dict[tuple[str, int], float]:
    """Return what an update takes on devices that sleep for 20 + 40 ms, in what the simulator says.

    By schedule and devices, from the file that ``benchmarks/emulated/run.py --json`` has written.
    """
    found: dict[tuple[str, int], float] = {}
    for rows in json.loads(emulated.read_text())["cases"].values():
        for row in rows:
            if "stream" in row and row["system"] == "vpipe" and "20 + 40" in row["stream"] and row["update_every"] > 1:
                found[PIPEDREAM, row["ranks"]] = median(row["seconds"]) / row["ideal_s"]
            elif "case" in row and "vpipe" in row["median_s"] and "20 + 40" in row["case"]:
                devices = int(row["case"].split(",")[0].removeprefix("P = "))
                found[row["schedule"], devices] = row["median_s"]["vpipe"] / row["formula_s"]
    return found


def emulated_table(results: Results, factors: Mapping[tuple[str, int], float]) -> Iterator[str]:
    """Yield a Markdown table: the fastest arms with the overhead that emulated devices have."""
    yield "| devices | schedule | measured / simulated | fastest arm | time to L*, simulated | with that overhead |"
    yield "|---|---|---:|---|---:|---:|"
    for (schedule, depth), factor in sorted(factors.items(), key=lambda item: (-item[0][1], item[0][0])):
        best = _fastest(results, [arm for arm in arms() if arm.depth == depth and arm.setting.core
                                  and arm.schedule == schedule])
        if best is not None:
            yield (f"| {depth} | {schedule} | {factor:.3f} | {label(best[1])} | {best[0]:.2f} s | "
                   f"{best[0] * factor:.2f} s |")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of rows")
    parser.add_argument("--picture", type=Path, help="write the picture there")
    parser.add_argument("--emulated", type=Path, help="what benchmarks/emulated/run.py --json has written")
    options = parser.parse_args()
    results = Results(read(options.results))
    costs = block_costs()
    print(f"{len(results.rows)} rows, of vpipe {', '.join(sorted({row['commit'] for row in results.rows.values()}))}; "
          f"{sum(row['cpu_s'] for row in results.rows.values()) / 3600:.1f} hours of a core\n")
    print(f"A block and a sequence: F {1e3 * costs.forward_s:.2f} ms, B {1e3 * costs.backward_s:.2f}, I "
          f"{1e3 * costs.input_s:.2f}, W {1e3 * costs.weight_s:.2f}; a step of "
          + ", ".join(f"{name} {1e3 * step:.2f}" for name, step in costs.step_s.items()) + f" ({costs.machine})")
    for depth in DEPTHS:
        print(f"\n### p = {depth}\n")
        print("\n".join(arm_table(results, depth)))
    print("\n### Gates")
    print("\n".join(verdicts(results)))
    if options.emulated:
        print("\n### On emulated devices, 20 + 40 ms\n")
        print("\n".join(emulated_table(results, overheads(options.emulated))))
    if options.picture:
        options.picture.write_text(draw(results))


if __name__ == "__main__":
    main()
