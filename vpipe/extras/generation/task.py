"""Generate the texts of several prompts, in this process or on ranks, and print them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from vpipe import accelerator
from vpipe.app.data.tokenizers import load_tokenizer
from vpipe.app.errors import StartError
from vpipe.app.progress import print_line, progress
from vpipe.checkpoint import Manifest
from vpipe.distributed import join_world, watch
from vpipe.errors import UserError, counted
from vpipe.extras.generation.decoding import Chosen, Decoding, Request
from vpipe.extras.generation.pipelined_decoding import GenerationRank, in_flight
from vpipe.extras.generation.sampled_checkpoint import SampledCheckpoint
from vpipe.extras.generation.stage_decoder import DecoderModel
from vpipe.extras.generation.text_model import ChosenTokens, line_of, texts, translation_request
from vpipe.runtime import Ring

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TASK = "sample.json"


@dataclass(frozen=True)
class GenerationTask:
    """What is generated, as the command hands it to its ranks.

    Attributes:
        folder: of the checkpoint.
        length: most tokens that the model reads at once.
        tokenizer: file of the tokenizer.
        partition: layers of each rank.
        threads: of each process.
        prompts: texts.
        ids: of each of them; of a blank line to translate none.
        translates: whether they are sources to translate.
    """

    folder: str
    length: int
    tokenizer: str
    partition: tuple[int, ...]
    threads: int
    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    decoding: Decoding
    translates: bool

    def save(self, folder: Path) -> None:
        """Write it into a folder for the ranks."""
        (folder / _TASK).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> GenerationTask:
        """Read what :meth:`save` wrote."""
        content = json.loads((folder / _TASK).read_text())
        content |= {"partition": tuple(content["partition"]), "prompts": tuple(content["prompts"]),
                    "ids": tuple(map(tuple, content["ids"])), "decoding": Decoding(**content["decoding"])}
        return cls(**content)

    @property
    def requests(self) -> list[Request]:
        return [translation_request(self.decoding, ids) if self.translates else Request(ids, self.decoding)
                for ids in self.ids if ids]

    def describe(self, rank: int) -> str:
        """Return ``rank 1 (stage 1)``."""
        return f"rank {rank} (stage {rank})"


def generate_alone(task: GenerationTask, checkpoint: SampledCheckpoint, tokenizer: Tokenizer) -> None:
    """Print the texts of a task, computed in this process."""
    torch.set_num_threads(task.threads)
    text = checkpoint.text_model(task.length, tokenizer)
    _show(task, tokenizer, DecoderModel(text.model).cached, text.choices(task.requests))


def generate_rank(folder: Path, rank: int, arguments: Sequence[str]) -> None:
    """Run a rank of the task in a folder; rank 0 prints the texts.

    Raises:
        StartError: what a user can mend; no training is lost, as in one process.
    """
    try:
        _generate(folder, rank)
    except UserError as error:
        raise StartError.all_of(error.problems) from None


def _generate(folder: Path, rank: int) -> None:
    task = GenerationTask.load(folder)
    torch.set_num_threads(task.threads)
    path, ranks = Path(task.folder), len(task.partition)
    checkpoint = SampledCheckpoint.from_manifest(path, Manifest.load(path))
    layers = checkpoint.model(task.length).split(task.partition)[rank].layers
    if rank == 0:
        checkpoint.introduce()
    requests, device = task.requests, torch.device("cpu")
    at_once = in_flight(ranks, len(requests))
    stage = checkpoint.stage(task.length, layers, accelerator.free_bytes(device) / (ranks * at_once))
    join_world("gloo", checkpoint.timeout_s, "cpu")
    ring = Ring.join(ranks, checkpoint.timeout_s, at_once, task.describe)
    show = partial(_show, task, load_tokenizer(Path(task.tokenizer)), stage.cached)
    with watch.activity.during("generating text"):
        member = GenerationRank(stage, ring, requests)
        if rank == 0:
            show(member.lead())
        else:
            member.follow()
        ring.finish()


def _show(task: GenerationTask, tokenizer: Tokenizer, cached: bool, choices: Iterator[tuple[int, Chosen]]) -> None:
    """Print the texts in the order of their prompts, each as it comes; then how fast they came."""
    if not cached:
        print("a layer of the model has no method 'step': every token computes the whole text again "
              "(vpipe/extras/generation/docs/sample.md)", file=sys.stderr, flush=True)
    began, decoding = perf_counter(), task.decoding
    streams = decoding.beams is None and not task.translates
    if not streams:  # translations mostly end long before their most tokens
        choices = iter(progress(choices, "translating" if task.translates else "searching", unit=" tokens",
                                total=None if task.translates else len(task.prompts) * decoding.tokens))
    found = ChosenTokens(choices)
    numbers = count()
    for prompt, ids in zip(task.prompts, task.ids, strict=True):
        if not ids:
            print_line("")  # so that lines of sources and translations belong together
            continue
        number = next(numbers)
        if number and not task.translates:
            print()
        if streams:
            print(prompt, end="", flush=True)
            try:
                for piece in texts(tokenizer, ids, found.tokens(number), decoding.end):
                    print(piece, end="", flush=True)
            finally:  # before an error
                print(flush=True)
            continue
        for text in found.texts(number):
            score = f"{text.score:.4f}  " if decoding.best > 1 else ""
            print_line(score + (line_of(tokenizer, text) if task.translates else
                                prompt + "".join(texts(tokenizer, ids, iter(text.tokens), None))))
    for _ in choices:
        pass
    seconds = perf_counter() - began
    print(f"{counted(found.steps, 'token', commas=True)} in {seconds:.1f} s, {found.steps / seconds:,.0f} tokens/s, on "
          f"{counted(len(task.partition), 'rank')}"
          + (f", {counted(decoding.beams, 'beam')}" if decoding.beams else ""),
          file=sys.stderr, flush=True)
