"""``Pipeline.save`` and ``load``: what goes on from a folder was never interrupted, in process and over gloo."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from models import rich_batches
from world import World

from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import Manifest
from vpipe.errors import UserError, VpipeError


def stretch(*, folder: str | None, into: str, steps: int, batches: int, cadence: int | None = None,
            model: str = "rich", samples: int = 8, **arguments: Any) -> dict[str, Any]:
    """Go on from a checkpoint, or begin; train so many steps, save, and say what was done.

    Args:
        folder: of the checkpoint to go on from.
        into: which to make.
        batches: of the whole run.
        cadence: after how many steps the pipeline runs empty.
    """
    pipe = jobs.pipeline(jobs.MODELS[model](), **arguments)
    data = rich_batches(batches, samples)
    begin = 0
    if folder is not None:
        begin = pipe.load(folder).microbatches // pipe.microbatches
    made: list[list[Any]] = []
    for step in pipe.engine.training.train(
            data[begin:], pauses=lambda before: cadence and (before // cadence + 1) * cadence):
        made.append([step.index, step.loss, step.gradient_norm])
        if len(made) == steps:
            break
    pipe.save(into)
    position = pipe.engine.training.position
    return {"steps": made, "state": jobs.fingerprint(pipe.state_dict()), "samples": position.samples,
            "position": [position.steps, position.microbatches, position.begun]}


def refused(*, folder: str, into: str | None = None, **arguments: Any) -> list[Any]:
    """The words with which a load is refused, or a save fails, and whether the pipeline then still trains."""
    pipe = jobs.pipeline(jobs.MODELS["rich"](), **arguments)
    try:
        if into is None:
            pipe.load(folder)
        else:
            pipe.save(into)
    except VpipeError as error:
        said = str(error).replace(str(Path(folder).parent), "FOLDER")
        return [isinstance(error, UserError), said, [step.index for step in pipe.train(rich_batches(1, 8))]]
    return ["nothing was refused"]


ASYNCHRONOUS: dict[str, Any] = {"schedule": "pipedream", "partition": [2, 2, 2, 2], "cadence": 5}
CUT: dict[str, Any] = {"schedule": "pipedream", "partition": [2, 2, 2, 2]}
FLUSH: dict[str, Any] = {"schedule": "1f1b", "partition": [2, 2, 2, 2], "recompute": 0.5}
RUN: dict[str, Any] = {"microbatches": 4, "grad_clip": 0.5, "batches": 7}


def tensors_of(folder: Path) -> dict[str, Any]:
    """What the files hold, without regard to which rank wrote it."""
    manifest = Manifest.load(folder)
    return jobs.fingerprint(dict(sorted(Checkpoint(folder, manifest).tensors(manifest.tensors).items())))


def here(**arguments: Any) -> dict[str, Any]:
    return stretch(**{**RUN, **arguments})


@pytest.mark.parametrize(("arguments", "stretches"), [
    (ASYNCHRONOUS, (5, 5, 5)), (FLUSH, (2, 1, 3)), ({**FLUSH, "optimizer": "muon"}, (1, 1)),
    ({"schedule": "pipedream", "partition": [4, 4], "placement": [[0, 1, 2], [3]], "cadence": 2,
      "delay_correction": 1.0, "optimizer": "muon"}, (2, 4)),
    ({**ASYNCHRONOUS, "compress": "int8_stochastic"}, (5, 5)),
    ({"schedule": "gpipe", "model": "norm", "partition": [2, 4], "placement": [[0, 1], [2, 3]]}, (3, 2))])
def test_stretches_in_turn_over_gloo_and_in_process(world: World, tmp_path: Path, arguments: dict[str, Any],
                                                    stretches: tuple[int, ...]) -> None:
    whole = here(folder=None, into=str(tmp_path / "whole"), steps=sum(stretches), **arguments)
    steps, last, run = [], None, [gloo(world), here]
    for number, length in enumerate(stretches):
        into = tmp_path / f"part{number}"
        part = run[number % 2](folder=last and str(last), into=str(into), steps=length, **RUN | arguments)
        steps += part["steps"]
        last = into
    assert steps == whole["steps"]
    assert part["state"] == whole["state"]
    assert (part["position"], part["samples"]) == (whole["position"], whole["samples"])
    assert tensors_of(last) == tensors_of(tmp_path / "whole")
    ours, theirs = (Manifest.load(folder).arrangement for folder in (last, tmp_path / "whole"))
    assert [ours.get(key) for key in ("optimizers", "optimizer_of")] == [
        theirs.get(key) for key in ("optimizers", "optimizer_of")]
    assert not Checkpoint.open(last).damage()


def gloo(world: World) -> Callable[..., dict[str, Any]]:
    """The job on every rank; all tell the same."""

    def run(**arguments: Any) -> dict[str, Any]:
        results = world.run(stretch, **arguments)
        assert results == results[:1] * len(results)
        return results[0]

    return run


def test_other_cuts_and_numbers_of_stages_over_gloo_go_on_alike(world: World, tmp_path: Path) -> None:
    """With a flush and untied weights: one number of stages after the other, in process and as processes."""
    whole = here(folder=None, into=str(tmp_path / "whole"), steps=5, model="untied", **FLUSH)
    cuts: list[tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = [
        (gloo(world), {"partition": [1, 4, 2, 1]}), (here, {"partition": [3, 5]}),
        (gloo(world), {"partition": [1] * 8, "schedule": "interleaved"}), (here, {"partition": [8]}),
        (gloo(world), {"partition": [3, 1, 2, 2], "schedule": "zb_h1"})]
    folders = [None, *(str(tmp_path / f"part{number}") for number in range(5))]
    steps = []
    for (run, arguments), (folder, into) in zip(cuts, pairwise(folders), strict=True):
        part = run(folder=folder, into=into, steps=1, **RUN | {"model": "untied"} | FLUSH | arguments)
        steps += part["steps"]
    assert steps == whole["steps"]
    assert part["state"] == whole["state"]


def test_a_rank_that_cannot_write_leaves_what_was_there(world: World, tmp_path: Path) -> None:
    gloo(world)(folder=None, into=str(tmp_path / "step"), steps=1, **RUN, **FLUSH)
    before = tensors_of(tmp_path / "step")
    (tmp_path / "file").write_text("no folder")
    arguments = {key: RUN[key] for key in ("microbatches", "grad_clip")} | FLUSH
    results = world.run(refused, folder=str(tmp_path / "x"), into=str(tmp_path / "file" / "step"), **arguments)
    assert results == results[:1] * 4
    is_users, said, trained = results[0]
    assert not is_users
    assert said.startswith("error: could not save a checkpoint to 'FOLDER/file/step': Not a directory (rank 0)")
    assert trained == [0], "training goes on"
    assert tensors_of(tmp_path / "step") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step"]


def test_a_checkpoint_makes_way_for_the_next_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    here(folder=None, into=str(folder), steps=1, **FLUSH)
    first = tensors_of(folder)
    here(folder=str(folder), into=str(folder), steps=1, **FLUSH)
    assert tensors_of(folder) != first
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    manifest = Manifest.load(folder)
    assert (manifest.step, manifest.samples, manifest.seed) == (2, 16, 2)
    assert manifest.numbers == {"microbatches": 8, "begun": 0, "batch": 4}
    assert manifest.arrangement["partition"] == [2, 2, 2, 2]
    assert manifest.arrangement["optimizers"] == ["AdamW"]


@pytest.mark.parametrize(("change", "text"), [
    ({"seed": 5}, "the checkpoint is of a run with seed 2, this pipeline has 5\nhint: give it seed=2: dropout follows"),
    ({"optimizer": "sgd"}, "the checkpoint has the state of AdamW, this pipeline trains with SGD\nhint: give it an"),
    ({"schedule": "1f1b"}, "the checkpoint was made after 2 of the 4 microbatches of a batch, but '1f1b' takes whole"),
    ({"microbatches": 1}, "with 4 microbatches per batch, and was made after 2 of them: with 1 that is within one")])
def test_a_checkpoint_that_does_not_fit_is_refused_with_both_values(tmp_path: Path, change: dict[str, Any],
                                                                    text: str) -> None:
    here(folder=None, into=str(tmp_path / "step"), steps=2, **ASYNCHRONOUS | {"cadence": 2})
    arguments = {key: {**RUN, **ASYNCHRONOUS}[key] for key in ("microbatches", "schedule", "partition")} | change
    if "optimizer" in change:
        arguments["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    pipe = jobs.pipeline(jobs.MODELS["rich"](), **arguments)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        pipe.load(tmp_path / "step")
    assert text in str(error.value)
    assert next(pipe.train(rich_batches(1, 8))).index == 0, "nothing was loaded"


def test_hints_of_a_load_are_for_python(tmp_path: Path) -> None:
    pipe = jobs.pipeline(jobs.MODELS["rich"](), microbatches=4, **FLUSH)
    for number, _ in enumerate(pipe.train(rich_batches(2, 8)), 1):
        pipe.save(tmp_path / f"step-{number}")
    file = tmp_path / "step-2" / "rank0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"hint: resume from step 1 with: pipe\.load\('.*/step-1'\)$"):
        jobs.pipeline(jobs.MODELS["rich"](), microbatches=4, **FLUSH).load(tmp_path / "step-2")
    with pytest.raises(UserError, match=r"hint: load it into a pipeline of the model that saved it$"):
        jobs.pipeline(jobs.MODELS["norm"](), stages=2, microbatches=4).load(tmp_path / "step-1")


def test_of_a_run_the_newest_is_loaded_and_one_without_a_manifest_is_damaged(tmp_path: Path) -> None:
    pipe = jobs.pipeline(jobs.MODELS["rich"](), microbatches=4, **FLUSH)
    (tmp_path / "checkpoints").mkdir()
    for number, _ in enumerate(pipe.train(rich_batches(2, 8)), 1):
        pipe.save(tmp_path / "checkpoints" / f"step-{number}")
    new = jobs.pipeline(jobs.MODELS["rich"](), microbatches=4, **FLUSH)
    assert new.load(tmp_path).steps == 2
    (tmp_path / "checkpoints" / "step-2").rename(tmp_path / "best")
    (tmp_path / "best" / "checkpoint.json").unlink()
    for folder, text in ((tmp_path / "best", "best' is damaged: checkpoint.json is missing"),
                         (tmp_path / "none", "none': it does not exist")):
        with pytest.raises(UserError, match=text):
            jobs.pipeline(jobs.MODELS["rich"](), microbatches=4, **FLUSH).load(folder)
