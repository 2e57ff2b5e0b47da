"""The command as a user meets it: every mistake is an error and a hint, status 2, before anything starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import assert_golden
from small_run import write_config

from vpipe import Cut, Execution, Order
from vpipe.app.cli import main
from vpipe.plan.plan import Plan
from vpipe.runtime import prepare_schedule
from vpipe.schedules.assignment import Layout
from vpipe.schedules.builder import build
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule

VPIPE = Path(sys.executable).with_name("vpipe")

Refused = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a good ``c.yaml``."""
    monkeypatch.chdir(tmp_path)
    write_config(Path())
    return tmp_path


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs a command that must be refused; what it says, as (error, hint) pairs."""

    def started(*arguments: object, **more: object) -> None:
        pytest.fail("ranks were started")

    monkeypatch.setattr("vpipe.app.launch.local.run_ranks", started)
    before = os.environ.get("RANK")

    def run(*arguments: str) -> list[tuple[str, str]]:
        try:
            status = main(arguments)
        except SystemExit as exit_:  # argparse
            status = exit_.code  # type: ignore[assignment]
        out, err = capsys.readouterr()
        assert status == 2
        assert out == ""
        assert not list(here.rglob("runs"))
        assert os.environ.get("RANK") == before
        lines = err.splitlines()
        assert all(line.startswith("error: ") for line in lines[::2]), err
        assert all(line.startswith("hint: ") for line in lines[1::2]), err
        assert len(lines) % 2 == 0
        return [(what.removeprefix("error: "), hint.removeprefix("hint: "))
                for what, hint in zip(lines[::2], lines[1::2], strict=True)]

    return run


def said(problems: list[tuple[str, str]]) -> str:
    """What a package may add to is left out."""
    [(what, hint)] = problems
    known = hint.partition("; operations: ")[0].replace(", ".join(RegisteredSchedule.names()), "SCHEDULES")
    return f"error: {what}\nhint: {known}"


def settings(*texts: str) -> list[str]:
    return ["train", "c.yaml", *(part for text in texts for part in ("--set", text))]


SETTINGS = """\
training.learning_rat=1
training.lr=1
lr=1
parallel.partition=[2, 2]
parallel.model_parallel_size=9; parallel.partition=auto
parallel.recompute=1.5
dataset.batch_size=800
model.name=bertt
model.preset=tini
dataset.name=text; dataset.path=data
dataset.name=synthetik
parallel.schedule=1f1bb
training.lr_policy=polynomial; training.warmup_steps=5
model.vocab_size=3
log_directory=c.yaml
log_directory=c.yaml/deeper
x
=3
training..epochs=3"""


def test_a_wrong_setting(refused: Refused) -> None:
    assert_golden(__file__, "settings", {line: said(refused(*settings(*line.split("; ")))).replace(os.getcwd(), "HERE")
                                         for line in SETTINGS.splitlines()})


COMMANDS = """
trian c.yaml
checkpoint lst
checkpoint
train
train c.yaml --sett a=b
train c.yaml d.yaml
train c.yaml --set
train none.yaml
train --config none.yaml
slurm --config_file=none.yaml --nodes 1
train --config_file c.yaml --config d.yaml
train --config
plan --config=
watch
configs gpt_small -o c.yaml
configs gpt_smal -o new
train ."""


def test_a_wrong_command_line(refused: Refused) -> None:
    assert_golden(__file__, "commands", {line: said(refused(*line.split())) for line in COMMANDS.split("\n")})


def test_the_models_own_config(refused: Refused) -> None:
    def with_file(text: str) -> str:
        Path("b.json").write_bytes(text.encode("latin-1"))
        return said(refused(*without))

    without = settings("model.config_file=b.json", "model.preset=", "model.vocab_size=-1")
    assert_golden(__file__, "config files", {"none": said(refused(*without))} | {text: with_file(text) for text in (
        '{"hidden_size": ', "[1]", '{"hidden_size": 16, "hidden_size": 32}', '{"hiden_size": 16}', "\xff",
        '{"vocab_size": "many"}')})


def test_a_schedules_file_in_a_config(refused: Refused, here: Path) -> None:
    assert refused(*settings("parallel.schedule=none.csv")) == [
        ("parallel.schedule names no schedule: there is no file 'none.csv' (--set parallel.schedule)",
         "check the path; relative paths start at the current folder")]
    Path("bad.csv").write_text("0F0,0X0\n")
    [(what, hint)] = refused(*settings("parallel.schedule=bad.csv", "parallel.update_every=2"))
    assert what.startswith("parallel.schedule names no schedule: '0X0' in cell 2 of rank 0 is no")
    assert "(bad.csv:1)" in what
    assert hint.startswith("write <stage><operation><index>")


def test_a_port_in_use(refused: Refused) -> None:
    for address in ("127.0.0.1", ""):
        with socket.socket() as holder:
            holder.bind((address, 0))
            holder.listen()
            port = holder.getsockname()[1]
            assert refused(*settings(f"parallel.master_port={port}")) == [
                (f"port {port} cannot be used: Address already in use",
                 "set parallel.master_port to a free port, or leave it out to have one found")]


def test_a_gpu_that_is_not_there_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert refused(*settings("parallel.device=cuda")) == [
        (f"device is cuda, but this process sees no GPU (torch {torch.__version__} is built for processors alone)",
         "leave device out, or set it to cpu")]
    assert refused(*settings("parallel.device=cpu", "parallel.backend=nccl")) == [
        ("parallel.device is cpu, but nccl carries tensors of GPUs only (--set parallel.device)",
         "write backend: gloo, or leave device out")]


def test_an_unexpected_error_shows_no_traceback(here: Path, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(here))

    def fail(error: Exception) -> Callable[..., Any]:
        def load(*arguments: object, **more: object) -> None:
            raise error
        return load

    for load, what, remedy in (
            (None, "error: TypeError: 'NoneType' object is not callable", "hint: this is a defect of vpipe or of a "
             "package it loads"),
            (fail(ZeroDivisionError("by zero")), "error: ZeroDivisionError: by zero", "hint: fix what raised it"),
            (fail(OSError(28, "No space left", "a")), "error: [Errno 28] No space left: 'a'", "hint: check that the "
             "path exists, may be used and has room"),
            (fail(MemoryError()), "error: this process has too little memory: MemoryError", "hint: smaller "
             "microbatches, more recompute, or fewer layers in this stage take less memory")):
        monkeypatch.setattr("vpipe.app.config.config.load_config", load)
        assert main(["train", "c.yaml"]) == 1
        said, *frames, hint = capsys.readouterr().err.splitlines()
        assert said == what
        assert frames[1:2] == (["    raise error"] if "fix" in remedy else [])  # of this file, which is no vpipe's
        assert hint.startswith(f"{remedy}; the traceback is in ")
        file = Path(hint.partition("the traceback is in ")[2])
        assert "Traceback" in file.read_text()
    monkeypatch.setattr("vpipe.app.config.config.load_config", fail(KeyboardInterrupt()))  # type: ignore[arg-type]
    assert main(["train", "c.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_command_itself(here: Path) -> None:
    Path("c.yaml").write_text("model: {nam: bert}\n")
    done = subprocess.run([VPIPE, "train", "c.yaml"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: unknown key 'model.nam' (c.yaml:1:9)\nhint: did you mean 'name'?\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_as_a_module() -> None:
    for module in ("vpipe", "vpipe.app.cli"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60,
                              check=True)
        assert re.fullmatch(r"vpipe \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("arguments", [
    ["configs"], ["schedule", "gpipe", "--ranks", "8", "--microbatches", "64", "--format", "svg"]])
def test_a_closed_pipe_shows_no_traceback(arguments: list[str], forked: None) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([VPIPE, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# -- schedules -----------------------------------------------------------------------------------------

LARGE = ["--ranks", "4", "--microbatches", "8"]


SCHEDULES = """\
schedule
schedule 1F1B --ranks 4 --microbatches 8
schedule 1f1bb --ranks 4 --microbatches 8
schedule 1f1b
schedule 1f1b --ranks 4
schedule 1f1b --ranks 0 --microbatches 8
schedule 1f1b --ranks 4 --microbatches -8
schedule 1f1b --ranks x --microbatches 8
schedule interleaved --ranks 4 --microbatches 8 --chunks 0
schedule interleaved --ranks 4 --microbatches 7
schedule 1f1b --ranks 4 --microbatches 8 --chunks 2
schedule 1f1b --ranks 4 --microbatches 8 --slices 2
schedule seq1f1b --ranks 4 --microbatches 8 --slices 0
schedule seq1f1b --ranks 4 --microbatches 8 --slices 100000
schedule a.csv --slices 2
schedule 1f1b --ranks 4000 --microbatches 1000000
schedule zb_h2 --ranks 4 --microbatches 0
schedule 1f1b --ranks 4 --microbatches 8 --update-every 2
schedule pipedream --ranks 4 --microbatches 8 --update-every 3
schedule 1f1b --ranks 4 --microbatches 8 --format pdf
schedule 1f1b --ranks 4 --microbatches 8 --formt svg
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,2
schedule 1f1b --ranks 4 --microbatches 8 --costs ''
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,x,1,0
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,nan,1,0
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,-1,1,0
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,1_0,1
schedule 1f1b --ranks 4 --microbatches 8 --costs -1,1,1,0
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,1/0,1,0
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,1e99999999,1,0
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,1e400,1,0
schedule 1f1b --ranks 4 --microbatches 8 --costs 1,0,0,0
schedule --all
schedule --all 1f1b --ranks 4 --microbatches 8
schedule --all --ranks 4 --microbatches 8 --format svg
schedule none.csv
schedule ./none
schedule plan.json
schedule plan2.json
schedule plan2.json --microbatches 4 --ranks 3
schedule none.json
schedule pipedream --ranks 4 --microbatches 8 --format torch
schedule 1f1b --widths 2,1 --microbatches 8 --format torch
schedule a.csv --ranks 3
schedule a.csv --microbatches 3
schedule a.csv --chunks 1
schedule bad.csv
schedule 1f1b --widths 2 --microbatches 8
schedule 1f1b --stages 4 --microbatches 8 --widths 2,1,1
schedule 1f1b --stages 4 --microbatches 8 --widths 2,,1,1
schedule 1f1b --stages 4 --microbatches 8 --widths -2
schedule 1f1b --stages 4 --microbatches 8 --widths 1,9,1,1
schedule pipedream --stages 4 --microbatches 8 --widths 9
schedule 1f1b --microbatches 999999 --widths 1,999999
schedule interleaved --widths 2,1 --microbatches 8
schedule auto --widths 2,1 --microbatches 8
schedule pipedream_vertical_sync --widths 2,1 --microbatches 8
schedule a.csv --widths 2"""


def test_a_wrong_schedule_command(refused: Refused, here: Path) -> None:
    (here / "a.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (here / "bad.csv").write_text("0F0,0X0\n")
    (here / "plan.json").write_text('{"partition": [2, 2]}')
    (here / "plan2.json").write_text('{"partition": [2, 2], "schedule": "1f1b"}')
    assert_golden(__file__, "schedules", {line: said(refused(*shlex.split(line))) for line in SCHEDULES.splitlines()})


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_schedule_as_text_and_csv(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "schedule", "1f1b", *LARGE)
    assert "bubble 9 (27 %), makespan 33  (F 1, I 1, W 1, transfer 0)" in text
    assert "\x1b" not in text
    (here / "a.csv").write_text(printed(capsys, "schedule", "1f1b", *LARGE, "--format", "csv"))
    assert (here / "a.csv").read_text().startswith("0F0,0F1,0F2,0F3,0B0,0F4,0B1,")
    for again in (printed(capsys, "simulate", "a.csv"), printed(capsys, "schedule", "a.csv", *LARGE)):
        assert again == text.replace("1f1b:", "a.csv:")
    assert printed(capsys, "check", "a.csv") == """\
ok: a.csv: 4 ranks, 8 microbatches, flush, 68 actions
no deadlock, whether sends wait for their receives or not; with the transfers that vpipe adds
peak activations per rank: 4 3 2 1; versions per stage: 1 1 1 1; staleness: 0 0 0 0
"""


def test_a_schedule_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "schedule", "interleaved", "--ranks", "2", "--microbatches", "2", "--chunks",
                              "2", "--format", "json", "--costs", "2,2,2,0")) == {
        "schedule": "interleaved", "placement": [[0], [1], [0], [1]], "programs": [
            ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1", "0STEP0", "2STEP0"],
            ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1", "1STEP0", "3STEP0"]],
        "makespan": 15, "bubble": 3, "period": 15, "peak_activations": [4, 4], "versions": [1] * 4,
        "staleness": [0] * 4}
    stream = json.loads(printed(capsys, "schedule", "pipedream", "--ranks", "2", "--microbatches", "2", "--format",
                                "json", "--costs", "0.5,0.25,0,0.125"))
    assert (stream["makespan"], stream["versions"], stream["staleness"]) == (2.5, [2, 1], [1, 0])
    assert type(stream["bubble"]) is int or stream["bubble"] % 1


def test_a_schedule_with_replicas_in_every_form(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "1f1b", "--widths", "2,1", "--microbatches", "4"]
    found = json.loads(printed(capsys, *command, "--format", "json"))
    assert (found["placement"], found["peak_activations"]) == ([[0, 1], [2]], [2, 2, 1])
    assert found["programs"][:2] == [["0F0", "0F2", "0B0", "0B2", "0STEP0"], ["0F1", "0F3", "0B1", "0B3", "0STEP0"]]
    assert json.loads(printed(capsys, *command, "--stages", "2", "--format", "json")) == found
    (here / "a.csv").write_text(printed(capsys, *command, "--format", "csv"))
    assert printed(capsys, "simulate", "a.csv") == printed(capsys, *command).replace("1f1b:", "a.csv:")
    assert printed(capsys, "check", "a.csv") == """\
ok: a.csv: 3 ranks, 2 stages with 2, 1 replicas, 4 microbatches, flush, 19 actions
no deadlock, whether sends wait for their receives or not; with the transfers that vpipe adds
peak activations per rank: 2 2 1; versions per stage: 1 1; staleness: 0 0
"""
    assert "rank 1 (stage 0, 2 of 2)" in printed(capsys, "schedule", "a.csv", "--stages", "2", "--format", "svg")
    (here / "a.csv").write_text(lower(build("1f1b", ((0, 1), (2,)), 4)).to_csv())
    assert "37 actions, 16 of them transfers\n" in printed(capsys, "check", "a.csv")
    (here / "a.csv").write_text((here / "a.csv").read_text().replace("0REDUCE_GRAD0,", "", 1))
    assert main(["check", "a.csv"]) == 2
    assert "0REDUCE_GRAD0 is missing on rank 0" in capsys.readouterr().err


def test_actions_that_torch_does_itself_are_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Plan(Cut((2, 2, 1, 1), recompute=(0.0, 1.0, 0.0, 0.0), ranks=((0,), (1,), (1,), (0,))), Order("v_half"),
         microbatches=2).save("plan.json")
    assert main(["schedule", "plan.json", "--format", "torch"]) == 0
    out, err = capsys.readouterr()
    rows = [row.split(",") for row in out.splitlines()]
    assert [{cell[0] for cell in row} for row in rows] == [{"0", "3"}, {"1", "2"}]
    assert {cell[1] for row in rows for cell in row} <= set("FBIW")
    assert err == ("note: num_stages=4, n_microbatches=2; left out: 4 STEP: step the optimizer after schedule.step(); "
                   "2 R: a backward recomputes where your modules use torch.utils.checkpoint\n")
    (here / "a.csv").write_text(lower(build("1f1b", Layout.LOOP(2), 1)).to_csv())
    assert main(["schedule", "a.csv", "--format", "torch"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.count("left out: 4 transfers and sums: PyTorch adds its own; 2 STEP")) == ("0F0,0B0\n1F0,1B0\n", 1)


def test_actions_left_out_of_a_file_are_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.csv").write_text("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD,0RESHARD\n")
    for command in ("check", "simulate", "schedule"):
        assert main([command, "a.csv"]) == 0
        assert capsys.readouterr().err == (
            "note: a.csv: left out 1 UNSHARD, 1 REDUCE_GRAD, 1 RESHARD: only a model's weights ask for them; "
            "1 OVERLAP_F_B: each taken as one action after the other\n")


@pytest.mark.parametrize(("words", "said"), [
    ("zb_v --ranks 4", "zb_v: 4 ranks, 8 stages, "), ("zb_v --stages 4", "zb_v: 2 ranks, 4 stages, "),
    ("interleaved --stages 8 --chunks 4", "interleaved: 2 ranks, 8 stages, "), ("auto --stages 4", "auto: 4 ranks, "),
    ("chimera --stages 4", "chimera: 4 ranks, 4 stages"), ("1f1b --ranks 4 --widths 2", "1f1b: 4 ranks, 2 stages"),
    ("zb_v --stages 5", "error: --stages is 5, but 'zb_v' holds 2 stages on each rank\nhint: give a multiple of 2"),
    ("1f1b --ranks 3 --widths 2", "error: --ranks is 3, but each stage has 2 replicas\nhint: give a multiple of 2"),
    ("zb_v --stages 8 --ranks 3", "error: --ranks is 3, but with these --stages and --widths 'zb_v' has 4 ranks")])
def test_stages_and_ranks_are_those_of_configs_and_python(capsys: pytest.CaptureFixture[str], words: str,
                                                          said: str) -> None:
    main(["schedule", *words.split(), "--microbatches", "8"])
    assert "".join(capsys.readouterr()).startswith(said)
    name, option, count, *more = words.split()
    if option == "--stages" and not more and not said.startswith("error"):
        found = prepare_schedule(None, Cut(int(count)), Order(name), 8, Execution(), needs_norms=False)
        assert said.startswith(f"{name}: {found.ranks} ranks, ")


def test_all_schedules_with_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "schedule", "--all", "--ranks", "4", "--widths", "2", "--microbatches", "8").splitlines()
    assert lines[0] == "4 ranks (2 replicas each), 8 microbatches, F 1, I 1, W 1, transfer 0"
    assert {line.split()[0] for line in lines[3:lines.index("", 3)]} == set(RegisteredSchedule.names())
    assert not [line for line in lines if "not possible" in line]
    lines = printed(capsys, "schedule", "--all", "--widths", "2,1", "--microbatches", "8").splitlines()
    assert lines[0].startswith("3 ranks (2, 1 replicas), 8 microbatches")
    assert any(line.startswith("1f1b ") and "not possible" not in line for line in lines)
    assert any(line.startswith("zb_v ") and "not possible: 'zb_v' has equally many replicas" in line for line in lines)


def test_all_schedules_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "schedule", "--all", "--ranks", "3", "--microbatches", "5").splitlines()
    assert lines[0] == "3 ranks, 5 microbatches, F 1, I 1, W 1, transfer 0"
    names = {line.split()[0] for line in lines[3:lines.index("", 3)]}
    assert names == set(RegisteredSchedule.names())
    [impossible] = [line for line in lines if line.startswith("interleaved ")]
    assert "not possible" in impossible


def test_a_limit_holds_for_auto_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "schedule", "--all", *LARGE, "--memory", "2").splitlines()
    assert lines[0] == "4 ranks, 8 microbatches, F 1, I 1, W 1, transfer 0; auto: 2 microbatches on a rank at most"
    [auto] = [line.split() for line in lines if line.startswith("auto ")]
    assert float(auto[6]) <= 2  # peak activations


@pytest.mark.timeout(30)  # it once took minutes and all memory
def test_costs_far_from_one_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    for costs in ("1e-9,1e-9,1e-9,0", "1,1e-9,1e-9,0", "1e9,1e-9,1,0", "1/3,0.1234567,1e9,1e-9"):
        for form in ("text", "svg"):
            out = printed(capsys, "schedule", "zb_h1", *LARGE, "--costs", costs, "--format", form)
            assert len(out) < 100_000
    assert "(F 0.5, I 1, W 1, transfer 0)" in printed(capsys, "schedule", "1f1b", *LARGE, "--costs", "1/2,1,1")


def test_a_name_is_no_file(refused: Refused, here: Path) -> None:
    for command in ("check", "simulate"):
        assert refused(command, "1f1b") == [("'1f1b' is a schedule's name, not a file", "vpipe schedule 1f1b proves "
                                             "and draws it; with --format csv it writes the file")]


def test_a_schedule_that_breaks_a_rule(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.csv").write_text("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    for command in (["check", "a.csv"], ["check", "b.csv"], ["simulate", "b.csv"], ["schedule", "b.csv"]):
        (here / "b.csv").write_text("0B0,0F0\n1F0,1B0\n")
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "<-- here" in err
        assert "hint: " in err


def test_a_lowered_file_is_checked_unchanged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = lower(build("1f1b", Layout.LOOP(2), 2))
    (here / "a.csv").write_text(schedule.to_csv())
    assert "18 actions, 8 of them transfers\nno deadlock, whether sends wait for their receives or not\n" in printed(
        capsys, "check", "a.csv")
    (here / "a.csv").write_text(
        schedule.to_csv().replace("0SEND_F0,0RECV_B0,0F1,0SEND_F1,", "0SEND_F0,0F1,0SEND_F1,0RECV_B0,")
        .replace("1RECV_F1,1B0,1SEND_B0,", "1B0,1SEND_B0,1RECV_F1,"))
    assert main(["check", "a.csv"]) == 2
    assert "deadlock when sends wait for their receive (rendezvous)" in capsys.readouterr().err
    assert "rank 0  F0 F1 ......B0" in printed(capsys, "schedule", "a.csv")  # its compute order is sound


def test_colours_are_for_terminals(forked: None) -> None:
    reader, writer = os.openpty()
    command = [VPIPE, "schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]
    terminal = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    subprocess.run(command, stdout=writer, check=True, timeout=60, env={**terminal, "COLUMNS": "100"})
    assert b"\x1b[38;5;255;48;5;26mF0" in os.read(reader, 100_000)
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        subprocess.run(command, stdout=writer, check=True, timeout=60, env={**terminal, **plain})
        assert b"\x1b" not in os.read(reader, 100_000)
    os.close(writer)
    os.close(reader)


def test_schedules_need_no_torch() -> None:
    code = ("import sys\nfrom vpipe.app.cli import main\nassert main(['schedule', '--all', '--ranks', '2', "
            "'--microbatches', '4']) == 0\n"
            "assert not {'torch', 'numpy', 'yaml', 'pydantic'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
