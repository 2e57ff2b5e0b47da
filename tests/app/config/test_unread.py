"""No key that is set is ever ignored: every key of every section, with every family, data set and starter, is read or
refused by name and line; and what is said to be read is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

import vpipe
from vpipe.app import data, families
from vpipe.app.config.config import Config, ModelSection, load_config
from vpipe.app.config.unread import RULES
from vpipe.app.config.validation import section_of
from vpipe.app.data import huggingface
from vpipe.app.data.corpus import Document
from vpipe.app.data.dataset import DatasetSettings
from vpipe.app.data.registry import PLUGINS as DATASETS
from vpipe.app.data.registry import dataset_named, keys_read, register_dataset
from vpipe.app.families.registry import PLUGINS as FAMILIES
from vpipe.app.families.registry import ModelSettings, family_named, register_model
from vpipe.app.train.model_section import model_settings
from vpipe.errors import UserError
from vpipe.model.model import Model

GOOD: dict[str, dict[str, Any]] = {
    "model": {"name": "gpt"}, "dataset": {"name": "synthetic", "batch_size": 8},
    "training": {"learning_rate": 1e-3, "num_microbatches": 4},
    "parallel": {"model_parallel_size": 2, "partition": [2, 3]},
    "checkpoint": {"at_end": False, "every_minutes": None}}

LORA = {"model.lora.rank": 2, "model.lora.alpha": 4.0}
OF_EXPERTS = ("model.experts_per_token", "model.balance_weight")



def infos(section: type = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for key, info in section.model_fields.items():  # type: ignore[attr-defined]
        inner = section_of(info)
        yield from [(prefix + key, info)] if inner is None else infos(inner, f"{prefix}{key}.")


def another(info: FieldInfo) -> Any:
    """The first of some values that the key may have and that is not its default; None without one."""
    words = [word for part in (info.annotation, *get_args(info.annotation)) if get_origin(part) is Literal
             for word in get_args(part)]
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[info.annotation, info], config=ConfigDict(strict=True))
    for value in (*words, False, True, 2, 0.5, "a", ["a"]):
        with suppress(ValidationError):
            if adapter.validate_python(value) != info.default:
                return value


VALUES: dict[str, Any] = {key: another(info) for key, info in infos()} | {
    "model.name": "gpt", "model.preset": "small", "model.hidden_size": 32, "model.num_heads": 4, "model.experts": 16,
    "model.experts_per_token": 1, "model.options": {"kernel": 3}, "dataset.name": "synthetic", "dataset.batch_size": 16,
    "dataset.language": "zh_CN", "parallel.schedule": "gpipe", "parallel.chunks": 1, "parallel.executor": "naive",
    "parallel.partition": [3, 2], "parallel.recompute": 0.5, "parallel.memory": "8GiB", "parallel.device": "cpu",
    "parallel.stage_to_rank_map": {"0": [0], "1": [1]}, "parallel.warmup_depth": [2, 0], "training.loss_scale": 1024.0,
    "machines": ["localhost:0", "localhost:1"]}
"""A value of every key that is not its default; a few have to fit the other keys."""

NEEDS: dict[str, dict[str, Any]] = {
    "training.momentum": {"training.optimizer": "sgd"}, "training.loss_scale": {"training.precision": "fp16"},
    "training.delay_correction": {"parallel.schedule": "pipedream"},
    "training.delay_correction_strength": {"parallel.schedule": "pipedream",
                                           "training.delay_correction": "extrapolate"},
    "training.exit_after_profile": {"training.profile_iteration": 2},
    "parallel.use_orion_scheduler": {"parallel.executor": "async_threaded", "parallel.schedule": "gpipe"},
    "parallel.orion_strict": {"parallel.use_orion_scheduler": True, "parallel.executor": "async_threaded",
                              "parallel.schedule": "gpipe"},
    "parallel.memory": {"parallel.partition": "auto"}, "parallel.slices": {"parallel.schedule": "seq1f1b"},
    "parallel.update_every": {"parallel.schedule": "pipedream"},
    "parallel.warmup_depth": {"parallel.schedule": "pipedream"},
    "parallel.compress_rounding": {"parallel.compress": "int8"},
    "training.patience": {"training.evaluate_every": 2},
    "checkpoint.keep": {"checkpoint.at_end": True}, "checkpoint.directory": {"checkpoint.at_end": True},
    "launch.ssh_options": {"machines": VALUES["machines"]}, "launch.python": {"machines": VALUES["machines"]},
    "launch.directory": {"machines": VALUES["machines"]}, "parallel.master_address": {"machines": VALUES["machines"]},
    "elastic": {"machines": VALUES["machines"]}}
"""Keys that are read beside others alone: elsewhere they are refused."""

REFUSED_ELSEWHERE = {"training.loss_scale", "training.delay_correction", "parallel.use_orion_scheduler",
                     "parallel.slices", "parallel.update_every", "parallel.warmup_depth"}
"""Those of them with a check of their own, for numbers or another remedy."""

FAMILIES_THERE = [*families.READS, *FAMILIES.names, "strange"]
DATASETS_THERE = [*data.READS, *DATASETS.names, "strange"]


@register_model("strange", reads=("packed",))
def strange(settings: ModelSettings) -> Model:
    raise AssertionError("it is not built")


@register_dataset("strange")
def strange_data(settings: DatasetSettings) -> Any:
    raise AssertionError("it is not opened")


def family_reads(name: str) -> set[str]:
    return {*(families.READS[name] if name in families.READS else family_named(name).reads)}


def dataset_reads(name: str) -> set[str]:
    return {*(data.READS[name] if name in data.READS else keys_read(name))}


def refused(folder: Path, key: str, beside: dict[str, Any], started: bool | None) -> list[str]:
    """What is wrong with a config that sets a key; each is of that key, and has its place."""
    config = yaml.safe_load(yaml.safe_dump(GOOD))
    for path, value in {**(LORA if "lora" in key else {}), **beside, key: VALUES[key]}.items():
        *sections, leaf = path.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    file = folder / "c.yaml"
    file.write_text(yaml.safe_dump(config))
    try:
        load_config(file, started=started)
    except UserError as error:
        for problem in error.problems:
            assert problem.what.startswith(f"{key} "), problem
            assert re.fullmatch(r".*c\.yaml:\d+:\d+", problem.where or ""), problem
        return [problem.what for problem in error.problems]
    return []


@pytest.mark.parametrize("started", [None, False, True], ids=["any starter", "vpipe train", "torchrun or srun"])
def test_every_key_is_read_or_refused_by_name_and_line(started: bool | None, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key in VALUES.keys() - {"parallel.plan", "model.options"}:  # a plan must be there; options: test_options.py
        section, _, leaf = key.partition(".")
        if key in NEEDS:
            by_ssh = section == "launch"
            assert bool(refused(tmp_path, key, NEEDS[key], started)) == bool(by_ssh and started), key
            by_others = key in ("parallel.master_address", "elastic")
            assert bool(refused(tmp_path, key, {}, started)) == (started is False or not by_others), key
        elif section == "model" and leaf in families.KEYS:
            for name in FAMILIES_THERE[:None if started is None else 1]:  # they do not know who starts the ranks
                read = leaf in family_reads(name)
                beside = {"model.name": name, **({"model.experts": 8} if key in OF_EXPERTS and read else {})}
                assert bool(refused(tmp_path, key, beside, started)) != read, (key, name)
        elif section == "dataset" and leaf in data.KEYS:
            for name in DATASETS_THERE[:None if started is None else 1]:
                read = leaf in dataset_reads(name)
                assert bool(refused(tmp_path, key, {"dataset.name": name}, started)) != read, (key, name)
        else:
            assert refused(tmp_path, key, {}, started) == []


def test_every_rule_is_tried(tmp_path: Path) -> None:
    tried = {*NEEDS, *OF_EXPERTS, "dataset.language"} - REFUSED_ELSEWHERE
    assert {key for rule in RULES for key in rule.keys} == tried
    for key in OF_EXPERTS:
        for name, family in families.READS.items():
            known = name in families.WITHOUT_EXPERTS or not family
            assert bool(refused(tmp_path, key, {"model.name": name}, None)) == known
    assert refused(tmp_path, "dataset.language", {"dataset.name": "text", "dataset.path": "texts"}, None) == [
        "dataset.language is 'zh_CN', but the text is that of dataset.path"]


def test_what_a_run_had_set_goes_on(tmp_path: Path) -> None:
    """Its folder has every key, also those that an older version took and did not read; adapters of [] were all."""
    run = tmp_path / "config.yaml"
    run.write_text(yaml.safe_dump(GOOD | {"elastic": True, "launch": {"python": "python3"}, "model": {
        "name": "bert", "lora": {"rank": 2, "alpha": 4.0, "targets": []}}}))
    config = load_config(run, ["training.max_steps=3"], resolved=True, started=False)
    assert config.model.lora is not None
    assert (config.elastic, config.launch.python, config.model.lora.targets) == (True, "python3", None)
    with pytest.raises(UserError, match=r"^error: dataset\.language is 'de', .*\(--set dataset\.language\)"):
        load_config(run, ["dataset.language=de"], resolved=True)
    with pytest.raises(UserError, match=r"^error: model\.lora\.targets is empty: nothing would be trained"):
        load_config(run)


# -- what is said to be read is read -------------------------------------------------------------------------------


class Watched(DatasetSettings):
    """Settings that know which of their fields were asked for, but by a copy."""

    asked: set[str]

    def __getattribute__(self, name: str) -> Any:
        if sys._getframe(1).f_globals["__name__"] != "dataclasses":
            type(self).asked.add(name)
        return super().__getattribute__(name)


def described(name: str, **keys: Any) -> str:
    """All of a model: its layers, and what each is built from."""
    section = ModelSection.model_validate({"name": name, "sequence_length": 16, **keys})
    model = family_named(name).factory(model_settings(section))
    return repr([(layer.name, layer.build, layer.inputs, layer.ties) for layer in model.layers])


@pytest.mark.parametrize("name", [name for name in FAMILIES_THERE if name != "strange"])
def test_a_family_computes_something_else_with_every_key_that_it_reads(name: str) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_layers": 1, "num_heads": 8}
    experts = {"experts": 8} if "experts" in family_reads(name) else {}
    for key in (*sizes, "dropout", "tie_weights", *families.KEYS):
        beside = sizes | (experts if f"model.{key}" in OF_EXPERTS else {})
        values = (True, False) if key == "tie_weights" else (VALUES[f"model.{key}"],)
        changed = any(described(name, **{**beside, key: value}) != described(name, **beside) for value in values)
        assert changed == (key not in families.KEYS or key in family_reads(name)), key


@pytest.mark.parametrize("name", [name for name in DATASETS_THERE if name != "strange"])
def test_a_data_set_asks_for_the_keys_that_it_reads_and_for_no_others(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"This is text {number}. It goes on.\tDies ist Text {number}. Er geht weiter.\n" for number in range(200)]
    (tmp_path / "a.tsv").write_text("".join(lines))
    (tmp_path / "a.txt").write_text("\n".join(line.replace("\t", " ") for line in lines))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"code": "def a(b): return {number}"}}\n' for number in range(200)))
    (tmp_path / "dataset_info.json").write_text("{}") if name == "huggingface" else None
    monkeypatch.setattr(huggingface, "_read", lambda path: map(Document, lines))
    monkeypatch.setattr(Watched, "asked", set(), raising=False)
    for read in ("input_ids", "labels"), ("source_ids",):
        try:
            dataset_named(name)(Watched(tmp_path, 16, fields=read, cache_directory=tmp_path / "cache"))
        except UserError:
            assert name == "bert_hdf5", "there are no shards"
    assert Watched.asked & {*data.KEYS} == dataset_reads(name)


def test_every_key_has_a_reader() -> None:
    """Somewhere beside the section that has it, or in a property there."""
    package = Path(vpipe.__file__).parent
    text = "\n".join(file.read_text() for file in package.rglob("*.py") if "tests" not in file.parts)
    assert [key for key in VALUES if not re.search(rf"\.{key.rpartition('.')[2]}\b", text)] == []
