"""Native configs: what is read, every mistake with its place and remedy, overrides, the way back to YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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
    assert errors(at, """\
model: {name: 3, hiden_size: 8}
dataset: {name: text}
training:
  learning_rate: fast
  lr_policy: cosin
  epochs: 1.5
  batch_size: 4
paralel: {}
trace: 1
""") == [
        ("the key 'parallel' is missing", "c.yaml:1:1",
         "add parallel: stages, their ranks and their schedule"),
        ("model.name must be text, got 3", "c.yaml:1:15",
         "name: model family, such as bert, gpt, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe or translation"),
        ("unknown key 'model.hiden_size'", "c.yaml:1:18", "did you mean 'hidden_size'?"),
        ("the key 'dataset.batch_size' is missing", "c.yaml:2:1",
         "add batch_size: samples per batch, which is split into num_microbatches microbatches; with a flush, one "
         "update per batch"),
        ("training.learning_rate must be a number, got 'fast'", "c.yaml:4:18",
         "learning_rate: learning rate after the warm-up, such as 1e-3"),
        ("training.lr_policy must be 'constant', 'step', 'polynomial' or 'cosine', got 'cosin'", "c.yaml:5:14",
         "did you mean 'cosine'?"),
        ("training.epochs must be a whole number, got 1.5", "c.yaml:6:11",
         "epochs: stop after this many passes over the data; 1 when neither max_steps nor max_minutes is given"),
        ("unknown key 'training.batch_size'", "c.yaml:7:3", "did you mean 'dataset.batch_size'?"),
        ("unknown key 'paralel'", "c.yaml:8:1", "did you mean 'parallel'?"),
        ("trace must be true or false, got 1", "c.yaml:9:8", "trace: write the timeline of the run"),
    ]


@pytest.mark.parametrize(("line", "what"), [
    ("model: 5", "model must be keys with values, got 5"),
    ("training: {learning_rate: 0}", "training.learning_rate must be above 0, got 0"),
    ("training: {learning_rate: 1, weight_decay: -1}", "training.weight_decay must be at least 0, got -1"),
    ("training: {learning_rate: 1, seed: 9223372036854775808}",
     "training.seed must be at most 9223372036854775807, got 9223372036854775808"),
    ("training: {learning_rate: .inf}", "training.learning_rate must be finite, got inf"),
    ("training: {learning_rate: true}", "training.learning_rate must be a number, got true"),
    ("dataset: {name: text, batch_size: -4}", "dataset.batch_size must be at least 1, got -4"),
    ("dataset: {name: text, batch_size: '4'}", "dataset.batch_size must be a whole number, got '4'"),
    ("dataset: {name: text, batch_size: 4, path: 4}", "dataset.path must be text, got 4"),
    ("dataset: {name: '', batch_size: 4}", "dataset.name must not be empty, got ''"),
    ("model: {name: bert, dropout: 1}", "model.dropout must be below 1, got 1"),
    ("parallel: {model_parallel_size: 4, master_port: 70000}", "parallel.master_port must be at most 65535, got 70000"),
    ("parallel: {model_parallel_size: 4, warmup_depth: 3}",
     "parallel.warmup_depth must be a list of whole numbers or auto, got 3"),
    ("parallel: {model_parallel_size: 4, stage_to_rank_map: {'0': [a]}}",
     "parallel.stage_to_rank_map.0[0] must be a whole number, got 'a'"),
    ("parallel: {model_parallel_size: 4, device: gpu}",
     "parallel.device must be cpu, cuda or a GPU such as cuda:1, got 'gpu'"),
    ("parallel: {model_parallel_size: 4, device: 'cuda:-1'}",
     "parallel.device must be cpu, cuda or a GPU such as cuda:1, got 'cuda:-1'"),
    ("parallel: {model_parallel_size: 4, backend: mpi}",
     "parallel.backend must be 'gloo', 'nccl', 'xccl' or 'hccl', got 'mpi'"),
    ("parallel: {}", "the key 'parallel.model_parallel_size' is missing"),
    ("parallel: {partition: 3}", "parallel.partition must be a list of whole numbers or auto, got 3"),
    ("parallel: {partition: [3, 0]}", "parallel.partition[1] must be a whole number of at least 1, got 0"),
    ("parallel: {model_parallel_size: 4, recompute: 1.5}", "parallel.recompute must be a number from 0 to 1, got 1.5"),
    ("parallel: {partition: [1, 1], recompute: [0.3, yes]}",
     "parallel.recompute[1] must be a number from 0 to 1, got true"),
    ("parallel: {partition: [1, 1], recompute: [0.3, [1, a]]}",
     "parallel.recompute[1][1] must be the number of a layer, got 'a'"),
    ("parallel: {partition: [1, 1], recompute: [2]}", "parallel.recompute[0] must be a number from 0 to 1, got 2"),
    ("parallel: {model_parallel_size: 2, memory: much}",
     "parallel.memory is 'much', which is no amount of memory"),
    ("model: [a]", "model must be keys with values, got ['a']"),
    ("log_directory:", "log_directory must be text, got nothing"),
    ("unheard_of: 1", "unknown key 'unheard_of'"),
])
def test_one_wrong_value(at: Path, line: str, what: str) -> None:
    section = line.split(":")[0]
    rest = "".join(other + "\n" for other in GOOD.splitlines() if not other.startswith(section + ":"))
    assert what in [found for found, _, _ in errors(at, line + "\n" + rest)]


@pytest.mark.parametrize(("overrides", "what", "hint"), [
    (["dataset.batch_size=10"],
     "dataset.batch_size is 10, which the 4 microbatches of training.num_microbatches do not divide",
     "the nearest batch sizes are 8 and 12"),
    (["dataset.batch_size=3"],
     "dataset.batch_size is 3, which the 4 microbatches of training.num_microbatches do not divide",
     "the nearest batch size is 4"),
    *((["parallel.update_every=" + every], f"parallel.update_every is {every}, but the schedule 1f1b updates once per "
       "batch of 4 microbatches", "leave it out") for every in "12"),
    (["parallel.schedule=pipedream", "parallel.update_every=3"],
     "parallel.update_every is 3, which does not divide the 4 microbatches of a batch",
     "use one of 1, 2, 4, or make training.num_microbatches a multiple of 3"),
    (["training.num_microbatches=null", "parallel.schedule=pipedream", "dataset.batch_size=17"],
     "dataset.batch_size is 17, which cannot be cut evenly into 4 to 8 microbatches, as pipedream has them where "
     "training.num_microbatches is not given", "the nearest batch sizes are 16 and 20; or give "
     "training.num_microbatches"),
    (["training.num_microbatches=null", "parallel.schedule=pipedream", "dataset.batch_size=3",
      "parallel.data_parallel_size=2"],
     "dataset.batch_size is 3, which cannot be cut evenly into 8 to 16 microbatches, a multiple of 2, as pipedream has "
     "them where training.num_microbatches is not given", "the nearest batch size is 8; or give "
     "training.num_microbatches"),
    (["parallel.schedule=gpip"], "parallel.schedule is 'gpip', which is no schedule of this version",
     "did you mean 'gpipe'? Your own are added by importing their file (--import FILE.py) or by a package"),
    (["parallel.partition=[3, 2]"], "parallel.partition has 2 entries for 4 stages", "give one entry per stage"),
    (["parallel.recompute=[0.5]"], "parallel.recompute has 1 entry for 4 stages", "give one entry per stage"),
    (["parallel.warmup_depth=[3, 2, 1]"], "parallel.warmup_depth has 3 entries for 4 stages",
     "give one entry per stage"),
    (["parallel.warmup_depth=[4, 2, 1, 0]"], "parallel.warmup_depth is [4, 2, 1, 0], but '1f1b' has a flush",
     "leave warmup_depth out, or choose one of: 2bw, pipedream, pipedream_vertical_sync"),
    (["parallel.warmup_depth=auto"], "parallel.warmup_depth is auto, but '1f1b' has a flush",
     "leave warmup_depth out, or choose one of: 2bw, pipedream, pipedream_vertical_sync"),
    (["parallel.warmup_depth=auto", "parallel.schedule=auto"],
     "parallel.warmup_depth is auto, but the schedule is auto, which takes one with a flush",
     "leave it out, or choose a schedule without a flush, such as pipedream"),
    (["parallel.warmup_depth=[2, 2, 1, 0]", "parallel.schedule=pipedream"],
     "parallel.warmup_depth is [2, 2, 1, 0]: stage 0 does 2 before its first backward, but needs 3",
     "use [3, 2, 1, 0], the nearest depths that fit"),
    (["parallel.data_parallel_size=2", "parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: [3]}"],
     "parallel.data_parallel_size is 2, but stage_to_rank_map gives the stages 1, 1, 1, 1 ranks",
     "leave it out: the map says it"),
    (["parallel.warmup_depth=[3, 2, 1, 0]", "parallel.stage_to_rank_map={0: [0], 1: [1, 2], 2: [3], 3: [4]}"],
     "parallel.warmup_depth is [3, 2, 1, 0], but '1f1b' has a flush",
     "leave warmup_depth out, or choose one of: 2bw, pipedream, pipedream_vertical_sync"),
    (["parallel.executor=naiv"], "parallel.executor is naiv, but no executor is called 'naiv'",
     "did you mean 'naive'? Your own are added by importing their file (--import FILE.py) or by a package"),
    (["parallel.compress=bf16", "parallel.tensor=2"], "parallel.compress is bf16, but tensor is 2: its ranks would "
     "round apart what they hold in common", "leave it out, or set tensor: 1"),
    (["training.compile=true", "parallel.tensor=2"], "training.compile is True, but parallel.tensor is 2, and split "
     "layers are not compiled", "set it to false"),
    (["elastic=true", "parallel.tensor=2"], "elastic is true, but parallel.tensor is 2: what is left of a host cannot "
     "split a layer", "set it to false"),
    (["parallel.partition=[1, 1, 2, 2]", "parallel.recompute=[0.5, [1], [2, 4], [4, 6]]"],
     "parallel.recompute[2] names layer 4, but stage 2 has the layers 2 to 3",
     "layers are those of the model, counted from 0"),
    (["parallel.recompute=[0, [1], 0, 0]"],
     "parallel.recompute names layers, but the partition, which decides whose they are, is auto",
     "write the partition, or recompute: auto"),
    (["parallel.slices=2"], "parallel.slices is 2, but '1f1b' takes whole microbatches",
     "leave slices out, or choose a schedule of slices: gpipe, seq1f1b"),
    (["parallel.schedule=auto", "parallel.chunks=2"], "parallel.chunks is 2, but the schedule is auto",
     "leave it out, or name a schedule"),
    (["parallel.schedule=auto", "parallel.stage_to_rank_map={0: [0], 1: [1], 2: [0], 3: [1]}"],
     "parallel.stage_to_rank_map.2 puts stage 2 on rank 0, where stage 0 is already; auto holds one stage on each rank",
     "give each stage ranks of its own: 4 of them are numbered 0 to 3, or choose a schedule with several stages per "
     "rank, such as interleaved"),
    (["parallel.memory=8G"], "parallel.memory is '8G', which may be GB (of 1000s) or GiB (of 1024s)",
     "write 8GiB or 8GB"),
    (["parallel.memory=0"], "parallel.memory is 0", "give more than nothing; write bytes with a unit, such as 8GiB, "
     "500 MB or 1.5GB"),
    (["model.vocab_size=0"], "model.vocab_size is 0", "give the number of tokens, or -1 to ask the data set"),
    (["model.config_file=b.json"],
     "model.preset is 'tiny', but the sizes also come from the config_file 'b.json'", "keep one of the two"),
    (["model.hidden_size=10", "model.num_heads=4"], "model.hidden_size is 10, which 4 heads do not divide",
     "the nearest sizes are 8 and 12"),
    (["training.momentum=0.5"], "training.momentum is 0.5, but the optimizer is adamw",
     "leave it out, or set optimizer: sgd"),
    (["training.delay_correction=extrapolate", "parallel.schedule=1f1b"],
     "training.delay_correction is extrapolate, but under the schedule 1f1b no gradient is late: it has a flush",
     "set it to none, or choose a schedule without a flush, such as pipedream"),
    (["training.delay_correction_strength=0.5"],
     "training.delay_correction_strength is 0.5, but nothing is corrected",
     "leave it out, or set delay_correction: extrapolate"),
    (["training.exit_after_profile=true"],
     "training.exit_after_profile is true, but no profile_iteration says which update is profiled",
     "leave it out, or set profile_iteration"),
    (["training.warmup_steps=2.5"], "training.warmup_steps is 2.5", "give whole updates, or a share below 1"),
    (["training.warmup_steps=0.1", "training.max_minutes=1"],
     "training.warmup_steps is 0.1, a share of all updates, but max_minutes alone does not give their number",
     "give max_steps or epochs as well; the run still ends at the first limit it reaches"),
    (["training.lr_policy=cosine", "training.max_minutes=1"],
     "training.lr_policy is cosine, which depends on the number of updates, but max_minutes alone does not give it",
     "give max_steps or epochs as well; the run still ends at the first limit it reaches"),
    (['parallel.stage_to_rank_map={"0": [0], "2": [1]}'],
     'parallel.stage_to_rank_map names the stages 0, 2; there are 4: 0, 1, 2, 3',
     'name each stage once, as "0", "1", ..., or correct model_parallel_size'),
    (['parallel.stage_to_rank_map={0: [0, 1], 1: [2], 2: [2], 3: [3]}'],
     "parallel.stage_to_rank_map.2 puts stage 2 on rank 2, where stage 1 is already; 1f1b holds one stage on each "
     "rank", "give each stage ranks of its own: 5 of them are numbered 0 to 4, or choose a schedule with several "
     "stages per rank, such as interleaved"),
    (['parallel.schedule=interleaved', 'parallel.stage_to_rank_map={0: [0, 1], 1: [2], 2: [0], 3: [2]}'],
     "parallel.stage_to_rank_map.2 puts stage 2 on rank 0, where stage 0 is already; stage 0 has ranks [0, 1], stage 2 "
     "[0]", "let the two share all of their ranks, in the same order, or none"),
    (['parallel.schedule=chimera', 'parallel.stage_to_rank_map={0: [0, 0], 1: [1, 2], 2: [2, 1], 3: [3, 0]}'],
     "parallel.stage_to_rank_map.0 names rank 0 twice for stage 0",
     "give each stage ranks of its own: 8 of them are numbered 0 to 7"),
    (['parallel.stage_to_rank_map={0: [0, 0], 1: [1], 2: [2], 3: [3]}'],
     "parallel.stage_to_rank_map.0 names rank 0 twice for stage 0",
     "give each stage ranks of its own: 5 of them are numbered 0 to 4"),
    (['parallel.stage_to_rank_map={0: [-1], 1: [0], 2: [1], 3: [2]}'],
     "parallel.stage_to_rank_map.0 puts stage 0 on rank -1",
     "give each stage ranks of its own: 4 of them are numbered 0 to 3"),
    (['parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: []}'],
     "parallel.stage_to_rank_map.3 puts stage 3 on no rank", "give the stage a rank, or several"),
    (['parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: [4]}'],
     "parallel.stage_to_rank_map names ranks up to 4, but never rank 3", "number the ranks from 0 without a gap"),
    (['parallel.stage_to_rank_map={0: [0], 1: [1], 2: [2], 3: [0]}'],
     "parallel.stage_to_rank_map.3 puts stage 3 on rank 0, where stage 0 is already; 1f1b holds one stage on each "
     "rank", "give each stage ranks of its own: 4 of them are numbered 0 to 3, or choose a schedule with several "
     "stages per rank, such as interleaved"),
])
def test_rules_across_keys(at: Path, overrides: list[str], what: str, hint: str) -> None:
    found = errors(at, GOOD, *overrides)
    assert (what, hint) in [(found_what, found_hint) for found_what, _, found_hint in found]


def test_rules_of_several_sections_are_reported_together(at: Path) -> None:
    assert [(what, where) for what, where, _ in errors(at, """\
model: {name: bert, vocab_size: 0}
dataset: {name: text, batch_size: 16}
training: {learning_rate: 1e-3, momentum: 0.5, warmup_steps: 2.5}
parallel:
  model_parallel_size: 3
  partition: [3, 2]
  executor: naiv
""")] == [
        ("model.vocab_size is 0", "c.yaml:1:33"),
        ("training.warmup_steps is 2.5", "c.yaml:3:62"),
        ("parallel.partition has 2 entries for 3 stages", "c.yaml:6:14"),
        ("parallel.executor is naiv, but no executor is called 'naiv'", "c.yaml:7:13"),
        ("training.momentum is 0.5, but the optimizer is adamw", "c.yaml:3:43"),
    ]


def test_a_missing_key_is_placed_at_its_section(at: Path) -> None:
    text = "# a comment first\n" + GOOD.replace("model_parallel_size: 4", "update_every: 1")
    assert errors(at, text) == [
        ("the key 'parallel.model_parallel_size' is missing", "c.yaml:5:1",
         "add model_parallel_size: number of stages; optional where partition or stage_to_rank_map gives it")]


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
    assert not load(at, GOOD, "checkpoint.at_end=false").saving.makes_any


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
    (16, "schedule=1f1b", (1, None)), (16, "schedule=auto", (1, None)),  # with a flush as ever
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
    assert errors(
        at, GOOD, "training.learning_rat=3e-4", "trainin.epochs=1", "epochs=2", "training.seed=x",
        "dataset.batch_size.x=1") == [
        ("unknown key 'training.learning_rat'", "--set training.learning_rat", "did you mean 'learning_rate'?"),
        ("unknown key 'trainin'", "--set trainin.epochs", "did you mean 'training'?"),
        ("unknown key 'epochs'", "--set epochs", "did you mean 'training.epochs'?"),
        ("training.seed must be a whole number, got 'x'", "--set training.seed",
         "seed: seed of initial weights and dropout"),
        ("dataset.batch_size must be a whole number, got a mapping", "--set dataset.batch_size.x",
         "batch_size: samples per batch, which is split into num_microbatches microbatches; with a flush, one "
         "update per batch"),
    ]


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


@pytest.mark.parametrize(("text", "what", "where"), [
    ("", "the file is empty", "c.yaml:1:1"),
    ("# only a comment\n", "the file is empty", "c.yaml:1:1"),
    ("\n- a\n- b\n", "the file holds ['a', 'b'], not keys with values", "c.yaml:2:1"),
    ("hello\n", "the file holds 'hello', not keys with values", "c.yaml:1:1"),
    ("model: [1\n", "the YAML cannot be read: expected ',' or ']', but got '<stream end>'", "c.yaml:2:1"),
    ("a: b: c\n", "the YAML cannot be read: mapping values are not allowed here", "c.yaml:1:5"),
    ("a: 1\n---\nb: 1\n", "the YAML cannot be read: but found another document", "c.yaml:2:1"),
    ("a: \x07\n", "the YAML cannot be read: unacceptable character #x0007: special characters are not allowed",
     "c.yaml:1:1"),
    ("[" * 600, "the YAML cannot be read: lists or mappings are nested too deeply", "c.yaml:1:1"),
])
def test_unreadable_text(at: Path, text: str, what: str, where: str) -> None:
    [(found, place, hint)] = errors(at, text)
    assert (found, place) == (what, where)
    assert hint


@pytest.mark.parametrize(("line", "what", "where"), [
    ("trace: !!int abc", "a value cannot be read: invalid literal for int() with base 10: 'abc'", "c.yaml:5:8"),
    ("trace: !mine abc", "a value cannot be read: could not determine a constructor for the tag '!mine'", "c.yaml:5:8"),
    ("trace: !mine {a: b}", "the tag '!mine' is not understood", "c.yaml:5:8"),
    ("trace: &a [*a]", "an alias leads into itself", "c.yaml:5:8"),
    ("[a]: 1", "a key is not plain text", "c.yaml:5:1"),
])
def test_yaml_beyond_plain_values(at: Path, line: str, what: str, where: str) -> None:
    assert (what, where) in [(found, place) for found, place, _ in errors(at, GOOD + line + "\n")]


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
