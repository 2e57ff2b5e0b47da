"""--import: schedules, models and data sets from a file of one's own."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from golden import assert_golden, refusal
from small_run import losses, only_run

from vpipe.app.cli import main
from vpipe.app.commands.slurm import WRITTEN_BY
from vpipe.app.data import registry as data_sets
from vpipe.app.families import registry as models
from vpipe.app.imports import IMPORTS, file_digests, import_files, imported_files
from vpipe.app.launch import remote_agent
from vpipe.errors import UserError
from vpipe.schedules import registry as schedules

pytestmark = pytest.mark.jobs

SCHEDULE = """\
from vpipe.schedules.generators.gpipe import gpipe
from vpipe.schedules.registry import register_schedule


@register_schedule("mine", flush=True)
def mine(rank, ranks, microbatches):
    yield from gpipe(rank, ranks, microbatches)
"""
MODEL = """\
from torch import nn

from vpipe import Layer, Model
from vpipe.app.data.registry import register_dataset
from vpipe.app.data.synthetic import synthetic
from vpipe.app.families.loss import next_token_loss
from vpipe.app.families.registry import register_model


class Head(nn.Linear):
    def forward(self, h, labels):
        return next_token_loss(super().forward(h), labels)


@register_model("own")
def own(settings):
    return Model([Layer("embed", lambda: nn.Embedding(settings.vocab_size, 8), inputs=("input_ids",)),
                  Layer("head", lambda: Head(8, settings.vocab_size), inputs=("h", "labels"), outputs=("loss",))],
                 batch=("input_ids", "labels"))


@register_dataset("same")
def same(settings):
    return synthetic(settings)
"""
CONFIG = {"model": {"name": "own", "sequence_length": 8, "vocab_size": 16},
          "dataset": {"name": "same", "batch_size": 4, "samples": 16},
          "training": {"learning_rate": 0.1, "max_steps": 2, "num_microbatches": 2, "evaluation_batches": 1},
          "parallel": {"schedule": "mine", "partition": [1, 1]}, "metrics": {"peak_tflops": 1.0}}
IMPORT = ["--import", "my_schedules.py", "--import", "folder/my_models.py"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with files to import and ``c.yaml``; what they register is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(IMPORTS, "[]")  # so that it is taken back, too
    (tmp_path / "folder").mkdir()
    Path("my_schedules.py").write_text(SCHEDULE)
    Path("folder/my_models.py").write_text(MODEL)
    Path("c.yaml").write_text(yaml.safe_dump(CONFIG))
    models.model_names(), data_sets.dataset_names(), schedules.RegisteredSchedule.names()
    for room, store in ((models, "_families"), (data_sets, "_factories"), (schedules, "_REGISTERED")):
        monkeypatch.setattr(room, store, dict(getattr(room, store)))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def forget() -> None:
    """What another process would not have: the files' modules, and what they registered."""
    for name in ("my_schedules", "my_models"):
        del sys.modules[name]
    del models._families["own"], data_sets._factories["same"], schedules._REGISTERED["mine"]


def test_a_schedule_of_a_file_is_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--ranks", "2", "--microbatches", "2", "--format", "csv"]
    assert main(["schedule", "mine", *size, "--import", "my_schedules.py"]) == 0
    mine = capsys.readouterr().out
    assert main(["schedule", "gpipe", *size]) == 0
    assert capsys.readouterr().out == mine
    assert imported_files() == []  # the next command line gives none


@pytest.mark.usefixtures("forked")
def test_a_run_of_files_and_its_resumption(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "c.yaml", *IMPORT]) == 0, capfd.readouterr().err
    run = only_run(here / "output")
    assert len(losses(run)) == 2
    forget()
    again = ["train", "--resume", str(run), "--set", "training.max_steps=3"]
    assert main(again) == 2
    assert capfd.readouterr().err.endswith("hint: did you mean 'v_min'? Your own are added by importing their file "
                                           "(--import FILE.py) or by a package\n")
    assert main([*again, "--import", "my_schedules.py"]) == 2
    assert "no model is called 'own'" in capfd.readouterr().err
    del sys.modules["my_schedules"], schedules._REGISTERED["mine"]
    assert main([*again, *IMPORT]) == 0, capfd.readouterr().err
    assert len(losses(run)) == 3


def test_the_script_of_slurm_names_the_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "c.yaml", "--nodes", "1", *IMPORT]) == 0
    script = capsys.readouterr().out
    assert f"vpipe train c.yaml {shlex.join(IMPORT)}\n" in script
    assert WRITTEN_BY + f"vpipe slurm c.yaml --nodes 1 {shlex.join(IMPORT)}\n" in script


def test_a_file_is_imported_once(here: Path) -> None:
    Path("counts.py").write_text("import sys\nsys.imports = getattr(sys, 'imports', 0) + 1\n")
    import_files(["counts.py", here / "counts.py", "folder/../counts.py"])
    import_files(["counts.py"])
    assert vars(sys).pop("imports") == 1


FILES = [
    ("absent.py", None), ("c.yaml", None), ("my-models.py", ""), ("json.py", ""), ("sys.py", ""),
    ("typo.py", "x = 1\ny = (\n"), ("falls.py", "def f():\n    return 1 / 0\n\nf()\n"),
    ("script.py", "import sys\nsys.exit(3)\n"), ("lacks.py", "import no_such_package.part\n"),
    ("guesses.py", "import vpipe.nothing\n"), ("folder/needs.py", "import my_models_2\n"),
    ("taken.py", SCHEDULE.replace("mine", "1f1b", 1)), ("taken_too.py", MODEL.replace('"own"', '"gpt"')),
    ("taken_data.py", MODEL.replace('"same"', '"text"'))]


def test_a_file_that_cannot_be_imported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "folder" / "my_models_2.py").touch()
    texts = {}
    for name, source in FILES:
        if source is not None:
            Path(name).write_text(source)
        texts[name] = refusal(import_files, [name])
        assert Path(name).stem not in sys.modules or Path(name).stem in ("json", "sys")
        assert main(["schedule", "gpipe", "--ranks", "1", "--microbatches", "1", "--import", name]) == 2
        assert capsys.readouterr().err == f"{texts[name]}\n"
        assert IMPORTS not in os.environ
    assert_golden(__file__, "files", {name: text.replace(str(json.__file__), "JSON").replace(sys.executable, "PYTHON")
                                      for name, text in texts.items()})


def test_another_host_must_have_the_same_file(here: Path) -> None:
    digests = file_digests(["my_schedules.py"])
    remote_agent._import_files(digests)
    assert imported_files() == ["my_schedules.py"]
    Path("my_schedules.py").write_text(SCHEDULE + "\n")
    with pytest.raises(UserError, match=r"my_schedules\.py' of --import differs from that of the first host"):
        remote_agent._import_files(digests)
