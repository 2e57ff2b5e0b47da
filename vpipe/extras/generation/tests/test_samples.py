"""``training.sample_prompts``: what a run shows at its end, and what is refused before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import job_of

from vpipe.app.families.bert import BertConfig, bert
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.errors import UserError
from vpipe.extras.generation.masked_words import fill_masks

LINE = "The cat sat on the mat. The dog sat on the log."
GPT = {"model__name": "gpt", "model__preset": None, "model__num_layers": 1, "model__num_heads": 2,
       "model__hidden_size": 32, "model__dropout": 0.0, "training__learning_rate": 0.01}


def text_job(folder: Path, prompts: list[str], **changes: Any) -> Job:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n\n".join(f"{LINE} {LINE} It has {number % 3}." for number in range(80)))
    (folder / "run").mkdir()
    return job_of(folder, dataset__name="text", dataset__path=str(folder / "text"), dataset__samples=None,
                  dataset__cache_directory=str(folder / "cache"), model__vocab_size=-1,
                  parallel__model_parallel_size=1, training__num_microbatches=1,
                  training__sample_prompts=prompts, **changes)


def test_a_run_ends_with_its_prompts_continued_before_and_after(tmp_path: Path,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    job = text_job(tmp_path, ["The cat sat"], training__max_steps=60, **GPT)
    train(job, tmp_path / "run")
    shown = capsys.readouterr().out
    text = job.held_out_text
    assert text is not None
    assert f"\nheld out: {text.tokens:,} tokens of {text.bytes / text.tokens:.2f} bytes, unigram entropy " in shown
    assert " bits per byte\nthat is " in shown
    assert f"below the unigram entropy of the held-out text, {text.unigram_entropy:.2f}\n" in shown
    before, after = shown.split("\n\nbefore training:\n")[1].split("after 60 updates:\n")
    assert before.startswith("    The cat sat")
    assert "on the mat" not in before
    assert after.startswith("    The cat sat on the ")
    assert len(after.splitlines()) <= 10


def test_a_mask_has_probabilities_of_words_at_its_place() -> None:
    model = bert(BertConfig(40, 16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16))
    found_pv = fill_masks(model, model.materialize(3).eval(), [2, 4, 9, 4, 3], [1, 3], 38)
    assert found_pv.shape == (2, 38)
    assert torch.allclose(found_pv.sum(1), torch.ones(2, dtype=found_pv.dtype))
    assert not torch.equal(found_pv[0], found_pv[1])


def test_bert_fills_in_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = text_job(tmp_path, ["The [MASK] sat"], training__max_steps=2)
    train(job, tmp_path / "run")
    before, after = capsys.readouterr().out.split("before training:\n")[1].split("after 2 updates:\n")
    for shown in (before, after):
        assert shown.startswith("    The [MASK] sat\n    [MASK] 1: ")
        assert shown.count("%") == 5


def test_prompts_that_nobody_can_continue_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the data set 'synthetic' has no tokenizer"):
        job_of(tmp_path, training__sample_prompts=["the [MASK]"])
    with pytest.raises(UserError, match=r"the prompt has no \[MASK\]"):
        text_job(tmp_path, ["the cat"])
