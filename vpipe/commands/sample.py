"""Run ``vpipe sample``: continue a text with the model of a checkpoint, or fill in its masked words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vpipe.checkpoint.export import weights_of
from vpipe.checkpoint.load import check_compatible
from vpipe.checkpoint.manifest import Manifest
from vpipe.commands.checkpoint import checkpoints_in
from vpipe.data.tokenizers import CLS, MASK, SEP, end_token, ids_in, load_tokenizer, load_wordpiece, token_id
from vpipe.errors import UserError, counted, counted_with_commas
from vpipe.model.generate import WholeForward, fill_masks, generate, load_weights
from vpipe.model.layer import Model
from vpipe.progress import byte_progress
from vpipe.train.checkpoint_model import CheckpointModel, checkpoint_config, data_tokenizer, has_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS, TEMPERATURE, CANDIDATES = 100, 0.8, 5
"""Defaults of ``--tokens`` and ``--temperature``; most probable words that are shown for a mask."""

_CUT = "\ufffd"
"""Stands for bytes that are no character yet: the next tokens complete it."""


def run_sample(options: argparse.Namespace) -> None:
    """Print a continuation of the prompt as it comes, or for BERT the most probable words of every mask."""
    _check(options)
    prompt = _prompt(options.prompt)
    checkpoint = _Checkpoint.find(options.folder, options.step)
    tokenizer = checkpoint.tokenizer(options.tokenizer)
    if checkpoint.found.name == "bert":
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

    def load(self, length: int) -> tuple[Model, nn.ModuleDict]:
        """Return the model for texts of up to ``length`` tokens, and its layers with their weights."""
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
        return model, modules.float()


def _continue(options: argparse.Namespace, checkpoint: _Checkpoint, tokenizer: Tokenizer, prompt: str) -> None:
    end = end_token(tokenizer)
    ids = _ids(tokenizer, prompt, end, own_beginning=options.tokenizer is not None)
    most = TOKENS if options.tokens is None else options.tokens
    window = checkpoint.window
    model, modules = checkpoint.load(min(window, len(ids) + most))
    tokens = generate(WholeForward(model, modules, window), ids, _vocabulary(checkpoint, tokenizer),
                      temperature=TEMPERATURE if options.temperature is None else options.temperature,
                      top_k=options.top_k, seed=options.seed or 0)
    print(prompt, end="", flush=True)
    for piece in texts(tokenizer, ids, islice(tokens, most), None if end is None else end[1]):
        print(piece, end="", flush=True)
    print()


def _ids(tokenizer: Tokenizer, prompt: str, end: tuple[str, int] | None, own_beginning: bool) -> list[int]:
    """Return the tokens of the prompt, after the token that begins a text.

    In training that is the one that ends the text before it. A tokenizer of other weights may add its own.
    """
    tokenizer.encode_special_tokens = True  # as in training: a text that spells such a token means its letters
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    marked: list[int] = tokenizer.encode(prompt).ids if own_beginning else ids
    if len(marked) > len(ids) and marked[len(marked) - len(ids):] == ids:
        return marked
    if end is not None:
        return [end[1], *ids]
    if not ids:
        raise UserError("the prompt is empty, and the tokenizer has no token that begins a text",
                        hint="give a --prompt")
    return ids


def texts(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[int], end: int | None) -> Iterator[str]:
    """Yield the text of tokens as they come, up to the end of the text; a character that is cut waits for its rest."""
    ids, shown = list(prompt), len(tokenizer.decode(list(prompt)))
    text = ""
    for token in tokens:
        if token == end:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(_CUT):
            yield text[shown:]
            shown = len(text)
    yield text[shown:]


def _fill(options: argparse.Namespace, checkpoint: _Checkpoint, tokenizer: Tokenizer, prompt: str) -> None:
    given = [f"--{name}" for name in ("tokens", "temperature", "seed") if getattr(options, name) is not None]
    if given:
        raise UserError(f"{' and '.join(given)} cannot be given for BERT, which fills in masks and chooses nothing",
                        hint="leave it out; --top-k is the number of words that are shown")
    encoding = tokenizer.encode(prompt, add_special_tokens=False)
    mask = token_id(tokenizer, MASK)
    ids = [token_id(tokenizer, CLS), *encoding.ids, token_id(tokenizer, SEP)]
    masked = [position for position, token in enumerate(ids) if token == mask]
    if not masked:
        raise UserError(f"the prompt has no {MASK}, and BERT fills in masked words alone",
                        hint=f'write {MASK} for a word, such as --prompt "The {MASK} of a list"')
    if len(ids) > (window := checkpoint.window):
        raise UserError(f"the prompt has {counted(len(ids), 'token')} with the two around it, but the model reads "
                        f"{window}", hint="shorten it")
    model, modules = checkpoint.load(len(ids))
    probabilities = fill_masks(model, modules, ids, masked, _vocabulary(checkpoint, tokenizer))
    best = probabilities.topk(min(options.top_k or CANDIDATES, probabilities.shape[1]))
    for number, (shares, tokens) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True), 1):
        words = [f"{tokenizer.id_to_token(token)} {share:.1%}" for share, token in zip(shares, tokens, strict=True)]
        print(f"{MASK} {number}: {', '.join(words)}")
    for position, tokens in zip(masked, best.indices.tolist(), strict=True):
        ids[position] = tokens[0]
    print(tokenizer.decode(ids[1:-1]))


def _vocabulary(checkpoint: _Checkpoint, tokenizer: Tokenizer) -> int:
    """Return one more than the largest id of the tokenizer, which the model must have."""
    words, size = ids_in(tokenizer), checkpoint.found.settings.vocab_size
    if words > size:
        raise UserError(f"the tokenizer has {words:,} tokens, but the model only {size:,}",
                        hint="name the tokenizer.json that the model was trained with as --tokenizer")
    return words
