"""Planning when a run starts: what is planned, what stays, what the run leaves behind, and when nothing fits."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from made_profile import identities_of
from small_run import check_updates, job_of, losses, oracle

from vpipe import Cut
from vpipe.app.config.config import load_config
from vpipe.app.errors import StartError
from vpipe.app.launch.failure_report import find_failure, write_report
from vpipe.app.launch.rank_env import ranks_of
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.app.train.planning import memory_limit, plan_job, request_of
from vpipe.app.train.profile_cache import store
from vpipe.app.train.summary import headline
from vpipe.errors import RunError, UserError
from vpipe.plan.plan import Plan
from vpipe.plan.profile import Identity, LayerProfile, LinkProfile, Profile, Seconds, TensorBytes


def profile_of(seconds: tuple[float, ...]) -> Profile:
    """Of five layers that take so long forward, twice as long backward, and keep 1 MB each."""
    def layer(number: int, s: float) -> LayerProfile:
        time = Seconds(s)
        return LayerProfile(
            f"layer{number}", time, Seconds(2 * s), time, time, time, Seconds(1e-6), 1000, 2000,
            ("input_ids",) if number == 0 else ("h",), (TensorBytes("loss" if number == 4 else "h", 1000, True),),
            1_000_000, (), 1000, 100, {}, 10**6, number)

    identity = Identity("m", "bert tiny", 5, 2, "adamw", "a processor", 1, 2, "gloo", "2")
    return Profile(identity, tuple(layer(i, s) for i, s in enumerate(seconds)), {"input_ids": 1000},
                   LinkProfile(1e-5, 1e9), cores=2, device_bytes=80_000_000)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of microbatches that were asked for; the first layer takes as long as the other four."""
    asked: list[list[int]] = []

    def profile_job(job: Job, sizes: list[int], **_: Any) -> dict[int, Profile]:
        asked.append(sizes)
        return {size: profile_of((0.04, 0.01, 0.01, 0.01, 0.01)) for size in sizes}

    monkeypatch.setattr("vpipe.app.train.planning.profile_job", profile_job)
    return asked


def auto(tmp_path: Path, **changes: Any) -> Job:
    return job_of(tmp_path, **{"parallel__partition": "auto", **changes})


def test_values_to_be_planned_have_stand_ins_with_the_same_ranks(tmp_path: Path) -> None:
    job = auto(tmp_path, parallel__schedule="auto", parallel__recompute="auto", parallel__data_parallel_size=2)
    assert job.config.parallel.to_plan == ("partition", "recompute", "schedule")
    assert (job.cut.partition, job.cut.recomputed) == ((1, 4), (frozenset(), frozenset()))
    assert job.schedule.placement == ((0, 1), (2, 3))
    assert job.config.parallel.partition == job.config.parallel.recompute == job.config.parallel.schedule == "auto"
    assert ranks_of(job.config) == 4
    assert headline(job) == "bert: 5 layers in 2 stages, partition, recompute, schedule to be planned, 4 processes"


def test_one_stage_can_be_cut_in_one_way_only(tmp_path: Path) -> None:
    job = auto(tmp_path, parallel__model_parallel_size=1)
    assert (job.config.parallel.to_plan, job.config.parallel.partition) == ((), (5,))


def test_the_partition_alone(tmp_path: Path, measured: list[list[int]]) -> None:
    job = auto(tmp_path, parallel__stage_to_rank_map={"0": [1], "1": [0]}, parallel__recompute=0.5)
    asked = request_of(job, {4: profile_of((0.01,) * 5)}, None)
    assert (asked.schedules, asked.placement, asked.recompute, asked.partition) == (("1f1b",), ((1,), (0,)), 0.5, None)
    found = plan_job(job, tmp_path)
    assert measured == [[2]]
    assert (found.cut.partition, found.schedule.placement) == ((1, 4), ((1,), (0,)))
    assert found.config.parallel.schedule == "1f1b"
    assert found.cut.recomputed == (frozenset(), {3, 4}), "half of the stage, whatever its layers are"
    assert found.plan is not None
    assert found.plan.predictions is not None


def test_a_stream_is_planned_as_one(tmp_path: Path, measured: list[list[int]]) -> None:
    found = plan_job(auto(tmp_path, parallel__schedule="pipedream", parallel__update_every=2), tmp_path)
    assert (found.config.parallel.schedule, found.schedule.update_every) == ("pipedream", 2)
    assert found.cut.partition == (1, 4)


def test_recompute_is_what_the_memory_asks_for(tmp_path: Path, measured: list[list[int]]) -> None:
    def recomputed(memory: str | None) -> int:
        job = job_of(tmp_path, parallel__partition=[3, 2], parallel__recompute="auto", parallel__memory=memory)
        return sum(map(len, plan_job(job, tmp_path).cut.recomputed))

    assert recomputed("100MB") == 0
    assert recomputed("5MB") > 0


def test_the_run_is_what_was_planned_and_says_so(tmp_path: Path, measured: list[list[int]],
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    job = auto(tmp_path, parallel__schedule="auto", parallel__recompute="auto")
    train(job, tmp_path)
    check_updates(tmp_path, 4)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("planned in ")]
    config, plan = load_config(tmp_path / "config.yaml"), Plan.load(tmp_path / "plan.json")
    assert config.parallel.to_plan == ()
    assert (config.parallel.partition, config.parallel.schedule) == (plan.partition, plan.schedule)
    assert f"stages of {list(plan.partition)} layers" in line
    assert f"schedule {plan.schedule}; expected are " in line
    assert Profile.load(tmp_path / "profile.json").identity.digest == plan.profile
    assert json.loads((tmp_path / "run.json").read_text())["planned_s"] == [
        pytest.approx(4 * stage.microbatch_s + stage.step_s) for stage in plan.predicted.stages]
    assert losses(tmp_path) == oracle(Job.from_config(config), 4).losses


def test_a_complete_config_is_not_measured(tmp_path: Path, measured: list[list[int]]) -> None:
    train(job_of(tmp_path), tmp_path)
    assert measured == []
    assert not (tmp_path / "plan.json").exists()


def test_the_profile_of_a_plan_from_a_file_comes_with_it_from_the_cache(tmp_path: Path) -> None:
    job = job_of(tmp_path, dataset__cache_directory=str(tmp_path / "cache"))
    of_another = profile_of((0.01,) * 5)
    own = replace(of_another, identity=identities_of(job, [2], 2)[0])
    for profile in (of_another, own):
        store(replace(profile, process_bytes=1), tmp_path / "cache")
        job.with_plan(Plan(Cut((2, 3)), profile=profile.identity.digest)).keep_plan(tmp_path)
        assert (tmp_path / "profile.json").exists() == (profile is own)
    assert Profile.load(tmp_path / "profile.json") == replace(own, process_bytes=1)


def test_a_plan_for_another_model_is_refused_and_one_for_another_microbatch_remarked(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, path = job_of(tmp_path), tmp_path / "plan.json"
    Plan(Cut((2, 3)), profiled=asdict(identities_of(job, [2], 2)[0])).save(path)
    following: dict[str, Any] = {"parallel__partition": "auto", "parallel__plan": str(path)}
    assert job_of(tmp_path, **following).plan == Plan.load(path)
    assert capsys.readouterr().err == ""
    job_of(tmp_path, **following, training__num_microbatches=2)
    assert "the plan was made for microbatch size 2, not 4: its predictions do not hold" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"for another model: bert tiny \(digest \w+\) there, bert tiny \(digest "):
        job_of(tmp_path, **following, model__hidden_size=32)
    path.write_text('{"partition": [2, 3], "profile": "0123456789ab"}')
    assert job_of(tmp_path, **following).cut.partition == (2, 3)


def test_settings_that_change_costs_change_the_digest(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"training__momentum": 0.0}, {"training__weight_decay": 0.1},
                                     {"model__dropout": 0.0}, {"training__optimizer": "muon"}]
    plain, *changed = (job_of(tmp_path, **{"training__optimizer": "sgd", **change}) for change in changes)
    digests = {identities_of(job, [2], 2)[0].digest for job in (plain, *changed)}
    assert len(digests) == 5
    assert identities_of(job_of(tmp_path, training__optimizer="sgd"), [2], 2)[0].digest in digests
    assert identities_of(plain, [2], 2, hosts=2)[0].digest != identities_of(plain, [2], 4)[0].digest


def test_the_memory_of_a_rank(tmp_path: Path) -> None:
    profile = profile_of((0.01,) * 5)
    assert memory_limit(job_of(tmp_path).config, profile)[0] == 40_000_000, "two ranks of a host share what it has"
    split = replace(profile, identity=replace(profile.identity, tensor=2))
    assert memory_limit(job_of(tmp_path).config, split)[0] == 20_000_000, "each of the two is two processes"
    assert memory_limit(job_of(tmp_path).config, replace(profile, cores=None))[0] == 80_000_000, "each has a GPU"
    assert memory_limit(auto(tmp_path, parallel__memory="1MiB").config, profile)[0] == 2**20


def test_when_nothing_fits_every_rank_says_the_same_and_the_user_hears_it_once(
        tmp_path: Path, measured: list[list[int]]) -> None:
    with pytest.raises(StartError, match=r"no plan fits into 97\.7 KiB per rank") as error:
        plan_job(auto(tmp_path, parallel__recompute="auto", parallel__memory="100kB"), tmp_path)
    for rank in (0, 1):
        write_report(tmp_path, rank, error.value)
    told = find_failure(tmp_path, "rank {}".format, {})
    assert isinstance(told, UserError)
    assert str(told) == str(error.value)
    for rank in (0, 1):
        write_report(tmp_path, rank, UserError("other", hint="no plan"))
    assert isinstance(find_failure(tmp_path, "rank {}".format, {}), RunError)


def test_under_a_schedule_from_a_file_stages_are_balanced_without_measuring(tmp_path: Path,
                                                                            measured: list[list[int]]) -> None:
    file = tmp_path / "s.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    job = auto(tmp_path, parallel__schedule=str(file), training__num_microbatches=2)
    assert (job.config.parallel.to_plan, job.config.parallel.partition) == ((), (1, 4))
    train(job, tmp_path)
    assert measured == []
    check_updates(tmp_path, 4)
    with pytest.raises(UserError, match=r"is auto, but the schedule is a file"):
        auto(tmp_path, parallel__schedule=str(file), parallel__recompute="auto", training__num_microbatches=2)
