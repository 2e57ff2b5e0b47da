"""A kind of action that only these tests have: proved, costed, drawn, run in one and four processes, reported."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from proved import prove
from small_run import write_config
from torch import nn
from world import World

from vpipe import Model, Pipeline
from vpipe.app.cli import main
from vpipe.errors import CheckError, UserError
from vpipe.runtime.worker import Worker, check_runnable
from vpipe.schedules import kinds, registry
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.checker import check
from vpipe.schedules.costs import Costs, StageCosts
from vpipe.schedules.kinds import GRADIENT, MICROBATCH, SAVED, Action, Kind, Value, register_kind, step
from vpipe.schedules.lowering import lower
from vpipe.schedules.schedule import Schedule
from vpipe.schedules.simulator.timeline import simulate

PACKAGE = '''"""{kind}: the average of a stage's weights over its updates, as an action behind every step."""

from vpipe.schedules.kinds import Action
from vpipe.schedules.generators.one_f_one_b import one_f_one_b
from vpipe.schedules.kinds import UPDATE, UPDATED, Kind, Memory, Value, register_kind
from vpipe.schedules.registry import register_schedule

MEAN = Value("average of weights", bytes=lambda cost: cost.version_bytes)
{kind} = register_kind(Kind(
    "{kind}", "average of weights", UPDATE, "{package}:average",
    needs=lambda at, stage, update, rank: [(UPDATED, stage, update)], seconds=lambda cost: cost.step_s / 2,
    makes=((MEAN, 0),), memory=Memory(leaves=(MEAN,)), colour="#d0bfff"))


@register_schedule("{package}_1f1b", flush=True,
                   peak_activations=lambda rank, size: min(size.ranks - rank, size.microbatches))
def averaged(rank, ranks, microbatches):
    """1F1B, and the average behind every step."""
    yield from one_f_one_b(rank, ranks, microbatches)
    yield Action({kind}, rank, 0)


AVERAGES = {{}}


def average(worker, stage, update):
    """Move the averages of a stage's weights a tenth of the way."""
    for name, weight in worker.stages[stage].weights.masters.items():
        mean = AVERAGES.setdefault(name, weight.detach().clone())
        mean.lerp_(weight.detach(), 0.1)
'''


def install(folder: Path, package: str, kind: str) -> None:
    """Put the package where Python finds it once ``folder`` is on its path."""
    (folder / f"{package}.py").write_text(PACKAGE.format(package=package, kind=kind))
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[vpipe.actions]\n{kind} = {package}\n[vpipe.schedules]\n{package}_1f1b = {package}\n")


def train(*, folder: str, package: str, schedule: str | None = None, ranks: int = 4) -> dict[str, Any]:
    """Two updates of four stages: the losses, and this process's averages."""
    if not dist.is_initialized() or dist.get_rank() < ranks:
        sys.path.insert(0, folder)
    try:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        pipe = Pipeline(Model.sequential(layers, loss=nn.MSELoss()), lambda weights: torch.optim.SGD(weights, lr=0.1),
                        stages=4, schedule=schedule or f"{package}_1f1b", microbatches=4, seed=0)
        data = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
        losses = [step.loss for step in pipe.train({"input": batch, "target": batch.flip(1)} for batch in data)]
        averages = {name: mean.tolist() for name, mean in sys.modules[package].AVERAGES.items()}
        sys.modules[package].AVERAGES.clear()
        return {"losses": losses, "averages": averages}
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with an installed package; what it registers is taken back."""
    registry.RegisteredSchedule.names()
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    install(tmp_path, "averaging", "AVERAGE")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("averaging", None)


def test_it_is_proved(folder: Path) -> None:
    schedule = lower(build("averaging_1f1b", Layout.LOOP(3), 4, ties={0: (2,)}), norm=True)
    check(schedule)
    assert [str(program[-1]) for program in schedule.programs] == ["0AVERAGE0", "1AVERAGE0", "2AVERAGE0"]
    rows = [list(program) for program in schedule.programs]
    rows[1].insert(-2, rows[1].pop())
    with pytest.raises(CheckError, match="1AVERAGE0 on rank 1 needs 1STEP0 before it, which comes only later"):
        check(schedule.with_programs(rows))


def test_it_is_costed(folder: Path) -> None:
    schedule = build("averaging_1f1b", Layout.LOOP(2), 2)
    plain = build("1f1b", Layout.LOOP(2), 2)
    costs = Costs((StageCosts(1, 1, 1, step_s=4, activation_bytes=Fraction(1, 3), version_bytes=10),) * 2)
    with_it, without = simulate(schedule, costs), simulate(plain, costs)
    assert with_it.makespan_s == without.makespan_s + 2
    assert [curve[-1][1] for curve in with_it.memory] == [curve[-1][1] + 10 for curve in without.memory]


def test_it_is_drawn_written_and_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "2", "--microbatches", "2"]
    assert main(["schedule", "averaging_1f1b", *sizes, "--costs", "1,1,1,0"]) == 0
    assert "A average of weights" in capsys.readouterr().out
    assert main(["schedule", "averaging_1f1b", *sizes, "--format", "svg"]) == 0
    assert re.search(r'class="AVERAGE0".*<title>1AVERAGE0 at', capsys.readouterr().out)
    assert main(["schedule", "averaging_1f1b", *sizes, "--format", "csv"]) == 0
    file = folder / "averaged.csv"
    file.write_text(capsys.readouterr().out)
    assert "0AVERAGE0" in file.read_text()
    del kinds._KINDS["AVERAGE"], sys.modules["averaging"]  # as in another process
    assert main(["check", str(file)]) == 0
    assert main(["schedule", "averaging_1f1b", *sizes, "--format", "torch"]) == 0
    assert "AVERAGE" not in (printed := capsys.readouterr()).out
    assert "2 AVERAGE: PyTorch has no such action" in printed.err


def test_it_runs_in_one_and_four_processes(folder: Path, world: World) -> None:
    here = train(folder=str(folder), package="averaging")
    plain = train(folder=str(folder), package="averaging", schedule="1f1b")
    assert here["losses"] == plain["losses"]
    assert not plain["averages"]
    assert len(here["averages"]) == 8
    four = world.run(train, folder=str(folder), package="averaging")
    together = {name: mean for rank in four for name, mean in rank["averages"].items()}
    assert [rank["losses"] for rank in four] == [here["losses"]] * 4
    assert together == here["averages"]
    assert [len(rank["averages"]) for rank in four] == [2] * 4


@pytest.mark.jobs
@pytest.mark.usefixtures("forked")
def test_it_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    config = write_config(folder, parallel__schedule="averaging_1f1b")
    assert main(["train", str(config), "--set", "trace=true"]) == 0
    (run,) = (folder / "runs").iterdir()
    assert main(["trace", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "average of weights" in page
    assert page.count("other actions") >= 4, "in the bars, their table and the stages'"
    del kinds._KINDS["AVERAGE"]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(folder)])
    assert main(["trace", str(run)]) == 2
    assert "no kind of action is called 'AVERAGE' here" in capsys.readouterr().err


def made(text: str, **row: Any) -> Kind:
    """A kind of the test."""
    return Kind(text, "kind of a test", row.pop("counts", MICROBATCH), row.pop("runs", "averaging:average"), **row)


def with_kind(kind: Kind, place: int = 1) -> Schedule:
    """1F1B on one rank with an action of the kind somewhere, from its end on."""
    schedule = build("1f1b", Layout.LOOP(1), 1)
    (program,) = schedule.programs
    at = len(program) - place
    return schedule.with_programs([(*program[:at], Action(kind, 0, 0), *program[at:])])


@pytest.mark.usefixtures("folder")
def test_gradients_are_not_there_behind_the_step() -> None:
    norm = register_kind(made("GNORM", needs=lambda at, stage, index, rank: [(GRADIENT, stage, index)]))
    check(with_kind(norm))
    with pytest.raises(CheckError, match="0GNORM0 on rank 0 needs the weight gradient of a microbatch of stage 0 and "
                                         "microbatch 0, which 0STEP0 has freed"):
        check(with_kind(norm, place=0))


WISH = Value("wish")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("row", "text"), [
    ({"needs": lambda at, stage, index, rank: [(WISH, stage, index)]}, "no kind of action makes the value 'wish'"),
    ({"makes": [(WISH, 0)], "needs": lambda at, stage, index, rank: [(WISH, stage, index)]},
     "0ODD0 on rank 0 needs 0ODD0 before it, which is itself"),
    *(({"seconds": lambda cost, seconds=seconds: seconds}, f"an action ODD of stage 0 takes {seconds} seconds")
      for seconds in (-1, float("nan"), float("inf"))),
    ({"runs": "averaging:lost"}, "an action ODD is run by averaging:lost, which cannot be found")])
def test_a_kind_that_cannot_be_proved_costed_or_run(row: dict[str, Any], text: str) -> None:
    kind = register_kind(made("ODD", **row))

    def use() -> None:
        check(with_kind(kind))
        simulate(with_kind(kind), Costs((StageCosts(1, 1, 1),)))
        check_runnable({kind})

    with pytest.raises((UserError, CheckError), match=text):
        use()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("row", "hint"), [
    ({"counts": "step"}, "MICROBATCH, UPDATE or VERSION"), ({"runs": "average"}, "module:function"),
    ({"makes": [GRADIENT]}, "(VALUE, 0)"), ({"memory": (GRADIENT,)}, "Memory("), ({"seconds": 3}, "a function of"),
    ({"colour": "reddish"}, "#rrggbb")])
def test_a_row_that_cannot_be(row: dict[str, Any], hint: str) -> None:
    with pytest.raises(UserError, match=re.escape(hint)):
        register_kind(made("ODD", **row))


def test_a_file_with_a_kind_of_an_imported_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    (tmp_path / "averaging.py").write_text(PACKAGE.format(package="averaging", kind="AVERAGE"))
    (tmp_path / "own.csv").write_text("0F0,0B0,0STEP0,0AVERAGE0\n")
    imported = ["--import", str(tmp_path / "averaging.py")]
    assert main(["check", str(tmp_path / "own.csv")]) == 2
    assert "for AVERAGE of a package install it, or name its file with --import" in capsys.readouterr().err
    try:
        assert main(["check", str(tmp_path / "own.csv"), *imported]) == 0
        assert main(["simulate", str(tmp_path / "own.csv"), *imported]) == 0
    finally:
        sys.modules.pop("averaging", None)


def test_one_that_another_rank_has_not_is_refused(tmp_path: Path, pair: World) -> None:
    install(tmp_path, "elsewhere", "ELSEWHERE")
    pair.begin(train, folder=str(tmp_path), package="elsewhere", ranks=1)
    outcomes = [pair.outcome(rank, 30.0) for rank in range(2)]
    assert [kind for kind, _ in outcomes] == ["error", "error"]


@pytest.mark.usefixtures("forked")
def test_the_example_of_the_docs(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/add-an-action.md").read_text()
    (folder / "averaging.py").unlink()
    (example := tmp_path / "mine" / "averaging.py").parent.mkdir()
    example.write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(example.parent)
    assert main(["schedule", "averaged_gpipe", "--ranks", "2", "--microbatches", "2", "--format", "csv",
                 "--import", "averaging.py"]) == 0
    assert capsys.readouterr().out == ("0F0,0F1,0B0,0B1,0STEP0,0AVERAGE0\n"
                                       "1F0,1F1,1B0,1B1,1STEP0,1AVERAGE0\n")
    config = write_config(tmp_path, parallel__schedule="averaged_gpipe")
    assert main(["train", str(config), "--import", "averaging.py"]) == 0
    assert len(sys.modules["averaging"].averages) == 0, "the ranks are other processes"


def test_the_example_that_takes_what_another_kind_has_made(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/add-an-action.md").read_text()
    (folder / "packing.py").write_text(page.split("```python\n")[2].split("```")[0])
    packing = importlib.import_module("packing")
    sizes = []

    def packed(worker: Worker, stage: int, index: int) -> None:
        pack(worker, stage, index)
        assert (SAVED, stage, index) not in worker.values
        _, small = worker.values[packing.PACKED, stage, index]
        sizes.append([(tensor._nnz(), tensor.numel()) for _, tensor in small])

    def losses(schedule: str) -> list[float]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)))
        pipe = Pipeline(Model.sequential(layers, loss=nn.MSELoss()), lambda weights: torch.optim.SGD(weights, lr=0.1),
                        stages=2, schedule=schedule, microbatches=4)
        data = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
        return [step.loss for step in pipe.train({"input": batch, "target": batch.flip(1)} for batch in data)]

    pack, packing.pack = packing.pack, packed
    assert losses("packed_gpipe") == losses("gpipe")
    assert len(sizes) == 2 * 2 * 4
    assert any(held < whole for small in sizes for held, whole in small)
    sys.modules.pop("packing")


def test_its_meaning_is_the_same_in_every_process_and_another_in_another_row() -> None:
    def meaning(**row: Any) -> str:
        kind = kinds.Kind("SPREAD", "spread", kinds.UPDATE, "mine:spread", **row)
        return with_kind(kind).meaning(kind)

    def row(size: int = 1) -> dict[str, Any]:
        return {"needs": lambda at, s, i, rank: (
            (kinds.UPDATED, n, i) for n in sorted(range(s + size), key=lambda n: -n))}

    meanings = {meaning(**row()), meaning(**row())}
    assert len(meanings) == 1
    assert len({*meanings, meaning(), meaning(**row(2)), meaning(memory=kinds.Memory(leaves=(WISH,))),
                meaning(makes=((kinds.SUM, 0),))}) == 5


def test_kinds_that_make_what_others_make_disturb_no_schedule(folder: Path) -> None:
    kinds.register_kind(kinds.Kind("SCATTER", "other sum", kinds.UPDATE, "mine:scatter", makes=((kinds.SUM, 0),)))
    prove("1f1b", ((0, 1), (2, 3)), 4, norm=True)


def test_one_that_stands_twice_or_on_another_rank_is_explained(folder: Path) -> None:
    schedule = build("averaging_1f1b", Layout.LOOP(2), 2)
    rows = [list(program) for program in schedule.programs]
    rows[1].append(rows[1][-1])
    with pytest.raises(CheckError, match="1AVERAGE0 stands 2 times in the programs"):
        check(schedule.with_programs(rows))
    plain = build("gpipe", ((0, 1), (2, 3)), 4)
    with pytest.raises(CheckError, match="0REDUCE_GRAD0 stands on rank 2, but stage 0 lives on rank 0 and 1"):
        check(lower(plain.with_programs([*plain.programs[:2], (*plain.programs[2], step(0, 0)), plain.programs[3]])))


def test_two_of_one_name_are_refused(folder: Path) -> None:
    install(folder, "other", "AVERAGE")
    with pytest.raises(UserError, match=r"the package 'averaging' .* and the package 'other' .* have a kind of action "
                                         "called 'AVERAGE'"):
        Action.parse("0AVERAGE0")
    with pytest.raises(UserError, match="there is already a kind of action called 'STEP': optimizer step"):
        kinds.register_kind(kinds.Kind("STEP", "mine", kinds.UPDATE, "mine:step"))
    with pytest.raises(UserError, match="'MINE' would send the output, which 'SEND_F' sends"):
        kinds.register_kind(kinds.Kind("MINE", "mine", kinds.MICROBATCH, "mine:send",
                                       transfer=kinds.Op.SEND_F.transfer))
    with pytest.raises(UserError, match="an action cannot be called 'A1'"):
        kinds.register_kind(kinds.Kind("A1", "mine", kinds.UPDATE, "mine:step"))
