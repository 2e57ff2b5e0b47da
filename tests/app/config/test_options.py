"""``model.options``: the keys of a model family of the user's own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from golden import assert_golden, refusal
from small_run import losses, only_run, write_config

from vpipe.app.cli import main
from vpipe.app.config.config import load_config
from vpipe.app.config.options import section_of_options
from vpipe.app.families import registry
from vpipe.app.families.gpt import gpt_from_settings
from vpipe.app.families.registry import ModelSettings, register_model
from vpipe.app.imports import IMPORTS
from vpipe.app.train.checkpoint_model import CheckpointModel
from vpipe.app.train.job import Job
from vpipe.checkpoint.directory import Checkpoints
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError
from vpipe.model.model import Model

pytestmark = pytest.mark.jobs


@dataclass(frozen=True)
class Options:
    reach: int = field(default=16, metadata={"help": "tokens that a block sees", "ge": 1, "le": 64})
    kind: Literal["causal", "full"] = "causal"
    scale: float | None = None
    widths: tuple[int, ...] = (3, 5)
    file: Path | None = None
    bias: bool = True
    drop: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.kind == "full" and not self.bias:
            raise ValueError("a full convolution needs its bias")


GIVEN: list[ModelSettings] = []


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model ``conv``, which has options, notes its settings; else it is GPT."""
    for name in registry.model_names():  # imported once, they register themselves once
        registry.family_named(name)
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    GIVEN.clear()

    @register_model("conv", options=Options)
    def conv(settings: ModelSettings) -> Model:
        GIVEN.append(settings)
        return gpt_from_settings(settings)


def config(folder: Path, options: object, **changes: Any) -> Path:
    sizes = {"name": "conv", "hidden_size": 8, "num_layers": 2, "num_heads": 2, "sequence_length": 8, "vocab_size": 32}
    path = write_config(folder, model__name="conv", **changes)
    for key, value in {**sizes, "options": options}.items():
        if value is not None:
            text = path.read_text()
            lines = [line for line in text.splitlines() if not line.startswith(f"  {key}:") or key == "name"]
            at = lines.index("model:") + 1
            if key != "name":
                lines.insert(at, f"  {key}: {value}")
            path.write_text("\n".join(line for line in lines if not line.startswith("  preset:")) + "\n")
    return path


def test_the_factory_gets_the_options_and_the_run_has_them_all(tmp_path: Path) -> None:
    path = config(tmp_path, "{reach: 8, scale: 2, widths: [1], file: a.txt}")
    job = Job.from_config(load_config(path, ["model.options.bias=false"]))
    expected = Options(reach=8, scale=2.0, widths=(1,), file=Path("a.txt"), bias=False)
    assert GIVEN[-1].options == expected
    assert isinstance(GIVEN[-1].options, Options)
    (tmp_path / "resolved.yaml").write_text(job.config.resolved_yaml())
    again = load_config(tmp_path / "resolved.yaml", resolved=True)
    assert again == job.config
    assert again.model.options == {"reach": 8, "kind": "causal", "scale": 2.0, "widths": [1], "file": "a.txt",
                                   "bias": False, "drop": []}
    Job.from_config(load_config(config(tmp_path, None)))
    assert GIVEN[-1].options == Options()


def test_all_mistakes_at_once_with_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("""\
model:
  name: conv
  sequence_lenth: 8
  options: {reech: 8, reach: 99, kind: ful, widths: [1, "2"], bias: 1,
            scale: big}
dataset: {name: synthetic, batch_size: 8}
training: {learning_rate: 1}
parallel: {partition: [2, 2]}
""")
    assert_golden(__file__, "all", [refusal(load_config, Path("c.yaml"), ["model.options.drop=x"])])


REFUSED = [
    ["model.options={kind: full, bias: false}"], ["model.options={reach: 1}", "model.name=gpt"],
    ["model.options={}", "model.name=gpd"], ["model.options=5"]]


def test_options_that_are_refused(tmp_path: Path) -> None:
    assert_golden(__file__, "refused", [refusal(load_config, config(tmp_path, None), given) for given in REFUSED])


@dataclass
class Thawed:
    reach: int = 1


def frozen(kind: Any, default: Any, name: str = "reach", **metadata: object) -> type:
    return make_dataclass("Made", [(name, kind, field(default=default, metadata=metadata))], frozen=True)


@pytest.mark.parametrize(("options", "what"), [
    (Thawed, "the options of the model 'x' are the class Thawed, which is no frozen dataclass"),
    (Options(), "the options of the model 'x' are an object of class Options, which is no frozen dataclass"),
    (make_dataclass("Made", [("reach", int)], frozen=True), "the option 'reach' of the model 'x' has no default")])
def test_a_class_that_cannot_hold_options(options: Any, what: str) -> None:
    with pytest.raises(UserError) as caught:
        register_model("x", options=options)
    assert caught.value.problems[0].what == what


@pytest.mark.parametrize(("options", "what"), [
    (frozen(dict, None), "Made.reach is of the type <class 'dict'>, which no key of a config has"),
    (frozen(int | str, 1), "Made.reach is of the type int | str, which no key of a config has"),
    (frozen("Nowhere", 1), "the types of Made cannot be found: NameError: name 'Nowhere' is not defined"),
    (frozen(int, 1, text="x"), "Made.reach has the metadata 'text'"),
    (frozen(int, 1, name="copy"), "Made.copy cannot be a key of a config, whose class uses that name"),
    (frozen(int, "1"), "a default of Made would be refused: reach must be a whole number, got '1'"),
    (frozen(int, 0, ge=1), "a default of Made would be refused: reach must be at least 1, got 0")])
def test_a_field_that_cannot_be_a_key(options: type, what: str) -> None:
    with pytest.raises(UserError) as caught:
        section_of_options(options)
    assert caught.value.problems[0].what == what


FILE = """\
from dataclasses import dataclass
from vpipe.app.families.gpt import gpt_from_settings
from vpipe.app.families.registry import register_model

@dataclass(frozen=True)
class Reach:
    reach: int = 16

@register_model("conv", options=Reach)
def conv(settings):
    return gpt_from_settings(settings)
"""


@pytest.mark.usefixtures("forked")
def test_a_checkpoint_keeps_the_options_and_a_resumed_run_may_change_them(
        tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMPORTS, "[]")  # so that it is taken back
    monkeypatch.delitem(registry._families, "conv")
    monkeypatch.setitem(sys.modules, "conv_with_reach", Mock())  # and the module, too
    del sys.modules["conv_with_reach"]
    (tmp_path / "conv_with_reach.py").write_text(FILE)
    file = ["--import", str(tmp_path / "conv_with_reach.py")]
    path = config(tmp_path, "{reach: 8}", checkpoint__at_end=True, training__max_steps=1,
                  training__evaluation_batches=1, parallel__model_parallel_size=1)
    assert main(["train", str(path), *file]) == 0, capfd.readouterr().err
    run = only_run(tmp_path / "runs")
    [step] = Checkpoints(run / "checkpoints").all()
    assert CheckpointModel.from_manifest(Manifest.load(step), step).settings.options.reach == 8
    assert main(["train", "--resume", str(run), "--set", "training.max_steps=2", "--set", "model.options.reach=9",
                 *file]) == 0
    assert "model.options.reach 8 -> 9" in capfd.readouterr().err
    assert len(losses(run)) == 2
