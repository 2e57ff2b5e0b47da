"""The families' layers, split over two and four ranks, compute what they compute whole, dropout included.

In fp64, where 2^-53 is so much smaller than what a wrong plan changes that the bound may be coarse. Splitting leaves
all products as they are and changes the order of sums. A value is the end of a chain of sums, whose terms
:func:`roundings` counts; every term is rounded once, which moves the value by 2^-53 of the largest that meets it, in
either of the two computations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from by_slices import run_slices
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from world import World

from vpipe import Layer, Model, Pipeline
from vpipe.accelerator import seeded
from vpipe.app.families import experts
from vpipe.app.families import tensor_parallel as tp
from vpipe.app.families.experts import BALANCE, Experts
from vpipe.app.families.gpt import GptAttention
from vpipe.app.families.registry import Family, ModelSettings, family_named
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.errors import UserError
from vpipe.model.layer import seed_of, set_parameter, split_target
from vpipe.model.structure import structure
from vpipe.profiling.layer_runner import LayerRunner
from vpipe.profiling.measurement import survey
from vpipe.runtime.sharded_tensors import local, parted, whole

pytestmark = pytest.mark.jobs

WORDS, HIDDEN, HEADS, LENGTH, SAMPLES, BLOCKS = 24, 16, 8, 8, 3, 2
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {}, "llama": {"num_kv_heads": 4, "overrides": {"intermediate_size": 24}},
    "gpt packed": {"packed": True},
    "qwen3": {"num_kv_heads": 4, "packed": True, "overrides": {"intermediate_size": 24, "head_dim": 4}},
    "gpt experts": {"experts": 3, "balance_weight": 0.5},
    "mixtral": {"num_kv_heads": 4, "experts": 4, "balance_weight": 0.0, "packed": True,
                "overrides": {"intermediate_size": 24}},
    "qwen3_moe": {"num_kv_heads": 4, "experts": 5, "experts_per_token": 3, "balance_weight": 0.5, "overrides": {
        "moe_intermediate_size": 24, "head_dim": 4, "norm_topk_prob": False}},
    "bert": {"preset": "tiny"},
    "translation": {"preset": "tiny", "overrides": {"attention_dropout": 0.1, "activation_dropout": 0.1}}}


def named(family: str) -> Family:
    return family_named(family.partition(" ")[0])


def settings(family: str) -> ModelSettings:
    """Two blocks, with ties and every dropout that the family has."""
    options = named(family).options
    return ModelSettings(
        WORDS, hidden_size=HIDDEN, num_layers=BLOCKS, num_heads=HEADS, sequence_length=LENGTH, dropout=0.1,
        tie_weights=True, options=None if options is None else options(), **SETTINGS[family])


def model(family: str) -> Model:
    return named(family).factory(settings(family))


def batch(family: str, length: int = LENGTH) -> dict[str, Tensor]:
    """Random words, of which some are padding, and some labels none; those of the mask are the first."""
    generator = torch.Generator().manual_seed(7)

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (SAMPLES, *shape), generator=generator)

    labels, mask = ids(WORDS, length), torch.ones(SAMPLES, length, dtype=torch.int64)
    labels[0, 2:5], mask[1, 5:] = Model.NO_LABEL, 0
    positions = torch.arange(length) - torch.tensor([[0] * length, [0, 0, 0, *[3] * (length - 3)], [0, *[1] * (
        length - 1)]])  # one text, two and two
    if family == "bert":
        return {"input_ids": ids(WORDS, length), "segment_ids": ids(2, length), "masked_lm_positions": ids(length, 3),
                "masked_lm_ids": ids(WORDS, 3), "input_mask": mask, "next_sentence_labels": ids(2)}
    if family == "translation":
        return {"source_ids": ids(WORDS, length), "source_mask": mask, "target_ids": ids(WORDS, length),
                "labels": labels}
    return {"input_ids": ids(WORDS, length), "labels": labels} | (
        {"positions": positions} if SETTINGS[family].get("packed") else {})


def roundings() -> int:
    """The longest chain: forward and backward through as many layers as translation has, each with its two matrices,
    norms, softmax and scores, then the loss over the vocabulary and all tokens, and a gradient's sum over those. A
    layer of experts has fewer terms: a row and the softmax of its router, one expert's two matrices, the sum of some.
    """
    layer = 4 * HIDDEN + HIDDEN + 4 * HIDDEN + LENGTH
    return 2 * ((5 * BLOCKS + 1) * layer + WORDS + SAMPLES * LENGTH)


BOUND = 2 * roundings() * 2.0 ** -53


def built(layer: Layer, index: int) -> nn.Module:
    with seeded(seed_of(3, index)):
        return layer.build()


def run(model: Model, fields: Mapping[str, Tensor],
        slices: tuple[int, ...] = ()) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """All tensors that the layers write, the last of each name, after the backward; and the parameters. In slices of
    these lengths the loss alone. Biases are not zero, which would hide one that is added by every rank."""
    layers = {layer.name: built(layer, index).double() for index, layer in enumerate(model.layers)}
    for module in layers.values():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                local(parameter.detach()).add_(0.1)
    for layer in model.layers:
        for own, target in layer.ties.items():
            other, name = split_target(target, model.layers)
            set_parameter(layers[layer.name], own, layers[other].get_parameter(name))
    tensors = dict(fields)
    if slices:
        tensors = {"loss": run_slices(model, layers, fields, slices)}
    else:
        for index, layer in enumerate(model.layers):
            torch.manual_seed(100 + index)
            outputs = layers[layer.name](*(tensors[name] for name in layer.inputs))
            tensors |= dict(zip(layer.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
        tensors["loss"].backward()
    return tensors, {f"{name}.{own}": p for name, module in layers.items() for own, p in module.named_parameters()}


def compare(family: str, parts: int, sequence: bool, planted: str | None = None) -> dict[str, Any]:
    """On every rank: the layers whole, and split over ``parts`` ranks; how far they are apart, and what a rank has."""
    mesh = init_device_mesh("cpu", (4 // parts, parts), mesh_dim_names=("pp", "tp"))["tp"]
    at = tp.TensorMesh(mesh, Shard(1) if sequence else Replicate())
    patch = pytest.MonkeyPatch()
    if planted == "heads":
        patch.setitem(GptAttention.tensor_plan, "qkv", tp.fused(1))
    if planted == "loss":
        patch.setattr(tp, "_over_ranks", lambda tensor, mesh, operation: tensor)
    if planted == "balance":
        patch.setitem(Experts.tensor_plan, "counted", lambda module, at: module)
    if planted == "router":
        patch.setitem(Experts.tensor_plan, "router", tp.replicated)
    routed: list[tuple[list[float], list[int]]] = []
    imbalance = experts._imbalance
    patch.setattr(experts, "_imbalance", lambda odds, chosen: (
        routed.append((odds.flatten().tolist(), chosen.flatten().tolist())), imbalance(odds, chosen))[1])
    unsplit, expected = run(model(family), batch(family))
    chosen = [chosen for _, chosen in routed]
    routed.clear()
    fresh = tp.parallel(model(family), at)
    begun = {f"{layer.name}.{name}": p.detach() for index, layer in enumerate(fresh.layers)
             for name, p in built(layer, index).named_parameters()}
    split, found = run(fresh, batch(family))
    patch.undo()
    assert found.keys() == expected.keys()
    first = {f"{layer.name}.{name}": p.detach() for index, layer in enumerate(model(family).layers)
             for name, p in built(layer, index).named_parameters()}
    gradients = {name: p.grad.to_local() if planted == "norm" and p.grad.placements[0].is_partial() else
                 whole(p.grad) for name, p in found.items()}
    between = {name: list(split[name].shape) for layer in fresh.layers for name in layer.outputs}
    return {"routed": str(routed), "chosen": [chosen for _, chosen in routed] == chosen,
            "begins": all(torch.equal(whole(p), first[name]) for name, p in begun.items()),
            "held": {name: p.to_local().untyped_storage().nbytes() / p.nbytes for name, p in begun.items()},
            "loss": split["loss"].item(), "loss off": abs((split["loss"] - unsplit["loss"]).item()), "between": between,
            "scale": max(p.grad.abs().max().item() for p in expected.values()),
            "gradient off": max((gradients[name] - p.grad).abs().max().item() for name, p in expected.items()),
            "placed": all(isinstance(p.grad, DTensor) and (p.grad.placements == p.placements
                          or p.grad.placements[0].is_partial()) for p in found.values())}


CASES = [(family, parts, sequence) for family in SETTINGS for parts, sequence in ((2, True), (4, True), (2, False))
         if family not in ("gpt packed", "qwen3", "mixtral", "qwen3_moe") or parts == 4]


@pytest.mark.parametrize(("family", "parts", "sequence"), CASES)
def test_a_split_model_is_the_whole_one(world: World, family: str, parts: int, sequence: bool) -> None:
    ranks = world.run(compare, family=family, parts=parts, sequence=sequence)
    assert len({rank["loss"] for rank in ranks}) == 1, "all ranks have the same loss, to the last bit"
    assert len({rank["routed"] for rank in ranks}) == 1, "and the same probabilities of experts"
    for rank in ranks:
        assert rank["chosen"], "no two scores are so near that rounding exchanges their experts"
        assert rank["begins"]
        assert rank["placed"]
        assert rank["loss off"] < BOUND * max(1, rank["loss"])
        assert rank["gradient off"] < BOUND * rank["scale"]
        length = LENGTH // parts if sequence else LENGTH
        assert rank["between"].pop("loss") == rank["between"].pop(BALANCE, []) == []
        assert set(map(tuple, rank["between"].values())) == {(SAMPLES, length, HIDDEN)}
        assert {name.rpartition(".")[0].rpartition(".")[2] for name, share in rank["held"].items() if share == 1} <= {
            "norm", "query_norm", "key_norm", "final_norm", "position", "segment", "transform", "pooler",
            "next_sentence", "output", "contract", "router"}
        assert {share for share in rank["held"].values() if share < 1} == {1 / parts}


@pytest.mark.parametrize(("planted", "what"), [("norm", "gradient off"), ("heads", "gradient off"),
                                               ("loss", "loss off"), ("balance", "gradient off"),
                                               ("router", "gradient off")])
def test_a_wrong_plan_is_found(world: World, planted: str, what: str) -> None:
    """Gradients of norms that nobody has summed; a plain split of queries, keys and values; the cross entropy of a
    part of the vocabulary; a gradient of the loss of balance that every rank adds, one of the router that none adds."""
    family = "gpt experts" if planted in ("balance", "router") else "gpt"
    for rank in world.run(compare, family=family, parts=2, sequence=True, planted=planted):
        assert rank[what] > 1e6 * BOUND


def compare_slices() -> list[float]:
    """On every rank: how far layers that four ranks split, which compute the sequences in two slices, are from the
    whole of both, in parts of what rounding may do."""
    at, off = tp.TensorMesh(init_device_mesh("cpu", (4,)), Shard(1)), []
    for family in ("gpt packed", "qwen3", "mixtral"):
        unsplit, expected = run(model(family), batch(family))
        split, found = run(tp.parallel(model(family), at), batch(family), (4, LENGTH - 4))
        scale = max(1, *(p.grad.abs().max().item() for p in expected.values()))
        off += [abs((split["loss"] - unsplit["loss"]).item()) / (BOUND * max(1, unsplit["loss"].item())),
                max((whole(found[name].grad) - p.grad).abs().max().item() for name, p in expected.items()) / (
                    BOUND * scale)]
    return off


def test_slices_of_a_split_model_are_the_whole_one(world: World) -> None:
    for rank in world.run(compare_slices):
        assert max(rank) < 1


def counts(*, family: str, parts: int) -> list[list[int]]:
    """Per layer of a model in each of ``parts`` processes that split it: the first that is equal, operations, bytes of
    weights, and the most bytes of a microbatch at once."""
    made, device = model(family), torch.device("cpu")
    if parts > 1:
        mesh = init_device_mesh("cpu", (4 // parts, parts), mesh_dim_names=("pp", "tp"))
        made = tp.parallel(made, tp.TensorMesh(mesh["tp"], Shard(1)))
    seen = survey(made, list(map(structure, made.layers)), batch(family),
                  lambda number: LayerRunner(made, number, device, 0), device,
                  OptimizerSettings("adamw", 1e-3).from_named)
    return [[first, found.forward_flops, found.parameter_bytes, found.saved_bytes + found.working_bytes]
            for first in seen.like for found in [seen.counts[first]]]


@pytest.mark.parametrize(("family", "router"), [("gpt", 0), ("gpt experts", 2 * SAMPLES * LENGTH * HIDDEN * 3)])
def test_a_profile_counts_what_one_process_does_and_holds(world: World, family: str, router: int) -> None:
    """Not what DTensor's whole tensors stand for, and nothing of what it asks about their shapes. All compute the
    scores of experts, with so many operations."""
    alone = counts(family=family, parts=1)
    for rank in world.run(counts, family=family, parts=2):
        for number, ((first, flops, weights, most), (like, all_flops, all_weights, at_most)) in enumerate(
                zip(rank, alone, strict=True)):
            assert (first, 2 * flops) == (like, all_flops + router * (number % 2))
            assert all_weights / 2 <= weights <= all_weights
            assert most <= at_most


def refused(length: int) -> str:
    """What the embeddings say to a sequence."""
    at = tp.TensorMesh(init_device_mesh("cpu", (4,)), Shard(1))
    with pytest.raises(UserError) as raised:
        run(tp.parallel(model("gpt"), at), batch("gpt", length))
    return str(raised.value)


def test_a_sequence_that_is_no_multiple_is_refused(world: World) -> None:
    assert set(world.run(refused, length=6)) == {
        "error: sequence_length is 6, which 4 ranks of tensor parallelism cannot share evenly\n"
        "hint: set parallel.tensor to 1 or 2 or 3; or model.sequence_length to 8, the next that they can share"}


def test_sizes_that_cannot_be_split_are_named() -> None:
    """Of every family: the vocabulary, heads, the width of its MLP, and the sequence where it is split."""
    found = {}
    for family in SETTINGS:
        assert list(tp.problems(4, named(family).tensor_sizes(settings(family)))) == []
        found[family] = {problem.what.partition(" ")[0] for problem in tp.problems(
            5, named(family).tensor_sizes(settings(family)))}
    assert found.pop("qwen3") == found.pop("mixtral") == found["llama"]
    assert found.pop("qwen3_moe") == found["llama"] - {"intermediate_size"} | {"moe_intermediate_size"}
    assert found.pop("gpt packed") == found.pop("gpt experts") == found["gpt"]
    assert found == {"gpt": {"vocab_size", "num_heads", "n_inner", "sequence_length"},
                     "llama": {"vocab_size", "num_heads", "num_kv_heads", "intermediate_size", "sequence_length"},
                     "bert": {"vocab_size", "num_heads", "intermediate_size", "sequence_length"},
                     "translation": {"vocab_size", "decoder_vocab_size", "encoder_attention_heads",
                                     "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"}}
    assert [str(problem) for problem in tp.problems(4, {"vocab_size": 50257})] == [
        "error: vocab_size is 50,257, which 4 ranks of tensor parallelism cannot share evenly\n"
        "hint: set parallel.tensor to 1; or model.vocab_size to 50,260, the next that they can share"]


def test_a_layer_without_a_plan_is_refused() -> None:
    split = tp.parallel(Model([Layer("a", lambda: nn.Linear(2, 2), ("x",), ("loss",))], ("x",)), None)
    with pytest.raises(UserError, match="Linear has no plan for tensor parallelism that names 'weight'"):
        split.layers[0].build()


def saved(*, folder: str) -> list[float]:
    """Train GPT on 2 x 2 ranks, save in shards, train on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = pipeline(tp.parallel(model("gpt"), tp.TensorMesh(mesh["tp"], Shard(1))), mesh=mesh)
    list(pipe.train([batch("gpt")] * 2))
    dcp.save({"pipe": pipe.sharded}, checkpoint_id=folder)
    return [step.loss for step in pipe.train([batch("gpt")])]


def loaded(*, folder: str, parts: int) -> list[float]:
    mesh = init_device_mesh("cpu", (4 // parts, parts), mesh_dim_names=("pp", "tp"))
    pipe = pipeline(tp.parallel(model("gpt"), tp.TensorMesh(mesh["tp"], Shard(1))), mesh=mesh)
    dcp.load({"pipe": pipe.sharded}, checkpoint_id=folder)
    return [step.loss for step in pipe.train([batch("gpt")])]


def pipeline(model: Model, **words: Any) -> Pipeline:
    return jobs.pipeline(model, schedule="1f1b", partition=[2, 3], microbatches=SAMPLES, **words)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_state_in_shards_has_the_parts_of_fused_projections(world: World, tmp_path: Path) -> None:
    """Two ranks save queries, keys and values; as many, four and one load them. In fp32."""
    expected, *_ = world.run(saved, folder=str(tmp_path))
    assert world.run(loaded, folder=str(tmp_path), parts=2) == [expected] * 4
    bound = BOUND * 2.0 ** (53 - 24) * expected[0]
    assert world.run(loaded, folder=str(tmp_path), parts=4)[0] == pytest.approx(expected, abs=bound)
    pipe = pipeline(model("gpt"))
    dcp.load({"pipe": pipe.sharded}, checkpoint_id=tmp_path, no_dist=True)
    assert [step.loss for step in pipe.train([batch("gpt")])] == pytest.approx(expected, abs=bound)


RATE, UPDATES = 0.1, 3


def stepped(*, parts: int, planted: bool = False) -> float:
    """How far apart whole matrices and split ones are after a few steps of Muon along the same gradients.

    Args:
        planted: whether each rank steps its shards as if they were whole.
    """
    mesh = init_device_mesh("cpu", (4 // parts, parts), mesh_dim_names=("pp", "tp"))["tp"]
    split = tp.parallel(model("gpt"), tp.TensorMesh(mesh, Shard(1)))
    settings = OptimizerSettings("muon", RATE, 0.1, matrices=hidden_matrices(model("gpt")))
    unsplit, found = ({f"{layer.name}.{own}": p for index, layer in enumerate(one.layers)
                       for own, p in built(layer, index).double().named_parameters()
                       if f"{layer.name}.{own}" in settings.matrices} for one in (model("gpt"), split))
    stepping = {own: nn.Parameter(local(p)) if planted else p for own, p in found.items()}
    made = [*settings.from_named(unsplit), *settings.from_named(stepping)]
    generator = torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", Tensor.double)
        for _ in range(UPDATES):
            for own, p in unsplit.items():
                p.grad = torch.randn(p.shape, generator=generator).double()
                shard = parted(p.grad, found[own])
                stepping[own].grad = local(shard) if planted else shard
            for optimizer in made:
                optimizer.step()
    return max((whole(found[own]) - p).abs().max().item() for own, p in unsplit.items())


@pytest.mark.parametrize("parts", [2, 4])
def test_muon_sees_whole_matrices(world: World, parts: int) -> None:
    """Up to roundings.

    Muon multiplies DTensors, whose sums are in another order; here in fp64, as bf16 would say nothing. An iteration of
    Newton and Schulz maps singular values from [0, 1] into [0, 1.21], and these into themselves. There its slope is
    below 4, and so is what it makes of an earlier error. It has one of its own: three products, together with
    coefficients below 15 of sums of at most 4 HIDDEN terms, each rounded, of at most sqrt(HIDDEN) in Frobenius' norm. A
    step is RATE * 0.2 * sqrt(4 HIDDEN) of that.
    """
    unit = 2.0 ** -53
    iterations = sum(4.0 ** later for later in range(6)) * 15 * 3 * 4 * HIDDEN * HIDDEN ** 0.5
    bound = 2 * UPDATES * (RATE * 0.2 * (4 * HIDDEN) ** 0.5 * iterations + 4 * 4) * unit
    assert max(world.run(stepped, parts=parts)) <= bound
    if parts == 2:
        assert world.run(stepped, parts=parts, planted=True)[0] > 1e-3
