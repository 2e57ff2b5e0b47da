"""Run ``vpipe sample``: continue a text with the model of a checkpoint, or fill in its masked words."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.checkpoint.export import weights_of
from vpipe.checkpoint.load import check_compatible
from vpipe.checkpoint.manifest import Manifest
from vpipe.commands.checkpoint import checkpoints_in
from vpipe.data.tokenizers import ids_in, load_tokenizer, load_wordpiece
from vpipe.errors import UserError, counted_with_commas
from vpipe.model.generate import load_weights
from vpipe.progress import byte_progress
from vpipe.train.checkpoint_model import CheckpointModel, checkpoint_config, data_tokenizer, has_model
from vpipe.train.sampling import BERT, CANDIDATES, TEMPERATURE, TextModel, masked_ids, prompt_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS = 100
"""Default of ``--tokens``."""


def run_sample(options: argparse.Namespace) -> None:
    """Print a continuation of the prompt as it comes, or for BERT the most probable words of every mask."""
    _check(options)
    prompt = _prompt(options.prompt)
    checkpoint = _Checkpoint.find(options.folder, options.step)
    tokenizer = checkpoint.tokenizer(options.tokenizer)
    if checkpoint.found.name == BERT:
        _fill(options, checkpoint, load_wordpiece(tokenizer), prompt)
    else:
        _continue(options, checkpoint, load_tokenizer(tokenizer), prompt)


def _check(options: argparse.Namespace) -> None:
    for name, least in (("tokens", 1), ("top_k", 1), ("seed", 0), ("step", 0)):
        value = getattr(options, name)
        if value is not None and not least <= value < 2**63:
            raise UserError(f"--{name.replace('_', '-')} is {value}", hint=f"give a whole number, {least} or more")
    if options.temperature is not None and not 0 <= options.temperature < inf:
        raise UserError(f"--temperature is {options.temperature:g}",
                        hint="give a number from 0 (the most probable token) on, such as 0.8")


def _prompt(given: str) -> str:
    """Return the prompt; ``-`` reads it from standard input."""
    if given != "-":
        return given
    try:
        return sys.stdin.buffer.read().decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on standard input is not UTF-8 (byte {error.start})",
                        hint="convert it: iconv -f LATIN1 -t UTF-8") from None


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint whose model is known."""

    folder: Path
    manifest: Manifest
    found: CheckpointModel

    @classmethod
    def find(cls, folder: Path, step: int | None) -> _Checkpoint:
        """Return the newest checkpoint of a run, or that of a step.

        Raises:
            UserError: there is none, or it does not describe its model.
        """
        paths = checkpoints_in(folder)
        manifest = Manifest.load(path := paths[-1])
        if step is not None and manifest.step != step:
            loaded = {(one := Manifest.load(other)).step: (other, one) for other in paths}
            if step not in loaded:
                raise UserError(f"there is no checkpoint of step {step} in '{folder}'",
                                hint=f"give one of the steps {', '.join(map(str, sorted(loaded)))}")
            path, manifest = loaded[step]
        if not has_model(manifest):
            raise UserError(f"the checkpoint '{path}' does not say what model it is of: Pipeline.save wrote it",
                            hint="sample a run of 'vpipe train', or what 'vpipe checkpoint import' made")
        return cls(path, manifest, CheckpointModel.from_manifest(manifest, path))

    @property
    def window(self) -> int:
        """Return the tokens of a sample of the run; of a model without one the positions that it has."""
        trained, settings = checkpoint_config(self.manifest), self.found.settings
        assert settings.sequence_length is not None, "a config has one"
        huggingface = self.found.family.huggingface
        if trained is not None or huggingface is None:
            return settings.sequence_length
        sizes = huggingface.config(settings)
        positions = sizes.get("n_positions", sizes.get("max_position_embeddings"))
        return positions if isinstance(positions, int) else settings.sequence_length

    def tokenizer(self, given: Path | None) -> Path:
        """Return the ``tokenizer.json`` that is given, or that of the data of the run.

        Raises:
            UserError: there is none.
        """
        if given is not None:
            return given
        path, why = data_tokenizer(self.manifest)
        if path is None:
            raise UserError(f"there is no tokenizer for the checkpoint '{self.folder}': {why}",
                            hint="name a tokenizer.json with --tokenizer, such as the one beside imported weights")
        return path

    def load(self, length: int, tokenizer: Tokenizer) -> TextModel:
        """Return the model for texts of up to ``length`` tokens, with its weights.

        Raises:
            UserError: it has fewer tokens than the tokenizer.
        """
        words, size = ids_in(tokenizer), self.found.settings.vocab_size
        if words > size:
            raise UserError(f"the tokenizer has {words:,} tokens, but the model only {size:,}",
                            hint="name the tokenizer.json that the model was trained with as --tokenizer")
        if checkpoint_config(self.manifest) is None:  # tables of positions for all that it could read would be large
            settings = replace(self.found.settings, sequence_length=length)
            model = self.found.family.factory(settings)
        else:
            model = self.found.model()
        check_compatible(self.manifest, model, "its code has changed since: take the one that it was trained with")
        with byte_progress(f"reading {self.folder.name}") as progress:
            weights = weights_of(self.folder, self.manifest, progress, checked=True)
        own = self.found.family.factory.__module__.startswith("vpipe.")
        modules = load_weights(model, weights, self.manifest.seed, draw=not own)
        count = sum(weight.numel() for weight in weights.values())
        print(f"{self.folder}: {self.found.name}, {counted_with_commas(count, 'parameter')}, after step "
              f"{self.manifest.step:,}", file=sys.stderr, flush=True)
        return TextModel(model, modules.float(), tokenizer, length)


def _continue(options: argparse.Namespace, checkpoint: _Checkpoint, tokenizer: Tokenizer, prompt: str) -> None:
    ids = prompt_ids(tokenizer, prompt, own_beginning=options.tokenizer is not None)
    most = TOKENS if options.tokens is None else options.tokens
    text = checkpoint.load(min(checkpoint.window, len(ids) + most), tokenizer)
    print(prompt, end="", flush=True)
    for piece in text.continued(ids, most, temperature=TEMPERATURE if options.temperature is None else
                                options.temperature, top_k=options.top_k, seed=options.seed or 0):
        print(piece, end="", flush=True)
    print()


def _fill(options: argparse.Namespace, checkpoint: _Checkpoint, tokenizer: Tokenizer, prompt: str) -> None:
    given = [f"--{name}" for name in ("tokens", "temperature", "seed") if getattr(options, name) is not None]
    if given:
        raise UserError(f"{' and '.join(given)} cannot be given for BERT, which fills in masks and chooses nothing",
                        hint="leave it out; --top-k is the number of words that are shown")
    ids = masked_ids(tokenizer, prompt, checkpoint.window)
    print("\n".join(checkpoint.load(len(ids), tokenizer).filled(ids, options.top_k or CANDIDATES).lines()))
