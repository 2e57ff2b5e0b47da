"""Layers and models: names, ties, the loss, and that building is independent of how the model is cut."""

from __future__ import annotations

import pytest
import torch
from golden import assert_golden, refusal
from torch import Tensor, nn

from vpipe import Layer, Model, Pipeline
from vpipe.errors import UserError
from vpipe.model.layer import moved, seed_of, set_parameter, split_target


def linear() -> nn.Module:
    return nn.Linear(3, 3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def problems(layers: list[Layer], batch: tuple[str, ...] = ("x",)) -> list[str]:
    with pytest.raises(UserError) as error:
        Model(layers, batch)
    return [str(problem) for problem in error.value.problems]


FIRST = Layer("first", linear, ("x",))
LAST = Layer("last", linear, ("h",), ("loss",))


# -- mistakes ------------------------------------------------------------------------------------------


MISTAKES: list[tuple[list[Layer], tuple[str, ...]]] = [
    ([], ("x",)), ([FIRST, Layer("first", linear), LAST], ("x",)), ([FIRST, LAST], ("x", "loss")),
    ([FIRST, Layer("last", linear, ("hiden",), ("loss",))], ("x",)),
    ([Layer("first", linear, ("xs",)), LAST, ], ("xss",)),
    ([Layer("first", linear, ("x",), ("x",)), Layer("last", linear, ("x",), ("loss",))], ("x",)),
    ([Layer("first", linear, ("x",), ("h", "loss")), LAST], ("x",)),
    ([FIRST, Layer("second", linear, ("x",)), LAST], ("x",)), ([FIRST, Layer("last", linear)], ("x",)),
    ([FIRST, LAST], ("x", "y")),
    ([FIRST, Layer("last", linear, ("h",), ("loss",), {"weight": "frist.weight"})], ("x",)),
    ([FIRST, Layer("last", linear, ("h",), ("loss",), {"weight": "last.weight"})], ("x",)),
    ([Layer("first", linear, ("x",), ("h",), {"weight": "last.weight"}), LAST], ("x",))]


def test_a_mistake_is_named_with_its_remedy() -> None:
    assert_golden(__file__, "mistakes", [refusal(Model, *case) for case in MISTAKES])


def test_all_mistakes_come_at_once() -> None:
    found = problems([FIRST, Layer("first", linear), Layer("last", linear, ("g", "h"))], ("x", "y"))
    assert [line.split("\n")[0] for line in found] == [
        "error: two layers are called 'first'",
        "error: layer 'last' reads 'g', which no earlier layer writes and no batch holds",
        "error: the last layer 'last' does not write 'loss'", "error: no layer reads the batch field 'y'"]


def test_a_build_function_must_return_a_module() -> None:
    assert refusal(Layer("odd", lambda: torch.zeros(1)).materialize, 0, 0) == (
        "error: layer 'odd' was built as an object of class Tensor, not as an nn.Module\n"
        "hint: its build function must return a module: Layer(name, lambda: MyModule())")


def test_a_target_names_its_layer_though_names_hold_dots() -> None:
    layers = [Layer("block", linear), Layer("block.0", linear), Layer("embed", linear)]
    assert split_target("embed.word.weight", layers) == ("embed", "word.weight")
    with pytest.raises(UserError, match=r"tie to 'embd.weight', which names no layer\nhint: did you mean 'embed'\?"):
        split_target("embd.weight", layers)


def test_layers_whose_parameters_could_be_mistaken_for_one_another_are_refused() -> None:
    """``block`` may hold a child ``0``, and then ``block.0.weight`` would mean two parameters."""
    assert problems([Layer("block", linear, ("x",)), Layer("block.0", linear), Layer("block1", linear), LAST]) == [
        "error: the name of layer 'block.0' begins with that of layer 'block' and a dot\n"
        "hint: rename one of them: '<layer>.<parameter>' must name one parameter alone"]


# -- building ------------------------------------------------------------------------------------------


def test_a_layer_starts_alike_wherever_and_whenever_it_is_built() -> None:
    layer = Layer("one", linear)
    torch.manual_seed(1)
    first = layer.materialize(4, 7).weight
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert torch.equal(first, layer.materialize(4, 7).weight)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers are left alone"
    assert not torch.equal(first, layer.materialize(5, 7).weight)
    assert not torch.equal(first, layer.materialize(4, 8).weight)


def test_seeds_are_unrelated_and_fit_into_63_bits() -> None:
    seeds = {seed_of(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed & 0xFF for seed in seeds}) > 200, "the low bits vary"
    assert seed_of(1, 2) == seed_of(1, 2) != seed_of(2, 1)
    assert seed_of(-1) != seed_of(1)
    assert seed_of(1, 2) == 5934340693050249675, "runs of yesterday can be repeated"


class Squared(nn.Linear):
    """Its mean square as a loss; square weights."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).square().mean()


def test_the_whole_model_shares_tied_parameters_through_ties_of_ties() -> None:
    model = Model([FIRST, Layer("second", linear, ties={"weight": "first.weight"}),
                   Layer("last", lambda: nn.Sequential(Squared(3)), ("h",), ("loss",),
                         ties={"0.weight": "second.weight", "0.bias": "first.bias"})], ("x",))
    whole = model.materialize()
    assert whole["last"][0].weight is whole["second"].weight is whole["first"].weight
    assert whole["last"][0].bias is whole["first"].bias
    assert whole["second"].bias is not whole["first"].bias
    assert len(list(whole.parameters())) == 3


def test_a_parameter_of_several_names_stays_one_where_it_is_moved() -> None:
    """torch itself makes two on meta, and on devices that another package brings."""
    table = nn.Embedding(3, 3)
    module = nn.ModuleDict({"first": table, "second": nn.Sequential(linear())})
    set_parameter(module["second"], "0.weight", table.weight)
    moved(module, "meta")
    assert module["second"].get_parameter("0.weight") is table.weight
    assert table.weight.device.type == "meta"


# -- sequential ----------------------------------------------------------------------------------------


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2), nn.Tanh()))


def test_sequential_keeps_names_weights_and_the_original() -> None:
    net = sequential()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = Model.sequential(net, nn.MSELoss())
    assert [layer.name for layer in model.layers] == ["0", "1", "2", "3"]
    assert [(layer.inputs, layer.outputs) for layer in model.layers] == [
        (("input",), ("h",)), (("h",), ("h",)), (("h",), ("h",)), (("h", "target"), ("loss", "output"))]
    assert model.batch == ("input", "target")
    pipe = Pipeline(model, sgd, stages=3)
    state = pipe.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    list(pipe.train([{"input": torch.randn(6, 3), "target": torch.randn(6, 2)}] * 3))
    changed = pipe.state_dict()
    assert not any(torch.equal(changed[name], value) for name, value in before.items())
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items()), "it is copied"
    net.load_state_dict(changed)


def test_the_loss_joins_the_last_child_in_both_modes() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    layer = Model.sequential(net, nn.MSELoss()).layers[-1]
    module = layer.materialize(0, 0)
    x, target = torch.randn(8, 3), torch.randn(8, 3)
    module.eval()
    loss, output = module(x, target)
    assert torch.equal(loss, nn.functional.mse_loss(x, target))
    assert torch.equal(output, x)
    module.train()
    assert not torch.equal(module(x, target)[0], nn.functional.mse_loss(x, target))


def test_an_empty_sequential_is_refused() -> None:
    assert refusal(Model.sequential, nn.Sequential(), nn.MSELoss()) == (
        "error: the nn.Sequential has no children\nhint: give it at least one module")


def shared_net() -> nn.Sequential:
    """One activation in two places, one linear layer in two places, one weight in two layers."""
    torch.manual_seed(3)
    act, twice, other = nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = twice.weight
    return nn.Sequential(twice, act, other, act, twice)


def test_children_that_occur_again_are_layers_again_and_share_their_parameters() -> None:
    model = Model.sequential(shared_net(), nn.MSELoss())
    assert [layer.name for layer in model.layers] == ["0", "1", "2", "3", "4"]
    assert [dict(layer.ties) for layer in model.layers] == [
        {}, {}, {"weight": "0.weight"}, {}, {"weight": "0.weight", "bias": "0.bias"}]


@pytest.mark.parametrize("partition", [[5], [2, 1, 2], [1, 3, 1]])
def test_a_sequential_that_shares_parameters_trains_as_it_would_by_itself(partition: list[int]) -> None:
    net, loss_of = shared_net(), nn.MSELoss()
    batches = [{"input": torch.randn(4, 3), "target": torch.randn(4, 3)} for _ in range(4)]
    pipe = Pipeline(Model.sequential(net, loss_of), sgd, stages=partition)
    losses = [step.loss for step in pipe.train(batches)]
    optimizer, expected = sgd(list(net.parameters())), []
    for batch in batches:
        loss = loss_of(net(batch["input"]), batch["target"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    # Three uses of one weight on up to three stages are summed in another order: two roundings of the gradient a step.
    assert losses == pytest.approx(expected, rel=1e-5)
    state = pipe.state_dict()
    assert list(state) == ["0.weight", "0.bias", "2.bias"]
    for name, value in state.items():
        torch.testing.assert_close(value, net.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_frozen_parameters_need_no_tie() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    model = Model.sequential(nn.Sequential(frozen, nn.Linear(3, 3), frozen), nn.MSELoss())
    assert not any(layer.ties for layer in model.layers)
    pipe = Pipeline(model, sgd, stages=[1, 1, 1])
    list(pipe.train([{"input": torch.randn(4, 3), "target": torch.randn(4, 3)}]))
    assert torch.equal(pipe.state_dict()["2.weight"], frozen.weight)


@pytest.mark.parametrize(("ties", "text"), [
    ({"weight": "first.bias"}, "error: 'last.weight' [3, 3] (float32) is tied to 'first.bias' [3] (float32)\n"
                               "hint: tied parameters are one: give both the same shape and dtype, train both or"),
    ({"wieght": "first.weight"}, "error: a tie names 'last.wieght', but layer 'last' has no parameter 'wieght'\n"
                                 "hint: did you mean 'weight'?"),
    ({"weight": "first.w"}, "error: a tie names 'first.w', but layer 'first' has no parameter 'w'\n"
                            "hint: known names: bias, weight"),
    ({"weight": "double.weight"}, "error: 'last.weight' [3, 3] (float32) is tied to 'double.weight' [3, 3] (float64)\n"
                                  "hint: tied parameters are one: give both the same shape and dtype, train both or")])
@pytest.mark.parametrize("partition", [[3], [1, 1, 1], None])
def test_a_tie_of_unequal_parameters_or_none_is_refused(ties: dict[str, str], text: str,
                                                        partition: list[int] | None) -> None:
    """In one stage, across two, and in the whole model on one device."""
    model = Model([FIRST, Layer("double", lambda: nn.Linear(3, 3).double()),
                   Layer("last", linear, ("h",), ("loss",), ties)], ("x",))
    with pytest.raises(UserError) as error:
        model.materialize() if partition is None else Pipeline(model, torch.optim.SGD, stages=partition)
    if ties["weight" if "weight" in ties else "wieght"] == "first.w" and partition == [1, 1, 1]:
        text = "error: 'last.weight' is tied to 'first.w', which is no parameter"
    assert text in str(error.value)


def test_a_constructor_that_loads_weights_is_built_without_values() -> None:
    """Without torch's warning, which is an error here, for each weight that it would load."""
    weights = nn.Linear(3, 3).state_dict()

    def loaded() -> nn.Module:
        module = nn.Linear(3, 3)
        module.load_state_dict(weights)
        return module

    layer = Layer("first", loaded, ("x",), ("loss",))
    outline = layer.without_values()
    assert outline is not None
    assert all(tensor.is_meta for tensor in outline.parameters())
    assert torch.equal(layer.make().state_dict()["weight"], weights["weight"])
