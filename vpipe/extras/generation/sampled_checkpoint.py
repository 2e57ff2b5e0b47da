"""Read the model of a checkpoint, to generate texts with it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vpipe import Model
from vpipe.app.config.config import Config
from vpipe.app.data.tokenizers import ids_in
from vpipe.app.families.decoding import TRANSLATES
from vpipe.app.progress import byte_progress
from vpipe.app.train.checkpoint_model import CheckpointModel, checkpoint_config
from vpipe.checkpoint import Checkpoint, Manifest
from vpipe.errors import UserError, counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
    def from_manifest(cls, folder: Path, manifest: Manifest, run: Path) -> SampledCheckpoint:
        """Read what the manifest of ``folder`` says of the model of a ``run``. Raises UserError where that is wrong."""
        found = CheckpointModel.from_manifest(manifest, folder, run)
        return cls(folder, manifest, found, checkpoint_config(manifest))

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
        """Return the threads: those of the run's ranks; without a run 1, or as OMP_NUM_THREADS says."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        if self.config is not None:
            return self.config.training.threads
        return max(1, int(given)) if given.isdecimal() else 1

    def model(self, length: int) -> Model:
        """Return the model for texts of up to ``length`` tokens."""
        settings = replace(self.found.settings, packed=False)
        if self.config is None:  # tables of positions for all that it could read would be large
            settings = replace(settings, sequence_length=length)
        return self.found.family.model(settings)

    def load(self, length: int, tokenizer: Tokenizer) -> tuple[Model, nn.ModuleDict]:
        """Return the model for texts of up to ``length`` tokens, and its layers in fp32; print which checkpoint it is.

        Raises:
            UserError: the checkpoint is of another model, or cannot be read; the model has fewer tokens.
        """
        model, words, size = self.model(length), ids_in(tokenizer), self.found.settings.vocab_size
        if words > size:
            raise UserError(f"the tokenizer has {words:,} tokens, but the model only {size:,}",
                            hint="name the tokenizer.json that the model was trained with as --tokenizer")
        self.manifest.check_compatible(model, "its code has changed since: take the one that it was trained with")
        try:
            with byte_progress(f"reading {self.folder.name}") as progress:
                weights = Checkpoint(self.folder, self.manifest).weights(progress=progress)
        except UserError:
            if self.folder.exists():
                raise
            raise removed(self.folder) from None
        parameters = model.parameter_count()
        count = "parameters unknown" if parameters is None else counted(parameters, "parameter", commas=True)
        print(f"{self.folder}: {self.found.name}, {count}, after step {self.manifest.step:,}", file=sys.stderr,
              flush=True)
        draws = not self.found.family.factory.__module__.startswith("vpipe.")
        return model, model.with_weights(weights, self.manifest.seed, draws).float()


def removed(folder: Path) -> UserError:
    """Return the error that a run has removed a checkpoint in favour of newer ones."""
    return UserError(f"the checkpoint '{folder}' was removed while it was read, as a run does that keeps a few",
                     hint="do it again; a run keeps more of them with a larger checkpoint.keep")
