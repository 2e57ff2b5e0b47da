"""Profiles as files: what is written is read, and what is another's or damaged is not taken."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_profile import identities_of, made_profile
from small_run import job_of, write_config
from torch import Tensor, nn

from vpipe import Cut, Order
from vpipe.app.cli import main
from vpipe.app.commands.profile import described, profiles_of
from vpipe.app.train import planning
from vpipe.app.train.job import check_plan, microbatch_of
from vpipe.app.train.planning import profile_job
from vpipe.app.train.profile_cache import cached, profile_path, store
from vpipe.errors import UserError
from vpipe.model.layer import Layer
from vpipe.model.model import Model
from vpipe.model.structure import code_digest, structure
from vpipe.plan.plan import Plan
from vpipe.plan.profile import LinkProfile, Profile, Seconds

MADE = replace(made_profile(3, cores=2), process_bytes=1,
               links={(0, 1): LinkProfile(1e-4, 2e9, 0.05), (1, 0): LinkProfile(2e-4, 1e9)},
               layers=tuple(replace(layer, tied={0: 8} if number == 2 else {}, frozen_bytes=number,
                                    frozen_tied={1: 4} if number == 2 else {})
                            for number, layer in enumerate(made_profile(3).layers)))


def test_a_saved_file_is_loaded_as_it_was(tmp_path: Path) -> None:
    MADE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == MADE
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"], "nothing else is left"


def damaged(content: dict[str, Any], *keys: Any, value: Any) -> str:
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(("keys", "value", "says"), [
    (("format",), 7, "format 7, this version reads 1"),
    (("layers", 0, "forward", "median"), "fast", "'fast' is no measured number"),
    (("layers", 0, "forward", "median"), -1.0, "-1.0 is no measured number"),
    (("layers", 0, "forward", "median"), float("inf"), "Infinity is no number of JSON"),
    (("layers", 1, "saved_bytes"), 1.5, "1.5 is no count"),
    (("layers", 1, "tied"), {"2": 4}, "layer 1 is like layer 1 and borrows from [2]"),
    (("layers", 1, "saves"), ["in:x"], "layer 1 keeps ['in:x'], which it neither reads nor writes"),
    (("layers", 1, "colour"), "red", "colour"),
    (("layers",), [], "it has 0 layers and says 3"),
    (("default_link", "bytes_per_s"), 0, "a link carries 0.0 bytes per second"),
    (("identity",), {"model": "x"}, "missing"),
    (("identity", "layers"), "3", "'3' is no count"),
    (("identity", "ranks_per_host"), 0, "ranks_per_host is 0"),
    (("identity", "tensor"), 0, "tensor is 0"),
    (("identity", "model"), 7, "7 is no text"),
    (("layers", 1, "reads"), ["h", "x"], "reads ['x'], which nothing before it writes"),
    (("layers", 1, "name"), None, "None is no text"),
    (("device_bytes",), 2**63, f"{2**63} is no count"),
    (("cores",), 0, "its ranks share 0 cores"),
    (("cores",), "two", "'two' is no count")])
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, keys: tuple[Any, ...], value: Any, says: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(damaged(MADE.as_json(), *keys, value=value))
    with pytest.raises(UserError) as caught:
        Profile.load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "\0"])
def test_files_that_are_no_profile_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(UserError, match="vpipe profile CONFIG measures one"):
        Profile.load(path)
    with pytest.raises(UserError, match="cannot read the profile"):
        Profile.load(tmp_path / "none.json")


def test_the_cache_gives_back_what_it_was_given(tmp_path: Path) -> None:
    said: list[str] = []
    assert cached(MADE.identity.kept_as, tmp_path, said.append) is None
    store(MADE, tmp_path)
    path = profile_path(MADE.identity.digest, tmp_path)
    assert cached(MADE.identity.kept_as, tmp_path, said.append) == MADE
    assert cached(replace(MADE.identity, microbatch_size=8).kept_as, tmp_path, said.append) is None
    assert not said
    path.write_text(path.read_text()[:100])
    assert cached(MADE.identity.kept_as, tmp_path, said.append) is None
    replace(MADE, identity=replace(MADE.identity, device="H100")).save(path)
    assert cached(MADE.identity.kept_as, tmp_path, said.append) is None
    old = MADE.as_json()
    del old["process_bytes"]
    path.write_text(json.dumps(old))
    assert Profile.load(path) == replace(MADE, process_bytes=0)
    assert cached(MADE.identity.kept_as, tmp_path, said.append) is None
    assert [line.partition(" (")[0] for line in said] == [
        "measured again: the profile is not JSON: Expecting ',' delimiter",
        "measured again: the file holds the profile of something else",
        "measured again: an older version wrote it"]
    assert cached("../../etc", tmp_path) is None


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("in the way")
    with pytest.raises(UserError, match=r"dataset\.cache_directory"):
        store(MADE, tmp_path)


def test_a_job_is_measured_once_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"dataset__cache_directory": str(tmp_path / "cache"), "parallel__model_parallel_size": 1}
    job = job_of(tmp_path, **changes)
    monkeypatch.setattr(planning, "measure", partial(planning.measure, budget_s=0.0))
    found = profile_job(job, [1, 2])
    assert [profile.identity.microbatch_size for profile in found.values()] == [1, 2]
    assert [profile.identity for profile in found.values()] == [identities_of(job, [size], 1)[0] for size in found]
    assert "measuring" in capsys.readouterr().err

    def measured_again(*_: Any, **__: Any) -> None:
        raise AssertionError("it is in the cache")

    monkeypatch.setattr(planning, "measure", measured_again)
    assert profile_job(job, [1, 2]) == found
    assert main(["profile", str(write_config(tmp_path, **changes)), "-o", str(tmp_path / "profile.json")]) == 0
    assert Profile.load(tmp_path / "profile.json") == found[2]
    out = capsys.readouterr().out
    assert "bert tiny: 5 layers, 4 distinct; microbatches of 2 samples, adamw" in out
    assert "block0.mlp x 2" in out
    assert f"kept in {profile_path(found[2].identity.digest, tmp_path / 'cache')}" in out


def test_more_samples_than_a_batch_repeat(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    ids = microbatch_of(job, 20)["input_ids"]
    assert ids.shape[0] == 20
    assert ids[8:16].equal(ids[:8])


def test_a_profile_is_of_the_config_s_precision_and_says_it(tmp_path: Path) -> None:
    jobs = [job_of(tmp_path, training__precision=name) for name in ("fp32", "bf16_pure")]
    identities = [identities_of(job, [1], 1)[0] for job in jobs]
    assert [identity.precision for identity in identities] == ["fp32", "bf16_pure"]
    assert len({identity.digest for identity in identities}) == 2
    assert "adamw, bf16_pure\n" in described(replace(MADE, identity=replace(MADE.identity, precision="bf16_pure")))


def test_a_plan_made_for_another_precision_is_followed_with_a_warning(tmp_path: Path) -> None:
    job, said = job_of(tmp_path, training__precision="bf16"), list[str]()
    made_for = asdict(identities_of(job, [job.config.microbatch_size], 1)[0])
    for precision in ("bf16", "fp32"):
        plan = Plan(Cut(job.cut.partition), Order("1f1b"), profiled=made_for | {"precision": precision})
        check_plan(replace(job, plan=plan), said.append)
    assert said == ["warning: the plan was made for precision fp32, not bf16: its predictions do not hold here"]


def test_noise_is_marked() -> None:
    noisy = replace(MADE, layers=(replace(MADE.layers[0], forward=Seconds(0.004, 0.25)), *MADE.layers[1:]))
    assert "4.00 ± 25%*" in described(noisy)
    assert "spreads above 10%" in described(noisy)
    assert "*" not in described(MADE)
    assert "between two ranks: 0.10 ms, then 1.00 GB/s" in described(MADE)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(write_config(tmp_path)), "-o", str(tmp_path / "none" / "p.json")]) == 2
    assert "is in no folder" in capsys.readouterr().err
    assert main(["profile", str(write_config(tmp_path)), "-o", str(tmp_path)]) == 2
    assert main(["profile", str(write_config(tmp_path)), "-o", "/proc/p.json"]) == 2
    assert "error: cannot write '/proc/p.json': /proc: " in capsys.readouterr().err


def test_more_ranks_than_a_host_can_bear_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    job = job_of(tmp_path, dataset__batch_size=40, dataset__samples=800, dataset__cache_directory=str(tmp_path),
                 parallel__data_parallel_size=20, training__num_microbatches=20)
    with pytest.raises(UserError, match="40 processes would be started to be measured, on 2 cores"):
        profiles_of(job, [2])


class Loops(nn.Module):
    """What it computes depends on an object that does not say what is in it."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, h: Tensor) -> Tensor:
        return h


def test_a_model_whose_content_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    def code_of(own: Any) -> str | None:
        model = Model([Layer("a", lambda: Loops(own), ("h",), ("loss",))], batch=("h",))
        return code_digest(model.layers, [structure(layer) for layer in model.layers])

    assert code_of(3) == code_of(4)
    assert code_of(3) is not None, "a number is in the structure"
    assert code_of(write_config) not in (None, code_of(3))
    assert code_of(object()) is code_of(lambda h: h) is None
    unknown = replace(MADE, identity=replace(MADE.identity, code=None))
    with pytest.raises(UserError, match="is not kept"):
        store(unknown, tmp_path)
    profile_path(unknown.identity.digest, tmp_path).parent.mkdir()
    unknown.save(profile_path(unknown.identity.digest, tmp_path))
    assert cached(unknown.identity.kept_as, tmp_path) is None


@pytest.mark.parametrize("key", ["cores", "device_bytes", "links", "checked"])
def test_a_file_without_a_field_that_has_a_default_is_damaged(tmp_path: Path, key: str) -> None:
    """Without cores, say, the planner would take every rank to have a device of its own."""
    content = MADE.as_json()
    del content[key]
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"damaged: KeyError: '{key}'"):
        Profile.load(tmp_path / "profile.json")
