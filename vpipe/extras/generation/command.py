"""Run ``vpipe sample``: continue texts with the model of a checkpoint, or fill in its masked words."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from vpipe import files
from vpipe.app.commands.checkpoint import checkpoints_in
from vpipe.app.data.plain_text import decoded, not_utf8
from vpipe.app.data.tokenizers import load_for_pairs, load_tokenizer, load_wordpiece
from vpipe.app.families.decoding import TextDecoder
from vpipe.app.progress import on_terminal, progress
from vpipe.app.train.checkpoint_model import data_tokenizer, has_model
from vpipe.app.train.run_folder import run_in
from vpipe.checkpoint import Manifest
from vpipe.errors import Problem, UserError, counted
from vpipe.extras.generation.continuation import continuation, prompt_ids, source_ids, translation
from vpipe.extras.generation.masked_words import BERT, CANDIDATES, fill_text, masked_ids
from vpipe.extras.generation.sampled_checkpoint import SampledCheckpoint, removed
from vpipe.units import size_text

TOKENS, TEMPERATURE = 100, 0.8
"""Defaults of ``--tokens`` and ``--temperature``."""

MOST_BYTES, MOST_PROMPTS, LONGEST_PROMPT = 16 << 20, 100_000, 1 << 20
"""Of prompts: bytes, number, and characters of one. Longer words take a tokenizer minutes and gigabytes."""

_TRIES = 3
"""To find the newest checkpoint of a run that replaces it meanwhile."""


def run_sample(options: argparse.Namespace) -> None:
    """Print a continuation of every prompt, or for BERT the most probable words of every mask."""
    _check(options)
    prompts = _prompts(options)
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) > LONGEST_PROMPT:
            raise UserError(f"prompt {number} has {len(prompt):,} characters", hint=f"give at most {LONGEST_PROMPT:,}: "
                            "the model reads the last few thousand tokens at most")
    options.folder = run_in(options.folder)
    checkpoint = _find(options.folder, options.step)
    tokenizer = _tokenizer(checkpoint, options.tokenizer, options.folder)
    if options.prompts is not None and not checkpoint.translates:
        prompts = [prompt for prompt in prompts if prompt.strip()]
    if checkpoint.found.name == BERT:
        _fill(options, checkpoint, tokenizer, prompts)
    else:
        _continue(options, checkpoint, tokenizer, prompts)


def _check(options: argparse.Namespace) -> None:
    problems = []
    for name in ("tokens", "top_k", "seed", "step"):
        value, least = getattr(options, name), int(name not in ("seed", "step"))
        if value is not None and not least <= value < 2**63:
            problems.append(Problem(f"--{name.replace('_', '-')} is {value}", "give a whole number, "
                                    + (f"{least} or more" if value < least else f"{least} to {2**63 - 1}")))
    if problems:
        raise UserError.all_of(problems)
    if options.temperature is not None and not 0 <= options.temperature < inf:
        raise UserError(f"--temperature is {options.temperature:g}",
                        hint="give a number from 0 (the most probable token) on, such as 0.8")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p is {options.top_p:g}", hint="give a share above 0, at most 1, such as 0.9")


def _prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts; ``-`` is standard input, as one prompt or as a file of one per line. Lines may be blank."""
    if options.prompts is None:
        return [_decoded(_standard_input(), "the prompt on standard input").rstrip("\n") if prompt == "-"
                else _decoded(os.fsencode(prompt), "the prompt") for prompt in options.prompt]
    where = "standard input" if str(options.prompts) == "-" else f"'{options.prompts}'"
    try:
        content = _standard_input() if str(options.prompts) == "-" else files.read_bounded(
            options.prompts, MOST_BYTES, "a file of prompts")
    except OSError as error:
        raise UserError(f"cannot read the prompts in {where}: {error.strerror}",
                        hint="name a file with a prompt per line as --prompts") from None
    text = _decoded(content, f"the file of prompts, {where},")
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not any(map(str.strip, lines)):
        raise UserError(f"there is no prompt in {where}", hint="write one per line")
    if len(lines) > MOST_PROMPTS:
        raise UserError(f"there are {len(lines):,} prompts in {where}",
                        hint=f"give at most {MOST_PROMPTS:,} at once: split -l {MOST_PROMPTS}")
    return lines


def _standard_input() -> bytes:
    content = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"standard input has more than {size_text(MOST_BYTES)}", hint="give the prompts in parts")
    return content


def _decoded(content: bytes, what: str) -> str:
    try:
        return decoded(content)
    except UnicodeDecodeError as error:
        raise not_utf8(what, error) from None


def _find(folder: Path, step: int | None) -> SampledCheckpoint:
    """Return the newest checkpoint of a run, or that of a step.

    Raises:
        UserError: there is none, or it does not describe its model.
    """
    for attempt in range(_TRIES):
        paths = checkpoints_in(folder)
        path = paths[-1]
        try:
            manifest = Manifest.load(path)
            break
        except UserError:
            if path.exists():
                raise
            if attempt == _TRIES - 1:
                raise removed(path) from None
    if step is not None and manifest.step != step:
        loaded = {(one := Manifest.load(other)).step: (other, one) for other in paths}
        if step not in loaded:
            raise UserError(f"there is no checkpoint of step {step} in '{folder}'",
                            hint=f"give one of the steps {', '.join(map(str, sorted(loaded)))}")
        path, manifest = loaded[step]
    if not has_model(manifest):
        raise UserError(f"the checkpoint '{path}' does not say what model it is of: Pipeline.save wrote it",
                        hint="sample a run of 'vpipe train', or what 'vpipe checkpoint import' made")
    return SampledCheckpoint.from_manifest(path, manifest, folder)


def _tokenizer(checkpoint: SampledCheckpoint, given: Path | None, run: Path) -> Path:
    """Return the ``tokenizer.json`` that is given, or that of the data of the run.

    Raises:
        UserError: there is none.
    """
    if given is not None:
        return given
    path, why = data_tokenizer(checkpoint.manifest, checkpoint.folder, run)
    if path is None:
        raise UserError(f"there is no tokenizer for the checkpoint '{checkpoint.folder}': {why}",
                        hint="name a tokenizer.json with --tokenizer, such as the one beside imported weights")
    return path


def _continue(options: argparse.Namespace, checkpoint: SampledCheckpoint, path: Path, prompts: Sequence[str]) -> None:
    """Print the texts of the prompts, then how fast they came."""
    translates, window = checkpoint.translates, checkpoint.window
    tokens = TOKENS if options.tokens is None else options.tokens
    if translates:
        tokenizer = load_for_pairs(path)
        if not any(map(str.strip, prompts)):
            raise UserError("there is nothing to translate", hint="give a sentence as --prompt")
        ids = [source_ids(tokenizer, prompt, window) if prompt.strip() else [] for prompt in prompts]
        tokens = min(tokens, window)
        length = max(tokens, *map(len, ids))
    else:
        tokenizer = load_tokenizer(path)
        ids = [prompt_ids(tokenizer, prompt, own_beginning=options.tokenizer is not None) for prompt in prompts]
        length = min(window, max(map(len, ids)) + tokens)
    torch.set_num_threads(checkpoint.threads)
    decoder = TextDecoder(*checkpoint.load(length, tokenizer), length)
    if not decoder.cached:
        print("a layer of the model has no method 'step': every token computes the whole text again "
              "(vpipe/extras/generation/docs/sample.md)", file=sys.stderr, flush=True)
    began, choice = perf_counter(), _choice(options, translates)
    if translates:  # a blank line gives one, so that lines of sources and translations belong together
        for one in progress(ids, "translating", unit="line"):
            text = translation(decoder, tokenizer, one, tokens, **choice) if one else ""
            if on_terminal():  # the progress line makes room for it
                tqdm.write(text)
                sys.stdout.flush()
            else:
                print(text, flush=True)
    else:
        for number, (prompt, one) in enumerate(zip(prompts, ids, strict=True)):
            if number:
                print()
            print(prompt, end="", flush=True)
            try:
                for piece in continuation(decoder, tokenizer, one, tokens, **choice):
                    print(piece, end="", flush=True)
            finally:  # before an error
                print(flush=True)
    seconds = perf_counter() - began
    print(f"{counted(decoder.passes, 'token', commas=True)} in {seconds:.1f} s, {decoder.passes / seconds:,.0f} "
          "tokens/s", file=sys.stderr, flush=True)


def _choice(options: argparse.Namespace, translates: bool) -> dict[str, Any]:
    """Return how tokens are chosen; of translations the most probable ones, unless an option says otherwise."""
    given = {name: value for name in ("temperature", "top_k", "top_p", "seed")
             if (value := getattr(options, name)) is not None}
    return {"temperature": TEMPERATURE if given or not translates else 0, **given}


def _fill(options: argparse.Namespace, checkpoint: SampledCheckpoint, path: Path, prompts: Sequence[str]) -> None:
    """Print the most probable words of every mask."""
    given = [f"--{name.replace('_', '-')}" for name in ("tokens", "temperature", "top_p", "seed")
             if getattr(options, name) is not None]
    if given:
        raise UserError(f"{' and '.join(given)} cannot be given for BERT, which fills in masks and chooses nothing",
                        hint="leave it out; --top-k is the number of words that are shown")
    tokenizer = load_wordpiece(path)
    ids = [masked_ids(tokenizer, prompt, checkpoint.window) for prompt in prompts]
    model, modules = checkpoint.load(max(map(len, ids)), tokenizer)
    filled = (fill_text(model, modules, tokenizer, one, options.top_k or CANDIDATES) for one in ids)
    print("\n\n".join(map("\n".join, filled)))
