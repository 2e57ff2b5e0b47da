"""The first VPipe's files: found, read as data, and matched with the model or refused."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.app.families.bert import bert_from_settings
from vpipe.app.families.registry import Family, ModelSettings, family_named
from vpipe.errors import UserError
from vpipe.extras.legacy.vpipe_stage_files import MatchedWeights, StageFiles, match_weights, read_stage_files
from vpipe.model.layer import Layer
from vpipe.model.model import Model

SETTINGS = ModelSettings(50, tie_weights=False, overrides={
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40,
    "max_position_embeddings": 16})
BERT = bert_from_settings(SETTINGS)
HEADLESS = ("head.pooler.weight", "head.pooler.bias", "head.next_sentence.weight", "head.next_sentence.bias")


def weights_of(model: Model) -> dict[str, Tensor]:
    return dict(model.materialize(seed=5).state_dict())


def vpipe_stages(weights: Mapping[str, Tensor], cut: int) -> list[OrderedDict[str, Tensor]]:
    """What VPipe's generated BERT calls those weights, in two stages.

    It numbers modules, has positions before segments, and cuts after an addition, so that the norm of a half block is
    in the next one.
    """
    halves: list[list[tuple[str, str]]] = [[]]  # (its module, ours)
    first = "block0.attention.embeddings"
    halves[0] += [("word_embeddings.", f"{first}.word."), ("position_embeddings.", f"{first}.position."),
                  ("token_type_embeddings.", f"{first}.segment."), ("LayerNorm.", f"{first}.norm.")]
    for block in range(2):
        attention = "block0.attention.attention" if block == 0 else f"block{block}.attention"
        halves[-1] += [(f"{name}.", f"{attention}.{name}.") for name in ("query", "key", "value")]
        halves[-1] += [("", f"{attention}.output.")]
        halves.append([("", f"{attention}.norm."), ("", f"block{block}.mlp.expand."),
                       ("", f"block{block}.mlp.contract.")])
        halves.append([("", f"block{block}.mlp.norm.")])
    halves[-1] += [("", "head.transform."), ("", "head.norm."), ("", "head.decoder.weight"), ("", "head.decoder.bias")]
    stages = []
    for part in (halves[:cut], halves[cut:]):
        named: OrderedDict[str, Tensor] = OrderedDict()
        for number, (module, ours) in enumerate(pair for half in part for pair in half):
            leaves = [ours] if not ours.endswith(".") else [f"{ours}weight", f"{ours}bias"]
            for name in leaves:
                if name in weights:
                    named[f"layer{number}.{module}{name.rpartition('.')[2]}"] = weights[name]
        stages.append(named)
    return stages


def write(folder: Path, stages: list[Any]) -> list[Path]:
    """As PipeDream's runtime does: a dict of modules under ``state_dict``, and what a run needs beside it."""
    for stage, state in enumerate(stages):
        torch.save({"epoch": 3, "arch": "bert", "state_dict": {"module0": state}, "best_prec1": torch.tensor(0.5),
                    "optimizer": {"state": {}, "param_groups": [{"lr": 0.03}]}},
                   folder / f"checkpoint.{stage}.pth.tar")
    return StageFiles().find(folder)


def found_in(files: list[Path], model: Model = BERT, family: Family | None = None) -> MatchedWeights:
    return match_weights(read_stage_files(files), model, family or family_named("bert"), SETTINGS)


@pytest.mark.parametrize("cut", [1, 3])
def test_vpipes_own_bert_is_matched_by_its_order(cut: int, tmp_path: Path) -> None:
    weights = weights_of(BERT)
    found = found_in(write(tmp_path, vpipe_stages(weights, cut)))
    assert found.by == "the first VPipe's order"
    assert found.absent == HEADLESS
    assert set(found.weights) == set(weights) - set(HEADLESS)
    for name, weight in found.weights.items():
        assert torch.equal(weight.tensor, weights[name]), name


@pytest.mark.parametrize(("rename", "by"), [
    (lambda name: name, "their names"),
    (lambda name: f"module.{name}", "their names"),
    (lambda name: {ours: theirs for theirs, ours in family_named("bert").huggingface.names(  # type: ignore[union-attr]
        family_named("bert").huggingface.config(SETTINGS)).items()}[name], "their names"),  # type: ignore[union-attr]
    (lambda name: "layer." + name.replace("block", "b"), "the model's order")])
def test_names_decide_where_they_are_known_else_order_does(rename: Callable[[str], str], by: str,
                                                           tmp_path: Path) -> None:
    weights = weights_of(BERT)
    named = [(rename(name), tensor) for name, tensor in weights.items()]
    if by == "their names":
        named.reverse()
    found = found_in(write(tmp_path, [OrderedDict(named[:20]), OrderedDict(named[20:])]))
    assert (found.by, found.absent) == (by, ())
    assert all(torch.equal(weight.tensor, weights[name]) for name, weight in found.weights.items())
    assert set(found.weights) == set(weights)


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        call()
    [problem] = error.value.problems
    return problem.what, problem.hint


def test_files_that_do_not_fit_are_refused_with_their_place(tmp_path: Path) -> None:
    stages = vpipe_stages(weights_of(BERT), 3)
    last = list(stages[1])[-1]
    files = write(tmp_path, [stages[0], {name: t for name, t in stages[1].items() if name != last}])
    what, _ = refused(lambda: found_in(files))
    assert what == ("the files' 42 tensors are not this model's weights in the first VPipe's order: there are 43 of "
                    "them, and 'head.decoder.bias' is missing")
    key = next(name for name in stages[0] if name.endswith("key.weight"))
    files = write(tmp_path, [{**stages[0], key: torch.zeros(24, 23)}, stages[1]])
    what, hint = refused(lambda: found_in(files))
    assert what == ("the files' 43 tensors are not this model's weights in the first VPipe's order: tensor 7 is "
                    f"'module0.{key}' [24, 23] of checkpoint.0.pth.tar, where 'block0.attention.attention.key.weight' "
                    "[24, 24] should be")
    assert "config of the model" in hint


def test_two_orders_that_fit_are_refused(tmp_path: Path) -> None:
    model = Model([Layer("a", lambda: nn.Linear(3, 3), inputs=("x",)), Layer("b", lambda: nn.Linear(3, 3),
                                                                             outputs=("loss",))], batch=("x",))
    swapped = Family(lambda settings: model, stage_order=lambda settings: ["b.weight", "b.bias", "a.weight", "a.bias"])
    state = {f"layer{number}.{leaf}": torch.zeros(3, 3) if leaf == "weight" else torch.zeros(3)
             for number in range(2) for leaf in ("weight", "bias")}
    files = write(tmp_path, [state])
    what, _ = refused(lambda: found_in(files, model, swapped))
    assert what.endswith("in the first VPipe's order and in the model's order: their shapes do not tell which")
    assert found_in(files, model, Family(lambda settings: model)).by == "the model's order"


def test_tied_weights_must_be_equal(tmp_path: Path) -> None:
    settings = ModelSettings(50, tie_weights=True, overrides=SETTINGS.overrides)
    tied = bert_from_settings(settings)
    stages = vpipe_stages(weights_of(BERT), 2)

    def found() -> MatchedWeights:
        return match_weights(read_stage_files(write(tmp_path, stages)), tied, family_named("bert"), settings)

    what, hint = refused(found)
    assert "word_embeddings.weight' [50, 24] of checkpoint.0.pth.tar differ, but the model ties them" in what
    assert "--set model.tie_weights=false" in hint
    decoder = next(name for name, tensor in stages[1].items() if tensor.shape == (50, 24))
    stages[1][decoder] = stages[0]["layer0.word_embeddings.weight"]
    assert "head.decoder.weight" not in found().weights


class Trap:
    """Its unpickling would run code."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("code of a file was run",))


@pytest.mark.parametrize(("content", "says"), [
    (b"not a pickle", "cannot be read as weights: "),
    (b"", "cannot be read as weights: "),
    (pickle.dumps(Trap(), protocol=2), "which could run code; it was not loaded"),
    ({"state_dict": {"a": torch.zeros(2)}, "optimizer": Trap()}, "which could run code; it was not loaded"),
    ({"epoch": 3}, "has no 'state_dict': it holds epoch"),
    ([torch.zeros(2)], "has no 'state_dict': it holds a list"),
    ({"state_dict": {"module0": {"a": 3}}}, "'a' in state_dict.module0 of '"),
    ({"state_dict": {"module0": {}, "master_parameters": []}}, "holds 16-bit weights")])
def test_a_file_that_is_none_is_refused(content: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.0.pth.tar"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    what, _ = refused(lambda: read_stage_files(StageFiles().find(tmp_path)))
    assert says in what
    assert str(path) in what


def test_a_truncated_file_and_a_missing_stage(tmp_path: Path) -> None:
    files = write(tmp_path, vpipe_stages(weights_of(BERT), 2))
    files[1].write_bytes(files[1].read_bytes()[:-200])
    assert "cannot be read as weights" in refused(lambda: read_stage_files(files))[0]
    files[0].rename(tmp_path / "checkpoint.1700000000.pth.tar")  # a time, perhaps: not as many are looked for
    assert refused(lambda: StageFiles().find(tmp_path))[0].startswith("there is no 'checkpoint.0.pth.tar'")
