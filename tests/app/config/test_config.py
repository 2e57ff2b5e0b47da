"""Native configs: what is read, every mistake with its place and remedy, overrides, the way back to YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from golden import assert_golden, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vpipe.app.config.config import Config, load_config
from vpipe.errors import UserError

CONFIGS = Path(__file__).parents[3] / "configs"
GOOD = """\
model: {name: bert, preset: tiny}
dataset: {name: text, batch_size: 16}
training: {learning_rate: 1e-4, num_microbatches: 4}
parallel: {model_parallel_size: 4}
"""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("c.yaml")


def load(path: Path, text: str, *overrides: str) -> Config:
    path.write_text(text)
    return load_config(path, overrides)


def errors(path: Path, text: str, *overrides: str) -> list[tuple[str, str | None, str]]:
    with pytest.raises(UserError) as caught:
        load(path, text, *overrides)
    return [(problem.what, problem.where, problem.hint) for problem in caught.value.problems]


def test_defaults(at: Path) -> None:
    config = load(at, GOOD)
    assert config.training.learning_rate == 1e-4
    assert (config.training.epochs, config.training.max_steps, config.training.max_minutes) == (1, None, None)
    assert (config.parallel.schedule, config.parallel.executor) == ("1f1b", "overlapped")
    assert (config.parallel.backend, config.parallel.device) == (None, None)
    assert config.parallel.partition == "auto"
    assert config.parallel.recompute == 0.0
    assert config.microbatch_size == 4
    assert config.log_directory == Path("output")
    assert config.checkpoint is None


def test_every_key_is_described() -> None:
    for section in (Config, *(field.annotation for field in Config.model_fields.values())):
        for name, field in getattr(section, "model_fields", {}).items():
            assert field.description, f"{section}.{name}"


def test_config_is_frozen(at: Path) -> None:
    with pytest.raises(ValidationError):
        load(at, GOOD).parallel.schedule = "gpipe"


def test_ourgpipe_file(at: Path) -> None:
    config = load(at, """\
model:    {name: gpt, hidden_size: 512, num_layers: 16, num_heads: 16, sequence_length: 128, vocab_size: -1}
dataset:  {name: code_search_net, batch_size: 4, num_workers: 0}
training: {learning_rate: 0.0001, epochs: 2, num_microbatches: 4, exit_after_profile: false}
parallel: {model_parallel_size: 4, data_parallel_size: 1, use_orion_scheduler: false, schedule: gpipe}
""")
    assert config.model.num_layers == 16
    assert config.training.epochs == 2
    assert config.parallel.schedule == "gpipe"


def test_all_mistakes_at_once_in_the_order_of_the_file(at: Path) -> None:
    assert_golden(__file__, "in order", [refusal(load, at, """\
model: {name: 3, hiden_size: 8}
dataset: {name: text}
training:
  learning_rate: fast
  lr_policy: cosin
  epochs: 1.5
  batch_size: 4
paralel: {}
trace: 1
""")])


WRONG = """\
model: 5
training: {learning_rate: 0}
training: {learning_rate: 1, weight_decay: -1}
training: {learning_rate: 1, seed: 9223372036854775808}
training: {learning_rate: .inf}
training: {learning_rate: true}
dataset: {name: text, batch_size: -4}
dataset: {name: text, batch_size: '4'}
dataset: {name: text, batch_size: 4, path: 4}
dataset: {name: '', batch_size: 4}
model: {name: bert, dropout: 1}
parallel: {model_parallel_size: 4, master_port: 70000}
parallel: {model_parallel_size: 4, warmup_depth: 3}
parallel: {model_parallel_size: 4, stage_to_rank_map: {'0': [a]}}
parallel: {model_parallel_size: 4, device: gpu}
parallel: {model_parallel_size: 4, device: 'cuda:-1'}
parallel: {model_parallel_size: 4, backend: mpi}
parallel: {}
parallel: {partition: 3}
parallel: {partition: [3, 0]}
parallel: {model_parallel_size: 4, recompute: 1.5}
parallel: {partition: [1, 1], recompute: [0.3, yes]}
parallel: {partition: [1, 1], recompute: [0.3, [1, a]]}
parallel: {partition: [1, 1], recompute: [2]}
parallel: {model_parallel_size: 2, memory: much}
model: [a]
log_directory:
unheard_of: 1"""


def test_one_wrong_value(at: Path) -> None:
    def rest(line: str) -> str:
        """The other sections."""
        return "".join(other + "\n" for other in GOOD.splitlines() if not other.startswith(line.split(":")[0] + ":"))

    assert_golden(__file__, "values", {line: refusal(load, at, f"{line}\n{rest(line)}") for line in WRONG.splitlines()})


RULES = """\
dataset.batch_size=10
dataset.batch_size=3
parallel.update_every=1
parallel.update_every=2
parallel.schedule=pipedream; parallel.update_every=3
training.num_microbatches=null; parallel.schedule=pipedream; dataset.batch_size=17
training.num_microbatches=null; parallel.schedule=pipedream; dataset.batch_size=3; parallel.data_parallel_size=2
parallel.schedule=gpip
parallel.partition=[3, 2]
parallel.recompute=[0.5]
parallel.warmup_depth=[3, 2, 1]
parallel.warmup_depth=[4, 2, 1, 0]
parallel.warmup_depth=auto
parallel.warmup_depth=auto; parallel.schedule=auto
parallel.warmup_depth=[2, 2, 1, 0]; parallel.schedule=pipedream
parallel.data_parallel_size=2; parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: [3]}
parallel.warmup_depth=[3, 2, 1, 0]; parallel.stage_to_rank_map={0: [0], 1: [1, 2], 2: [3], 3: [4]}
parallel.executor=naiv
parallel.compress=bf16; parallel.tensor=2
training.compile=true; parallel.tensor=2
elastic=true; parallel.tensor=2
parallel.partition=[1, 1, 2, 2]; parallel.recompute=[0.5, [1], [2, 4], [4, 6]]
parallel.recompute=[0, [1], 0, 0]
parallel.slices=2
parallel.schedule=auto; parallel.chunks=2
parallel.schedule=auto; parallel.stage_to_rank_map={0: [0], 1: [1], 2: [0], 3: [1]}
parallel.memory=8G
parallel.memory=0
model.vocab_size=0
model.config_file=b.json
model.hidden_size=10; model.num_heads=4
training.momentum=0.5
training.delay_correction=extrapolate; parallel.schedule=1f1b
training.delay_correction_strength=0.5
training.exit_after_profile=true
training.warmup_steps=2.5
training.warmup_steps=0.1; training.max_minutes=1
training.lr_policy=cosine; training.max_minutes=1
parallel.stage_to_rank_map={"0": [0], "2": [1]}
parallel.stage_to_rank_map={0: [0, 1], 1: [2], 2: [2], 3: [3]}
parallel.schedule=interleaved; parallel.stage_to_rank_map={0: [0, 1], 1: [2], 2: [0], 3: [2]}
parallel.schedule=chimera; parallel.stage_to_rank_map={0: [0, 0], 1: [1, 2], 2: [2, 1], 3: [3, 0]}
parallel.stage_to_rank_map={0: [0, 0], 1: [1], 2: [2], 3: [3]}
parallel.stage_to_rank_map={0: [-1], 1: [0], 2: [1], 3: [2]}
parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: []}
parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: [4]}
parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: [0]}"""


def test_rules_across_keys(at: Path) -> None:
    assert_golden(__file__, "rules", {line: refusal(load, at, GOOD, *line.split("; ")) for line in RULES.splitlines()})


def test_rules_of_several_sections_are_reported_together(at: Path) -> None:
    assert_golden(__file__, "sections", [refusal(load, at, """\
model: {name: bert, vocab_size: 0}
dataset: {name: text, batch_size: 16}
training: {learning_rate: 1e-3, momentum: 0.5, warmup_steps: 2.5}
parallel:
  model_parallel_size: 3
  partition: [3, 2]
  executor: naiv
""")])


def test_a_missing_key_is_placed_at_its_section(at: Path) -> None:
    text = "# a comment first\n" + GOOD.replace("model_parallel_size: 4", "update_every: 1")
    assert errors(at, text) == [
        ("the key 'parallel.model_parallel_size' is missing", "c.yaml:5:1",
         "add model_parallel_size: number of stages; optional where partition or stage_to_rank_map gives the number")]


def test_stages_on_any_ranks(at: Path) -> None:
    config = load(at, GOOD, "parallel.stage_to_rank_map={0: [2], 1: [0], 2: [3], 3: [1]}")
    assert config.parallel.stage_to_rank_map == {"0": (2,), "1": (0,), "2": (3,), "3": (1,)}


def test_neutral_values_of_features_to_come(at: Path) -> None:
    config = load(at, GOOD, "parallel.executor=overlapped", "parallel.data_parallel_size=1", "checkpoint={}",
                  "parallel.use_orion_scheduler=false", "parallel.partition=auto",
                  "parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: [3]}", "parallel.warmup_depth=[3, 2, 1, 0]")
    assert config.parallel.stage_to_rank_map == {"0": (0,), "1": (1,), "2": (2,), "3": (3,)}
    assert config.checkpoint is not None


def test_a_run_saves_its_end_unless_told_otherwise(at: Path) -> None:
    said = load(at, GOOD).saving, load(at, GOOD, "checkpoint={every_steps: 5, at_end: false}").saving
    assert [(one.every_steps, one.keep, one.at_end, one.makes_any) for one in said] == [
        (None, 3, True, True), (5, 3, False, True)]
    assert load(at, GOOD, "checkpoint.at_end=false").saving.makes_any, "one every ten minutes"
    assert not load(at, GOOD, "checkpoint.at_end=false", "checkpoint.every_minutes=null").saving.makes_any


@pytest.mark.parametrize("tells", ["partition: [3, 2, 2]", "stage_to_rank_map: {0: [0], 1: [1], 2: [2]}"])
def test_the_number_of_stages_follows_from_other_keys(at: Path, tells: str) -> None:
    assert load(at, GOOD.replace("model_parallel_size: 4", tells)).parallel.model_parallel_size == 3
    null = GOOD.replace("model_parallel_size: 4", f"model_parallel_size: null, {tells}")
    assert load(at, null).parallel.model_parallel_size == 3


def test_updates_of_an_asynchronous_schedule(at: Path) -> None:
    config = load(at, GOOD, "parallel.schedule=pipedream", "parallel.update_every=2")
    assert config.parallel.asynchronous
    assert config.microbatch_size == 4
    config = load(at, GOOD, "parallel.schedule=pipedream")  # a number that is given keeps its meaning
    assert (config.training.num_microbatches, config.parallel.update_every) == (4, None)


@pytest.mark.parametrize(("batch", "parallel", "expected"), [
    (16, "schedule=1f1b", (16, None)), (96, "schedule=1f1b", (24, None)), (16, "schedule=auto", (16, None)),
    (16, "schedule=zb_v", (2, None)), (16, "model_parallel_size=1", (1, None)), (12, "schedule=interleaved", (4, None)),
    (128, "data_parallel_size=2 schedule=gpipe", (64, None)), (64, "schedule=gpipe slices=4", (8, None)),
    (16, "schedule=pipedream", (4, 4)), (14, "schedule=pipedream", (7, 7)), (3, "schedule=pipedream", (3, 3)),
    (16, "schedule=2bw", (4, 4)), (1, "schedule=pipedream", (1, 1)),
    (16, "schedule=pipedream update_every=1", (4, 1)), (16, "schedule=pipedream update_every=8", (8, 8)),
    (16, "schedule=pipedream data_parallel_size=2", (8, 4)), (6, "schedule=pipedream data_parallel_size=2", (6, 3)),
    (24, "schedule=pipedream stage_to_rank_map={0:[0],1:[1,2,3],2:[4],3:[5]}", (24, 8))])
def test_microbatches_by_default(at: Path, batch: int, parallel: str, expected: tuple[int, int | None]) -> None:
    settings = [f"parallel.{setting.replace(':', ': ')}" for setting in parallel.split()]
    text = GOOD.replace(", num_microbatches: 4", "").replace("batch_size: 16", f"batch_size: {batch}")
    config = load(at, text, *settings)
    assert (config.training.num_microbatches, config.parallel.update_every) == expected
    assert load(at, config.resolved_yaml()) == config


@pytest.mark.parametrize(("setting", "updates"), [("0", 0), ("0.25", 25), ("1", 1), ("40", 40)])
def test_warmup_is_updates_or_a_share(at: Path, setting: str, updates: int) -> None:
    assert load(at, GOOD, f"training.warmup_steps={setting}").training.warmup_updates(100) == updates


def test_limits_count_when_given(at: Path) -> None:
    training = load(at, GOOD, "training.max_steps=5").training
    assert (training.epochs, training.max_steps) == (None, 5)
    training = load(at, GOOD, "training.max_minutes=0.5", "training.epochs=2").training
    assert (training.epochs, training.max_minutes) == (2, 0.5)


def test_override_shows_its_place_and_the_nearest_key(at: Path) -> None:
    assert_golden(__file__, "overrides", [refusal(
        load, at, GOOD, "training.learning_rat=3e-4", "trainin.epochs=1", "epochs=2", "training.seed=x",
        "dataset.batch_size.x=1")])


def test_overrides_win_and_are_yaml(at: Path) -> None:
    config = load(at, GOOD, "training.learning_rate=3e-4", "parallel.partition=[3, 2, 2, 2]", "model.preset=",
                  "training.seed=1", "training.seed=2", "log_directory=here")
    assert config.training.learning_rate == 3e-4
    assert config.parallel.partition == (3, 2, 2, 2)
    assert config.model.preset is None
    assert config.training.seed == 2
    assert config.log_directory == Path("here")


def test_an_override_may_be_a_section(at: Path) -> None:
    assert load(at, GOOD, "model={name: gpt, hidden_size: 64}").model.hidden_size == 64
    assert errors(at, GOOD, "model={name: gpt, hiden_size: 64}") == [
        ("unknown key 'model.hiden_size'", "--set model", "did you mean 'hidden_size'?")]


def test_override_with_broken_yaml(at: Path) -> None:
    [(what, where, _)] = errors(at, GOOD, "parallel.partition=[3, 2")
    assert what.startswith("the YAML cannot be read: ")
    assert where == "--set parallel.partition"
    [(what, where, _)] = errors(at, GOOD, "model={name: bert, name: gpt}")
    assert (what, where) == ("the key 'model.name' is given twice, first at --set model", "--set model")


def test_duplicate_keys_show_both_places(at: Path) -> None:
    assert errors(at, GOOD + "trace: false\ntrace: false\ntracee: 1\n") == [
        ("the key 'trace' is given twice, first at c.yaml:5:1", "c.yaml:6:1", "remove one of the two"),
        ("unknown key 'tracee'", "c.yaml:7:1", "did you mean 'trace'?"),
    ]
    assert errors(at, GOOD + "trace: false\ntrace: false\n") == [
        ("the key 'trace' is given twice, first at c.yaml:5:1", "c.yaml:6:1", "remove one of the two")]


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.e-4", "0.0001", "+1e-4", ".1e-3"])
def test_numbers(at: Path, number: str) -> None:
    assert load(at, GOOD.replace("1e-4", number)).training.learning_rate == pytest.approx(1e-4, rel=1e-12)


UNREADABLE = [
    "", "# only a comment\n", "\n- a\n- b\n", "hello\n", "model: [1\n", "a: b: c\n", "a: 1\n---\nb: 1\n", "a: \x07\n",
    "[" * 600]


def test_unreadable_text(at: Path) -> None:
    assert_golden(__file__, "unreadable", [refusal(load, at, text) for text in UNREADABLE])


BEYOND = ["trace: !!int abc", "trace: !mine abc", "trace: !mine {a: b}", "trace: &a [*a]", "[a]: 1"]


def test_yaml_beyond_plain_values(at: Path) -> None:
    assert_golden(__file__, "beyond", {line: refusal(load, at, f"{GOOD}{line}\n") for line in BEYOND})


def test_aliases_and_dates_are_plain_values(at: Path) -> None:
    config = load(at, GOOD.replace("preset: tiny", "preset: &p 2024-01-01") + "log_directory: *p\n")
    assert config.model.preset == "2024-01-01"
    assert config.log_directory == Path("2024-01-01")


def test_long_values_are_shortened(at: Path) -> None:
    assert errors(at, GOOD, f"trace={'x' * 100}")[0][0] == f"trace must be true or false, got '{'x' * 56}..."
    assert errors(at, GOOD, f"trace={list(range(50))}")[0][0] == "trace must be true or false, got a list of 50"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.y*ml")), ids=lambda path: path.name)
def test_files_in_configs(path: Path, at: Path) -> None:
    config = load_config(path)
    again = at.with_name("again.yaml")
    again.write_text(config.resolved_yaml())
    assert load_config(again) == config
    comment = path.read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in comment)
    assert any(f"vpipe train configs/{path.name}" in line for line in comment)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


LOOK_ALIKES = ["1e5", "null", "yes", "2024-01-01", "auto", "~", "0x1f", "1_0", "<<", ".5e3"]
WORDS = st.text(min_size=1) | st.sampled_from(LOOK_ALIKES)
SEEDS = st.integers(0, 2**63 - 1)
PATHS = WORDS.filter(lambda word: "\0" not in word and len(word.encode()) < 200)
COUNTS = st.integers(1, 10_000)
POSITIVE = st.floats(min_value=0, max_value=1e9, exclude_min=True)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 64))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "pipedream"]))
    divisors = [k for k in range(1, microbatches + 1) if microbatches % k == 0]
    per_stage = st.lists(st.floats(0, 1), min_size=stages, max_size=stages)
    return Config.model_validate({
        "model": {"name": draw(WORDS), "preset": draw(optional(WORDS)), "hidden_size": draw(optional(COUNTS)),
                  "sequence_length": draw(COUNTS), "dropout": draw(optional(st.floats(0, 1, exclude_max=True))),
                  "tie_weights": draw(st.booleans())},
        "dataset": {"name": draw(WORDS), "path": draw(optional(PATHS)), "seed": draw(optional(SEEDS)),
                    "batch_size": microbatches * draw(st.integers(1, 100)), "cache_directory": draw(optional(PATHS))},
        "training": {"learning_rate": draw(POSITIVE), "epochs": draw(optional(COUNTS)), "max_steps": draw(COUNTS),
                     "max_minutes": draw(optional(POSITIVE)), "num_microbatches": microbatches,
                     "lr_policy": draw(st.sampled_from(["constant", "step", "polynomial", "cosine"])),
                     "warmup_steps": draw(COUNTS | st.floats(0, 1)), "grad_clip": draw(optional(POSITIVE))},
        "parallel": {"model_parallel_size": stages, "schedule": schedule,
                     "partition": draw(st.just("auto") | st.lists(COUNTS, min_size=stages, max_size=stages)),
                     "recompute": draw(st.integers(0, 1) | st.floats(0, 1) | per_stage | st.just("auto")),
                     "memory": draw(st.sampled_from([None, "8GiB", 500_000_000])),
                     "update_every": draw(st.sampled_from(divisors)) if schedule == "pipedream" else None,
                     "stage_to_rank_map": draw(optional(st.permutations(range(stages)).map(
                         lambda ranks: {str(s): [rank] for s, rank in enumerate(ranks)}))),
                     "warmup_depth": draw(optional(st.just([*range(stages)][::-1]) | st.just("auto")))
                     if schedule == "pipedream" else draw(optional(st.just([*range(stages)][::-1])))},
        "checkpoint": draw(st.none() | st.just({"every_steps": 5, "keep": None, "at_end": False, "directory": "c"})),
        "elastic": draw(st.booleans()), "log_directory": draw(PATHS), "trace": draw(st.booleans())})


@settings(deadline=None, max_examples=20)
@given(config=configs())
def test_resolved_yaml_loads_as_an_equal_config(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("resolved") / "config.yaml"
    path.write_text(config.resolved_yaml(), encoding="utf-8")
    again = load_config(path, resolved=True)
    assert again == config
    assert again.resolved_yaml() == config.resolved_yaml()
