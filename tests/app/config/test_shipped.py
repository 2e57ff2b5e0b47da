"""Configs by name: from any folder, with their files; a file that exists comes first; unknown names are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vpipe.app.cli import main
from vpipe.app.config import shipped
from vpipe.app.config.config import load_config
from vpipe.app.config.shipped import find_config, shipped_configs
from vpipe.errors import UserError

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_are_those_of_the_repository() -> None:
    files = [*CONFIGS.glob("*.y*ml"), *ROOT.glob("vpipe/extras/*/configs/*.y*ml")]
    assert shipped_configs() == {file.stem: file for file in files}
    assert len(shipped_configs()) == len(files)


@pytest.mark.parametrize("name", shipped_configs())
def test_every_config_is_loaded_by_name_and_by_path(name: str, elsewhere: Path) -> None:
    if shipped_configs()[name].suffix == ".yml":
        pytest.importorskip("vpipe.extras.legacy.vpipe_flat", reason="its form is read by an extra")
    by_name, by_path = load_config(Path(name)), load_config(shipped_configs()[name])
    assert by_name.model == by_path.model
    assert by_name.parallel == by_path.parallel
    assert by_name.log_directory.absolute() == elsewhere / "output"


def test_no_config_needs_torch_to_be_loaded() -> None:
    """Native, VPipe's, OurGPipe's; by the commands that open no data, and the agent of a host whose ranks run in a
    container."""
    legacy = find_spec("vpipe.extras.legacy.vpipe_flat") is not None
    given = [[name] for name, file in shipped_configs().items() if legacy or file.suffix != ".yml"]
    given += [["gpt2_124m", "--scheduler", "naive"]] * legacy
    code = ("import sys\nsys.modules['torch'] = None\nimport vpipe.app.launch.remote_agent\n"
            "from vpipe.app.cli import main\nassert main(['configs']) == 0\n"
            f"for words in {given}:\n    assert main(['slurm', *words, '--nodes', '2']) == 0, words")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#SBATCH --nodes=2") == len(given)


@pytest.mark.extras("legacy")
@pytest.mark.parametrize("name", [name for name, file in shipped_configs().items() if file.suffix == ".yml"])
def test_a_flat_config_is_copied_with_its_json_files(name: str, elsewhere: Path) -> None:
    assert main(["configs", name, "-o", "mine"]) == main(["configs", name, "-o", "mine"]) == 0, "again is no harm"
    copied, own = load_config(Path("mine", f"{name}.yml")), load_config(Path(name))
    assert (copied.training, copied.parallel.partition) == (own.training, own.parallel.partition)
    assert str(copied.model.config_file).startswith(str(elsewhere)) == (own.model.config_file is not None)
    Path("mine", f"{name}.yml").write_text("changed: true")
    assert main(["configs", name, "-o", "mine"]) == 2
    assert Path("mine", f"{name}.yml").read_text() == "changed: true"


def test_with_or_without_the_ending(elsewhere: Path) -> None:
    assert find_config(Path("gpt_small")) == find_config(Path("gpt_small.yaml")) == CONFIGS / "gpt_small.yaml"
    (elsewhere / "gpt_small").mkdir()
    assert find_config(Path("gpt_small")) == CONFIGS / "gpt_small.yaml"


@pytest.mark.parametrize("name", ["gpt_small", "gpt_small.yaml"])
def test_a_file_that_exists_comes_first(name: str) -> None:
    Path(name).write_text("model: 3")
    assert find_config(Path(name)) == Path(name)


@pytest.mark.parametrize(("path", "what", "hint"), [
    ("gpt_smal", "there is no file 'gpt_smal', and no config of that name comes with vpipe: bert_",
     "did you mean 'gpt_small'?"),
    ("mine", "there is no file 'mine', and no config of that name comes with vpipe: bert_",
     "name a YAML file, or one of these; vpipe configs explains them"),
    ("configs/gpt_small.yaml", "there is no file 'configs/gpt_small.yaml'",
     "check the path; relative paths start at the current folder; a config 'gpt_small' comes with vpipe: write "
     "gpt_small"),
    ("mine.yaml", "there is no file 'mine.yaml'", "check the path; relative paths start at the current folder"),
])
def test_unknown_names_are_refused(path: str, what: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(Path(path))
    [problem] = caught.value.problems
    assert problem.what.startswith(what)
    assert problem.hint == hint


def test_a_wheel_has_them_in_the_package(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = elsewhere / "site-packages" / "vpipe"
    (package / "app" / "config").mkdir(parents=True)
    monkeypatch.setattr(shipped, "__file__", str(package / "app" / "config" / "shipped.py"))
    assert shipped_configs() == {}
    (package / "configs").mkdir()
    (package / "configs" / "one.yaml").touch()
    assert shipped_configs() == {"one": package / "configs" / "one.yaml"}


def test_configs_lists_and_prints_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["configs"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == list(shipped_configs())
    assert re.search("^gpt_small +GPT with 16 blocks of 512 = 33 layers on Python functions", out, re.MULTILINE)
    assert main(["configs", "gpt_small"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "gpt_small.yaml").read_text()
    assert main(["configs", "gpt_smal"]) == 2
    assert capsys.readouterr().err == ("error: no config 'gpt_smal' comes with vpipe\nhint: did you mean "
                                       "'gpt_small'?\n")
