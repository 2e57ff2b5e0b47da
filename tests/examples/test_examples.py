"""The examples, and docs/python.md: what they print, and on fewer batches the same numbers under torchrun."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import parts
from torch import Tensor, nn

from vpipe import Asynchronous, Cut, Execution, Layer, Model, Order, Pipeline, Precision, Transfers, Update
from vpipe.runtime.step_results import Step
from vpipe.schedules.builder import build
from vpipe.schedules.registry import RegisteredSchedule

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
TRANSFORMER = QUICKSTART.with_name("transformer.py")
MESH = QUICKSTART.with_name("mesh.py")
TOKEN_WEIGHTS = QUICKSTART.with_name("token_weights.py")
TORCH_RUNTIME = QUICKSTART.with_name("torch_runtime.py")
PAGE = QUICKSTART.parents[1] / "docs" / "python.md"
LIBRARY = PAGE.with_name("library.md")


def printed_here(program: Path) -> str:
    """What the example prints in a process without a launcher: this one, which has torch already."""
    with contextlib.redirect_stdout(io.StringIO()) as out, torch.random.fork_rng():
        runpy.run_path(str(program))
    return out.getvalue()


def printed(program: Path, *launcher: str, arguments: Sequence[str] = ()) -> str:
    """What it prints under a launcher; ends it with all that it started when it takes too long."""
    with subprocess.Popen([sys.executable, *launcher, str(program), *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, start_new_session=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}) as process:
        try:
            out, err = process.communicate(timeout=100)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err
    return out


@pytest.mark.system
@pytest.mark.long
def test_both_ways_to_use_a_mesh_print_the_same_losses() -> None:
    """Their sums have other orders: printed are four digits."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    tensor, data = (printed(MESH, *launcher, arguments=[how]) for how in ("tensor", "data"))
    assert tensor == data
    assert re.fullmatch(r"(step \d+: loss \d\.\d{4}\n){4}", tensor)


def test_the_output_of_quickstart() -> None:
    lines = printed_here(QUICKSTART).splitlines()
    number = r"\d\.\d{6}"
    for line, schedule, updates in zip(lines, ("gpipe", "1f1b", "pipedream"), (36, 36, 72), strict=False):
        match = re.fullmatch(rf" *{schedule}: partition \[\d, \d, \d, \d\], {updates} updates, "
                             rf"loss ({number}) -> ({number}), held out ({number})", line)
        assert match, line
        first, last, held_out = map(float, match.groups())
        assert last < 0.7 * first
        assert held_out < 0.7 * first
    assert lines[0].split(":")[1] == lines[1].split(":")[1], "both wait for the pipeline to empty: one run"
    assert lines[3:] == ["8 tensors: 0.weight, 0.bias, 2.weight, 2.bias, ..."]


def test_tokens_that_count_the_same_are_those_of_plain_pytorch() -> None:
    """Whose loss is over all labels of a batch at once, and whose average is torch's own formula."""
    with contextlib.redirect_stdout(io.StringIO()) as out, torch.random.fork_rng():
        made = runpy.run_path(str(TOKEN_WEIGHTS))
    model, losses = made["model"], made["losses"]
    modules = model.materialize(made["pipe"].description.seed)

    def loss_of(batch: Mapping[str, Tensor]) -> Tensor:
        h = batch["ids"]
        for layer in model.layers[:-1]:
            h = modules[layer.name](h)
        found: Tensor = modules["head"](h, batch["labels"])
        return found

    optimizer = torch.optim.AdamW(modules.parameters(), lr=0.02)
    average = [parameter.detach().clone() for parameter in modules.parameters()]
    for batch, loss in zip(made["batches"](60, seed=1), losses, strict=True):
        expected = loss_of(batch)
        # To the digits that are printed; to the last bit it is compared in tests/runtime/test_per_token_loss.py.
        assert loss == pytest.approx(expected.item(), abs=1e-4)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, parameter in zip(average, modules.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
    with torch.no_grad():
        for mean, parameter in zip(average, modules.parameters(), strict=True):
            parameter.copy_(mean)
        held_out = list(made["batches"](8, seed=2))
        counts = [int((batch["labels"] != Model.NO_LABEL).sum()) for batch in held_out]
        expected = sum(loss_of(batch) * count for batch, count in zip(held_out, counts, strict=True)) / sum(counts)
    assert made["held_out"][1] == pytest.approx(expected.item(), abs=1e-4)
    assert made["held_out"][1] < made["held_out"][0] - 0.05
    assert out.getvalue() in PAGE.with_name("concepts.md").read_text()


@pytest.mark.usefixtures("forked")
def test_it_prints_the_same_under_torchrun(tmp_path: Path) -> None:
    shorter = tmp_path / "quickstart.py"
    shorter.write_text(QUICKSTART.read_text().replace("range(36)", "range(6)"))
    alone = printed_here(shorter)
    assert "6 updates" in alone
    assert printed(shorter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4") == alone


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 opens its connections otherwise, and fails")
@pytest.mark.usefixtures("forked")
def test_torch_prints_under_a_schedule_of_ours_what_the_model_prints_without(tmp_path: Path) -> None:
    """Two stages on a rank, halved backwards; torch goes through all others in tests/schedules/test_csv_format.py."""
    file, ranks = tmp_path / "a.csv", 2
    file.write_text(build("v_min", RegisteredSchedule.named("v_min").layout(ranks, 2), 8).to_torch_csv())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)])
        optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.5), []
        for _ in range(5):
            batch = torch.randn(64, 32)
            loss = nn.functional.mse_loss(net(batch), batch.flip(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    said = printed(TORCH_RUNTIME, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   arguments=[str(file)])
    assert [float(line) for line in said.split()] == pytest.approx(expected, abs=2e-6)  # it prints six digits


def shown(page: Path, command: str) -> str:
    """What a page says that a command prints."""
    found = re.search(rf"\$ {re.escape(command)}\n(.*?)```", page.read_text(), re.DOTALL)
    assert found, command
    return found[1]


def without_digits(text: str) -> list[str]:
    """Digits may differ between processors."""
    return [re.sub(r"\d+\.\d+", "N", line) for line in text.splitlines()]


def test_the_output_of_the_transformer_is_on_its_page() -> None:
    """It learns, and a resumed run goes on with the same losses."""
    lines = printed_here(TRANSFORMER).splitlines()
    assert without_digits("\n".join(lines)) == without_digits(shown(PAGE, "python examples/transformer.py"))
    assert lines[-2].endswith("accuracy 100.0%")


def test_a_training_loop_of_ones_own() -> None:
    """It stops when it learns no more, and the best checkpoint has the loss that was measured."""
    said = printed_here(QUICKSTART.with_name("training_loop.py"))
    kinds, shown_kinds = ({re.sub(r"[\d.]+", "N", line) for line in text.splitlines()}
                          for text in (said, shown(LIBRARY, "python examples/training_loop.py")))
    assert kinds == shown_kinds - {"N"}, "a line of dots stands for others"
    assert said.endswith("the same loss\n")


def test_a_schedule_of_ones_own_is_made_and_proved_without_torch(tmp_path: Path) -> None:
    program = QUICKSTART.with_name("own_schedule.py")
    code = f"import runpy, sys; runpy.run_path({str(program)!r}); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.csv")], capture_output=True, text=True,
                         timeout=60, check=True)
    assert run.stdout == shown(LIBRARY, "python examples/own_schedule.py")
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 4


@pytest.mark.usefixtures("forked")
def test_pytorchs_own_pipeline_is_what_the_oracle_says() -> None:
    said = printed(QUICKSTART.with_name("beside_an_oracle.py"), "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", "4")
    assert without_digits(said) == without_digits(shown(
        LIBRARY, "torchrun --nproc-per-node 4 examples/beside_an_oracle.py"))
    assert said.count("equal to the last bit") == 3


def test_hugging_faces_blocks_of_the_page_are_layers() -> None:
    """In a stage of their own each, under schedules that split the backward, too: the losses of one stage, nearly."""
    pytest.importorskip("transformers")
    code = re.search(r"```python\n(from transformers.*?)```", PAGE.read_text(), re.DOTALL)
    assert code
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "Layer": Layer, "Model": Model}
    exec(compile(code[1], str(PAGE), "exec"), names)
    ids = torch.randint(101, (8, 16), generator=torch.Generator().manual_seed(0))

    def losses(**settings: Any) -> list[float]:
        pipe = Pipeline(names["model"],
                        **parts(microbatches=4, **settings, optimizer=lambda params: torch.optim.SGD(params, lr=0.01)))
        return [step.loss for step in pipe.train([{"ids": ids, "labels": ids.roll(-1, 1)}] * 3)]

    plain = losses(stages=1)
    for schedule in ("1f1b", "zb_h1"):
        assert losses(stages=3, schedule=schedule) == pytest.approx(plain, rel=1e-5)


def test_the_page_has_every_argument_and_every_attribute() -> None:
    page = PAGE.read_text()
    rows = {name for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    arguments = [*inspect.signature(Pipeline).parameters, *inspect.signature(Layer).parameters]
    public = [name for name in vars(Pipeline) if not name.startswith("_") and name != "prepared"]
    attributes = [*(field.name for field in fields(Step)), "updates", "microbatches", "samples"]
    assert not {*arguments, *public, *attributes} - rows


def test_the_page_has_every_field_of_every_part() -> None:
    page = PAGE.read_text()
    rows: dict[str, set[str]] = {}
    part = ""
    for first, second in re.findall(r"^\| (\S*) ?\| (`.*?) \|", page, re.MULTILINE):
        part = first.strip("`") or part
        rows.setdefault(part, set()).update(re.findall(r"`(\w+)", second))
    for kind in (Update, Cut, Order, Asynchronous, Precision, Transfers, Execution):
        assert {field.name for field in fields(kind)} <= rows[kind.__name__]
