"""The lines that a run begins with: model, stages, schedule, sizes, and how late gradients are."""

from __future__ import annotations

from collections import Counter

from vpipe.app.data.dataset import Described, Padded, VaryingBatches
from vpipe.app.train.job import Job
from vpipe.errors import counted


def headline(job: Job) -> str:
    """Describe a job in the line that a run begins with."""
    ranks, parts = job.schedule.ranks, job.config.parallel.tensor
    to_plan, parallel = job.config.parallel.to_plan, job.config.parallel.standing_in
    return (f"{job.config.model.name}: {counted(len(job.model), 'layer')} in {counted(len(job.placement), 'stage')}"
            + ("" if "partition" in to_plan else f" {list(job.partition)}")
            + ("" if "schedule" in to_plan else f", schedule {parallel.order_text}")
            + ("" if (precision := job.config.training.precision) == "fp32" else f", {precision}")
            + (", packed" if job.config.model.packed else "") + ", "
            + (f"{', '.join(to_plan)} to be planned, " if to_plan else "")
            + ("one process per stage" if sorted(job.placement) == [(rank,) for rank in range(ranks)]
               else _processes(job))
            + ("" if parts == 1 else f", times {parts} that split its layers: ranks " + ", ".join(
                f"{first}-{first + parts - 1}" for first in range(0, job.processes, parts)) + " on one host each"))


def _processes(job: Job) -> str:
    """Count the processes, and the stages of each where a schedule gives them several; say what gives more than one."""
    stages, ranks = len(job.placement), job.schedule.ranks
    of_each = Counter(rank for own in job.placement for rank in own).values()
    text = counted(ranks, "process") + (f" of {counted(max(of_each), 'stage')}" + " each" * (ranks > 1)
                                        if len(set(of_each)) == 1 < max(of_each) else "")
    if ranks > 1 or job.config.parallel.stage_to_rank_map is not None:
        return text
    return text + (f" (2 with parallel.model_parallel_size {2 * stages})" if 2 * stages <= len(job.model) else
                   f" ({stages} with parallel.schedule 1f1b)")


def size_lines(job: Job) -> str:
    """Describe the size of the model, of an epoch and of a held-out text in lines, which follow a run's first."""
    config, samples, dataset = job.config, job.dataset.samples("train"), job.dataset
    varying = isinstance(dataset, VaryingBatches)
    tokens = varying or "input_ids" in job.model.batch
    length = config.model.sequence_length
    steps, rest = divmod(job.epochs.batches * config.microbatches, job.schedule.assignment.step_microbatches)
    epoch = [counted(samples, "sample", commas=True),
             *([counted(job.epochs.tokens if varying else samples * length, "token", commas=True)] if tokens else []),
             "about " * (rest > 0) + counted(steps, job.step_name, commas=True)]
    if isinstance(dataset, Padded):
        epoch.append(f"{100 * dataset.padding_share(config.dataset.batch_size):.1f} % padding")
    parameters = job.model.parameter_count()
    text = job.held_out_text
    return (("parameters unknown" if parameters is None else counted(parameters, "parameter", commas=True))
            + f", vocabulary of {config.model.vocab_size:,}" * tokens
            + "".join(f"\n{line}" for line in (dataset.lines if isinstance(dataset, Described) else ()))
            + f"\nan epoch: {', '.join(epoch)}"
            + ("" if text is None else f"\nheld out: {counted(text.tokens, 'token', commas=True)} of "
               f"{text.bytes / text.tokens:.2f} bytes, unigram entropy {text.unigram_entropy:.2f} nats"))


def delay_line(job: Job) -> str | None:
    """Describe an update without a flush, and the delay of its gradients; None where there is no delay.

    What would lower the delay follows where :func:`delay_warning` says nothing.
    """
    said, better = job.advice.delays, job.advice.fewer_updates
    if said is None:
        return None
    microbatches = counted(job.schedule.assignment.step_microbatches, "microbatch")
    size = f"{counted(job.samples_per_update, 'sample')} in {microbatches}"
    update = f"{'an' if job.step_name == 'update' else 'a'} {job.step_name}: {size}"
    return f"{update}; {said}" + (f"; less with {better}" if better is not None and not delay_warning(job) else "")


def delay_warning(job: Job) -> str | None:
    """Return a warning with its remedies where late gradients cost much; None elsewhere."""
    training, remedies = job.config.training, []
    if training.optimizer != "muon":
        remedies.append("training.optimizer muon")
    if training.delay_correction == "none":
        remedies.append("training.delay_correction extrapolate")
    return job.advice.late_gradients(*remedies)
