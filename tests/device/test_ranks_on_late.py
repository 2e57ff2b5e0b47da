"""Ranks on the late device compute the bits of one process on a processor, over gloo and by nccl's rules, where streams
wait for transfers (late_nccl.py)."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jobs
import late_device
import pytest
import rank_checks
import test_pipeline_checkpoint
from everywhere import without_rates
from test_replicas_gloo import DOWN_AND_UP, FOLDED, FOUR, MIDDLE, ONE_THREE, TWO_ONE_ONE, TWO_TWO
from world import World

from vpipe.schedules.registry import RegisteredSchedule

Ended = Callable[..., subprocess.CompletedProcess[str]]

SYSTEM = [pytest.mark.system, pytest.mark.long]
HARDEST = {"eager": False, "buffered": False}
RULES: Mapping[str, Mapping[str, bool] | None] = {
    "hardest": HARDEST, "apart": {**HARDEST, "apart": True}, "eager-buffered": {"eager": True, "buffered": True},
    "gloo": None}
RULES_OF_NCCL = ("hardest", "apart", "eager-buffered")
SEEDS = 5

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def four(ended: Ended, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four ranks with the device; ``ended`` skips where no compiler builds it."""
    late_device.built()
    world = World(4, tmp_path_factory.mktemp("four"), program=Path(__file__).with_name("rank_with_late.py"))
    yield world
    statuses = world.close()
    assert not any(statuses), f"ranks ended with {statuses}"


# -- the rules themselves ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rules", RULES_OF_NCCL)
@pytest.mark.parametrize("wrong", [wrong.__name__ for wrong in rank_checks.WRONG])
def test_what_is_not_waited_for_goes_wrong(four: World, wrong: str, rules: str) -> None:
    job: dict[str, Any] = {"wrong": wrong, "rules": RULES[rules], "seeds": SEEDS}
    found = four.run(rank_checks.tried, mended=False, **job)
    for sender, receiver in (found[:2], found[2:]):
        assert sender == [True] * SEEDS
        if rules == "eager-buffered":  # a send that waits for nobody may have read its tensor in time
            assert False in receiver
        else:
            assert receiver == [False] * SEEDS
    assert four.run(rank_checks.tried, mended=True, **job) == [[True] * SEEDS] * 4


@pytest.mark.parametrize("rules", RULES_OF_NCCL)
def test_order_matches_and_the_host_does_not_wait(four: World, rules: str) -> None:
    assert four.run(rank_checks.order_of_a_pair, rules=RULES[rules]) == [[[0, 11, 2, 13], {}]] * 4


# -- training ----------------------------------------------------------------------------------------------------------

@cache
def here(text: str) -> dict[str, Any]:
    """What a run shows in one process, on the processor."""
    with late_device.without_dropout():
        return json.loads(json.dumps(without_rates(jobs.train(**json.loads(text)))))  # type: ignore[no-any-return]


def check(four: World, expected: dict[str, Any], rules: str, seed: int, words: dict[str, Any]) -> None:
    found = four.run(rank_checks.under, run="jobs.train", rules=RULES[rules], seed=seed, **words)
    for rank, told in enumerate(map(without_rates, found)):
        assert not [name for name in expected if told[name] != expected[name]], f"rank {rank}"
        assert told == expected, f"rank {rank}"


def words_of(schedule: str, **changes: Any) -> dict[str, Any]:
    stages = len(changes["placement"]) if "placement" in changes else 4 * RegisteredSchedule.named(schedule).chunks
    return {"model": "rich", "schedule": schedule, "microbatches": 4, "batches": 2, "stages": stages, "recompute": 0.5,
            "grad_clip": 0.5, **changes}


SHAPES: dict[str, Any] = {"lengths": [6, 9, 3], "batches": 4, "samples": 4, "microbatches": 2, "evaluate_after": [1]}
SETTINGS = {
    "shapes that change": words_of("1f1b", **SHAPES), "shapes that change in a stream": words_of("pipedream", **SHAPES),
    "buffers": words_of("pipedream", model="norm", partition=[1, 2, 2, 1], stages=None, microbatches=2, samples=4),
    "all recomputed": words_of("1f1b", recompute=1.0), "streams": words_of("gpipe", executor="async_threaded"),
    "streams and buffers": words_of("gpipe", model="norm", executor="async_threaded", stages=4, samples=4),
    "naive": words_of("1f1b", executor="naive"), "codec": words_of("zb_h1", compress="int8"),
    "skipped if not finite": words_of("gpipe", skip_not_finite=True),
    "bf16_pure": words_of("1f1b", precision="bf16_pure"),
    "bf16_pure in a stream": words_of("pipedream", precision="bf16_pure"),
    "evaluation of a stream": words_of("pipedream", microbatches=2, samples=4, batches=6, more=2,
                                       evaluate_after=[1, 3]),
    "fewer updates": words_of("pipedream", update_every=2), "2bw": words_of("2bw", update_every=4, batches=3),
    "extrapolation": words_of("pipedream", update_every=2, delay_correction=1.0),
    "Muon": words_of("1f1b", optimizer="muon"),
    **{f"replicas {name} {number}": words_of(name, placement=placement, microbatches=7, samples=14, lengths=[6, 9])
       for name, placements in (("1f1b", (TWO_ONE_ONE, MIDDLE, ONE_THREE)), ("zb_h1", (ONE_THREE,)), ("gpipe", (FOUR,)),
                                ("zb_v", (FOLDED,)))
       for number, placement in enumerate(placements)},
    **{f"replicas {name} {number}": words_of(name, placement=placement, microbatches=5, samples=5, batches=6, more=2,
                                             update_every=1, evaluate_after=[1])
       for name, placements in (("pipedream", (TWO_ONE_ONE, MIDDLE, FOUR)), ("pipedream_vertical_sync", (TWO_TWO,)))
       for number, placement in enumerate(placements)},
    "both directions": words_of("chimera", placement=DOWN_AND_UP, microbatches=8),
    "replicas that update seldom": words_of("2bw", placement=TWO_TWO, update_every=2, batches=3)}
THREADED = pytest.mark.extras("async_threaded")

SCALED = {"loss_scale": 1024}
LIKE_ONE_PROCESS = {
    f"{precision} {name}": words_of(name.split()[0], precision=precision, **changes)
    for precision in ("fp16", "bf16")
    for name, changes in (
        ("1f1b", {}), ("pipedream", SCALED if precision == "fp16" else {}), ("dualpipe", {"microbatches": 8}),
        ("1f1b replicas", {"placement": TWO_TWO}),
        ("pipedream replicas", {"placement": TWO_ONE_ONE, "samples": 4, **(SCALED if precision == "fp16" else {})}))}
"""Autocast computes otherwise on a processor: these are compared with one process that has the device."""

EVERY = {**{name: words_of(name, microbatches=8) for name in RegisteredSchedule.names()},
         "replicas": words_of("pipedream", placement=TWO_TWO)}
"""With a tied weight, recompute, clipping."""
FAST = ("1f1b", "pipedream", "replicas")


@pytest.mark.parametrize("rules", ["hardest", "gloo"])
@pytest.mark.parametrize("schedule", [pytest.param(name, marks=[] if name in FAST else SYSTEM) for name in EVERY])
def test_every_schedule(four: World, schedule: str, rules: str) -> None:
    words = EVERY[schedule]
    for seed in (1, 2):
        check(four, here(json.dumps(words)), rules, seed, words)


@pytest.mark.parametrize("rules", [pytest.param(name, marks=SYSTEM) for name in ("apart", "eager-buffered")])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "chimera", "dualpipe", "pipedream"])
def test_every_way_to_make_communicators_and_to_send(four: World, schedule: str, rules: str) -> None:
    check(four, here(json.dumps(EVERY[schedule])), rules, 1, EVERY[schedule])


@pytest.mark.parametrize("rules", [pytest.param(name, marks=SYSTEM) for name in ("hardest", "apart", "gloo")])
@pytest.mark.parametrize("setting", [pytest.param(name, marks=THREADED if "streams" in name else [])
                                     for name in SETTINGS])
def test_every_setting(four: World, setting: str, rules: str) -> None:
    words = SETTINGS[setting]
    check(four, here(json.dumps(words)), rules, 2, words)


@pytest.mark.parametrize("rules", [pytest.param(name, marks=SYSTEM) for name in ("hardest", "gloo")])
@pytest.mark.parametrize("setting", LIKE_ONE_PROCESS)
def test_as_one_process_with_the_device(four: World, ended: Ended, setting: str, rules: str) -> None:
    words = LIKE_ONE_PROCESS[setting]
    process = ended("rank_checks.py", json.dumps({"run": "jobs.train", "rules": None, "seed": 1, **words}))
    assert process.returncode == 0, process.stderr
    check(four, without_rates(json.loads(process.stdout)), rules, 2, words)


WAITS: dict[str, tuple[dict[str, Any], Sequence[int], Sequence[int]]] = {
    "1f1b": ({"schedule": "1f1b", "stages": 4}, (0, 0, 0, 1), (4, 8, 8, 4)),
    "pipedream": ({"schedule": "pipedream", "stages": 4}, (0, 0, 0, 1), (1, 2, 2, 1)),
    "clipping": ({"schedule": "1f1b", "stages": 4, "grad_clip": 0.5}, (1, 1, 1, 2), (4, 8, 8, 4)),
    "replicas": ({"schedule": "1f1b", "stages": 2, "placement": TWO_TWO}, (1, 1, 2, 2), (4, 4, 4, 4)),
    "streams": ({"schedule": "gpipe", "stages": 4, "executor": "async_threaded"}, (0, 0, 0, 1), (4, 8, 8, 4))}
"""By nccl's rules the waits of each rank per update: one for the losses on the last stage, one for norms, one for which
gradients replicas have. Over gloo these, and one for each transfer that leaves the rank, however many tensors it has;
receives are copied to the device without a wait."""


@pytest.mark.parametrize("rules", ["hardest", pytest.param("gloo", marks=SYSTEM)])
@pytest.mark.parametrize("name", ["1f1b", *[pytest.param(name, marks=[*SYSTEM, *[THREADED] * (name == "streams")])
                                            for name in list(WAITS)[1:]]])
def test_how_often_the_host_waits(four: World, name: str, rules: str) -> None:
    words, on_host, sent = WAITS[name]
    found = four.run(rank_checks.under, run="rank_checks.host_waits", rules=RULES[rules], seed=1, microbatches=4,
                     **words)
    for rank, waits in enumerate(found):
        # A call of train, here of four batches, waits until its transfers have ended.
        streams = sent[rank] if rules == "gloo" else 1 / (16 if name == "pipedream" else 4)
        assert waits == {"stream": streams, **({"copy to host": on_host[rank]} if on_host[rank] else {})}, rank


@pytest.mark.parametrize("rules", [pytest.param("hardest", marks=SYSTEM), "apart"])
def test_transfers_go_on_beside_computation(four: World, rules: str) -> None:
    """A rank between others receives activations while it computes the backward before their forward; where
    communicators progress apart, gradients, too. A step waits for no send of its update; a send for one of old."""
    found = four.run(rank_checks.under, run="rank_checks.in_time", rules=RULES[rules], seed=1, schedule="1f1b",
                     stages=4, microbatches=8)
    for rank in (1, 2):
        names = [what for what, _ in found[rank]]
        for kind in ("F", "B") if rules == "apart" else ("F",):
            for microbatch in range(4, 8 if kind == "F" else 5):
                at = names.index(f"{rank}RECV_{kind}{microbatch}")
                ended = next(time for what, time in reversed(found[rank][:at]) if what[1:2] in "FB")
                assert found[rank][at][1] < ended - 0.5, (found[rank][at], ended)
    for rank in (1, 2, 3):
        names = [what for what, _ in found[rank]]
        since = Counter(names[names.index(f"{rank}SEND_B7"):names.index(f"{rank}STEP0")])
        assert since.pop(f"wait in {rank}SEND_B7", 0) <= since.pop(f"{rank}SEND_B7")
        assert not since


@pytest.mark.system
@pytest.mark.long
def test_over_gloo_receives_are_posted_before_the_computation_before_their_use(four: World) -> None:
    found = four.run(rank_checks.under, run="rank_checks.in_time", rules=None, seed=1, schedule="1f1b", stages=4,
                     microbatches=8)
    for rank in (1, 2):
        names = [what for what, _ in found[rank]]
        for kind, microbatch in product("FB", range(1, 8)):
            use = names.index(f"{rank}{kind}{microbatch}")
            before = max(at for at, what in enumerate(names[:use]) if what[1] in "FB")
            assert names.index(f"post in {rank}RECV_{kind}{microbatch}") < before, (kind, microbatch)


@pytest.mark.parametrize("rules", [pytest.param(name, marks=SYSTEM) for name in ("hardest", "apart", "gloo")])
def test_a_tensor_is_kept_until_a_slow_rank_has_it(four: World, rules: str) -> None:
    words = {"schedule": "1f1b", "stages": 4, "microbatches": 20}
    with late_device.without_dropout():
        expected = rank_checks.evaluated_by_slow_ranks(**words)
    assert four.run(rank_checks.under, run="rank_checks.evaluated_by_slow_ranks", rules=RULES[rules], seed=1,
                    **words) == [expected] * 4


@pytest.mark.system
@pytest.mark.long
def test_a_sum_is_kept_until_a_slow_replica_has_it(four: World) -> None:
    """Where transfers of a rank progress apart, a replica may have made its next sum by then (``_Bucket.sum``)."""
    words = words_of("pipedream", placement=[[1, 0], [2], [3]], microbatches=3, samples=3, batches=1)
    found = four.run(rank_checks.under, run="rank_checks.summed_by_a_slow_replica", rules=RULES["apart"], seed=1,
                     **words)
    assert [without_rates(told) for told in found] == [here(json.dumps(words))] * 4


@pytest.mark.parametrize("rules", [pytest.param(name, marks=SYSTEM) for name in ("hardest", "apart", "gloo")])
@pytest.mark.parametrize("arguments", [
    {"schedule": "1f1b", "grad_clip": 0.5}, {"schedule": "pipedream", "update_every": 1, "cadence": 3},
    {"schedule": "pipedream", "placement": TWO_TWO, "update_every": 2}], ids=["flush", "drained", "replicas"])
def test_a_checkpoint_and_what_goes_on_from_it(four: World, tmp_path: Path, arguments: dict[str, Any],
                                               rules: str) -> None:
    words = {"microbatches": 4, "batches": 10, "steps": 2, "stages": len(arguments.get("placement", range(4))),
             **arguments}
    for begin, end in ((None, 2), (2, 4)):
        with late_device.without_dropout():
            expected = test_pipeline_checkpoint.stretch(folder=begin and str(tmp_path / f"here {begin}"),
                                                        into=str(tmp_path / f"here {end}"), **words)
        words_there = {**words, "folder": begin and str(tmp_path / f"there {begin}"),
                       "into": str(tmp_path / f"there {end}")}
        found = four.run(rank_checks.under, run="test_pipeline_checkpoint.stretch", rules=RULES[rules], seed=end,
                         **words_there)
        assert found == [json.loads(json.dumps(expected))] * 4
