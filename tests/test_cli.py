"""The command as a user meets it: every mistake is an error and a hint, status 2, before anything starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import write_config

from vpipe import Cut, Order
from vpipe.app.cli import main
from vpipe.plan.plan import Plan
from vpipe.schedules.builder import build
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.size import Layout

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


def settings(*texts: str) -> list[str]:
    return ["train", "c.yaml", *(part for text in texts for part in ("--set", text))]


@pytest.mark.parametrize(("texts", "what", "hint"), [
    (["training.learning_rat=1"], "unknown key 'training.learning_rat' (--set training.learning_rat)",
     "did you mean 'learning_rate'?"),
    (["parallel.partition=[2, 2]"], "partition [2, 2] adds up to 4 layers, but the model has 5",
     "change it by +1 so that it adds up to 5"),
    (["parallel.model_parallel_size=9", "parallel.partition=auto"], "9 stages, but the model has only 5 layers",
     "use between 1 and 5 stages"),
    (["parallel.recompute=1.5"], "parallel.recompute must be a number from 0 to 1, got 1.5 (--set parallel.recompute)",
     "recompute: the share of a stage's layers"),
    (["dataset.batch_size=800"], "the train split holds 64 samples, fewer than one batch of 800",
     "use a batch size of at most 64, or more data"),
    (["model.name=bertt"], "no model is called 'bertt'", "did you mean 'bert'?"),
    (["model.preset=tini"], "BERT has no preset 'tini'", "did you mean 'tiny'?"),
    (["dataset.name=text", "dataset.path=data"], "data does not exist", "name a file or a folder of "),
    (["dataset.name=synthetik"], "no data set is called 'synthetik'", "did you mean 'synthetic'?"),
    (["parallel.schedule=1f1bb"], "parallel.schedule is '1f1bb', which is no schedule of this version",
     "did you mean '1f1b'?"),
    (["training.lr_policy=polynomial", "training.warmup_steps=5"],
     "the learning rate warms up over 5 steps of a run of 4", "warm up over at most 4 steps, or train longer"),
    (["model.vocab_size=3"], "vocab_size is 3, but 5 ids are special tokens", "use at least 6"),
    (["log_directory=c.yaml"], "cannot make the run's folder in 'c.yaml'",
     "set log_directory to a folder that can be written"),
    (["log_directory=c.yaml/deeper"], "cannot make the run's folder in 'c.yaml/deeper': Not a directory",
     "set log_directory to a folder that can be written"),
    (["x"], "'x' does not set a key (--set x)", "write --set training.learning_rate=3e-4"),
    (["=3"], "'=3' does not set a key", "write --set training.learning_rate=3e-4"),
    (["training..epochs=3"], "'training..epochs=3' does not set a key", "write --set training.learning_rate=3e-4"),
])
def test_a_wrong_setting(refused: Refused, texts: list[str], what: str, hint: str) -> None:
    [(found, remedy)] = refused(*settings(*texts))
    assert found.startswith(what)
    assert remedy.startswith(hint)


@pytest.mark.parametrize(("arguments", "what", "hint"), [
    ([], "the following arguments are required: COMMAND", "vpipe --help says how"),
    (["trian", "c.yaml"], "vpipe has no command 'trian'", "did you mean 'train'?"),
    (["checkpoint", "lst"], "vpipe checkpoint has no command 'lst'", "did you mean 'list'?"),
    (["checkpoint"], "the following arguments are required: COMMAND", "vpipe checkpoint --help says how"),
    (["train"], "vpipe train is given no config", "name a YAML file: vpipe train CONFIG; or a run to go on with: "
     "vpipe train --resume RUN"),
    (["train", "c.yaml", "--sett", "a=b"], "vpipe train knows no '--sett'", "did you mean '--set'?"),
    (["train", "c.yaml", "d.yaml"], "vpipe train knows no 'd.yaml'", "vpipe train --help says how"),
    (["train", "c.yaml", "--set"], "argument --set: expected one argument", "vpipe train --help says how"),
    (["train", "none.yaml"], "there is no file 'none.yaml' (none.yaml)",
     "check the path; it is taken from the current folder"),
    (["train", "."], "the file '.' cannot be read", "give a readable UTF-8 text file"),
])
def test_a_wrong_command_line(refused: Refused, arguments: list[str], what: str, hint: str) -> None:
    [(found, remedy)] = refused(*arguments)
    assert found.startswith(what)
    assert remedy == hint


@pytest.mark.parametrize(("file", "text", "what", "hint"), [
    (None, "", "model.config_file names 'b.json', but there is no such file", "it is a JSON file such as"),
    ("b.json", '{"hidden_size": ', "the JSON cannot be read: ", "check this place"),
    ("b.json", "[1]", "the file holds [1], not keys with values (b.json:1:1)", 'write {"key": value, ...}'),
    ("b.json", '{"hidden_size": 16, "hidden_size": 32}',
     "the key 'hidden_size' is given twice, first at b.json:1:2 (b.json:1:21)", "remove one of the two"),
    ("b.json", '{"hiden_size": 16}', "a BERT config has no 'hiden_size'", "did you mean 'hidden_size'?"),
    ("b.json", "\udcff", "the file 'b.json' cannot be read", "give a readable UTF-8 text file"),
    ("b.json", '{"vocab_size": "many"}', "vocab_size is 'many'", "give a whole number"),
])
def test_the_models_own_config(refused: Refused, file: str | None, text: str, what: str, hint: str) -> None:
    if file is not None:
        Path(file).write_bytes(text.encode(errors="surrogateescape"))
    [(found, remedy)] = refused(*settings("model.config_file=b.json", "model.preset=", "model.vocab_size=-1"))
    assert found.startswith(what)
    assert remedy.startswith(hint)


def test_a_schedules_file_in_a_config(refused: Refused, here: Path) -> None:
    assert refused(*settings("parallel.schedule=none.csv")) == [
        ("parallel.schedule names no schedule: there is no file 'none.csv' (--set parallel.schedule)",
         "check the path; it is taken from the current folder")]
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
             "path exists, may be used and has room")):
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
    ["configs"], ["schedule", "gpipe", "--stages", "8", "--microbatches", "64", "--format", "svg"]])
def test_a_closed_pipe_shows_no_traceback(arguments: list[str], forked: None) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([VPIPE, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# -- schedules -----------------------------------------------------------------------------------------

LARGE = ["--stages", "4", "--microbatches", "8"]


@pytest.mark.parametrize(("arguments", "what", "hint"), [
    ([], "which schedule?", "name one of "),
    (["1F1B", *LARGE], "no schedule is called '1F1B'", "did you mean '1f1b'?"),
    (["1f1bb", *LARGE], "no schedule is called '1f1bb'", "did you mean '1f1b'?"),
    (["1f1b"], "--stages is missing", "say how large: --stages 4 --microbatches 8"),
    (["1f1b", "--stages", "4"], "--microbatches is missing", "say how large"),
    (["1f1b", "--stages", "0", "--microbatches", "8"], "--stages is 0", "give a whole number, 1 or more"),
    (["1f1b", "--stages", "4", "--microbatches", "-8"], "--microbatches is -8", "give a whole number, 1 or more"),
    (["1f1b", "--stages", "x", "--microbatches", "8"], "argument --stages: invalid int value: 'x'",
     "vpipe schedule --help says how"),
    (["interleaved", *LARGE, "--chunks", "0"], "--chunks is 0", "give a whole number, 1 or more"),
    (["interleaved", "--stages", "4", "--microbatches", "7"],
     "'interleaved' sends microbatches round in groups of 4", "use 4 or 8 microbatches"),
    (["1f1b", *LARGE, "--chunks", "2"], "--chunks is 2, but '1f1b' holds 1 stage on each rank",
     "leave --chunks out, or choose a schedule with any number: "),
    (["1f1b", *LARGE, "--slices", "2"], "--slices is 2, but '1f1b' takes whole microbatches",
     "leave --slices out, or choose a schedule of slices: gpipe, seq1f1b"),
    (["seq1f1b", *LARGE, "--slices", "0"], "--slices is 0", "give a whole number, 1 or more"),
    (["seq1f1b", *LARGE, "--slices", "100000"], "4 ranks and 8 microbatches are 6,400,000 forwards and backwards",
     "stay below 250,000"),
    (["a.csv", "--slices", "2"], "--slices is 2, but 'a.csv' has 1 forward of every stage", "give a divisor"),
    (["1f1b", "--stages", "4000", "--microbatches", "1000000"],
     "4000 ranks and 1000000 microbatches are 8,000,000,000 forwards and backwards", "stay below 250,000"),
    (["zb_h2", "--stages", "4", "--microbatches", "0"], "--microbatches is 0", "give a whole number, 1 or more"),
    (["1f1b", *LARGE, "--update-every", "2"], "update_every is 2, but '1f1b' updates once per batch",
     "leave update_every out"),
    (["pipedream", *LARGE, "--update-every", "3"], "update_every is 3, which does not divide 8 microbatches",
     "choose one of [1, 2, 4, 8]"),
    (["1f1b", *LARGE, "--format", "pdf"], "vpipe schedule has no --format 'pdf'",
     "known names: csv, json, svg, text, torch"),
    (["1f1b", *LARGE, "--formt", "svg"], "vpipe schedule knows no '--formt'", "did you mean '--format'?"),
    (["1f1b", *LARGE, "--costs", "1,2"], "--costs has 2 numbers, not 3 to 5: '1,2'", "write --costs F,I,W,transfer"),
    (["1f1b", *LARGE, "--costs", ""], "--costs has 1 number, not 3 to 5: ''", "write --costs F,I,W,transfer"),
    (["1f1b", *LARGE, "--costs", "1,x,1,0"], "--costs has 'x', which is neither 0 nor a number", "write --costs"),
    (["1f1b", *LARGE, "--costs", "1,nan,1,0"], "--costs has 'nan', which is neither", "write --costs"),
    (["1f1b", *LARGE, "--costs", "1,-1,1,0"], "--costs has '-1', which is neither 0 nor", "write --costs"),
    (["1f1b", *LARGE, "--costs", "1,1_0,1"], "--costs has '1_0', which is neither", "write --costs"),
    (["1f1b", *LARGE, "--costs", "-1,1,1,0"], "--costs has '-1', which is neither 0 nor", "write --costs"),
    (["1f1b", *LARGE, "--costs", "1,1/0,1,0"], "--costs has '1/0', which is neither 0 nor", "write --costs"),
    (["1f1b", *LARGE, "--costs", "1,1e99999999,1,0"], "--costs has '1e99999999', which is", "write --costs"),
    (["1f1b", *LARGE, "--costs", "1,1e400,1,0"], "--costs has '1e400', which is neither 0 nor", "write --costs"),
    (["1f1b", *LARGE, "--costs", "1,0,0,0"], "--costs has a forward of 1 and a backward of 0", "both take time"),
    (["--all"], "--stages is missing", "say how large"),
    (["--all", "1f1b", *LARGE], "--all and '1f1b'", "name a schedule, or compare all of them"),
    (["--all", *LARGE, "--format", "svg"], "--all prints a table, not svg", "leave --format out"),
    (["none.csv"], "there is no file 'none.csv'", "check the path"),
    (["./none"], "there is no file 'none'", "check the path"),
    (["plan.json"], "the plan has no schedule (plan.json)", 'add one, such as "schedule": "1f1b"'),
    (["plan2.json"], "the plan has no number of microbatches (plan2.json)", "give --microbatches"),
    (["plan2.json", "--microbatches", "4", "--stages", "3"], "--stages is 3, but 'plan2.json' has 2", "leave --stages"),
    (["none.json"], "cannot read the plan: No such file or directory (none.json)", ""),
    (["pipedream", *LARGE, "--format", "torch"], "'pipedream' updates weights before its pipeline is empty",
     "take a schedule with a flush, such as zb_v; vpipe train runs this one"),
    (["1f1b", "--widths", "2,1", "--microbatches", "8", "--format", "torch"], "stage 0 has 2 replicas, ranks 0, 1, but",
     "take the schedule without replicas, and wrap the modules"),
    (["a.csv", "--stages", "3"], "--stages is 3, but 'a.csv' has 2", "leave --stages out: the file says it"),
    (["a.csv", "--microbatches", "3"], "--microbatches is 3, but 'a.csv' has 1", "leave --microbatches out"),
    (["a.csv", "--chunks", "1"], "--chunks does not go with a file", "leave --chunks out"),
    (["bad.csv"], "'0X0' in cell 2 of rank 0 is not an action (bad.csv:1)", "write <stage><operation><index>"),
    (["1f1b", "--widths", "2", "--microbatches", "8"], "--stages is missing", "say how large"),
    (["1f1b", *LARGE, "--widths", "2,1,1"], "--widths has 3 numbers, but --stages is 4",
     "give 4 numbers, or one for all, or leave --stages out"),
    (["1f1b", *LARGE, "--widths", "2,,1,1"], "--widths has '', which is no number of replicas", "write --widths 2,1"),
    (["1f1b", *LARGE, "--widths", "-2"], "--widths has '-2', which is no number of replicas", "write --widths 2,1"),
    (["1f1b", *LARGE, "--widths", "1,9,1,1"], "9 replicas for 8 microbatches: some would have nothing to do",
     "use 9 microbatches or more, or fewer replicas"),
    (["pipedream", *LARGE, "--widths", "9"], "9 replicas for 8 microbatches", "use 9 microbatches or more"),
    (["1f1b", "--microbatches", "999999", "--widths", "1,999999"],
     "1000000 ranks and 999999 microbatches are 1,999,998,000,000 forwards and backwards or parts of sums",
     "stay below 250,000"),
    (["interleaved", "--widths", "2,1", "--microbatches", "8"],
     "'interleaved' has equally many replicas of every stage, not 2, 1, 2, 1", "give all stages equally many"),
    (["auto", "--widths", "2,1", "--microbatches", "8"], "'auto' has equally many replicas of every stage, not 2, 1",
     "give all stages equally many"),
    (["pipedream_vertical_sync", "--widths", "2,1", "--microbatches", "8"],
     "'pipedream_vertical_sync' gives a microbatch the same version on every stage", "give all stages equally many"),
    (["a.csv", "--widths", "2"], "--widths does not go with a file", "leave --widths out"),
])
def test_a_wrong_schedule_command(refused: Refused, here: Path, arguments: list[str], what: str, hint: str) -> None:
    (here / "a.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (here / "bad.csv").write_text("0F0,0X0\n")
    (here / "plan.json").write_text('{"partition": [2, 2]}')
    (here / "plan2.json").write_text('{"partition": [2, 2], "schedule": "1f1b"}')
    [(found, remedy)] = refused("schedule", *arguments)
    assert found.startswith(what)
    assert remedy.startswith(hint)


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
    assert json.loads(printed(capsys, "schedule", "interleaved", "--stages", "2", "--microbatches", "2", "--chunks",
                              "2", "--format", "json", "--costs", "2,2,2,0")) == {
        "schedule": "interleaved", "placement": [[0], [1], [0], [1]], "programs": [
            ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1", "0STEP0", "2STEP0"],
            ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1", "1STEP0", "3STEP0"]],
        "makespan": 15, "bubble": 3, "period": 15, "peak_activations": [4, 4], "versions": [1] * 4,
        "staleness": [0] * 4}
    stream = json.loads(printed(capsys, "schedule", "pipedream", "--stages", "2", "--microbatches", "2", "--format",
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


def test_all_schedules_with_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "schedule", "--all", "--stages", "2", "--widths", "2", "--microbatches", "8").splitlines()
    assert lines[0] == "4 ranks (2 replicas each), 8 microbatches, F 1, I 1, W 1, transfer 0"
    assert {line.split()[0] for line in lines[3:lines.index("", 3)]} == set(RegisteredSchedule.names())
    assert not [line for line in lines if "not possible" in line]
    lines = printed(capsys, "schedule", "--all", "--widths", "2,1", "--microbatches", "8").splitlines()
    assert lines[0].startswith("3 ranks (2, 1 replicas), 8 microbatches")
    assert any(line.startswith("1f1b ") and "not possible" not in line for line in lines)
    assert any(line.startswith("zb_v ") and "not possible: 'zb_v' has equally many replicas" in line for line in lines)


def test_all_schedules_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "schedule", "--all", "--stages", "3", "--microbatches", "5").splitlines()
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
    command = [VPIPE, "schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
    terminal = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}
    subprocess.run(command, stdout=writer, check=True, timeout=60, env={**terminal, "COLUMNS": "100"})
    assert b"\x1b[38;5;255;48;5;26mF0" in os.read(reader, 100_000)
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        subprocess.run(command, stdout=writer, check=True, timeout=60, env={**terminal, **plain})
        assert b"\x1b" not in os.read(reader, 100_000)
    os.close(writer)
    os.close(reader)


def test_schedules_need_no_torch() -> None:
    code = ("import sys\nfrom vpipe.app.cli import main\nassert main(['schedule', '--all', '--stages', '2', "
            "'--microbatches', '4']) == 0\n"
            "assert not {'torch', 'numpy', 'yaml', 'pydantic'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
