"""Show at the end of a run what the model makes of ``training.sample_prompts``, before its training and after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from textwrap import indent
from typing import Self

from torch import Tensor

from vpipe.app.data.tokenizers import load_tokenizer, load_wordpiece
from vpipe.app.families.decoding import TextDecoder
from vpipe.app.families.registry import family_named
from vpipe.app.train.job import Job
from vpipe.app.train.model_section import model_settings
from vpipe.app.train.observers import Observer, Run
from vpipe.app.visualize.table import printable
from vpipe.errors import UserError, counted
from vpipe.extras.generation.continuation import continuation, prompt_ids
from vpipe.extras.generation.masked_words import BERT, fill_text, masked_ids

_TOKENS = 64
_TEMPERATURE = 0.5  # lower than that of vpipe sample: a short training makes likely words alone


class Samples(Observer):
    """Continue the prompts of a run at its end."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @classmethod
    def check(cls, job: Job) -> None:
        """Check that the model can do something with the prompts."""
        training, name, what = job.config.training, job.config.model.name, "training.sample_prompts are given, but"
        if not training.sample_prompts:
            return
        if job.tokenizer_path is None:
            raise UserError(f"{what} the data set '{job.config.dataset.name}' has no tokenizer",
                            hint="leave them out (training.sample_prompts=[]), or train on texts")
        if name == BERT:
            tokenizer = load_wordpiece(job.tokenizer_path)
            for prompt in training.sample_prompts:
                masked_ids(tokenizer, prompt, job.config.model.sequence_length)
        elif not job.learns_next_tokens:
            raise UserError(f"{what} the model '{name}' predicts neither next nor masked tokens", hint="leave them out")

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        return cls(run) if run.job.config.training.sample_prompts else None

    def finish(self) -> None:
        weights = self._run.pipe.state_dict()  # all ranks take part
        if self._run.pipe.rank == 0:
            for line in sample_lines(self._run.job, weights, self._run.metrics.steps):
                print(line, flush=True)


def sample_lines(job: Job, weights: Mapping[str, Tensor], steps: int) -> Iterator[str]:
    """Yield lines with what the model makes of the prompts, before its training and after it.

    Args:
        weights: of the whole model after ``steps`` steps, as :meth:`vpipe.Pipeline.state_dict` returns them.
    """
    training, window = job.config.training, job.config.model.sequence_length
    assert job.tokenizer_path is not None, "checked"
    section, model = job.config.model, job.model
    if section.packed:  # a prompt is a sample of one text
        model = family_named(section.name).model(replace(model_settings(section), packed=False))
    masks = section.name == BERT
    tokenizer = (load_wordpiece if masks else load_tokenizer)(job.tokenizer_path)
    trained = model.with_weights(weights, training.seed, draw=True).float()
    states = {"before training": model.materialize(training.seed).eval(),
              f"after {counted(steps, job.step_name)}": trained}
    for prompt in training.sample_prompts:
        yield ""
        for when, modules in states.items():
            if masks:
                filled = fill_text(model, modules, tokenizer, masked_ids(tokenizer, prompt, window))
                found = "\n".join([prompt, *filled[:-1]])
            else:
                found = prompt + "".join(continuation(
                    TextDecoder(model, modules, window), tokenizer, prompt_ids(tokenizer, prompt), _TOKENS,
                    seed=training.seed, temperature=_TEMPERATURE))
            yield f"{when}:\n{indent(printable(found), '    ')}"
