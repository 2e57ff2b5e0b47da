"""The examples, and docs/python.md: what they print, and on fewer batches the same numbers under torchrun."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe import Asynchronous, Cut, Execution, Layer, Model, Order, Pipeline, Precision, Transfers, Update
from vpipe.runtime.step_results import Step
from vpipe.schedules.builder import build
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.testing import assert_equals_oracle

pytestmark = pytest.mark.jobs

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart.py"
TRANSFORMER = QUICKSTART.with_name("transformer.py")
RECORDED = QUICKSTART.with_name("recorded_run.py")
MESH = QUICKSTART.with_name("mesh.py")
TOKEN_WEIGHTS = QUICKSTART.with_name("token_weights.py")
TORCH_RUNTIME = QUICKSTART.with_name("torch_runtime.py")
PAGE = QUICKSTART.parents[1] / "docs" / "python.md"
LIBRARY, JOBS = PAGE.with_name("library.md"), PAGE.with_name("jobs.md")


def run_here(program: Path) -> tuple[dict[str, Any], str]:
    """What the example makes, and prints, in a process without a launcher: this one, which has torch already."""
    with contextlib.redirect_stdout(io.StringIO()) as out, torch.random.fork_rng():
        made = runpy.run_path(str(program))
    return made, out.getvalue()


def printed_here(program: Path) -> str:
    return run_here(program)[1]


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
    made, said = run_here(TOKEN_WEIGHTS)
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
        # To the digits that are printed; to the last bit tests/habits/test_weighted_losses.py compares.
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
    assert said in PAGE.with_name("concepts.md").read_text()


def plain_losses(loss_of: Callable[[dict[str, Tensor]], Tensor], parameters: Iterable[Tensor],
                 batches: Iterable[Mapping[str, Tensor]], rate: float = 1e-2) -> list[float]:
    """A loop of plain PyTorch: AdamW, each batch in four microbatches."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=rate), []
    for batch in batches:
        of_parts = []
        for fields_of_part in zip(*(field.chunk(4) for field in batch.values()), strict=True):
            loss = loss_of(dict(zip(batch, fields_of_part, strict=True)))
            (loss / 4).backward()
            of_parts.append(loss.item())
        losses.append(sum(of_parts) / 4)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run_plainly(model: Model, modules: nn.ModuleDict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One layer after the other, each with the tensors that it names."""
    for layer in model.layers:
        made = modules[layer.name](*(tensors[name] for name in layer.inputs))
        tensors.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return tensors


def check_losses(model: Model, batches: Iterable[Mapping[str, Tensor]], losses: list[float],
                 rate: float = 1e-2) -> nn.ModuleDict:
    """Bit for bit; return the modules that were trained."""
    modules = model.materialize()
    assert plain_losses(lambda fields: run_plainly(model, modules, fields)["loss"], modules.parameters(), batches,
                        rate) == losses
    return modules


def check_code(heading: str, program: Path) -> None:
    """What a section of docs/jobs.md shows of a program is in it."""
    section = JOBS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for line in "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)).splitlines():
        assert line.strip() in program.read_text()


def test_experts_with_a_loss_of_balance_are_those_of_plain_pytorch() -> None:
    """An evaluation leaves it out."""
    made, said = run_here(EXAMPLES / "experts.py")
    modules = check_losses(made["model"](0.05), made["batches"], made["losses"])
    with torch.no_grad():
        each = [run_plainly(made["model"](0.05), modules, {**batch}) for batch in made["batches"]]
        squares = [(modules["head"].out(found["h"])[:, 0] - found["y"]).square() for found in each]
    assert made["loss"] == pytest.approx(torch.stack(squares).mean().item())
    check_code("Experts", EXAMPLES / "experts.py")
    assert without_digits(said) == without_digits(shown(JOBS, "python examples/experts.py"))
    fewest = [min(int(share) for share in re.findall(r"(\d+)%", line)) for line in said.splitlines()]
    assert 2 * fewest[0] < fewest[1], "without the loss of balance an expert has little to do"


def test_dense_connections_send_each_tensor_once_to_each_later_rank() -> None:
    """Also where a rank has two stages. Gradients go back through every cut, one for each of the layers before it."""
    made, said = run_here(EXAMPLES / "dense.py")
    check_losses(made["model"], made["batches"], made["losses"]["1f1b"])
    assert made["losses"]["interleaved"] == made["losses"]["1f1b"]
    each = made["SAMPLES"] * made["WIDTH"] * torch.float32.itemsize
    for schedule, stages in made["STAGES"].items():
        sent, there = [0] * 4, {0: {*range(stages[0])}}  # by rank, which layers' outputs it has
        for stage, before in enumerate(accumulate(stages[:-1]), 1):
            rank, last = stage % 4, (stage - 1) % 4
            sent[last] += len({*range(before)} - there.get(rank, set()))
            sent[rank] += before
            there[rank] = {*range(before + stages[stage])}
        assert made["sent"][schedule] == [each * tensors for tensors in sent]
        assert sum(sent) == sum(  # the closed form: each output to every rank behind, each gradient through every cut
            len({stage % 4 for stage in range(own + 1, len(stages))} - {own % 4}) + len(stages) - 1 - own
            for own, layers in enumerate(stages[:-1]) for _ in range(layers))
    assert without_digits(said) == without_digits(shown(JOBS, "python examples/dense.py"))


def test_slices_of_texts_are_plain_pytorch_over_whole_ones() -> None:
    """Whole ones bit for bit, slices to the digits that are printed; as few are held as the schedule says."""
    made, said = run_here(EXAMPLES / "slices.py")
    check_losses(made["model"], list(made["batches"](16)), made["losses"]["1f1b"], rate=0.05)
    assert made["losses"]["seq1f1b"] == pytest.approx(made["losses"]["1f1b"], abs=1e-4)
    assert without_digits(said) == without_digits(shown(JOBS, "python examples/slices.py"))
    assert re.findall(r"held .*(\[.*\])", said) == ["[4.0, 3.0, 2.0, 1.0]", "[1.75, 1.5, 1.25, 1.0]"]


def test_captions_of_pictures_are_those_of_plain_pytorch() -> None:
    made, said = run_here(EXAMPLES / "captions.py")
    model = made["model"]
    modules = check_losses(model, made["batches"](60, seed=1), made["losses"], rate=6e-3)
    with torch.no_grad():
        right = [run_plainly(model, modules, batch)["logits"].argmax(-1) == batch["labels"]
                 for batch in made["batches"](4, seed=2)]
    assert torch.equal(torch.cat(right), made["found"]["right"])
    assert made["found"]["right"].float().mean() > 0.9
    assert without_digits(said) == without_digits(shown(JOBS, "python examples/captions.py"))


def test_a_class_of_transformers_is_itself_without_a_pipeline() -> None:
    """Its own forward with ``labels``: every loss and, after all updates, every weight, bit for bit."""
    pytest.importorskip("transformers")
    program = EXAMPLES / "hugging_face.py"
    [layers] = re.findall(r"```python\n(class Embed.*?)```", JOBS.read_text(), re.DOTALL)
    assert layers in program.read_text()
    made, said = run_here(program)
    llama = made["llama"]
    assert plain_losses(lambda batch: llama(input_ids=batch["ids"], labels=batch["labels"]).loss, llama.parameters(),
                        made["batches"]) == made["losses"]
    for ours, theirs in zip(made["pipe"].state_dict().values(), llama.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    split = Pipeline(made["model"], partial(torch.optim.AdamW, lr=1e-2), stages=3, schedule="zb_h1", microbatches=4)
    assert_equals_oracle(split, made["batches"][:2])
    assert without_digits(said) == without_digits(shown(JOBS, "python examples/hugging_face.py"))


def test_adapters_of_a_script_are_those_of_peft_alone() -> None:
    peft = pytest.importorskip("peft")
    made, said = run_here(EXAMPLES / "lora.py")
    loaded = {name.removeprefix("base_model.model."): value for name, value in made["loaded"].named_parameters()}
    assert all(torch.equal(value, loaded[name]) for name, value in made["adapters"].items())
    alone = peft.get_peft_model(made["loaded"].unload(), made["lora"])
    theirs = {name.removeprefix("base_model.model."): parameter for name, parameter in alone.named_parameters()
              if parameter.requires_grad}
    assert theirs.keys() == made["begun"].keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(made["begun"][name])
    assert plain_losses(lambda batch: nn.functional.mse_loss(alone(batch["input"]), batch["target"]), theirs.values(),
                        made["batches"](40, turned=True, seed=1)) == made["losses"]
    assert all(torch.equal(made["adapters"][name], parameter) for name, parameter in theirs.items())
    assert without_digits(said) == without_digits(shown(JOBS, "python examples/lora.py"))
    check_code("LoRA", EXAMPLES / "lora.py")


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
    return [re.sub(r"\d+\.\d+|\d+(?=%)", "N", line) for line in text.splitlines()]


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


def test_a_run_of_a_script_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last evaluation is that of plain PyTorch, and its figures follow from those that they are made of."""
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as out, torch.random.fork_rng():
        made = runpy.run_path(str(RECORDED))
    lines = [json.loads(line) for line in Path("output/spirals/metrics.jsonl").read_text().splitlines()]
    net, points, figures = made["net"], made["held_out"], made["figures"]
    net.load_state_dict(made["pipe"].state_dict())
    with torch.no_grad():
        scores = net(torch.cat([batch["input"] for batch in points]))
    labels = torch.cat([batch["target"] for batch in points])
    *_, evaluation, values, last, summary = lines  # the last update changed the weights once more
    assert evaluation["evaluation_loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), abs=0.05)
    assert values["values"]["accuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean().item(), abs=0.02)
    assert last["step"] == values["step"] + 1 == figures.steps - 1 < 399
    # f of two layers of 2 x 64 and two of 64 x 64 operations by two.
    assert figures.mfu == pytest.approx(3 * 4 * (2 * 64 + 64 * 64) * figures.samples_per_s / 0.05e12)
    assert figures.mfu == pytest.approx(summary["summary"]["mfu"], rel=1e-5)
    assert figures.sent_bytes == 3 * 2 * 64 * 64 * 4, "activations and gradients of 64 samples between four stages"
    shown_lines = shown(PAGE, "python examples/recorded_run.py").splitlines()
    assert {re.sub(r"[\d.,]+", "N", line) for line in out.getvalue().splitlines()} == {
        re.sub(r"[\d.,]+", "N", line) for line in shown_lines} - {"N"}


@pytest.mark.system
@pytest.mark.long
def test_a_run_of_four_processes_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = printed_here(RECORDED).splitlines()
    said = printed(RECORDED, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4").splitlines()
    assert said[:-5] == alone[:-5]
    assert len(list(Path("output/spirals/trace").glob("rank*.jsonl"))) == 4


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
