"""What a pipeline holds while it runs, beside what was predicted from a profile of its layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import rich_batches, rich_model

from vpipe import Asynchronous, Cut, Order, Pipeline, Update
from vpipe.app.train.optimizers import OptimizerSettings, hidden_matrices
from vpipe.plan.plan import Plan
from vpipe.plan.prediction import predict
from vpipe.profiling import RankGroup, measure
from vpipe.schedules.action_record import RecordedAction


@pytest.fixture(autouse=True)
def no_speed_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long to measure, and no memory depends on it."""
    monkeypatch.setattr("vpipe.profiling.measurement.matrix_flops_per_s", lambda device, dtype: 1e9)


@pytest.mark.parametrize(("precision", "name"), [
    ("fp32", "adamw"), ("bf16", "adamw"), ("bf16_pure", "adamw"), ("bf16", "muon"), ("bf16_pure", "soap")])
def test_a_pipeline_holds_what_was_predicted(precision: str, name: str) -> None:
    """Every byte: activations of all microbatches in flight and versions of weights, as counted while it runs; and
    gradients, master weights and the optimizer's state."""
    model = rich_model()
    optimizer = OptimizerSettings(name, 1e-3, matrices=hidden_matrices(model))
    batches = rich_batches(2, 32)
    microbatch = {name: field[:4] for name, field in batches[0].items()}
    identities = RankGroup("cpu").identify(model, [microbatch], model_name="rich", optimizer="adamw",
                                           precision=precision)
    made, = measure(model, [microbatch], optimizer.from_named, identities=identities, budget_s=0.0)
    cut = (2, 2, len(model) - 4)
    plans = [("1f1b", ((), (), ())), ("1f1b", ((1,), (2, 3), ())), ("zb_h1", ((), (3,), ())),
             ("pipedream", ((0, 1), (), (4,))), ("2bw", ((), (2,), ()))]
    for schedule, dropped in plans if precision == "fp32" else plans[-2:]:
        corrects = schedule == "2bw" or (schedule, precision) == ("pipedream", "bf16")
        plan = Plan(Cut(cut, recompute=dropped), Order(schedule), microbatches=8)
        prediction = predict(replace(made, extrapolates=corrects), plan, update_every=4 if schedule == "2bw" else None
                             ).prediction
        pipe = Pipeline(model, optimizer, plan.cut, Asynchronous(
            schedule, update_every=4 if schedule == "2bw" else None, delay_correction=float(corrects)), 8,
                        precision=precision)
        recorders = pipe.engine.record(limit=10_000)
        for _ in pipe.train(batches):
            pass
        for stage, recorder in recorders.items():
            notes = [note for note in recorder.pop_records()
                     if isinstance(note, RecordedAction) and note.stage == stage]
            held = max(note.held_bytes + note.versions * recorder.weight_bytes()[stage] for note in notes)
            memory = prediction.stages[stage].memory
            expected = memory.activations + memory.weights + memory.stashed
            assert recorder.static_bytes()[stage] == memory.gradients + memory.optimizer
            # Between halves the recorder counts the whole batch's field of which a microbatch has a part.
            assert expected == (pytest.approx(held, rel=0.15) if schedule == "zb_h1" else held), (plan, stage)


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_replicas_that_step_a_part_hold_at_most_what_was_predicted(precision: str) -> None:
    """An equal part of the optimizer's state, and the largest parameter; the last stage keeps last changes, too."""
    model, optimizer, batches = rich_model(), OptimizerSettings("adamw", 1e-3), rich_batches(2, 12)
    microbatch = {name: field[:2] for name, field in batches[0].items()}
    identities = RankGroup("cpu").identify(model, [microbatch], model_name="rich", optimizer="adamw",
                                           precision=precision)
    made, = measure(model, [microbatch], optimizer.from_named, identities=identities, budget_s=0.0)
    plan = Plan(Cut((4, len(model) - 4), ranks=((0, 1, 2), (3, 4))), Order("pipedream"), microbatches=6)
    predicted, without = (predict(replace(made, extrapolates=True, zero1=zero1), plan, update_every=1).prediction.stages
                          for zero1 in (True, False))
    pipe = Pipeline(model, Update(optimizer, zero1=True), plan.cut, Asynchronous(
        "pipedream", update_every=1, delay_correction=1.0), 6, precision=precision)
    list(pipe.train(batches))
    for stage, ranks in enumerate(pipe.placement):
        kept = [pipe.engine.workers[rank].usage(stage).state_bytes for rank in ranks]
        memory, total = predicted[stage].memory, without[stage].memory.optimizer
        assert sum(kept) == total
        assert max(kept) <= memory.optimizer < total
        assert memory.optimizer >= total / len(ranks)
        assert replace(memory, optimizer=0, working=0) == replace(without[stage].memory, optimizer=0, working=0)


@pytest.mark.parametrize(("schedule", "dropped"), [("chimera", ((), (), (), ())), ("chimera", ((1,), (2, 3), (), (6,))),
                                                   ("dualpipe", ((), (), (), ()))])
def test_a_rank_holds_what_was_predicted_of_its_copies(schedule: str, dropped: tuple[tuple[int, ...], ...]) -> None:
    """Weights, gradients and optimizer of two stages, and the activations of both, which are most at one time."""
    model = rich_model()
    optimizer = OptimizerSettings("adamw", 1e-3, matrices=hidden_matrices(model))
    batches = rich_batches(2, 32)
    microbatch = {name: field[:4] for name, field in batches[0].items()}
    identities = RankGroup("cpu").identify(model, [microbatch], model_name="rich", optimizer="adamw",
                                           precision="fp32")
    made, = measure(model, [microbatch], optimizer.from_named, identities=identities, budget_s=0.0)
    plan = Plan(Cut((2, 2, 2, len(model) - 6), dropped), Order(schedule), microbatches=8)
    stages = predict(made, plan).prediction.stages
    pipe = Pipeline(model, optimizer, plan.cut, schedule, 8)
    recorders = pipe.engine.record(limit=10_000)
    for _ in pipe.train(batches):
        pass
    for rank, recorder in recorders.items():
        notes = [note for note in recorder.pop_records() if isinstance(note, RecordedAction)]
        own = {stage: stages[stage].memory for stage in (rank, 3 - rank)}
        assert recorder.weight_bytes() == {stage: memory.weights for stage, memory in own.items()}
        assert recorder.static_bytes() == {stage: memory.gradients + memory.optimizer for stage, memory in own.items()}
        held, expected = max(note.held_bytes for note in notes), sum(memory.activations for memory in own.values())
        assert expected == (held if schedule == "chimera" else pytest.approx(held, rel=0.15)), rank
