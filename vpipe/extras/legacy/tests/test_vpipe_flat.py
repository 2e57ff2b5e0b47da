"""VPipe's flat configs: what they become, and every contradiction with its place in the flat file or its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import assert_golden, refusal

from vpipe.app.command_line import OptionSetting
from vpipe.app.config.config import Config, load_config
from vpipe.app.launch.rank_env import hosts_of, ranks_here
from vpipe.app.train.job import device_of
from vpipe.errors import UserError

GOOD = """\
'directory': 'bert'
'log_directory': 'output'
'module': 'vgpus=4'
'data_dir': 'data/shards'
'config_file': 'vgpus=4/mp_conf.json'
'partition': 'vgpus=4/vpipe.json'
'machines': ['localhost:0', 'localhost:1', 'localhost:2', 'localhost:3']
'sync_mode': 'asp'
'batch_size': 16
'learning_rate': 0.05
'weight_decay': 0.01
'epochs': 40
'print_frequency': 100
'verbose_frequency': 0
'learning_rate_policy': 'polynomial'
'model_type': 'bert'
'distributed_backend': 'nccl'
"""
PARTITION = {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}
RANKS: dict[str, Any] = {"module_to_stage_map": [0, 1, 2, 3, 3],
                         "stage_to_rank_map": {"0": [0], "1": [1], "2": [2], "3": [3]}}
JSON = Path("configs/bert/vgpus=4")


@pytest.fixture
def flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / JSON).mkdir(parents=True)
    (tmp_path / JSON / "vpipe.json").write_text(json.dumps(PARTITION, indent=2))
    (tmp_path / JSON / "mp_conf.json").write_text(json.dumps(RANKS, indent=2))
    return Path("configs/flat.yml")


def load(flat: Path, changes: dict[str, str] | None = None, extra: str = "", *overrides: str) -> Config:
    """GOOD with the values of some keys replaced (``""`` removes the key) and ``extra`` lines."""
    text = GOOD
    for key, value in (changes or {}).items():
        [line] = [line for line in GOOD.splitlines() if line.startswith(f"'{key}'")]
        text = text.replace(line + "\n", f"'{key}': {value}\n" if value else "")
    flat.write_text(text + extra)
    return load_config(flat, overrides)


def errors(flat: Path, changes: dict[str, str] | None = None, extra: str = "",
           *overrides: str) -> list[tuple[str, str | None, str]]:
    with pytest.raises(UserError) as caught:
        load(flat, changes, extra, *overrides)
    return [(problem.what, problem.where, problem.hint) for problem in caught.value.problems]


def write(name: str, values: dict[str, Any]) -> None:
    (JSON / name).write_text(json.dumps(values))


def place(name: str, text: str) -> str:
    """Where ``text`` stands in the first line of a JSON file."""
    return f"{Path.cwd() / JSON / name}:1:{(JSON / name).read_text().index(text) + 1}"


def test_asp_is_pipedream_with_an_update_per_minibatch(flat: Path, tmp_path: Path) -> None:
    config = load(flat)
    base = tmp_path / "configs" / "bert"
    assert (config.model.name, config.model.preset, config.model.config_file) == ("bert", "large", None)
    assert (config.dataset.name, config.dataset.path) == ("bert_hdf5", base / "data/shards")
    assert (config.dataset.batch_size, config.training.num_microbatches) == (16, 1)
    training = config.training
    assert (training.learning_rate, training.weight_decay, training.epochs) == (0.05, 0.01, 40)
    assert (training.optimizer, training.lr_policy, training.warmup_steps) == ("lamb", "polynomial", 0.2)
    assert training.print_frequency == 100
    parallel = config.parallel
    assert (parallel.schedule, parallel.update_every, parallel.backend) == ("pipedream", 1, "nccl")
    assert (parallel.model_parallel_size, parallel.partition) == (4, (12, 13, 13, 11))
    assert parallel.recompute == (0.3, 0, 0, 0)
    assert parallel.stage_to_rank_map == {"0": (0,), "1": (1,), "2": (2,), "3": (3,)}
    assert config.log_directory == base / "output"


def test_bsp_is_32_microbatches_and_a_flush(flat: Path) -> None:
    config = load(flat, {"sync_mode": "bsp"})
    assert config.parallel.schedule == "1f1b"
    assert (config.dataset.batch_size, config.training.num_microbatches, config.microbatch_size) == (512, 32, 16)
    assert load(flat, {"sync_mode": "bsp"}, "schedule: gpipe\n").parallel.schedule == "gpipe"


def test_macrobatch_is_an_update_every_so_many_minibatches_as_stages(flat: Path) -> None:
    config = load(flat, {}, "macrobatch: true\n")
    assert (config.parallel.schedule, config.parallel.update_every) == ("pipedream", 4)
    assert (config.dataset.batch_size, config.training.num_microbatches) == (64, 4)
    assert config.microbatch_size == 16


def test_recompute(flat: Path) -> None:
    assert load(flat, {}, "recompute: true\n").parallel.recompute == 1.0
    assert load(flat, {}, "recompute: false\n").parallel.recompute == (0.3, 0, 0, 0)
    write("vpipe.json", {"partition": [12, 13, 13, 11]})
    assert load(flat).parallel.recompute == 0.0


def test_data_and_sizes(flat: Path, tmp_path: Path) -> None:
    sizes = tmp_path / "configs/bert/bert_config.json"
    sizes.write_text("{}")
    config = load(flat, {"data_dir": ""}, "synthetic_data: true\n")
    assert (config.model.preset, config.model.config_file) == (None, sizes)
    assert (config.dataset.name, config.dataset.path) == ("synthetic", None)


def test_a_translation_model_is_base_or_of_the_sizes_in_its_file(flat: Path, tmp_path: Path) -> None:
    translation = {"model_type": "translation", "data_dir": ""}
    config = load(flat, translation)
    assert (config.model.name, config.model.preset, config.training.optimizer) == ("translation", "base", "adamw")
    assert (config.dataset.name, config.dataset.path) == ("pairs", None)
    sizes = tmp_path / "configs/bert/translation_config.json"
    sizes.write_text('{"model_type": "marian", "d_model": 64}')
    config = load(flat, {"model_type": "translation"})
    assert (config.model.preset, config.model.config_file) == (None, sizes)
    assert config.dataset.path == tmp_path / "configs/bert/data/shards"
    assert load(flat, translation, "synthetic_data: true\n").dataset.name == "synthetic"


def test_defaults(flat: Path) -> None:
    names = ("log_directory", "module", "machines", "weight_decay", "epochs", "print_frequency", "verbose_frequency",
             "learning_rate_policy", "distributed_backend")
    config = load(flat, dict.fromkeys(names, ""))
    assert config.log_directory.parts[-2:] == ("bert", "output")
    assert (config.training.epochs, config.training.weight_decay) == (1, 0.0)
    assert (config.training.lr_policy, config.parallel.backend) == ("polynomial", None)


def test_verbose_frequency_is_how_often_ranks_are_reported(flat: Path) -> None:
    assert load(flat).metrics.rank_times_every is None
    assert load(flat, {"verbose_frequency": "5"}).metrics.rank_times_every == 5
    both = load(flat, {"verbose_frequency": "5"}, "metrics: {rank_times_every: 5, peak_tflops: 1.0}\n")
    assert (both.metrics.rank_times_every, both.metrics.peak_tflops) == (5, 1.0)
    for said in ("5", "0"):
        assert (f"verbose_frequency is {said}, but metrics.rank_times_every, which means the same, is 7",
                "configs/flat.yml:14:22", "keep one of the two") in errors(flat, {"verbose_frequency": said},
                                                                          "metrics: {rank_times_every: 7}\n")
    [(what, *_)] = errors(flat, {"verbose_frequency": "5"}, "metrics: 3\n")
    assert what.startswith("metrics must be keys with values")


@pytest.mark.parametrize(("policy", "warmup"), [("step", 0), ("cosine", 0.2)])
def test_policies(flat: Path, policy: str, warmup: float) -> None:
    training = load(flat, {"learning_rate_policy": policy}).training
    assert (training.lr_policy, training.warmup_steps) == (policy, warmup)


def test_neutral_values_of_features_to_come(flat: Path) -> None:
    neutral = "compress_activations: False\ncompress_in_gpu: False\ncontainer: ''\nmacrobatch: false\ntrace: false\n"
    write("mp_conf.json", RANKS | {"stage_to_depth_map": {"0": 3, "1": 2, "2": 1, "3": 0}})
    config = load(flat, {}, neutral)
    assert not config.trace
    assert config.parallel.warmup_depth is None, "those are 1F1B's"
    write("mp_conf.json", RANKS | {"stage_to_depth_map": {"0": 5, "1": 3, "2": 1, "3": 0}})
    assert load(flat, {}, neutral).parallel.depths == (5, 3, 1, 0), "more forwards ahead than the stages need"


def test_compressed_activations_are_bf16(flat: Path) -> None:
    for backend in ("nccl", "gloo"):
        extra = "compress_in_gpu: true\n" if backend == "gloo" else ""
        parallel = load(flat, {"distributed_backend": backend}, f"compress_activations: true\n{extra}").parallel
        assert (parallel.compress, parallel.compress_rounding) == ("bf16", "nearest")
    assert load(flat, {}, "compress_activations: true\n", "parallel.compress=int8").parallel.compress == "int8"


@pytest.mark.parametrize("backend", ["", "gloo", "nccl"])
def test_ranks_compute_on_the_gpus_that_machines_names(backend: str, flat: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever carries tensors between them; where there is no GPU, on processors, unless nccl is asked for."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = load(flat, {"distributed_backend": backend, "machines": "[localhost:3, localhost:0, localhost:1, "
                                                                     "localhost:2]"})
    ranks, where = ranks_here(config, hosts_of(config), 4, "train"), []
    for gpus in (4, 0) if backend != "nccl" else (4,):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        for rank in range(4):
            monkeypatch.setenv("LOCAL_RANK", ranks.environment(rank)["LOCAL_RANK"])
            where.append(str(device_of(config)))
    assert where == ["cuda:3", "cuda:0", "cuda:1", "cuda:2", *["cpu"] * (0 if backend == "nccl" else 4)]


def test_directory_may_be_in_the_current_folder(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "configs/bert").rename(tmp_path / "bert")
    assert load(flat).dataset.path == tmp_path / "bert/data/shards"


def test_overrides_take_native_and_flat_keys(flat: Path) -> None:
    config = load(flat, {}, "", "sync_mode=bsp", "training.max_steps=7", "log_directory=here", "epochs=2",
                  "dataset.batch_size=64")
    assert (config.parallel.schedule, config.training.max_steps, config.training.epochs) == ("1f1b", 7, 2)
    assert config.log_directory == Path("here")
    assert config.dataset.batch_size == 64
    assert errors(flat, {}, "", "epoch=2")[0][:2] == ("unknown key 'epoch'", "--set epoch")
    assert errors(flat, {}, "", "epochs=x", "batch_size={a: 1, a: 2}") == [
        ("the key 'batch_size.a' is given twice, first at --set batch_size", "--set batch_size",
         "remove one of the two"),
        ("epochs must be a whole number, got 'x'", "--set epochs", "epochs: passes over the data"),
        ("batch_size must be a whole number, got a mapping", "--set batch_size",
         "batch_size: samples per minibatch, which passes the pipeline in one piece"),
    ]


def test_scheduler_option(flat: Path) -> None:
    flat.write_text(GOOD)
    parallel = load_config(flat, [OptionSetting("parallel.scheduler=naive", "--scheduler", "naive")]).parallel
    assert (parallel.schedule, parallel.executor) == ("gpipe", "naive")


def test_all_mistakes_of_the_flat_file_at_once(flat: Path) -> None:
    assert errors(flat, {"sync_mode": "'aps'", "batch_size": "many", "model_type": "", "epochs": "0"},
                  "'learning_rte': 1\n'epochs': 3\n") == [
        ("the key 'epochs' is given twice, first at configs/flat.yml:12:1", "configs/flat.yml:18:1",
         "remove one of the two"),
        ("the key 'model_type' is missing", "configs/flat.yml:1:1", "add model_type: model family"),
        ("sync_mode must be 'asp' or 'bsp', got 'aps'", "configs/flat.yml:8:14", "did you mean 'asp'?"),
        ("batch_size must be a whole number, got 'many'", "configs/flat.yml:9:15",
         "batch_size: samples per minibatch, which passes the pipeline in one piece"),
        ("epochs must be at least 1, got 0", "configs/flat.yml:12:11", "epochs: passes over the data"),
        ("unknown key 'learning_rte'", "configs/flat.yml:17:1", "did you mean 'learning_rate'?"),
    ]


WRONG = [
    ("machines", "['-oProxyCommand=x:0', 'node1:0']"), ("machines", "[]"), ("machines", "['localhost:0', 'localhost']"),
    ("machines", "['localhost:0']"), ("machines", "localhost:0"), ("verbose_frequency", "-1"), ("data_dir", ""),
    ("learning_rate_policy", "polynom"), ("partition", "'vgpus=4/none.json'"), ("config_file", "'vgpus=4/none.json'"),
    ("directory", "'berd'")]


def test_one_wrong_key(flat: Path) -> None:
    texts = {f"{key}: {value}": refusal(load, flat, {key: value}) for key, value in WRONG}
    assert_golden(__file__, "keys", {name: text.replace(str(Path.cwd()), "HERE") for name, text in texts.items()})


@pytest.mark.parametrize(("line", "what", "hint"), [
    ("compress_in_gpu: true", "compress_in_gpu is true, but compress_activations is false", "set both, or neither"),
    ("schedule: gpipe", "schedule is gpipe, which updates with a flush, but sync_mode is asp",
     "write sync_mode: bsp, or leave schedule out"),
    ("schedule: pipdream", "schedule is 'pipdream', which is no schedule of this version",
     "did you mean 'pipedream'? Your own are added by importing their file (--import FILE.py) or by a package"),
])
def test_one_more_key(flat: Path, line: str, what: str, hint: str) -> None:
    assert errors(flat, {}, line + "\n") == [(what, f"configs/flat.yml:18:{line.index(' ') + 2}", hint)]


def test_bsp_refuses_asynchronous_keys(flat: Path) -> None:
    assert [(what, where) for what, where, _ in errors(flat, {"sync_mode": "bsp"},
                                                       "schedule: pipedream\nmacrobatch: true\n")] == [
        ("schedule is pipedream, which updates without a flush, but sync_mode is bsp", "configs/flat.yml:18:11"),
        ("macrobatch is true, but sync_mode bsp takes 32 minibatches per update already", "configs/flat.yml:19:13")]


def maps(entries: list[int]) -> str:
    return json.dumps(RANKS | {"module_to_stage_map": entries})


@pytest.mark.parametrize(("name", "content", "what", "place", "hint"), [
    ("mp_conf", maps([0, 1, 2, 2]), "module_to_stage_map names 3 stages, but the partition has 4: [12, 13, 13, 11]",
     "1:25", "with one module per stage and the loss it is [0, 1, 2, 3, 3]"),
    ("mp_conf", maps([0, 2, 1, 3, 3]), "module_to_stage_map is [0, 2, 1, 3, 3], which goes back to an earlier stage",
     "1:25", "with one module per stage and"),
    *(("mp_conf", maps(entries), f"module_to_stage_map is {entries}; 4 stages need 5 entries, one per stage and the "
       "loss", "1:25", "with one module per stage and") for entries in (
           [0, 1, 2, 3], [0, 1, 1, 2, 3], [1, 2, 3, 4, 4])),
    ("mp_conf", json.dumps(RANKS | {"stage_to_depth_map": {"0": 1, "x": 0}}),
     "stage_to_depth_map names the stages 0, x; there are 4", "1:127", 'name each stage once, as "0", "1", ..., or'),
    ("vpipe", '{\n\t"partition":\t[12,13,13],\n\t"recompute_ratio":[0,0,2]\n}\n',
     "recompute_ratio[2] must be a number from 0 to 1, got 2", "3:25", ""),
    ("vpipe", '{"partition": [1, 2\n}\n', "the JSON cannot be read: expected ',' or ']', but got '}'", "2:1", "")])
def test_one_mistake_of_a_json_file(flat: Path, name: str, content: str, what: str, place: str, hint: str) -> None:
    (JSON / f"{name}.json").write_text(content)
    [(found, where, remedy)] = errors(flat)
    assert (found, where) == (what, f"{Path.cwd() / JSON}/{name}.json:{place}")
    assert remedy.startswith(hint)


def test_mistakes_of_both_json_files_at_once(flat: Path) -> None:
    write("vpipe.json", {"partitions": [12, 13]})
    (JSON / "mp_conf.json").write_text('{"module_to_stage_map": [0, "1"],\n "stage_to_rank_map": {"0": 0}}')
    folder = Path.cwd() / JSON
    assert [(what, where) for what, where, _ in errors(flat)] == [
        ("the key 'partition' is missing", f"{folder}/vpipe.json:1:1"),
        ("unknown key 'partitions'", f"{folder}/vpipe.json:1:2"),
        ("module_to_stage_map[1] must be a whole number, got '1'", f"{folder}/mp_conf.json:1:29"),
        ("stage_to_rank_map.0 must be a list, got 0", f"{folder}/mp_conf.json:2:29"),
    ]


def test_later_checks_point_into_the_json(flat: Path) -> None:
    write("vpipe.json", {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0]})
    write("mp_conf.json", RANKS | {"stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3]},
                                   "stage_to_depth_map": {"0": 1, "1": 2, "2": 1, "3": 0}})
    assert [(what, where) for what, where, _ in errors(flat)] == [
        ("recompute_ratio has 2 entries for 4 stages", place("vpipe.json", "[0.3")),
        ("stage_to_rank_map names the stages 0, 1, 2; there are 4: 0, 1, 2, 3", place("mp_conf.json", '{"0": [')),
        ("stage_to_depth_map is [1, 2, 1, 0]: stage 0 does 1 before its first backward, but needs 2",
         place("mp_conf.json", '{"0": 1')),
    ]


def test_replicated_stages(flat: Path) -> None:
    write("mp_conf.json", RANKS | {"stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3], "3": [4]},
                                   "stage_to_depth_map": {"0": 2, "1": 2, "2": 1, "3": 0}})
    parallel = load(flat, {"machines": str([f"localhost:{gpu}" for gpu in range(5)])}).parallel
    assert parallel.placement == ((0, 1), (2,), (3,), (4,))
    [(what, _, _)] = errors(flat)
    assert what == "machines lists 4, but stage_to_rank_map has 5 ranks"


def test_native_keys_that_the_flat_form_has_not_may_stand_in_it(flat: Path) -> None:
    config = load(flat, {}, "checkpoint: {every_steps: 5}\n'metrics': {peak_tflops: 2}\nelastic: true\n")
    assert config == load(flat, {}, "", "checkpoint.every_steps=5", "metrics.peak_tflops=2", "elastic=true")
    [(what, where, hint)] = errors(flat, {}, "checkpoint: {every_step: 5}\n")
    assert (what, where, hint) == ("unknown key 'checkpoint.every_step'", "configs/flat.yml:18:14",
                                   "did you mean 'every_steps'?")


def test_a_file_with_a_native_section_is_native(flat: Path) -> None:
    flat.write_text("model: {name: bert}\nbatch_size: 4\n")
    with pytest.raises(UserError) as caught:
        load_config(flat)
    assert ("unknown key 'batch_size'", "did you mean 'dataset.batch_size'?") in [
        (problem.what, problem.hint) for problem in caught.value.problems]
