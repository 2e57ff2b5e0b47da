"""Show what a translation model has learnt: BLEU of held-out pairs, and some of them, before training and after it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from vpipe.app.data.tokenizers import END, PADDING, ids_in, load_tokenizer, token_id
from vpipe.app.families.decoding import Decoding, TextDecoder
from vpipe.app.train.job import Job
from vpipe.app.train.observers import Observer, Run
from vpipe.app.visualize.table import printable
from vpipe.errors import counted
from vpipe.extras.translation.length_buckets import SOURCE_IDS, SOURCE_MASK, PairDataset

MOST_PAIRS, _AT_ONCE = 256, 64
"""Held-out pairs that are translated, and how many at once."""

_SHOWN, _FEWEST_WORDS = 4, 3


log = logging.getLogger("vpipe")


class Translations(Observer):
    """Translate held-out pairs at the end of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @classmethod
    def of_run(cls, run: Run) -> Self | None:
        """Return an observer of a model that translates, where the texts of held-out pairs are there."""
        dataset = run.job.dataset
        translates = SOURCE_IDS in run.job.model.batch and isinstance(dataset, PairDataset) and dataset.held_out
        return cls(run) if translates else None

    def finish(self) -> None:
        weights = self._run.pipe.state_dict()  # all ranks take part
        if self._run.pipe.rank == 0:
            for line in translation_lines(self._run.job, weights, self._run.metrics.steps):
                log.info("%s", line.strip())
                print(line, flush=True)


def translation_lines(job: Job, weights: Mapping[str, Tensor], steps: int) -> Iterator[str]:
    """Yield lines with BLEU of the first held-out pairs by greedy decoding, and with some of them.

    Args:
        weights: of the whole model after ``steps`` steps, as :meth:`vpipe.Pipeline.state_dict` returns them.
    """
    dataset, seed = job.dataset, job.config.training.seed
    assert isinstance(dataset, PairDataset), "asked for of pairs alone"
    pairs, after = dataset.held_out[:MOST_PAIRS], f"after {counted(steps, job.step_name)}"
    states = {"before training": job.model.materialize(seed).eval(),
              after: job.model.with_weights(weights, seed, draw=True).float()}
    texts = {"source": [source for source, _ in pairs], "reference": [target for _, target in pairs],
             **{when: _translations(job, dataset, modules, len(pairs)) for when, modules in states.items()}}
    found_bleu = {name: bleu(found, texts["reference"]) for name, found in texts.items()}
    scores = {name: found.score for name, found in found_bleu.items() if found is not None}
    how = f"of {counted(len(pairs), 'held-out pair')}, translated greedily"
    if (reference := found_bleu["reference"]) is None:
        yield f"\nno BLEU {how}: it needs sacrebleu (pip install vpipe[bleu])"
    else:
        yield (f"\nBLEU {how}: {scores[after]:.1f}; before training {scores['before training']:.1f}, the source as it "
               f"is {scores['source']:.1f} ({reference.signature})")
    shown = [number for number, (source, _) in enumerate(pairs) if len(source.split()) >= _FEWEST_WORDS][:_SHOWN]
    width = max(map(len, texts))
    for number in shown:
        yield "\n" + "\n".join(f"{name:{width}}  {printable(found[number])}" for name, found in texts.items())


class Bleu(NamedTuple):
    """The BLEU of a corpus, 0 to 100, and the signature by which sacrebleu says what it computed."""

    score: float
    signature: str


def bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu | None:
    """Return the BLEU of a corpus (Post 2018, arXiv:1804.08771); None without sacrebleu.

    Words are those of the references' script: sacrebleu's ``zh`` for Chinese, characters where a script has no spaces,
    else ``13a``.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        return None
    metric = BLEU(tokenize=_words_of("".join(references)))
    score = metric.corpus_score(list(translations), [list(references)])
    return Bleu(float(score.score), str(metric.get_signature()))


_WITHOUT_SPACES = {"char": re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff]"),  # Thai to Khmer, kana
                   "zh": re.compile("[\u3400-\u9fff]")}


def _words_of(text: str) -> str:
    """Return sacrebleu's tokenizer for the script of a text: one that over a tenth of its letters are of."""
    letters = sum(map(str.isalpha, text))
    return next((name for name, script in _WITHOUT_SPACES.items() if 10 * len(script.findall(text)) > letters), "13a")


def _translations(job: Job, dataset: PairDataset, modules: nn.ModuleDict, count: int) -> list[str]:
    """Translate the first ``count`` held-out pairs."""
    assert job.tokenizer_path is not None, "pairs have one"
    tokenizer = load_tokenizer(job.tokenizer_path)
    most, start = job.config.model.sequence_length, token_id(tokenizer, PADDING)
    decoding = Decoding(most, ids_in(tokenizer), token_id(tokenizer, END), barred=start, temperature=0)
    decoder, found = TextDecoder(job.model, modules, most), list[str]()
    for first in range(0, count, _AT_ONCE):
        rows = torch.arange(first, min(count, first + _AT_ONCE)).numpy()
        sources = dataset.batch("test", rows, (SOURCE_IDS, SOURCE_MASK))
        found += tokenizer.decode_batch(decoder.texts(torch.full((len(rows), 1), start), decoding, sources))
    return found
