"""Run ``vpipe sample``: continue texts with the model of a checkpoint, or fill in its masked words."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from vpipe import files
from vpipe.app.commands.checkpoint import checkpoints_in
from vpipe.app.commands.profile import folder_unless_failed
from vpipe.app.data.plain_text import conversion_hint, decoded
from vpipe.app.data.tokenizers import load_for_pairs, load_tokenizer, load_wordpiece
from vpipe.app.launch.local import run_ranks
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import HostRanks, check_alone
from vpipe.app.train.checkpoint_model import data_tokenizer, has_model
from vpipe.checkpoint import Manifest
from vpipe.errors import Problem, RunError, UserError, counted
from vpipe.extras.generation.masked_words import BERT, CANDIDATES, fill_text, masked_ids
from vpipe.extras.generation.sampled_checkpoint import SampledCheckpoint, removed
from vpipe.extras.generation.task import GenerationTask, generate_alone
from vpipe.extras.generation.text_model import (
    BEAMS,
    TEMPERATURE,
    decoding_for,
    prompt_ids,
    source_ids,
    translation_decoding,
)
from vpipe.units import size_text

TOKENS = 100
"""Default of ``--tokens``."""

MOST_BYTES, MOST_PROMPTS, LONGEST_PROMPT = 16 << 20, 100_000, 1 << 20
"""Of prompts: bytes, number, and characters of one. Longer words take a tokenizer minutes and gigabytes."""

_TRIES = 3
"""To find the newest checkpoint of a run that replaces it meanwhile."""

MOST_LENGTH_PENALTY = 10
"""Nothing but the length would count."""


def run_sample(options: argparse.Namespace) -> None:
    """Print a continuation of every prompt, or for BERT the most probable words of every mask."""
    _check(options)
    prompts = _prompts(options)
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) > LONGEST_PROMPT:
            raise UserError(f"prompt {number} has {len(prompt):,} characters", hint=f"give at most {LONGEST_PROMPT:,}: "
                            "the model reads the last few thousand tokens at most")
    checkpoint = _find(options.folder, options.step)
    tokenizer = _tokenizer(checkpoint, options.tokenizer)
    if options.prompts is not None and not checkpoint.translates:
        prompts = [prompt for prompt in prompts if prompt.strip()]
    if checkpoint.found.name == BERT:
        _fill(options, checkpoint, tokenizer, prompts)
    else:
        _continue(options, checkpoint, tokenizer, prompts)


def _check(options: argparse.Namespace) -> None:
    problems = []
    for name in ("tokens", "top_k", "beams", "best", "ranks", "seed", "step"):
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
    if options.length_penalty is not None and not 0 <= options.length_penalty <= MOST_LENGTH_PENALTY:
        raise UserError(f"--length-penalty is {options.length_penalty:g}",
                        hint=f"give a number from 0 (none) to {MOST_LENGTH_PENALTY}, such as 0.6")
    drawn = _given(options, *_DRAWN)
    if options.beams is not None and drawn:
        raise UserError(f"{' and '.join(drawn)} cannot be given with --beams: a beam search draws nothing",
                        hint="leave out one or the other")


_DRAWN = ("temperature", "top_k", "top_p", "seed")
"""Options of a text that is drawn."""


def _choice(options: argparse.Namespace, translates: bool) -> dict[str, Any]:
    """Return how texts are chosen; translations by a beam search, unless an option of drawing is given."""
    beams = options.beams
    if beams is None and translates and not _given(options, *_DRAWN):
        beams = BEAMS
    searched = _given(options, "length_penalty", "best")
    if beams is None and searched:
        raise UserError(f"{' and '.join(searched)} can be given for a beam search alone", hint="add --beams 4")
    if options.best is not None and options.best > beams:
        raise UserError(f"--best is {options.best}, but there are {counted(beams, 'beam')}",
                        hint=f"set --beams to {options.best} or more")
    given = {name: getattr(options, name) for name in (*_DRAWN, "length_penalty", "best")}
    return {"beams": beams, "temperature": TEMPERATURE,
            **{name: value for name, value in given.items() if value is not None}}


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]


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
        raise UserError(f"{what} is not UTF-8 (byte {error.start})", hint=conversion_hint(error)) from None


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
    return SampledCheckpoint.from_manifest(path, manifest)


def _tokenizer(checkpoint: SampledCheckpoint, given: Path | None) -> Path:
    """Return the ``tokenizer.json`` that is given, or that of the data of the run.

    Raises:
        UserError: there is none.
    """
    if given is not None:
        return given
    path, why = data_tokenizer(checkpoint.manifest)
    if path is None:
        raise UserError(f"there is no tokenizer for the checkpoint '{checkpoint.folder}': {why}",
                        hint="name a tokenizer.json with --tokenizer, such as the one beside imported weights")
    return path


def _continue(options: argparse.Namespace, checkpoint: SampledCheckpoint, path: Path, prompts: Sequence[str]) -> None:
    translates, window = checkpoint.translates, checkpoint.window
    most, choice = TOKENS if options.tokens is None else options.tokens, _choice(options, translates)
    if translates:
        tokenizer = load_for_pairs(path)
        if not any(map(str.strip, prompts)):
            raise UserError("there is nothing to translate", hint="give a sentence as --prompt")
        ids = [source_ids(tokenizer, prompt, window) if prompt.strip() else [] for prompt in prompts]
        most = min(most, window)
        length = max(most, *map(len, ids))
        decoding = translation_decoding(tokenizer, most, **choice)
    else:
        tokenizer = load_tokenizer(path)
        ids = [prompt_ids(tokenizer, prompt, own_beginning=options.tokenizer is not None) for prompt in prompts]
        length = min(window, max(map(len, ids)) + most)
        decoding = decoding_for(tokenizer, most, **choice)
    checkpoint.check(length, tokenizer)
    ranks = options.ranks or 1
    task = GenerationTask(str(checkpoint.folder), length, str(path), checkpoint.partition(ranks, length),
                          checkpoint.threads, tuple(prompts), tuple(map(tuple, ids)), decoding, translates)
    if ranks == 1:
        generate_alone(task, checkpoint, tokenizer)
        return
    check_alone("vpipe sample", os.environ)
    with folder_unless_failed("vpipe-sample-") as folder:
        task.save(folder)
        try:
            run_ranks(HostRanks.alone(ranks, free_port(None), task.threads, ("sample",)), folder, task.describe)
        except RunError as error:
            if BrokenPipeError.__name__ in str(error):
                raise BrokenPipeError from None  # `vpipe sample ... | head`
            print(f"logs of the ranks: {folder}", file=sys.stderr, flush=True)
            raise


def _fill(options: argparse.Namespace, checkpoint: SampledCheckpoint, path: Path, prompts: Sequence[str]) -> None:
    given = _given(options, "tokens", "temperature", "top_p", "seed", "beams", "length_penalty", "best", "ranks")
    if given:
        raise UserError(f"{' and '.join(given)} cannot be given for BERT, which fills in masks and chooses nothing",
                        hint="leave it out; --top-k is the number of words that are shown")
    tokenizer = load_wordpiece(path)
    ids = [masked_ids(tokenizer, prompt, checkpoint.window) for prompt in prompts]
    length = max(map(len, ids))
    checkpoint.check(length, tokenizer)
    text = checkpoint.text_model(length, tokenizer)
    filled = (fill_text(text.model, text.modules, tokenizer, one, options.top_k or CANDIDATES) for one in ids)
    print("\n\n".join("\n".join(each.lines()) for each in filled))
