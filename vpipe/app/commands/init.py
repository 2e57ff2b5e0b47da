"""Run ``vpipe init``: write a commented config for the user's data, from a few questions or from options."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from vpipe.app.config.config import Config
from vpipe.app.config.validation import section_of, validated
from vpipe.app.config.yaml_tree import parse, write
from vpipe.app.data.registry import files_read
from vpipe.app.errors import os_errors
from vpipe.app.families.registry import Family, family_named, model_names
from vpipe.app.train.model_section import model_settings
from vpipe.errors import UserError, counted, nearest

DEFAULT = "gpt"
"""The family that is taken where the data suit it."""

SIZES: Mapping[str, Mapping[str, int]] = {"tiny": {"hidden_size": 128, "num_layers": 2, "num_heads": 2},
                                          "mini": {"hidden_size": 256, "num_layers": 4, "num_heads": 4}}
"""Sizes for families whose presets are for GPUs."""

EXPERTS: Mapping[str, Mapping[str, int]] = {"qwen3_moe": {"experts": 8, "experts_per_token": 2}}
"""What these sizes say of the experts, by family, where those that it has otherwise are for GPUs, too."""

SCHEDULES = {"synchronous": "1f1b", "asynchronous": "pipedream"}


def run_init(options: argparse.Namespace) -> None:
    """Write the config that the answers describe, once it has been loaded and its model has enough layers."""
    ask = sys.stdin.isatty() and sys.stdout.isatty()

    def answer(given: Any, question: str, default: str, read: Callable[[str], Any]) -> Any:
        if given is not None or not ask:
            return read(default if given is None else str(given))
        while True:
            try:
                return read(input(f"{question} [{default}]: ").strip() or default)
            except EOFError:
                raise UserError("the questions were not answered to their end",
                                hint="give the answers as options: vpipe init --help lists them") from None
            except UserError as error:
                print(error, file=sys.stderr)

    if options.path is not None and options.data is not None:
        raise UserError(f"the data is given twice: '{options.path}' and --data {options.data}", hint="leave one out")
    output = answer(options.output, "Write the config to", "train.yaml",
                    lambda text: _writable(Path(text), options.force))
    data = answer(options.path if options.data is None else options.data, "Your data: a file, or a folder with files, "
                  f"called {_patterns(_known())}; none takes what is on this machine", "none", _data)
    suited = _datasets(data)
    name = answer(options.family, f"Model family ({', '.join(_known())})", next(iter(suited)),
                  partial(_family, suited, data))
    presets = _known()[name].presets
    sizes = {**(SIZES if "tiny" not in presets else {}), **presets}
    size = answer(options.size, f"Size of the model ({', '.join(sizes)})", "mini" if "mini" in sizes else next(
        iter(sizes)), partial(_one_of, sizes, "size"))
    stages = answer(options.stages, "Stages, one process or GPU each", "4", partial(_count, "--stages"))
    batch_size = answer(options.batch_size, "Samples per batch", "32", partial(_count, "--batch-size"))
    schedule = answer(options.schedule, f"Schedule ({', '.join(SCHEDULES)})", "synchronous",
                      partial(_one_of, SCHEDULES, "schedule"))
    given = f"{options.steps} steps" if options.steps is not None else options.minutes
    length = answer(given, "Minutes to train, or steps, such as 500 steps", "10", _length)

    sections = _sections(name, size, suited[name], data, batch_size, schedule, stages, length)
    text = "".join(_lines(sections))
    config = validated(Config, parse(text, "", str(output)))
    model = family_named(name).factory(model_settings(config.model, 8192))
    if stages > len(model):
        raise UserError(f"{stages} stages, but the model has only {len(model)} layers",
                        hint=f"give --stages {len(model)} or less, or a larger --size")
    with os_errors(f"cannot write '{output}'", "name another file with -o"):
        output.write_text(text, encoding="utf-8")
    file = shlex.quote(str(output))
    print(f"{output}: {name} {size}, {counted(len(model), 'layer')} in {counted(stages, 'stage')}, "
          f"{config.parallel.schedule}\nplan it:  vpipe plan {file}\ntrain it: vpipe train {file}")


def _writable(output: Path, force: bool) -> Path:
    if output.is_dir() or (output.exists() and not force):
        what, other = ("is a folder", "") if output.is_dir() else ("exists already", ", or overwrite it with --force")
        raise UserError(f"'{output}' {what}", hint=f"name another file with -o{other}")
    return output


def _data(text: str) -> Path | None:
    if text == "none":
        return None
    path = Path(os.path.expanduser(text))
    if not path.exists():
        raise UserError(f"there is no file or folder '{path}'", hint="name the text to train on; -o names the config "
                        "to write")
    if not _datasets(path):
        raise UserError(f"no data set reads '{path}'", hint="give a file, or a folder with files, called "
                        + _patterns(_known()))
    return path


@cache
def _known() -> dict[str, Family]:
    """Return the families that say which data sets they are trained on."""
    return {name: family for name in sorted(model_names(), key=lambda name: name != DEFAULT)
            if (family := family_named(name)).datasets}


def _patterns(families: Iterable[str]) -> str:
    """Return the names of the files on which these families are trained."""
    return ", ".join(dict.fromkeys(pattern for family in families for name in _known()[family].datasets
                                   for pattern in files_read(name)))


def _datasets(path: Path | None) -> dict[str, str]:
    """Return the name of the data set with which each family reads a file or a folder; the family's first without."""
    def reads(name: str) -> bool:
        return path is None or any(path.match(pattern) if path.is_file() else any(path.rglob(pattern))
                                   for pattern in files_read(name))

    return {family: name for family, known in _known().items() for name in list(filter(reads, known.datasets))[:1]}


def _family(suited: Mapping[str, str], data: Path | None, text: str) -> str:
    family = _one_of(_known(), "family", text)
    if family not in suited:
        raise UserError(f"the family {family} cannot be trained on '{data}'",
                        hint=f"give --family {' or '.join(suited)}, or data with {_patterns([family])}")
    return family


def _one_of(known: Mapping[str, object], what: str, text: str) -> str:
    if text not in known:
        raise UserError(f"vpipe init has no {what} '{text}'", hint=nearest(text, list(known)))
    return text


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UserError(f"{option} is {text}", hint="give a whole number, 1 or more")
    return int(text)


def _length(text: str) -> dict[str, float]:
    """Return the key of the section ``training`` that says how long to train."""
    number, _, unit = text.partition(" ")
    if unit in ("step", "steps"):
        return {"max_steps": _count("--steps", number)}
    try:
        minutes = float(number)
    except ValueError:
        minutes = 0
    if unit not in ("", "minute", "minutes") or not 0 < minutes < float("inf"):
        raise UserError(f"'{text}' is no length of a training", hint="give minutes, such as 10, or steps, such as "
                        "500 steps")
    return {"max_minutes": minutes}


def _sections(name: str, size: str, dataset: str, data: Path | None, batch_size: int, schedule: str, stages: int,
              length: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return the keys of the config, by section."""
    presets, late = _known()[name].presets, schedule == "asynchronous"
    training: dict[str, Any] = {"learning_rate": 0.001}
    if "max_steps" in length:
        training |= {"lr_policy": "cosine", "warmup_steps": 0.05}
    training |= length
    if late:
        # 70 to 160 seconds at 0.001, 0.003, 0.006 ended further below the unigram entropy each time, see LOG.md
        training |= {"learning_rate": 0.006 if size in ("tiny", "mini") else 0.001,
                     "optimizer": "muon", "delay_correction": "extrapolate"}
    else:
        training["optimizer"] = "adamw"
    training["weight_decay"] = 0.01
    sizes = {"preset": size} if size in presets else {**SIZES[size], **EXPERTS.get(name, {})}
    return {"model": {"name": name, **sizes, "sequence_length": 128, "vocab_size": -1},
            "dataset": {"name": dataset, **({} if data is None else {"path": str(data)}),
                        "batch_size": batch_size},
            "training": training,
            "parallel": {"model_parallel_size": stages, "schedule": SCHEDULES[schedule], "partition": "auto"},
            "checkpoint": {"every_minutes": 10}}


def _lines(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the file; the comment above a key is its description in the config."""
    yield "# A config of vpipe, as vpipe init wrote it. Paths are taken from the current folder.\n"
    for name, keys in sections.items():
        info = Config.model_fields[name]
        section = section_of(info)
        assert section is not None, "a section of the config"
        yield f"\n# {info.description}\n{name}:\n"
        for key, value in keys.items():
            about = section.model_fields[key].description or ""
            yield from (f"  # {line}\n" for line in wrap(about, 100))
            yield f"  {write({key: value})}"
