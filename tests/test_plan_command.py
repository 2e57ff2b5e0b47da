"""``vpipe plan`` as a user meets it: explained, written, run again; and what it refuses. Nothing is measured here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from golden import assert_golden
from made_profile import MIB, made_profile
from small_run import write_config

from vpipe.app.cli import main
from vpipe.app.commands.plan import microbatch_choices, with_ranks
from vpipe.app.config.config import load_config
from vpipe.app.launch.rank_env import hosts_of, ranks_of
from vpipe.app.train.job import Job, model_digest
from vpipe.app.train.planning import memory_limit, request_of
from vpipe.plan.plan import Plan
from vpipe.plan.profile import LinkProfile, Profile, Seconds
from vpipe.plan.solver.solve import solve
from vpipe.schedules import registry
from vpipe.schedules.kinds import Action, backward, forward, step
from vpipe.schedules.registry import RegisteredSchedule, register_schedule

pytestmark = pytest.mark.jobs

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Ranks and microbatch sizes of which profiles were asked for; they are made up."""
    asked: list[tuple[int, list[int]]] = []
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no layer is split

    def made(job: Job, sizes: Sequence[int], *, again: bool = False) -> dict[int, Profile]:
        asked.append((job.schedule.ranks, list(sizes)))
        times = [3.0, *[2.0] * (len(job.model) - 2), 3.0]
        made = {size: made_profile(len(job.model), size, job.schedule.ranks, forward_ms=times, saved=40 * MIB)
                for size in sizes}
        return {size: replace(one, identity=replace(one.identity, model=model_digest(job)))
                for size, one in made.items()}

    monkeypatch.setattr("vpipe.app.commands.profile.profiles_of", made)
    return asked


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
         asked: list[tuple[int, list[int]]]) -> Said:
    """Runs ``vpipe plan c.yaml ...``: status, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("vpipe.app.progress.SLOW_S", 1000)  # nor does a busy machine say that it is searching
    write_config(Path())

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(["plan", "c.yaml", *arguments])
        except SystemExit as exit_:  # argparse
            status = exit_.code  # type: ignore[assignment]
        return status, *capsys.readouterr()

    return run


def test_a_plan_is_explained_written_and_taken_by_a_config(said: Said, asked: list[tuple[int, list[int]]]) -> None:
    status, out, err = said("--memory", "1GiB", "-o", "plan.json")
    assert (status, err) == (0, "")
    assert asked == [(2, [4, 2, 1])], "batches of 8 samples in 4 microbatches, in half and in twice as many"
    assert out.startswith("bert made: 5 layers on 2 ranks of 1 GiB (--memory)\nplan: ")
    assert "\nthe config's own" in out
    assert "no recompute" not in out, "all activations fit"
    assert out.endswith("plan: plan.json\nrun it: vpipe train c.yaml --set parallel.plan=plan.json\n")
    plan = Plan.load("plan.json")
    assert plan.predictions is not None
    assert f"plan: {plan.schedule}, {len(plan.partition)} stages {list(plan.partition)}, " in out
    job = Job.from_config(load_config(Path("c.yaml"), ["parallel.plan=plan.json"]))
    assert (job.cut.partition, job.cut.recomputed) == (plan.partition, plan.recomputed)
    assert job.config.training.num_microbatches == plan.microbatches


def test_without_a_flush_it_plans_without_one_and_keeps_the_samples_of_an_update(said: Said) -> None:
    status, out, _ = said("--set", "parallel.schedule=pipedream", "--set", "parallel.update_every=2", "-o", "plan.json")
    assert status == 0
    plan = Plan.load("plan.json")
    assert plan.schedule in ("pipedream", "2bw")
    assert re.search(r"^stage .* late$", out, re.MULTILINE)
    assert plan.microbatches is not None
    assert plan.update_every == plan.microbatches // 2
    assert " (its device)\n" in out
    shared = made_profile(5, 2, 2, cores=2)
    assert memory_limit(load_config(Path("c.yaml")), shared) == (2**30, "its part of the host's memory")
    assert out.endswith("run it: vpipe train c.yaml --set parallel.plan=plan.json\n"), "the plan says what was set"
    assert said("--set", "training.seed=1")[1].endswith(
        "to run it, write it with -o plan.json, then: vpipe train c.yaml --set training.seed=1 "
        "--set parallel.plan=plan.json\n")


def test_rows_compare_the_same_batch_and_another_one_says_what_it_means(said: Said) -> None:
    update = ("--set", "parallel.schedule=pipedream", "--set", "training.num_microbatches=4",
              "--set", "parallel.update_every=4", "--ranks", "4")
    _, out, _ = said(*update, "-o", "plan.json")
    plan = Plan.load("plan.json")
    assert plan.predicted.samples_per_step == 8, "as the config has it, whatever the replicas"
    [row] = re.findall(r"^(\d+) samples in place of 8 .* faster, another batch$", out, re.MULTILINE)
    assert (f"{row} samples in place of 8 (--samples {row}): another training. The same data make "
            in out.replace("\n  ", " "))
    assert "training.learning_rate" in out
    _, out, _ = said(*update, "--samples", row, "-o", "larger.json")
    larger = Plan.load("larger.json")
    assert larger.predicted.samples_per_step == int(row)
    assert larger.predicted.seconds_per_sample < plan.predicted.seconds_per_sample
    assert f"--set dataset.batch_size={row} --set parallel.plan=larger.json" in out
    assert f"\n{row} samples in place of 8: another training. " in out
    assert said("--samples", "32", "--set", "parallel.schedule=gpipe")[0] == 0


def test_samples_that_cannot_be_an_update_are_refused(said: Said) -> None:
    assert said("--samples", "0")[2] == "error: --samples is 0\nhint: plan for 1 sample or more\n"
    assert said("--samples", "3")[2].startswith("error: dataset.batch_size is 3, which the 4 microbatches of ")
    replicas = ("--set", "parallel.schedule=pipedream", "--set", "parallel.update_every=4",
                "--set", "parallel.data_parallel_size=2", "--set", "training.num_microbatches=4")
    assert said("--samples", "3", *replicas)[2] == (
        "error: --samples is 3, but batches of 8 samples are updates of 16\nhint: give a multiple of 16\n")


def test_the_memory_is_that_of_the_process(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.app.commands.profile.profiles_of", lambda job, sizes: {size: replace(
        one := made_profile(5, size, 2), process_bytes=300 * MIB, kept_share=0.5, identity=replace(
            one.identity, model=model_digest(job))) for size in sizes})
    _, out, _ = said("-o", "plan.json")
    predicted = Plan.load("plan.json").predicted
    assert (predicted.process_bytes, predicted.kept_share) == (300 * MIB, 0.5)
    assert predicted.fullest_rank[1] == 300 * MIB + 3 * max(stage.memory.peak for stage in predicted.stages) // 2
    heads, row = (line.split() for line in out.partition("memory of a rank")[2].splitlines()[1:3])
    cells = dict(zip(heads, row, strict=False))
    assert (cells["process"], float(cells["peak"])) == ("300.0", pytest.approx(300 + sum(
        float(cells[head]) for head in heads[1:heads.index("process")]), abs=0.3))
    limit = predicted.fullest_rank[1] // MIB + 1
    assert said("--memory", f"{limit}MiB", "-o", "fits.json")[0] == 0
    assert Plan.load("fits.json").predicted.fullest_rank[1] <= limit * MIB
    assert said("--memory", "300MiB")[2].partition("most of it")[2].startswith(
        ", 300 MiB, is Python, torch and the data\nhint: allow ")


def test_a_limit_that_binds_recomputes_and_says_what_would_not(said: Said) -> None:
    # The weights, gradients and optimizer of five layers take 80 MiB; what they keep of one sample 50 more.
    _, out, _ = said("--memory", "1GiB")
    assert "no recompute" not in out
    status, out, _ = said("--memory", "90MiB", "-o", "plan.json")
    assert status == 0
    assert sum(map(len, Plan.load("plan.json").recomputed)) > 0
    assert re.search(r"^this plan .* \d of 5 ", out, re.MULTILINE)
    if found := re.search(r"^no recompute, from ([\d.]+) MiB ", out, re.MULTILINE):
        assert said("--memory", f"{found[1]}MiB", "-o", "other.json")[0] == 0
        assert not any(Plan.load("other.json").recomputed)


def test_too_little_memory_is_refused_and_the_named_amount_suffices(said: Said) -> None:
    status, out, err = said("--memory", "20MiB", "-o", "plan.json")
    assert (status, out) == (2, "")
    assert err.startswith("error: no plan fits into 20 MiB per rank: ")
    assert not Path("plan.json").exists()
    found = re.search(r"hint: allow ([\d.]+ MiB) or more per rank", err)
    assert found is not None
    assert said("--memory", found[1])[0] == 0


def test_for_other_ranks(said: Said, asked: list[tuple[int, list[int]]]) -> None:
    status, out, _ = said("--ranks", "3", "-o", "plan.json")
    assert status == 0
    assert [ranks for ranks, _ in asked] == [3]
    assert Plan.load("plan.json").ranks == 3
    assert "the config's own" not in out


def test_for_other_ranks_the_slices_stay(said: Said) -> None:
    write_config(Path(), model__name="gpt", model__preset=None, model__num_heads=2, model__num_layers=2,
                 parallel__schedule="seq1f1b", parallel__slices=2)
    assert "\nschedule seq1f1b" in said("--ranks", "3")[1], "a candidate, though the ranks are measured without slices"


def test_for_other_ranks_of_a_config_that_names_its_machines(said: Said, asked: list[tuple[int, list[int]]]) -> None:
    status, _, err = said("--ranks", "3", "--set", "machines=[localhost:0,localhost:1]")
    assert (status, err) == (0, "")
    assert [ranks for ranks, _ in asked] == [3]
    config = with_ranks(load_config(Path("c.yaml"), ["machines=[localhost:0,localhost:1]"]), 3)
    assert (ranks_of(config), hosts_of(config)) == (3, None)


def test_the_stages_are_kept_where_the_command_says_so(said: Said) -> None:
    for stages, ranks in ((2, 2), (1, 2), (2, 4), (4, 4)):
        file = f"{stages}on{ranks}.json"
        status, out, _ = said("--ranks", str(ranks), "--stages", str(stages), "-o", file)
        assert status == 0
        plan = Plan.load(file)
        assert (len(plan.partition), plan.ranks) == (stages, ranks)
        assert f", {stages} stage{'s' * (stages > 1)} [" in out


def test_replicas_share_the_optimizers_state_where_that_gains_and_the_config_does_not_say(
        said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(job: Job, sizes: Sequence[int]) -> dict[int, Profile]:
        one = made_profile(5, 2, 4)
        slow = tuple(replace(layer, step=Seconds(0.05), largest_bytes=MIB) for layer in one.layers)
        return {size: job.with_correction(replace(one, layers=slow, identity=replace(
            one.identity, microbatch_size=size, model=model_digest(job)))) for size in sizes}

    monkeypatch.setattr("vpipe.app.commands.profile.profiles_of", made)
    chosen, kept, off = (
        said("--ranks", "4", "--stages", "2", "-o", f"{number}.json", *setting)[1].replace("\n  ", " ")
        for number, setting in enumerate(([], ["--set", "parallel.zero1=true"], ["--set", "parallel.zero1=false"])))
    assert re.search(r"^plan: .*, 2 stages \[2, 3\], zero1, \d microbatches", chosen, re.MULTILINE)
    assert re.search(r"^no zero1 .* \d+ % slower", chosen, re.MULTILINE)
    assert ", zero1, " in kept.splitlines()[1]
    assert "zero1" not in off.partition("run it")[0]
    plans = [Plan.load(f"{number}.json") for number in range(3)]
    assert [plan.zero1 for plan in plans] == [True, True, False]
    assert plans[0].predicted == plans[1].predicted
    assert off.endswith("run it: vpipe train c.yaml --set parallel.plan=2.json\n"), "the plan says it"
    assert Job.from_config(load_config(Path("c.yaml"), ["parallel.plan=0.json"])).config.parallel.zero1


EVEN = 7
"""A seed for layers that two stages can share evenly."""


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch, said: Said) -> list[tuple[int, int]]:
    """Ranks of a pipeline, and to a layer, of which profiles were asked for: layers of 4 ms, or even in two stages."""
    asked: list[tuple[int, int]] = []

    def made(job: Job, sizes: Sequence[int]) -> dict[int, Profile]:
        tensor, ranks = job.config.parallel.tensor, job.schedule.ranks
        asked.append((ranks, tensor))
        times = [20.0, 30.0, 30.0, 40.0, 40.0] if job.config.training.seed == EVEN else [4.0] * 5
        one = made_profile(5, 2, ranks, forward_ms=[ms / tensor for ms in times], saved=10 * MIB // tensor)
        layers = tuple(replace(layer, parameter_bytes=layer.parameter_bytes // tensor,
                               optimizer_bytes=layer.optimizer_bytes // tensor) for layer in one.layers)
        return {size: replace(one, layers=layers, identity=replace(
            one.identity, microbatch_size=size, tensor=tensor, model=model_digest(job))) for size in sizes}

    monkeypatch.setattr("vpipe.app.commands.profile.profiles_of", made)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return asked


def test_layers_are_split_where_that_gains(said: Said, split: list[tuple[int, int]]) -> None:
    """Two stages of five equal layers are uneven, halves of all of them are not. Tiny BERT has 2 heads."""
    status, out, err = said("-o", "plan.json", "--set", "training.seed=3")
    assert (status, err, split) == (0, "", [(2, 1), (1, 2)])
    assert out.startswith("bert made: 5 layers on 2 ranks of ")
    assert re.search(r"^plan: \w+, 1 stage \[5\], tensor 2, \d microbatch", out, re.MULTILINE)
    assert re.search(r"^tensor 1 .* \d+ % slower", out, re.MULTILINE)
    assert out.endswith("run it: vpipe train c.yaml --set training.seed=3 --set parallel.plan=plan.json\n")
    assert Plan.load("plan.json").tensor == 2
    job = Job.from_config(load_config(Path("c.yaml"), ["parallel.plan=plan.json"]))
    assert (job.config.parallel.tensor, job.schedule.ranks, job.processes) == (2, 1, 2)
    split.clear()
    assert said("--set", "parallel.plan=plan.json")[0] == 0
    assert split == [(2, 1), (1, 2)], "a plan that the config names is planned anew"


def test_what_cannot_gain_is_not_measured(said: Said, split: list[tuple[int, int]]) -> None:
    _, out, _ = said("--ranks", "1")
    assert split == [(1, 1)]
    assert "tensor" not in out
    _, out, _ = said("--ranks", "4", "--set", "training.num_microbatches=8", "--set", "parallel.schedule=pipedream")
    assert (4, 1) in split
    assert (2, 2) in split, "four stages of five layers are uneven"
    split.clear()
    assert said("--ranks", "5", "--memory", "4GiB")[0] == 0
    assert split == [(5, 1)], "not a multiple of 2"
    split.clear()
    _, out, _ = said("--set", "parallel.schedule=pipedream", "--set", f"training.seed={EVEN}")
    assert split == [(2, 1)]
    assert re.search(r"^tensor 2: not measured, for it gains \d % at most$", out, re.MULTILINE)


@pytest.mark.parametrize(("settings", "asked"), [
    (["parallel.tensor=2"], [(1, 2)]), (["parallel.tensor=1"], [(2, 1)]), (["model.num_heads=1"], [(2, 1)]),
    (["training.compile=true"], [(2, 1)]), (["parallel.compress=int8"], [(2, 1)])])
def test_the_config_says_whether_layers_are_split(said: Said, split: list[tuple[int, int]], settings: list[str],
                                                  asked: list[tuple[int, int]]) -> None:
    status, _, err = said("--ranks", "2", *(word for setting in settings for word in ("--set", setting)))
    assert (status, err, split) == (0, "", asked)


def test_ranks_that_split_no_layers_evenly_are_refused(said: Said, split: list[tuple[int, int]]) -> None:
    assert said("--ranks", "3", "--set", "parallel.tensor=2")[2] == (
        "error: 3 ranks cannot split layers over 2 each (parallel.tensor)\n"
        "hint: plan for a multiple of 2 with --ranks\n")
    assert not split


def test_the_heuristic_of_the_paper(said: Said) -> None:
    status, out, _ = said("--solver", "vpipe", "--memory", "1GiB")
    assert status == 0
    assert "solver: the VPipe paper's; " in out


def test_a_choice_of_the_config_that_does_not_fit_is_said_to(said: Said) -> None:
    _, out, _ = said("--memory", "90MiB", "--set", "training.num_microbatches=2", "--set", "parallel.schedule=gpipe")
    assert re.search(r"^the config's own: [\d.,]+ samples/s, but a rank would hold [\d.]+ MiB$", out, re.MULTILINE)


WRONG = [
    ["--memory", "0"], ["--memory", "abc"], ["--memory", "8G"], ["--ranks", "0"], ["--ranks", "6"], ["--stages", "0"],
    ["--stages", "6"], ["--stages", "3"], ["-o", "no/where.json"], ["-o", "c.yaml"], ["-o", "."], ["--solver", "vpip"]]


def test_wrong_arguments_are_refused_before_measuring(said: Said, asked: list[tuple[int, list[int]]]) -> None:
    found = {" ".join(arguments): said(*arguments) for arguments in WRONG}
    assert {(status, out) for status, out, _ in found.values()} == {(2, "")}
    assert not asked
    assert_golden(__file__, "wrong", {name: err for name, (_, _, err) in found.items()})


def test_it_starts_its_ranks_itself(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert said()[2].startswith("error: vpipe plan is one of 2 processes of ")


@pytest.mark.parametrize(("schedule", "every", "count", "samples", "tried", "updates"), [
    ("1f1b", None, 4, 8, [2, 4, 8], {}), ("1f1b", None, 1, 8, [1, 2, 4], {}), ("1f1b", None, 3, 6, [1, 3, 6], {}),
    ("pipedream", 1, 1, 8, [1, 2, 4], {1: 1, 2: 2, 4: 4}), ("pipedream", 1, 4, 8, [4, 8], {4: 1, 8: 2}),
    ("pipedream", 2, 4, 16, [4, 8, 16], {4: 2, 8: 4, 16: 8}),  # not 2: no gradient becomes a whole update late
    ("pipedream", 4, 4, 16, [2, 4, 8, 16], {2: 2, 4: 4, 8: 8, 16: 16})])
def test_the_numbers_of_microbatches_that_are_tried(tmp_path: Path, schedule: str, every: int | None, count: int,
                                                    samples: int, tried: list[int], updates: dict[int, int]) -> None:
    config = load_config(write_config(tmp_path, parallel__schedule=schedule, parallel__update_every=every,
                                      training__num_microbatches=count, dataset__batch_size=samples))
    assert microbatch_choices(config) == tried
    profiles = {number: made_profile(5, samples // number, 2) for number in tried}
    assert request_of(Job.from_config(config), profiles, None).update_every == updates


def test_a_plan_is_valid_json_with_the_keys_of_vpipe(said: Said) -> None:
    assert said("-o", "plan.json")[0] == 0
    content = json.loads(Path("plan.json").read_text())
    assert sum(content["partition"]) == 5
    assert len(content["recompute_ratio"]) == len(content["partition"])
    assert content["predictions"]["stages"][0]["memory"]["weights"] >= 4 * MIB


def early_forwards(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """A schedule of a user's own file: 1F1B with twice the forwards ahead, which hides transfers behind computation."""
    ahead = min(2 * (ranks - 1 - rank), microbatches)
    yield from (forward(rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            yield forward(rank, ahead + microbatch)
        yield backward(rank, microbatch)
    yield step(rank, 0)


def test_a_users_schedule_is_planned_and_chosen_when_it_is_the_best(said: Said,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    RegisteredSchedule.named("1f1b")
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    register_schedule("early", flush=True, planned=True, peak_activations=lambda rank, size: min(
        2 * (size.ranks - rank) - 1, size.microbatches))(early_forwards)
    # Slow links and slow halves; the memory is too small for all microbatches at once.
    made = made_profile(5, 2, 2, saved=40 * MIB)
    layers = tuple(replace(layer, input_half=Seconds(0.01), weight_half=Seconds(0.01), recompute=Seconds(0.01))
                   for layer in made.layers)
    made = replace(made, layers=layers, default_link=LinkProfile(0.002, 1e9))
    monkeypatch.setattr("vpipe.app.commands.profile.profiles_of", lambda job, sizes: {size: replace(
        made, identity=replace(made.identity, microbatch_size=size, model=model_digest(job))) for size in sizes})
    status, out, _ = said("--memory", "400MiB", "-o", "plan.json")
    assert status == 0
    assert "\nplan: early, 2 stages" in out
    assert "\nschedule 1f1b" in out
    assert Plan.load("plan.json").schedule == "early"
    settings = ["parallel.schedule=auto", "parallel.partition=auto", "parallel.memory=400MiB"]
    job = Job.from_config(load_config(Path("c.yaml"), settings))
    assert solve(request_of(job, {4: made}, job.config.parallel.memory)).plan.schedule == "early"
    planned = Job.from_config(load_config(Path("c.yaml"), ["parallel.plan=plan.json"]))
    assert planned.schedule.name == "early", "lowered and proved as any"
