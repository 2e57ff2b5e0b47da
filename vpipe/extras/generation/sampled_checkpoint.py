"""Read the model of a checkpoint, whole or by stages, to generate texts with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe import Model
from vpipe.app.config.config import Config
from vpipe.app.data.tokenizers import ids_in
from vpipe.app.progress import byte_progress
from vpipe.app.train.checkpoint_model import CheckpointModel, checkpoint_config
from vpipe.checkpoint import Checkpoint, Manifest
from vpipe.errors import UserError, counted
from vpipe.extras.generation.stage_decoder import TRANSLATES, DecoderModel, StageDecoder
from vpipe.extras.generation.text_model import TextModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TIMEOUT_S = 60.0
"""Timeout of transfers when weights come from no run."""


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
        settings = replace(self.found.settings, packed=False)
        if self.config is None:  # tables of positions for all that it could read would be large
            settings = replace(settings, sequence_length=length)
        return self.found.family.model(settings)

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
