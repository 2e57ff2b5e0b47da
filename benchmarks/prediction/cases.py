"""What is trained: a BERT and a GPT-like stack, small enough for two cores, under several schedules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "throughput"))

from machine import busy_s, description
from model import TOKENS, VOCABULARY, adamw, gpt

from vpipe import Model
from vpipe.app.families.bert import BertConfig, bert

__all__ = ["CASES", "SETTINGS", "Case", "Setting", "adamw", "busy_s", "description"]

PREDICTIONS = 20
DIFFERENT = 4
"""Batches, over and over."""

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and samples for it.

    Attributes:
        model: makes it.
        fields: so many samples.
        samples: of a microbatch.
    """

    model: Callable[[], Model]
    fields: Callable[[int, torch.Generator], Batch]
    samples: int

    def microbatch(self) -> Batch:
        """One, for the profile."""
        return self.fields(self.samples, torch.Generator().manual_seed(2))

    def batches(self, microbatches: int) -> Iterator[Batch]:
        """Without an end."""
        generator = torch.Generator().manual_seed(1)
        made = [self.fields(self.samples * microbatches, generator) for _ in range(DIFFERENT)]
        while True:
            yield from made


@dataclass(frozen=True)
class Setting:
    """A schedule, and what it recomputes.

    Attributes:
        recompute: share of every stage's layers.
        update_every: microbatches per update of one without a flush.
    """

    schedule: str
    recompute: float
    update_every: int | None = None

    def __str__(self) -> str:
        return f"{self.schedule}{f', recompute {self.recompute:g}' if self.recompute else ''}"


def _bert() -> Model:
    return bert(BertConfig.preset("mini", vocab_size=VOCABULARY, max_position_embeddings=TOKENS))


def _bert_fields(samples: int, generator: torch.Generator) -> Batch:
    def numbers(end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=generator)

    return {"input_ids": numbers(VOCABULARY, samples, TOKENS), "segment_ids": numbers(2, samples, TOKENS),
            "input_mask": torch.ones(samples, TOKENS, dtype=torch.int64),
            "masked_lm_positions": numbers(TOKENS, samples, PREDICTIONS),
            "masked_lm_ids": 1 + numbers(VOCABULARY - 1, samples, PREDICTIONS),
            "next_sentence_labels": numbers(2, samples)}


def _gpt_fields(samples: int, generator: torch.Generator) -> Batch:
    ids, labels = torch.randint(VOCABULARY, (2, samples, TOKENS), generator=generator)
    return {"ids": ids, "labels": labels}


CASES = {"bert": Case(_bert, _bert_fields, 4), "gpt": Case(gpt, _gpt_fields, 2)}

SETTINGS = [Setting(schedule, recompute, every) for schedule, every in (("1f1b", None), ("gpipe", None),
                                                                        ("zb_h1", None), ("pipedream", 4))
            for recompute in (0.0, 0.5 if every is None else 1.0)]
