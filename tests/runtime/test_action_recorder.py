"""What is recorded of a run: every action once, with what was held; and recording changes no number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import RawMatmul, rich_batches, rich_model
from pipelines import parts
from torch import Tensor, nn

from vpipe import Cut, Layer, Model, Pipeline
from vpipe.errors import RunError
from vpipe.runtime import action_recorder as trace
from vpipe.runtime import saved_tensors as kept
from vpipe.runtime.microbatches import Batch
from vpipe.runtime.values import sizes_of
from vpipe.schedules.kinds import Kind, Op
from vpipe.schedules.trace import RecordedAction, RecordedEvaluation

SETTINGS: list[dict[str, Any]] = [
    {"schedule": "1f1b", "stages": 3, "recompute": [0.5, 1.0, 0.0], "grad_clip": 0.5},
    {"schedule": "pipedream", "stages": 3, "recompute": [0.0, 0.5, 0.5]},
    {"schedule": "zb_h1", "stages": 3, "recompute": [0.0, [3, 4], 0.0]},
    {"schedule": "interleaved", "stages": 4, "placement": [[0], [1], [0], [1]]},
    {"schedule": "pipedream", "placement": [[0, 1], [2]], "update_every": 1},
]


def trained(record: bool, **arguments: Any
            ) -> tuple[list[float], Pipeline, dict[int, list[RecordedAction | RecordedEvaluation]]]:
    """Batches of two lengths, an evaluation, more batches."""
    pipe = Pipeline(rich_model(),
                    **parts(microbatches=4, optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2), **arguments))
    recorders = pipe.engine.record() if record else {}
    data = rich_batches(2, 8, lengths=(6, 5))
    losses = [step.loss for step in pipe.train(data)]
    losses += [pipe.evaluate(data[:1]), *(step.loss for step in pipe.train(data))]
    return losses, pipe, {rank: recorder.pop_records() for rank, recorder in recorders.items()}


def actions(notes: Sequence[RecordedAction | RecordedEvaluation]) -> list[RecordedAction]:
    return [note for note in notes if isinstance(note, RecordedAction)]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["schedule"])
def test_recording_changes_no_number_and_misses_no_action(setting: dict[str, Any],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    plain, *_ = trained(record=False, **setting)
    losses, pipe, notes = trained(record=True, **setting)
    assert losses == plain
    for rank, own in notes.items():
        worker = pipe.engine.workers[rank]
        assert [isinstance(note, RecordedEvaluation) for note in own].count(True) == 1
        times = [time for note in own for time in (note.start_s, note.end_s)]
        assert times == sorted(times)
        stages = {stage: [note for note in actions(own) if note.stage == stage] for stage in worker.stages}
        assert actions(own)[-1].held_bytes == 0
        for stage, there in stages.items():
            forwards = [note.number for note in there if note.op is Op.FORWARD]
            assert forwards == [i for i in range(16) if i % len(pipe.placement[stage]) == worker.rank % 2
                                or len(pipe.placement[stage]) == 1]
            returns = [note.number for note in there if note.op in (Op.BACKWARD, Op.WEIGHT)]
            assert sorted(returns) == forwards
            updates = [note.number for note in there if note.op is Op.STEP]
            assert updates == list(range(worker.stages[stage].weights.latest))
            assert max(note.versions for note in there) == worker.stages[stage].weights.most_versions
            assert {note.op for note in there} >= ({Op.RECOMPUTE} if pipe.recomputed[stage] else {Op.FORWARD})
    # Counting every microbatch finds what the first of each shape let expect.
    monkeypatch.setattr(trace._Microbatch, "shape", property(lambda own: object(), lambda own, shape: None),
                        raising=False)
    again, _, counted = trained(record=True, **setting)
    assert again == plain
    for rank, own in notes.items():
        assert [note.held_bytes for note in actions(counted[rank])] == [note.held_bytes for note in actions(own)]


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4], {"schedule": "2bw", "stages": 2}],
                         ids=lambda setting: setting["schedule"])
def test_a_run_that_goes_on_counts_on(setting: dict[str, Any], tmp_path: Path) -> None:
    """Updates, versions and microbatches of the second half have the numbers that they have in a whole run."""
    data = rich_batches(4, 8)

    def recorded(batches: list[Batch], load: bool = False) -> tuple[Pipeline, list[list[tuple[Kind, int, int]]]]:
        pipe = Pipeline(rich_model(),
                        **parts(microbatches=4, optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2), **setting))
        if load:
            pipe.load(tmp_path / "saved")
        recorders = pipe.engine.record()
        list(pipe.train(batches))
        return pipe, [[(note.op, note.stage, note.number) for note in actions(recorder.pop_records())]
                      for recorder in recorders.values()]

    first, begun = recorded(data[:2])
    first.save(tmp_path / "saved")
    before = [len(own) for own in begun]
    recorders = first.engine.record()
    list(first.train(data[2:]))
    _, resumed = recorded(data[2:], load=True)
    assert all(before)
    assert resumed == [[(note.op, note.stage, note.number) for note in actions(recorder.pop_records())]
                       for recorder in recorders.values()]
    assert {number for own in resumed for op, stage, number in own if op is Op.STEP and stage == 0} == set(
        range(first.engine.workers[0].stages[0].weights.latest // 2, first.engine.workers[0].stages[0].weights.latest))


def test_a_flush_schedule_is_recorded_action_by_action() -> None:
    _, pipe, notes = trained(record=True, schedule="1f1b", stages=3, recompute=0.5, grad_clip=1.0)
    for rank, program in enumerate(pipe.lowered.programs):
        expected = [(a.op, a.stage, a.microbatch + batch * (4 if a.op.per_microbatch else 1))
                    for batch in range(4) for a in program]
        assert [(note.op, note.stage, note.number) for note in actions(notes[rank])] == expected


WIDTH, SAMPLES = 16, 4
TENSOR = SAMPLES * WIDTH * 4
"""Bytes of what passes between the layers below."""


class Dense(nn.Module):
    """x [B,W] -> tanh(linear(x)) [B,W]: keeps its input and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Total(nn.Module):
    """x [B,W] -> its sum: keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def dense_notes(schedule: str, recompute: Any) -> dict[int, list[RecordedAction]]:
    """Two stages of two dense layers; each keeps two inputs and two outputs of tanh."""
    model = Model([Layer("first", Dense, ("x",), ("h",)), *(Layer(f"dense{i}", Dense) for i in range(3)),
                   Layer("loss", Total, outputs=("loss",))], batch=("x",))
    pipe = Pipeline(model, lambda own: torch.optim.SGD(own, lr=0.1), stages=Cut([2, 3], recompute=recompute),
                    schedule=schedule, microbatches=2)
    recorders = pipe.engine.record()
    list(pipe.train([{"x": torch.randn(2 * SAMPLES, WIDTH)}]))
    return {rank: actions(recorder.pop_records()) for rank, recorder in recorders.items()}


def held(notes: Sequence[RecordedAction], *texts: str) -> list[int]:
    by_text = {f"{note.stage}{note.op}{note.number}": note.held_bytes for note in notes}
    return [by_text[text] // TENSOR if by_text[text] % TENSOR == 0 else -1 for text in texts]


def test_recorded_memory_is_what_the_graphs_keep() -> None:
    """By hand. The first layer's input is the batch's field, whose storage is the whole batch: it counts as its own
    half of it."""
    notes = dense_notes("gpipe", 0.0)
    assert held(notes[0], "0F0", "0F1", "0B0", "0B1") == [4, 8, 4, 0]
    assert held(notes[1], "1F0", "1F1", "1B0", "1B1") == [4, 8, 4, 0]


def test_recomputed_layers_hold_their_input_until_they_are_recomputed() -> None:
    notes = dense_notes("gpipe", [[0, 1], [3]])
    assert held(notes[0], "0F0", "0F1", "0R0", "0B0", "0R1", "0B1") == [1, 2, 5, 1, 4, 0]
    # The stage's input, tanh of layer 2, the input of 3, the input of the loss (which needs none of it).
    assert held(notes[1], "1F0", "1F1", "1R0", "1B0", "1R1", "1B1") == [4, 8, 9, 4, 5, 0]


def test_between_the_halves_the_inputs_and_the_gradients_of_the_linear_layers_wait() -> None:
    notes = dense_notes("zb_h1", 0.0)
    assert held(notes[1], "1F0", "1I0", "1W0")[:2] == [4, 4]
    assert notes[1][-1].held_bytes == 0
    assert held(notes[0], "0F0", "0F1", "0I0") == [4, 8, 8], "the batch's field still counts as half of its storage"


def test_the_weights_do_not_count_in_activations_but_for_themselves() -> None:
    pipe = Pipeline(rich_model(), lambda own: torch.optim.Adam(own, lr=1e-2), stages=2, schedule="pipedream",
                    microbatches=2)
    recorders = pipe.engine.record()
    assert recorders[0].static_bytes() == recorders[0].weight_bytes()  # gradients; no optimizer state yet
    list(pipe.train(rich_batches(1, 4)))
    for rank, recorder in recorders.items():
        stage = pipe.engine.workers[rank].stages[rank]
        own = sum(p.nbytes for p in stage.weights.masters.values())
        borrowed = sum(p.nbytes for weights in stage.borrowed.values() for p in weights.leaves())
        assert (borrowed > 0) == (rank == 1)
        assert recorder.weight_bytes() == {rank: own + borrowed}
        counters = 4 * len(stage.weights.names)  # of steps, which Adam keeps per parameter
        assert recorder.static_bytes() == {rank: 3 * own + borrowed + counters}


def test_only_the_first_actions_are_recorded() -> None:
    setting: dict[str, Any] = {"schedule": "pipedream", "stages": 3}
    pipe = Pipeline(rich_model(),
                    **parts(microbatches=4, optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2), **setting))
    recorders = pipe.engine.record(limit=50)
    losses = [step.loss for step in pipe.train(rich_batches(2, 8, lengths=(6, 5)))]
    assert losses == trained(record=False, **setting)[0][:len(losses)]
    for recorder in recorders.values():
        assert recorder.full
        assert (recorder.count, recorder.waiting, len(recorder.pop_records()), recorder.waiting) == (50, 50, 50, 0)


def test_tensors_saved_by_hooks_of_a_layer_belong_to_these_hooks() -> None:
    """A checkpoint inside a layer: what it would save is not kept, and is not counted."""
    assert kept.only_ours()
    layer = RawMatmul()
    x = torch.randn(3, 12, requires_grad=True)
    saved = kept.SavedTensors([layer.w], ())
    with saved.saving():
        assert kept.only_ours()
        with torch.autograd.graph.save_on_cpu():
            assert not kept.only_ours()
            layer(x)
        assert not list(saved.tensors())
        output = layer(x)
    assert len(sizes_of(saved.tensors())) == 3  # x, what tanh made, the mask of the dropout; not the weight
    del output
    assert not list(saved.tensors()), "what no graph keeps any more does not count"


class Changing(nn.Module):
    """Changes what sigmoid saved for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x).sigmoid()
        doubled: Tensor = made * 2
        made.mul_(3)
        return doubled + made


class Transforming(nn.Module):
    """Differentiates with torch.func, which refuses hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda value: self.linear(value).square().sum())(x)
        return x + gradient


def of_layers(kind: type[nn.Module]) -> Pipeline:
    layers = [Layer("first", kind, ("x",), ("h",)), Layer("second", kind), Layer("loss", Total, outputs=("loss",))]
    model = Model(layers, batch=("x",))
    return Pipeline(model, lambda own: torch.optim.SGD(own, 0.1), stages=2, schedule="gpipe", microbatches=2)


@pytest.mark.parametrize("record", [False, True])
def test_a_saved_tensor_changed_in_place_is_refused_at_once(record: bool) -> None:
    """As without a recorder, not only from the first microbatch on that is not counted."""
    pipe = of_layers(Changing)
    if record:
        pipe.engine.record()
    with pytest.raises(RunError, match=r"modified by an inplace operation: \[torch.FloatTensor \[2, 4\]\].*is at "
                                       r"version 1; expected version 0 instead"):
        next(iter(pipe.train([{"x": torch.ones(4, 4)}])))


def test_a_layer_that_refuses_hooks_cannot_be_counted_and_it_is_said() -> None:
    data = [{"x": torch.ones(4, 4)}]
    assert len(list(of_layers(Transforming).train(data))) == 1
    pipe = of_layers(Transforming)
    pipe.engine.record()
    with pytest.raises(RunError, match=r"saved tensor hooks.*\(rank 0, stage 0, microbatch 0, action 0F0\)\n"
                                       "hint: .*: set trace to false"):
        next(iter(pipe.train(data)))
