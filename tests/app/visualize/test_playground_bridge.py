"""The Python side of the playground (site/playground): what it answers is what the command line prints."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vpipe.app.cli import main
from vpipe.schedules.registry import RegisteredSchedule

SITE = Path(__file__).parents[3] / "site" / "playground"
SETTINGS = {"schedule": "1f1b", "ranks": "4", "microbatches": "8", "forward": "1", "input": "1", "weight": "1",
            "transfer": "0", "step": "0", "activation": "1", "version": "0"}
WRONG = "0F0,0F1,,0B0,0B1\n,1F0, 1B1 ,1F1,1B0\n"


@pytest.fixture(scope="module")
def playground() -> ModuleType:
    spec = spec_from_file_location("playground", SITE / "playground.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(playground: ModuleType, call: str, **arguments: Any) -> dict[str, Any]:
    return dict(json.loads(playground.answer(json.dumps({"call": call, **arguments}))))


def test_the_page_needs_the_standard_library_alone() -> None:
    code = ("import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'pydantic', 'yaml', 'tqdm']))\n"
            "import playground; playground.catalog()")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SITE,
                   env={"PYTHONPATH": f"{SITE}:{SITE.parent.parent}"})


def test_the_archive_has_all_that_a_request_imports(tmp_path: Path) -> None:
    """The page has no other files of vpipe, and no packages."""
    code = ("import json, shutil, sys; from pathlib import Path; import build\n"
            "for name, file in build.modules().items():\n"
            "    Path(sys.argv[1], name).parent.mkdir(parents=True, exist_ok=True)\n"
            "    shutil.copy(file, Path(sys.argv[1], name))")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=SITE,
                   env={"PYTHONPATH": f"{SITE}:{SITE.parent.parent}"})
    requests = [{"call": "catalog"}, {"call": "compare", "settings": SETTINGS, "name": "gpipe"},
                *({"call": "draw", "settings": SETTINGS | {"schedule": name, "ranks": "2", "microbatches": "4"}}
                  for name in ("1f1b", "zb_v", "auto", "pipedream", "chimera")),
                *({"call": "check", "settings": SETTINGS, "text": text}
                  for text in (WRONG, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "0F0,nothing"))]
    code = ("import json, sys, time; del time.thread_time  # which Python in a browser lacks\n"
            "sys.path.insert(0, sys.argv[1]); import playground\n"
            "for request in json.loads(sys.argv[2]):\n"
            "    print(playground.answer(json.dumps(request)))")
    said = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(tmp_path), json.dumps(requests)], check=True,
                          capture_output=True, text=True, timeout=60, cwd=tmp_path).stdout
    assert [list(json.loads(line)) for line in said.splitlines()] == [["result"]] * len(requests), said


def test_the_catalog_is_the_registry(playground: ModuleType) -> None:
    known = {one["name"]: one for one in asked(playground, "catalog")["result"]["schedules"]}
    assert sorted(known) == RegisteredSchedule.names()
    assert known["pipedream"]["any_warmup"]
    assert known["zb_v"]["about"].startswith("ZB-V: two stages per rank")


@pytest.mark.parametrize("changed", [
    {}, {"schedule": "zb_v", "forward": "1.5", "transfer": "0.25", "step": "2"},
    {"schedule": "interleaved", "chunks": "3"}, {"schedule": "seq1f1b", "slices": "2"},
    {"schedule": "pipedream", "warmup": "6,4,2,0", "update_every": "2", "transfer": "0.5"},
    {"schedule": "auto", "limit": "3", "ranks": "2", "microbatches": "4", "activation": "0.5"}])
def test_figures_are_those_of_the_command_that_it_names(playground: ModuleType, changed: dict[str, str],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    drawn = asked(playground, "draw", settings=SETTINGS | changed)["result"]
    main([*drawn["command"].split()[1:], "--format", "json"])
    printed = json.loads(capsys.readouterr().out)
    for key, other in (("bubble", "bubble"), ("makespan", "makespan"), ("period", "period")):
        assert float(drawn[key]) == pytest.approx(printed[other], rel=1e-5)
    assert [rank["activations"] for rank in drawn["ranks"]] == printed["peak_activations"]
    assert [stage["versions"] for stage in drawn["stages"]] == printed["versions"]
    assert [stage["staleness"] for stage in drawn["stages"]] == printed["staleness"]
    assert [[event[0] for event in rank["events"]] for rank in drawn["ranks"]] == [
        [action for action in program if "USE" not in action] for program in printed["programs"]]


def test_memory_has_the_size_of_activations_and_versions(playground: ModuleType) -> None:
    drawn = asked(playground, "draw", settings=SETTINGS | {"schedule": "pipedream", "activation": "2",
                                                           "version": "10"})["result"]
    assert [rank["peak"] for rank in drawn["ranks"]] == ["48", "36", "24", "12"]


def test_the_verdict_is_that_of_vpipe_check(playground: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    right = WRONG.replace(" 1B1 ", "1B0").replace(",1B0\n", ",1B1\n")
    good = asked(playground, "check", settings=SETTINGS, text=right)["result"]
    main(["check", "edited.csv"])
    assert capsys.readouterr().out == good["verdict"]
    assert good["drawn"]["bubble"] == "3"

    main(good["drawn"]["command"].split()[1:])
    assert "bubble 3 (" in capsys.readouterr().out

    refused = asked(playground, "check", settings=SETTINGS, text=WRONG)["result"]
    [problem], [mark] = refused["problems"], refused["marks"]
    assert main(refused["command"].split()[1:]) == 2
    assert capsys.readouterr().err == f"error: {problem['what']}\nhint: {problem['hint']}\n"
    assert (mark["action"], mark["line"], WRONG.splitlines()[1][mark["start"]:mark["end"]]) == ("1B1", 1, "1B1")


def test_mistakes_are_errors_with_hints(playground: ModuleType, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for changed, what in (({"ranks": "0"}, "--ranks is 0"), ({"ranks": "x"}, "--ranks is 'x'"),
                          ({"microbatches": "9999"}, "but this page draws 64 at most"),
                          ({"schedule": "1f1c"}, "no schedule is called '1f1c'"),
                          ({"schedule": "auto", "ranks": "16", "microbatches": "64"}, "the search takes long"),
                          ({"forward": "0"}, "--costs has a forward of 0"), ({"version": "-"}, "--costs has '-'")):
        [problem] = asked(playground, "draw", settings=SETTINGS | changed)["error"]
        assert what in problem["what"]
        assert problem["hint"]
    answer = asked(playground, "check", settings=SETTINGS, text="0F0,0X0\n")["result"]
    assert answer["problems"][0]["where"] == "edited.csv:1"
    assert answer["marks"][0]["line"] == 0
    [unforeseen] = asked(playground, "draw", settings={})["error"]
    assert unforeseen["what"].startswith("the playground failed: KeyError")


def test_a_row_is_that_of_the_table(playground: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "--all", "--ranks", "2", "--microbatches", "4", "--costs", "1,1,1,0.5"])
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[3:-4] if line.strip()}
    for name in ("1f1b", "zb_v", "pipedream"):
        settings = SETTINGS | {"ranks": "2", "microbatches": "4", "transfer": "0.5"}
        chunks, bubble, share, makespan, _, peak, versions, stale = asked(
            playground, "compare", settings=settings, name=name)["result"]["cells"]
        words = [word for word in lines[name][1:] if not word.startswith("(")]
        assert words == [chunks, bubble, *share.split(), makespan, peak, versions, stale]
