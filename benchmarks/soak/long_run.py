"""Describe a long run, from its first step to its last through many launches, and compare it with its oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from vpipe.app.config.config import load_config
from vpipe.app.train.job import Job
from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.directory import Checkpoints
from vpipe.testing import (
    CutCompression,
    ReferenceRun,
    TrainingRecipe,
    Trajectory,
    asynchronous_oracle,
    evaluate_oracle,
    flush_oracle,
    version_rule,
)

LAYERS = 9
SAVE_EVERY, EVALUATE_EVERY = 8, 20

Arrangement = Mapping[str, Any]
"""The ``parallel`` section of a config."""


@dataclass
class LongRun:
    """One run.

    Args:
        name: of what it is about.
        folder: of its own, in which everything of it lies.
        sections: of its config, without ``parallel``.
        arrangements: to choose from for every launch; one alone is kept.
        steps: of the run.
        evaluations: whether they are compared, too; that takes memory for the weights of every step.
    """

    name: str
    folder: Path
    sections: Mapping[str, Mapping[str, Any]]
    arrangements: Sequence[Arrangement]
    steps: int
    evaluations: bool = True
    drained: list[int] = field(default_factory=list)  # steps at which a launch began
    used: set[str] = field(default_factory=set)

    def write_config(self, arrangement: Arrangement) -> Path:
        """The config of a launch."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.used.add(described(arrangement))
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump({**self.sections, "parallel": {"timeout_s": 120, **arrangement},
                                        "log_directory": str(self.runs)}))
        return path

    @property
    def runs(self) -> Path:
        """Where the folder of the run lies."""
        return self.folder / "runs"

    @property
    def run(self) -> Path | None:
        """The folder of the run; None before there is one."""
        return max(self.runs.glob("*/"), default=None)

    @property
    def checkpoints(self) -> list[Path]:
        """Those there are, the oldest first."""
        return [] if self.run is None else Checkpoints(self.run / "checkpoints").all()

    def lines(self) -> list[dict[str, Any]]:
        """Of ``metrics.jsonl``, without one that is just being written."""
        if self.run is None or not (path := self.run / "metrics.jsonl").exists():
            return []
        return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]

    def steps_done(self) -> int:
        """As far as its metrics say."""
        return max((line["step"] + 1 for line in self.lines() if "loss" in line), default=0)

    def resumes_from(self, step: int) -> None:
        """Note that a launch begins after so many steps, with an empty pipeline."""
        self.drained = [*(at for at in self.drained if at < step), step]

    def differences(self, progress: Callable[[int], None] = lambda step: None) -> list[str]:
        """Where the finished run is not what its oracle says: losses, evaluations, weights, and what it left.

        Args:
            progress: told before every batch how many steps the oracle has come to.
        """
        job = Job.from_config(load_config(self.folder / "config.yaml"))
        # The oracle of an evaluation codes nothing; what the pipeline's codes there has no state, and changes none.
        compared = self.evaluations and job.config.parallel.compress == "none"
        lines, trajectory = self.lines(), Trajectory() if compared else None
        oracle = self._oracle(job, trajectory, progress)
        updates = [line for line in lines if "loss" in line]
        found = []
        if [line["step"] for line in updates] != list(range(self.steps)):
            found.append(f"the steps in metrics.jsonl are {_spans([line['step'] for line in updates])}")
        found += [f"the loss of step {step} is {line['loss']!r}, the oracle's {theirs!r}"
                  for step, (line, theirs) in enumerate(zip(updates, oracle.losses, strict=False))
                  if line["loss"] != theirs][:3]
        found += self._evaluations_missed([line["step"] + 1 for line in lines if "evaluation_loss" in line])
        for line in lines:
            if trajectory is not None and "evaluation_loss" in line:
                batches = job.evaluation_batches(tuple(job.dataset.fields))
                theirs = evaluate_oracle(job.model, trajectory.values[line["step"]], batches,
                                         job.config.training.num_microbatches)
                if line["evaluation_loss"] != theirs:
                    found.append(f"the evaluation after step {line['step']} gave {line['evaluation_loss']!r}, the "
                                 f"oracle's {theirs!r}")
        return found + self._left(oracle.state)

    def _evaluations_missed(self, found: Sequence[int]) -> list[str]:
        """Whether the run was evaluated after other steps than it had to be; one that a signal ends may leave out the
        last.

        Args:
            found: steps that were done, in the order of the lines.
        """
        every = self.sections["training"]["evaluate_every"]
        due = [*range(every, self.steps, every), self.steps]
        stopped = self.sections["training"]["max_steps"] > self.steps
        if list(found) == due or (stopped and list(found) == due[:-1]):
            return []
        return [f"there are {len(found)} evaluations instead of {len(due)}; of those that were due, the ones after "
                f"steps {sorted(set(due) - set(found))[:8]} are missing"]

    def _left(self, state: Mapping[str, Tensor]) -> list[str]:
        """What is wrong with the last checkpoint and the folder."""
        assert self.run is not None
        root = self.run / "checkpoints"
        last = root / f"step-{self.steps}"
        if not last.is_dir():
            return [f"there is no {last.name}, but {[path.name for path in self.checkpoints]}"]
        found = [f"{path.name}: {damage}" for path in self.checkpoints for damage in Checkpoint.open(path).damage()]
        found += [f"{path.name} was left behind" for path in self.run.rglob("*.tmp")]
        if (root / "latest").read_text().strip() != last.name:
            found.append(f"latest says {(root / 'latest').read_text()!r}")
        ours = {name.removeprefix("model."): value for file in last.glob("*.safetensors")
                for name, value in load_file(file).items() if name.startswith("model.")}
        if set(ours) != set(state):
            found.append(f"the checkpoint and the oracle do not both hold {sorted(set(ours) ^ set(state))[:4]}")
        return found + [f"weight '{name}' is not the oracle's" for name in sorted(set(ours) & set(state))
                        if not torch.equal(ours[name], state[name])][:3]

    def _oracle(self, job: Job, trajectory: Trajectory | None, progress: Callable[[int], None]) -> ReferenceRun:
        parallel, training = job.config.parallel, job.config.training
        per_step, partition = job.schedule.assignment.per_step, job.cut.partition

        def batches() -> Iterator[Mapping[str, Tensor]]:
            count = -(-self.steps * per_step // training.num_microbatches)
            for number, batch in enumerate(islice(job.training_batches(tuple(job.dataset.fields)), count)):
                progress(number * training.num_microbatches // per_step)
                yield batch

        codecs = parallel.transfers.codecs(len(partition))
        cross = CutCompression(job.model, partition, job.schedule.placement, codecs,
                               training.seed) if set(codecs) - {"none"} else TrainingRecipe.compress
        recipe = TrainingRecipe(job.optimizer.from_named, training.num_microbatches, training.seed, job.lr_policy(),
                          training.grad_clip, trajectory, cross, training.on_nan == "skip")
        if job.schedule.flush:
            return flush_oracle(job.model, batches(), recipe)
        drains = {*range(0, self.steps, SAVE_EVERY), *range(0, self.steps, EVALUATE_EVERY), *self.drained}
        return asynchronous_oracle(job.model, batches(), recipe, partition, job.schedule.update_every,
                                   sorted(step * per_step for step in drains), version_rule(
                                       parallel.schedule, job.schedule.warmup),
                                   [len(ranks) for ranks in job.schedule.placement])


def described(arrangement: Arrangement) -> str:
    """An arrangement in few words."""
    words = [str(arrangement["schedule"]), str(arrangement["partition"]).replace(" ", "")]
    if widths := arrangement.get("stage_to_rank_map"):
        words.append("x".join(str(len(ranks)) for ranks in widths.values()) + " replicas")
    if arrangement.get("recompute"):
        words.append(f"recompute {arrangement['recompute']}")
    if arrangement.get("compress", "none") != "none":
        words.append(str(arrangement["compress"]))
    return " ".join(words)


def long_runs(folder: Path, draw: random.Random) -> Sequence[LongRun]:
    """Draw a long run of each kind."""
    seed = draw.randrange(2**31)

    def sections(microbatches: int, **training: Any) -> dict[str, dict[str, Any]]:
        tied = training.pop("tied", False)
        optimizer = draw.choice(["sgd", "adam", "adamw", "lamb"])
        return {
            "model": {"name": "bert", "preset": "tiny", "num_layers": (LAYERS - 1) // 2, "hidden_size": 32,
                      "sequence_length": 32, "vocab_size": 64, "tie_weights": tied},
            "dataset": {"name": "synthetic", "batch_size": 16, "samples": 160},
            "training": {"learning_rate": 0.01, "max_steps": 0, "num_microbatches": microbatches, "seed": seed,
                         "optimizer": optimizer, "lr_policy": "cosine", "warmup_steps": 5, "grad_clip": 1.0,
                         "on_nan": draw.choice(["stop", "skip"]), "evaluate_every": EVALUATE_EVERY,
                         "evaluation_batches": 1, **training},
            "checkpoint": {"every_steps": SAVE_EVERY, "keep": 3}}

    def made(name: str, parts: dict[str, dict[str, Any]], arrangements: Sequence[Arrangement], steps: int) -> LongRun:
        parts["training"]["max_steps"] = steps
        return LongRun(name, folder / f"{name.replace(' ', '-')}-{seed:x}", parts, arrangements, steps)

    def cut(stages: int) -> list[int]:
        cuts = sorted(draw.sample(range(1, LAYERS), stages - 1))
        return [end - start for start, end in zip([0, *cuts], [*cuts, LAYERS], strict=True)]

    flush = [{"schedule": schedule, "partition": cut(stages), "recompute": draw.choice([0.0, 0.0, 0.5, 1.0])}
             for schedule, most in (("1f1b", 4), ("gpipe", 3), ("zb_h1", 4)) for stages in range(1, most + 1)
             if stages > 1 or schedule == "1f1b"]
    flush += [{"schedule": "interleaved", "partition": cut(4), "recompute": draw.choice([0.0, 0.5]), "chunks": 2}]
    # Of two microbatches the sum is the same in any order: so widths may change, too, and no bit does.
    wide = [{"schedule": schedule, "partition": cut(len(ranks)), "recompute": draw.choice([0.0, 0.5]),
             "stage_to_rank_map": {str(stage): own for stage, own in enumerate(ranks)}}
            for schedule in ("1f1b", "gpipe") for ranks in ([[0, 1]], [[0], [1, 2]], [[0, 1], [2]], [[0], [1], [2]])]
    stream = {"schedule": "pipedream", "partition": cut(draw.choice([2, 3])), "recompute": draw.choice([0.0, 0.5]),
              "compress": draw.choice(["none", "int8"])}
    double = {"schedule": "2bw", "partition": cut(3), "update_every": 4}
    return [made("flush", sections(4), flush, 96), made("pipedream", sections(2, tied=True), [stream], 96),
            made("replicas", sections(2), wide, 96), made("2bw", sections(4, tied=True), [double], 48)]


def _spans(numbers: Sequence[int]) -> str:
    """0..7, 9..12: where consecutive numbers begin and end."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}..{last}" for first, last in spans[:8])
