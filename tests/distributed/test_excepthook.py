"""What an uncaught error of a job prints, and which rank prints it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch import nn
from watched_ranks import Ranks

from vpipe import Model, Pipeline
from vpipe.app.launch.network import free_port
from vpipe.distributed import excepthook
from vpipe.distributed.fault import Fault
from vpipe.errors import Problem, RunError, UserError

HERE = f'  File "{__file__}", line '


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process, that no torchrun started, with Python's own hook; no time is spent on waiting."""
    for variable in ("RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(excepthook.watch, "watchdog", None)
    monkeypatch.setattr(excepthook, "time", SimpleNamespace(
        time=time.time, sleep=lambda seconds: print(f"waited {seconds:g} s", file=sys.stderr)))
    hook = sys.excepthook
    sys.excepthook = sys.__excepthook__
    yield
    sys.excepthook = hook


def _call(raising: Callable[[], object]) -> None:
    raising()


through_vpipe = FunctionType(_call.__code__.replace(co_filename="/vpipe/made_up.py"), {"__name__": "vpipe.made_up"})
"""Call a function of the user's from one of vpipe's."""


def ended(raising: Callable[[], object]) -> int | None:
    """Let an error go uncaught; return the exit status that the hook asks for, None where it leaves that to Python."""
    excepthook.install()
    try:
        raising()
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            return int(end.code or 0)
    return None


def users_error() -> None:
    def fail() -> None:
        raise KeyError("sample 17")

    through_vpipe(fail)


def layer_error() -> None:
    def forward() -> None:
        raise ValueError("in a layer")

    def execute() -> None:
        try:
            forward()
        except ValueError as error:
            raise RunError("layer 3 'x' raised ValueError: in a layer", hint="mend it", rank=1) from error

    through_vpipe(execute)


def test_a_mistake_in_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: Model([], batch=())) == 2
    what, *frames, hint = capsys.readouterr().err.splitlines()
    assert (what, hint) == ("error: the model has no layers", "hint: give Model at least one Layer")
    files = [line for line in frames if line.startswith("  File")]
    assert len(files) == 2, "in ended() and in this function"
    assert all(line.startswith(HERE) for line in files)


def test_a_failure_shows_the_line_of_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(layer_error) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: layer 3 'x' raised ValueError: in a layer (rank 1)\n" + HERE)
    assert text.endswith("    raise ValueError(\"in a layer\")\nhint: mend it\n")
    assert "Traceback" not in text
    assert "During handling" not in text


def test_several_mistakes_come_with_their_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError.all_of([Problem("x is 3", "use 4"), Problem("y is 5", "use 6")])
    assert error.with_frames() == "error: x is 3\nhint: use 4\nerror: y is 5\nhint: use 6"

    def refuse() -> None:
        raise error

    assert ended(refuse) == 2
    assert capsys.readouterr().err.startswith(f"error: x is 3\nhint: use 4\nerror: y is 5\nhint: use 6\n{HERE}")


def test_an_error_of_the_users_own_shows_no_line_of_vpipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(users_error) is None
    text = capsys.readouterr().err
    assert text.startswith(f"Traceback (most recent call last):\n{HERE}")
    assert text.endswith("KeyError: 'sample 17'\n")
    assert "made_up.py" not in text


def test_a_defect_of_vpipe_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(lambda: through_vpipe(None)) is None  # type: ignore[arg-type]
    assert 'File "/vpipe/made_up.py", line ' in capsys.readouterr().err


def test_a_hook_of_the_program_stays() -> None:
    sys.excepthook = own = partial(print, "failed:")
    excepthook.install()
    assert sys.excepthook is own


def test_arguments_that_several_ranks_refuse_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.sequential(nn.Sequential(nn.Linear(4, 4)), nn.MSELoss())
    for ranks, hook in (("1", sys.__excepthook__), ("2", excepthook._excepthook)):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
        with pytest.raises(UserError, match="3 stages, but the model has only 1 layer"):
            Pipeline(model, lambda own: torch.optim.SGD(own, lr=0.1), stages=3)
        assert sys.excepthook is hook


def test_an_interactive_session_keeps_its_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    excepthook.install()
    assert sys.excepthook is sys.__excepthook__


def test_an_error_that_is_its_own_cause_is_shown_once() -> None:
    with pytest.raises(RunError) as error:
        raise RunError("lost", hint="see there")
    error.value.__cause__ = error.value
    assert error.value.frames.count("raise RunError") == 1


def test_before_the_ranks_have_joined_the_first_prints_at_once(monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert ended(layer_error) == 1
    assert "waited" not in capsys.readouterr().err
    monkeypatch.setenv("RANK", "2")
    assert ended(layer_error) == 1
    assert capsys.readouterr().err.startswith("waited 2 s\nerror: ")


def test_torchruns_summary_is_given_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert ended(layer_error) == 1
    text = capsys.readouterr().err.rstrip()
    failure = ProcessFailure(0, 0, 1, str(file))
    assert failure.message == {"message": text, "extraInfo": {"timestamp": str(failure.timestamp)}}
    before = file.read_text()
    ended(users_error)
    assert file.read_text() == before, "the first error counts"


def test_of_ranks_with_one_error_one_prints_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    ranks.start(2)
    statuses, texts = [], []
    for rank in (1, 0):
        monkeypatch.setattr(excepthook.watch, "watchdog", ranks.watches[rank])
        statuses.append(ended(users_error))
        texts.append(capsys.readouterr().err)
    assert statuses == [None, 1]
    assert texts[0].startswith("rank 1 (stage 1) failed:\nTraceback")
    assert texts[1] == "waited 2 s\nrank 0 (stage 0) ends: rank 1 (stage 1) failed\n"


def test_a_rank_with_an_error_of_its_own_prints_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    ranks.start(2)
    ranks.watches[1].failed(ValueError("another"))
    monkeypatch.setattr(excepthook.watch, "watchdog", ranks.watches[0])
    assert ended(users_error) is None
    assert "KeyError: 'sample 17'" in capsys.readouterr().err


@pytest.mark.parametrize(("fault", "reporter"), [
    (Fault.failed(2, ValueError("7")), 2), (Fault.ended(2), 0), (Fault.ended(0, 1), 2), (Fault.busy(0), 1),
    (Fault.circle(0, 1, 2, 3), 0)])
def test_one_rank_reports_what_befell_all(ranks: Ranks, fault: Fault, reporter: int) -> None:
    ranks.start(4)
    errors = {rank: ranks.watches[rank].error(fault, "...") for rank in range(4)}
    assert [rank for rank, error in errors.items() if error.brief is None] == [reporter]
    [(rank, error), *_] = [(rank, error) for rank, error in errors.items() if rank != reporter]
    assert str(error.brief).startswith(f"rank {rank} (stage {rank}) on {'aabb'[rank]} ends: rank ")
    assert len(str(error.brief).splitlines()) == 1


@pytest.mark.parametrize(("error", "status"), [("UserError", 2), ("RunError", 1)])
def test_python_ends_with_the_status(error: str, status: int) -> None:
    script = (f"import atexit\nfrom vpipe.errors import {error}\nfrom vpipe.distributed import excepthook\n"
              f"excepthook.install()\natexit.register(print, 'at exit')\nraise {error}('x', hint='y')\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "at exit\n")
    what, where, *_, hint = done.stderr.splitlines()
    assert (what, where, hint) == ("error: x", '  File "<string>", line 6, in <module>', "hint: y")


SCRIPT = """\
import torch
from torch import nn
from vpipe import Model, Pipeline
# group

class Narrow(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, 1:])

net = nn.Sequential(nn.Linear(4, 4), Narrow(4, 4))
pipe = Pipeline(Model.sequential(net, nn.MSELoss()), lambda p: torch.optim.SGD(p, lr=0.1), 2, "1f1b", 2)
for step in pipe.train([{"input": torch.ones(4, 4), "target": torch.ones(4, 4)}]):
    print(step.loss)
"""


@pytest.mark.parametrize("group", ["", pytest.param("torch.distributed.init_process_group('gloo')",
                                                     marks=pytest.mark.jobs)])
def test_of_the_ranks_of_torchrun_one_reports_an_error(tmp_path: Path, forked: None, group: str) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(SCRIPT.replace("# group", group))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                           str(free_port(None)), "--log-dir", logs, "--redirects", "3", script],
                          capture_output=True, text=True, timeout=100)
    said = {rank: next(logs.rglob(f"{rank}/stderr.log")).read_text() for rank in range(2)}
    assert said[0] in ("", "rank 0 (stage 0) ends: rank 1 (stage 1) failed\n"), "torchrun ends it meanwhile"
    assert said[1] == (text := f"""\
error: the forward of layer 1 '1' on h float32[2, 4], target float32[2, 4] raised RuntimeError: mat1 and mat2 shapes \
cannot be multiplied (2x3 and 4x4) (rank 1, stage 1, microbatch 0, action 1F0)
  File "{script}", line 12, in <module>
    for step in pipe.train([{{"input": torch.ones(4, 4), "target": torch.ones(4, 4)}}]):
  File "{script}", line 8, in forward
    return super().forward(x[:, 1:])
           ^^^^^^^^^^^^^^^^^^^^^^^^^
hint: make the layer accept these inputs, or change the outputs of the layers before it or the batch's field 'target'
""")
    assert done.returncode == 1
    assert text.splitlines()[0] in done.stderr, "in torchrun's summary"
