"""What a script has around the loop, under every kind of schedule: as plain PyTorch has it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad, graph
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode
from world import World

from vpipe import Cut, Execution, Layer, Model, Pipeline
from vpipe.errors import UserError

Context = Callable[[], AbstractContextManager[Any]]
Batch = dict[str, Tensor]
RATE = 0.25
sgd = partial(torch.optim.SGD, lr=RATE)
autocast = partial(torch.autocast, "cpu", torch.bfloat16)


class Body(nn.Module):
    """Statistics, a derived weight, and a part that is not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = parametrizations.weight_norm(nn.Linear(16, 16)), nn.BatchNorm1d(16)
        self.exact = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.exact(x.float()))


class Twice(nn.Linear):
    """A weight that one layer uses twice: an autocast with a cache casts it once."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(super().forward(x)))


class Casting(nn.Linear):
    """A layer with an autocast of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with autocast():
            return torch.relu(super().forward(x)).float()


class End(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x).float(), y)


@cache
def made() -> tuple[list[nn.Module], list[Batch]]:
    """Layers to copy, and batches."""
    torch.manual_seed(0)
    return ([Body(), Twice(16, 16), Casting(16, 16), End(16, 4)],
            [{"x": torch.randn(8, 16), "y": torch.randint(4, (8,))} for _ in range(4)])


def pipeline(schedule: str = "1f1b", precision: str = "fp32", executor: str = "overlapped",
             optimizer: Any = sgd) -> Pipeline:
    """Two stages, the first of them recomputed."""
    layers = [Layer(f"l{i}", partial(deepcopy, layer), ("h" if i else "x",), ("h",))
              for i, layer in enumerate(made()[0][:-1])]
    model = Model([*layers, Layer("end", partial(deepcopy, made()[0][-1]), ("h", "y"), ("loss",))], batch=("x", "y"))
    return Pipeline(model, optimizer, Cut([2, 2], recompute=[1.0, 0.0]),
                    schedule, 2, precision=precision, execution=Execution(executor=executor))


def losses(pipe: Pipeline, batches: Iterable[Batch]) -> list[float]:
    return [step.loss for step in pipe.train(batches)]


def around() -> tuple[bool, bool, bool, int]:
    """Grad mode, inference mode, autocast, and how many autocasts are entered."""
    torch.autocast_increment_nesting()
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
            torch.autocast_decrement_nesting())


# -- the contexts

class Kind(NamedTuple):
    """A context around vpipe's loop. In plain PyTorch it is around each forward of a layer, or around the loop, or
    nowhere: there it trains nothing, and here as if it were not there."""

    loop: Context
    plain: str = "nowhere"


@contextmanager
def switched(switch: Callable[[Any], object], value: Any, usual: Any) -> Iterator[None]:
    switch(value)
    yield
    switch(usual)


def packed(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype is torch.float32 and not tensor.is_leaf else tensor


def unpacked(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.float16 else tensor


CONTEXTS: dict[str, Kind] = {
    "autocast": Kind(autocast, "each layer"),
    "autocast fp16": Kind(partial(torch.autocast, "cpu", torch.float16), "each layer"),
    "autocast off": Kind(partial(torch.autocast, "cpu", enabled=False), "each layer"),
    "autocast uncached": Kind(partial(autocast, cache_enabled=False), "each layer"),
    "no_grad": Kind(torch.no_grad),
    "inference_mode": Kind(torch.inference_mode),
    "set_grad_enabled": Kind(partial(switched, torch.set_grad_enabled, False, True)),
    "parametrize.cached": Kind(parametrize.cached),
    "default device meta": Kind(partial(switched, torch.set_default_device, "meta", None)),
    "device cpu": Kind(partial(torch.device, "cpu"), "the loop"),
    "default dtype fp64": Kind(partial(switched, torch.set_default_dtype, torch.float64, torch.float32), "the loop"),
    "default dtype bf16": Kind(partial(switched, torch.set_default_dtype, torch.bfloat16, torch.float32), "the loop"),
    "saved_tensors_hooks": Kind(partial(graph.saved_tensors_hooks, packed, unpacked), "the loop"),
    "save_on_cpu": Kind(graph.save_on_cpu, "the loop"),
    "allow_mutation": Kind(graph.allow_mutation_on_saved_tensors, "the loop"),
    "anomaly": Kind(partial(torch.autograd.set_detect_anomaly, True), "the loop"),
    "deterministic": Kind(partial(switched, torch.use_deterministic_algorithms, True, False), "the loop"),
    "profile": Kind(partial(profile, activities=[ProfilerActivity.CPU]), "the loop"),
    "flops": Kind(partial(FlopCounterMode, display=False), "the loop"),
    "sdpa_kernel": Kind(partial(sdpa_kernel, SDPBackend.MATH), "the loop"),
    "multithreading": Kind(partial(torch.autograd.set_multithreading_enabled, False), "the loop"),
    "dual_level": Kind(forward_ad.dual_level, "the loop"),
}


class Plain:
    """Plain PyTorch: an update is a step of two microbatches; without a flush it is one of one microbatch, for which
    the first stage still has the weights before the latest update."""

    def __init__(self, kind: Kind, stream: bool, precision: str = "fp32") -> None:
        self.kind, self.stream, self.precision = kind, stream, precision
        self.layers = [deepcopy(layer) for layer in made()[0]]
        self.weights = [dict(layer.named_parameters()) for layer in self.layers]

    def loss(self, weights: list[dict[str, Tensor]], x: Tensor, y: Tensor) -> Tensor:
        for layer, own in zip(self.layers, weights, strict=True):
            last = layer is self.layers[-1]
            with (self.kind.loop() if self.kind.plain == "each layer" else nullcontext(),
                  autocast(cache_enabled=True) if self.precision == "bf16" else nullcontext()):
                x = functional_call(layer, own, (x, y) if last else (x,))
            if self.precision == "bf16" and not last:
                x = x.bfloat16()
        return x

    def train(self, batches: list[Batch]) -> list[float]:
        found, before = [], self.weights
        for batch in batches:
            parts = list(zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True))
            for step in [[part] for part in parts] if self.stream else [parts]:
                used = [*before[:2], *self.weights[2:]] if self.stream else self.weights
                leaves = [{name: w.detach().requires_grad_() for name, w in own.items()} for own in used]
                of_step = [self.loss(leaves, x, y) for x, y in step]
                for loss in of_step:
                    (loss / len(step)).backward()
                found.append(sum(loss.item() for loss in of_step) / len(step))
                before, self.weights = self.weights, [
                    {name: w.detach().add(leaf[name].grad, alpha=-RATE) for name, w in own.items()}
                    for own, leaf in zip(self.weights, leaves, strict=True)]
        return found

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        for layer in self.layers:
            layer.eval()
        found = [float(self.loss(self.weights, x, y))
                 for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True)]
        for layer in self.layers:
            layer.train()
        return sum(found) / 2


@cache
def in_plain_pytorch(context: str, stream: bool, precision: str) -> list[float]:
    kind, batches = CONTEXTS[context], made()[1]
    plain = Plain(kind, stream, precision)
    with kind.loop() if kind.plain == "the loop" else nullcontext():
        return [*plain.train(batches[:2]), plain.evaluate(batches[2]), *plain.train(batches[3:])]


Cell = tuple[str, str, str]
"""A schedule, a precision and an executor."""

ONE: list[Cell] = [("1f1b", "fp32", "overlapped"), ("zb_h1", "bf16", "naive"), ("pipedream", "fp32", "overlapped"),
                   ("gpipe", "fp32", "async_threaded")]
TWO: list[Cell] = [("1f1b", "bf16", "naive"), ("zb_h1", "fp32", "overlapped"), ("pipedream", "bf16", "overlapped")]
ALL: list[Cell] = [*product(("1f1b", "zb_h1", "pipedream"), ("fp32", "bf16"), ("overlapped", "naive")),
                   *product(("gpipe",), ("fp32", "bf16"), ("async_threaded",))]
REFUSED = {("flops", schedule) for schedule in ("zb_h1", "pipedream", "gpipe")}
"""Where hooks on parameters are: torch's counter of operations registers some for a derived weight."""


def run(context: str, cells: Sequence[Cell]) -> list[list[float]]:
    found, batches = [], made()[1]
    for cell in cells:
        pipe = pipeline(*cell)
        with CONTEXTS[context].loop():
            found.append([*losses(pipe, batches[:2]), pipe.evaluate(batches[2:3]), *losses(pipe, batches[3:])])
    return found


@pytest.mark.parametrize(("one", "two_"), [(ONE, TWO), pytest.param(ALL, ALL, marks=pytest.mark.matrix)],
                         ids=["some cells", "all cells"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_training_and_evaluation_within_it_are_those_of_plain_pytorch(two: World, context: str, one: list[Cell],
                                                                      two_: list[Cell]) -> None:
    here, there = ([cell for cell in cells if (context, cell[0]) not in REFUSED] for cells in (one, two_))
    plain = {cell: in_plain_pytorch(context, cell[0] == "pipedream", cell[1]) for cell in (*here, *there)}
    assert dict(zip(here, run(context, here), strict=True)) == {cell: plain[cell] for cell in here}
    assert two.run(run, context=context, cells=there) == [[plain[cell] for cell in there]] * 2


@pytest.mark.parametrize(("context", "schedule"), sorted(REFUSED))
def test_hooks_that_a_context_registers_are_refused_where_others_are(context: str, schedule: str) -> None:
    with pytest.raises(UserError, match=r"hooks on 'l0\.first\.parametrizations"):
        run(context, [(schedule, "fp32", "async_threaded" if schedule == "gpipe" else "overlapped")])


# -- what the table does not show

def code_of_the_script_sees_what_is_around_the_loop(folder: str) -> None:
    for context in (nullcontext, torch.no_grad, torch.inference_mode, autocast):
        seen, pipe = set(), pipeline()

        def seeing(result: Any, seen: set[object] = seen) -> Any:
            seen.add(around())
            return result

        with context():
            list(pipe.train(map(seeing, made()[1]), stop=lambda seeing=seeing: seeing(False)))
            _, outputs = pipe.evaluate(made()[1], lambda tensors, seeing=seeing: seeing({"h": tensors["h"] * 2}))
            assert seen == {around()}
        assert not outputs["h"].is_inference()


def a_generator_may_yield_within_a_context(folder: str) -> None:
    def read(context: Context) -> Iterator[Batch]:
        with context():
            for batch in made()[1]:
                yield {name: field.clone() for name, field in batch.items()}
                assert not torch.is_grad_enabled(), "it goes on where it was"

    for schedule, context in product(("1f1b", "pipedream"), (torch.no_grad, torch.inference_mode)):
        pipe, other = pipeline(schedule), pipeline(schedule)
        assert losses(pipe, read(context)) == losses(other, made()[1])
        assert pipe.evaluate(read(context)) == other.evaluate(made()[1])
        assert around() == (True, False, False, 0)


def an_autocast_may_change_between_updates(folder: str) -> None:
    """So do the dtypes between stages: with a flush at any update, without one after a drain."""
    batches, kinds = made()[1], [CONTEXTS["autocast"], CONTEXTS["no_grad"]]
    for schedule in ("1f1b", "zb_h1", "pipedream"):
        pipe, plain, got, want = pipeline(schedule), Plain(kinds[0], schedule == "pipedream"), [], []
        steps = pipe.train(batches, pauses=2)
        for batch, plain.kind in zip(batches, kinds * 2, strict=True):
            want += plain.train([batch])
            with plain.kind.loop():
                got += [next(steps).loss for _ in range(2 if plain.stream else 1)]
        assert (got, list(steps)) == (want, []), schedule


def an_evaluation_drains_as_the_loop_computes(folder: str) -> None:
    """Not as the evaluation does, which an autocast is around."""
    found: dict[Context, list[float]] = {nullcontext: [], autocast: []}
    for context, numbers in found.items():
        pipe = pipeline("pipedream")
        for step in pipe.train(made()[1]):
            numbers.append(step.loss)
            if step.index == 3:
                with context():
                    pipe.drain()
                with autocast():
                    numbers.append(pipe.evaluate(made()[1]))
    assert found[nullcontext] == found[autocast]


def nothing_is_left_of_casts_and_contexts(folder: str) -> None:
    """A network beside the pipeline trains within an autocast as without the pipeline, also after an error."""
    def beside(use: Callable[[], object]) -> list[float]:
        torch.manual_seed(1)
        net, found = nn.Linear(16, 4), []
        with autocast():
            for _ in range(3):
                with torch.no_grad():
                    net(made()[1][0]["x"])
                use()
                assert around() == (True, False, True, 1)
                loss = nn.functional.cross_entropy(net(made()[1][0]["x"]).float(), made()[1][0]["y"])
                loss.backward()
                found.append(loss.item())
                with torch.no_grad():
                    net.weight -= net.weight.grad
                torch.clear_autocast_cache()
        return found

    def failing() -> None:
        with pytest.raises(UserError):
            pipeline().evaluate([])

    assert beside(lambda: losses(pipeline(), made()[1][:1])) == beside(failing) == beside(torch.clear_autocast_cache)


def pipelines_may_be_built_saved_and_loaded_within_inference_mode(folder: str) -> None:
    """Modules, optimizer states and batches that were made there train on."""
    batches = made()[1]
    for schedule in ("1f1b", "pipedream"):
        adam = partial(pipeline, schedule, optimizer=torch.optim.Adam)
        pipe = adam()
        losses(pipe, batches[:2])
        want = losses(pipe, batches[2:])
        with torch.inference_mode():
            saved, loaded, again = adam(), adam(), adam()
            inferred = [{name: field.clone() for name, field in batch.items()} for batch in batches]
        losses(saved, inferred[:2])
        with torch.inference_mode():
            saved.save(f"{folder}-{schedule}")
            loaded.load(f"{folder}-{schedule}")
            again.load_state_dict(tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value,
                                           saved.state_dict(sharded=True)))
            assert not any(tensor.is_inference() for tensor in saved.state_dict().values())
        assert losses(saved, inferred[2:]) == losses(loaded, batches[2:]) == losses(again, batches[2:]) == want


@pytest.mark.parametrize("habit", [
    code_of_the_script_sees_what_is_around_the_loop, a_generator_may_yield_within_a_context,
    an_autocast_may_change_between_updates, an_evaluation_drains_as_the_loop_computes,
    nothing_is_left_of_casts_and_contexts, pipelines_may_be_built_saved_and_loaded_within_inference_mode,
], ids=lambda habit: habit.__name__)
def test_it_is_true_in_one_process_and_in_two(two: World, habit: Callable[[str], None], tmp_path: Path) -> None:
    habit(str(tmp_path / "one"))
    two.run(habit, folder=str(tmp_path / "two"))


@pytest.mark.matrix  # it compiles the pipeline's own code, for seconds
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_may_use_a_pipeline() -> None:
    pipe, other, batches = pipeline(), pipeline(), made()[1]
    steps = pipe.train(batches)
    compiled = torch.compile(lambda: (next(steps).loss, pipe.evaluate(batches[:1])), backend="eager")
    assert [compiled() for _ in batches] == [(step.loss, other.evaluate(batches[:1])) for step in other.train(batches)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch makes dual tensors
def test_tangents_of_a_batch_are_left_out() -> None:
    for schedule in ("1f1b", "zb_h1", "pipedream"):
        with forward_ad.dual_level():
            dual = [{**batch, "x": forward_ad.make_dual(batch["x"], batch["x"])} for batch in made()[1]]
            assert losses(pipeline(schedule), dual) == losses(pipeline(schedule), made()[1])


# -- what is refused

def under_another_autocast(schedule: str, call: str) -> None:
    """Rank 0 has an autocast around the call, rank 1 has none."""
    pipe, batches = pipeline(schedule), made()[1]
    for differs in (False, True):  # the shapes are known when it does
        with autocast() if differs and dist.get_rank() == 0 else nullcontext():
            losses(pipe, batches) if call == "training" or not differs else pipe.evaluate(batches)


@pytest.mark.parametrize(("schedule", "call"), [("1f1b", "training"), ("pipedream", "training"),
                                                ("1f1b", "evaluation")])
def test_ranks_with_different_autocasts_are_told(two: World, schedule: str, call: str) -> None:
    two.begin(under_another_autocast, schedule=schedule, call=call)
    outcomes = [two.outcome(rank, 20) for rank in range(2)]
    two.kill()
    assert [kind for kind, _ in outcomes] == ["error", "error"]
    assert (f"rank 0 is at {call} under torch.autocast(torch.bfloat16), batch 0, rank 1 at {call} batch 0"
            in outcomes[1][1]["text"])


def changing() -> None:
    steps = pipeline("pipedream").train(made()[1])
    next(steps)
    with autocast():
        next(steps)


def yielding() -> None:
    def read() -> Iterator[Batch]:
        with autocast():
            yield from made()[1]
    try:
        losses(pipeline(), read())
    finally:
        assert around() == (True, False, False, 0)


def single(module: nn.Module | None = None) -> Pipeline:
    return Pipeline(Model([Layer("a", lambda: module or nn.Linear(4, 4), ("x",), ("loss",))], batch=("x",)),
                    torch.optim.SGD, 1)


def on_meta() -> None:
    with torch.device("meta"):
        single()


def inferred() -> None:
    with torch.inference_mode():
        module = nn.Linear(4, 4)
    single(module)


@pytest.mark.parametrize(("use", "text"), [
    (changing, "torch.autocast around the loop was off and is torch.bfloat16 after 1 step, while 'pipedream' has "
               "microbatches in flight\nhint: write pipe.drain() before the autocast changes"),
    (yielding, "the batches come from a generator that yields within torch.autocast, which stays on in the training\n"
               "hint: leave the autocast before yield"),
    (on_meta, "'a.weight' was made within torch.device('meta'), and cannot be trained\n"
              "hint: make the module and the pipeline outside"),
    (inferred, "'a.weight' was made within torch.inference_mode(), and cannot be trained\n"
               "hint: make the module and the pipeline outside"),
    (lambda: torch.func.grad(lambda x: x * pipeline().evaluate(made()[1]))(torch.ones(())),
     "a pipeline is used within a transform of torch.func, such as vmap or grad\n"
     "hint: call the pipeline outside the transform; its layers may use transforms themselves"),
], ids=["autocast changes", "yields within autocast", "meta", "inference_mode", "transform"])
def test_it_is_refused_with_the_remedy(use: Callable[[], None], text: str) -> None:
    with pytest.raises(UserError) as error:
        use()
    assert str(error.value) == f"error: {text}"
