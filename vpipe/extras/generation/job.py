"""Generate the texts of several prompts with the model of a checkpoint: in this process, or on ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from vpipe import Model, accelerator
from vpipe.app.config.config import Config
from vpipe.app.data.tokenizers import ids_in, load_tokenizer
from vpipe.app.progress import byte_progress, print_line, progress
from vpipe.app.train.checkpoint_model import CheckpointModel, checkpoint_config
from vpipe.checkpoint import Checkpoint, Manifest
from vpipe.distributed import join_world, watch
from vpipe.errors import UserError, counted
from vpipe.extras.generation.generate import (
    TRANSLATES,
    Chosen,
    DecoderModel,
    Decoding,
    Request,
    StageDecoder,
)
from vpipe.extras.generation.pipelined import GenerationRank, in_flight
from vpipe.extras.generation.sampling import ChosenTokens, TextModel, line_of, texts, translation_request
from vpipe.runtime import Ring

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TASK = "sample.json"
_TIMEOUT_S = 60.0
"""Of transfers, with weights of no run."""


@dataclass(frozen=True)
class SampledCheckpoint:
    """A checkpoint whose model is known.

    Attributes:
        config: of the run that wrote it; None if no run did.
    """

    folder: Path
    manifest: Manifest
    found: CheckpointModel
    config: Config | None

    @classmethod
    def from_manifest(cls, folder: Path, manifest: Manifest) -> SampledCheckpoint:
        """Read what the manifest of ``folder`` says of the model. Raises UserError where that is wrong."""
        return cls(folder, manifest, CheckpointModel.from_manifest(manifest, folder), checkpoint_config(manifest))

    @property
    def window(self) -> int:
        """Return the tokens of a sample of the run; of a model without one the positions that it has."""
        huggingface, settings = self.found.family.huggingface, self.found.settings
        assert settings.sequence_length is not None, "a config has one"
        if self.config is not None or huggingface is None:
            return settings.sequence_length
        sizes = huggingface.config(settings)
        positions = sizes.get("n_positions", sizes.get("max_position_embeddings"))
        return positions if isinstance(positions, int) else settings.sequence_length

    @property
    def translates(self) -> bool:
        """Return whether the model's text is the translation of a source."""
        return set(self.model(1).batch) == TRANSLATES

    @property
    def threads(self) -> int:
        """Return the threads of a process: those of the run's ranks; without a run 1, or as OMP_NUM_THREADS says."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        if self.config is not None:
            return self.config.training.threads
        return max(1, int(given)) if given.isdecimal() else 1

    @property
    def timeout_s(self) -> float:
        return _TIMEOUT_S if self.config is None else self.config.parallel.timeout_s

    def model(self, length: int) -> Model:
        """Return the model for texts of up to ``length`` tokens."""
        if self.config is not None:
            return self.found.model()
        # Tables of positions for all that it could read would be large.
        return self.found.family.factory(replace(self.found.settings, sequence_length=length))

    def check(self, length: int, tokenizer: Tokenizer) -> None:
        """Check that the checkpoint is of this model, for texts of up to ``length`` tokens of a tokenizer.

        Raises:
            UserError: it is not; or the model has fewer tokens than the tokenizer.
        """
        words, size = ids_in(tokenizer), self.found.settings.vocab_size
        if words > size:
            raise UserError(f"the tokenizer has {words:,} tokens, but the model only {size:,}",
                            hint="name the tokenizer.json that the model was trained with as --tokenizer")
        self.manifest.check_compatible(self.model(length), "its code has changed since: take the one that it was "
                                                           "trained with")

    def partition(self, ranks: int, length: int) -> tuple[int, ...]:
        """Return the layers of each rank: as in the run if it had as many stages, else balanced by their operations per
        token, or by parameters where the family does not count operations.

        Raises:
            UserError: there are more ranks than layers.
        """
        model = self.model(length)
        partition = None if self.config is None else self.config.parallel.partition
        if not isinstance(partition, str) and partition is not None and len(partition) == ranks:
            return tuple(partition)
        if ranks > len(model):
            raise UserError(f"--ranks is {ranks}, but the model has only {counted(len(model), 'layer')}",
                            hint=f"use {len(model)} ranks at most")
        flops = self.found.family.flops
        return model.balanced(ranks, None if flops is None else flops(
            replace(self.found.settings, sequence_length=length)))

    def text_model(self, length: int, tokenizer: Tokenizer) -> TextModel:
        """Return the whole model with its weights."""
        model = self.model(length)
        with self.kept(), byte_progress(f"reading {self.folder.name}") as progress:
            weights = Checkpoint(self.folder, self.manifest).weights(progress=progress, checked=True)
        self.introduce()
        return TextModel(model, model.with_weights(weights, self.manifest.seed, self._draws).float(), tokenizer,
                         length)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Say of a checkpoint that cannot be read, if it is so, that its run has removed it meanwhile."""
        try:
            yield
        except UserError:
            if self.folder.exists():
                raise
            raise removed(self.folder) from None

    def introduce(self) -> None:
        """Print which checkpoint it is."""
        parameters = self.model(1).parameter_count()
        size = "parameters unknown" if parameters is None else counted(parameters, "parameter", commas=True)
        print(f"{self.folder}: {self.found.name}, {size}, after step "
              f"{self.manifest.step:,}", file=sys.stderr, flush=True)

    @property
    def _draws(self) -> bool:
        return not self.found.family.factory.__module__.startswith("vpipe.")

    def stage(self, length: int, layers: range, free_bytes: float) -> StageDecoder:
        """Return layers of the model with their weights; no others are read. For ``free_bytes`` see StageDecoder."""
        model = self.model(length)
        names = {f"{model.layers[number].name}.{name}" for number in layers
                 for name in model.layers[number].outline(number).state_dict()
                 if name not in model.layers[number].ties}
        names |= {model.ties[f"{model.layers[number].name}.{own}"] for number in layers
                  for own in model.layers[number].ties}
        with self.kept():
            weights = Checkpoint(self.folder, self.manifest).weights(names, checked=True)
        modules = model.with_weights(weights, self.manifest.seed, self._draws, layers).float()
        return StageDecoder(DecoderModel(model), modules, length, layers, free_bytes)


def removed(folder: Path) -> UserError:
    """Return the error that a run has removed a checkpoint in favour of newer ones."""
    return UserError(f"the checkpoint '{folder}' was removed while it was read, as a run does that keeps a few",
                     hint="do it again; a run keeps more of them with a larger checkpoint.keep")


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


def generate_rank(folder: Path, rank: int) -> None:
    """Run a rank of the task in a folder; rank 0 prints the texts."""
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
        print("a layer of the model has no method 'step': every token computes the whole text again (docs/sample.md)",
              file=sys.stderr, flush=True)
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
