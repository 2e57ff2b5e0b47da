"""Run ``vpipe compare``: train models, systems or schedules in turns, each in runs of its own."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.app.config.config import Config, load_config
from vpipe.app.config.shipped import ENDINGS, shipped_configs
from vpipe.app.launch import launcher
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import check_alone
from vpipe.app.train.run_folder import make_run_folder
from vpipe.app.visualize.table import check_output, csv_text
from vpipe.errors import Problem, RunError, UserError, nearest
from vpipe.extras.comparison.systems import HINT, ComparisonRequest

if TYPE_CHECKING:
    from vpipe.extras.comparison.contenders import Contender
    from vpipe.extras.comparison.results import Outcome

CONFIGS = Path("configs")
"""The folder of a config that ``--models`` names without one."""

CSV, PAGE = "comparison.csv", "comparison.html"

UNSAVED = ("checkpoint={at_end: false, every_minutes: null}",)
"""What the runs do otherwise than those of ``vpipe train``, unless ``--set`` says so: they save no checkpoints."""


def run_compare(options: argparse.Namespace) -> None:
    """Plan the contenders, run each once in every round as ``vpipe train`` does, and compare their summaries."""
    check_output(options.output)
    if (options.config is None) == (options.models is None):
        raise UserError("vpipe compare takes a CONFIG or --models, " +
                        ("and there is neither" if options.config is None else "not both"),
                        hint="write vpipe compare CONFIG --systems NAME,..., or vpipe compare --models NAME,...")
    request = ComparisonRequest.parse(options.systems, options.schedules, options.memory)
    if options.models is None and not request.systems and not request.schedules:
        raise UserError("vpipe compare takes --systems or --schedules, and there is neither", hint=HINT)
    for option in ("steps", "rounds"):
        if (number := getattr(options, option)) is not None and number < 1:
            raise UserError(f"--{option} is {number}", hint="give a whole number, 1 or more")
    configs = _load(options)
    check_alone("vpipe compare")
    for config in configs.values():
        free_port(config.parallel.master_port)
    from vpipe.extras.comparison.contenders import plan_contenders  # torch is slow to import

    found, refused = plan_contenders(configs, request)
    if not found:
        raise UserError.all_of([Problem(f"no contender can take part: {name}: {why.what}", why.hint)
                                for name, why in refused.items()])
    first = next(iter(configs.values()))
    folder = make_run_folder(first.log_directory, first.resolved_yaml())
    print(f"folder of the comparison: {folder}", flush=True)
    outcomes = _run(found, folder, options.rounds)
    _write(outcomes, {name: why.what for name, why in refused.items()}, folder, options.output)


def _run(contenders: Sequence[Contender], folder: Path, rounds: int) -> list[Outcome]:
    """Run the contenders in turns, those with the same config once, and read what the runs have written."""
    from vpipe.extras.comparison.results import Outcome

    configs = {one.name: one.config_in(folder, number) for number, one in enumerate(contenders, 1)}
    first: dict[str, str] = {}  # by resolved config, the first contender with it
    for name, config in configs.items():
        first.setdefault(config.with_parallel(plan=None).resolved_yaml(), name)
    runs: dict[str, list[Path]] = {name: [] for name in first.values()}
    for number in range(rounds):
        for name in reversed(runs) if number % 2 else runs:
            print(f"\nround {number + 1} of {rounds}: {name}", flush=True)
            ran = launcher.run(configs[name], None, None)
            assert ran is not None, "a new run has something to train"
            runs[name].append(ran)
    outcomes = []
    for one in contenders:
        ran_as = first[configs[one.name].with_parallel(plan=None).resolved_yaml()]
        outcomes.append(Outcome.read(one, runs[ran_as], None if ran_as == one.name else ran_as))
    return outcomes


def _write(outcomes: Sequence[Outcome], refused: Mapping[str, str], folder: Path, output: Path | None) -> None:
    """Print the table, and write the CSV and the page."""
    from vpipe.extras.comparison.results import Comparison

    no_update = {one.name: "it made no update" for one in outcomes if not all(run.summary for run in one.histories)}
    outcomes = [one for one in outcomes if one.name not in no_update]
    if not outcomes:
        raise RunError("no contender made an update", hint="give more samples, epochs or minutes")
    comparison = Comparison(outcomes, {**refused, **no_update})
    (folder / CSV).write_text(csv_text(comparison.as_rows()), encoding="utf-8")
    (folder / PAGE).write_text(comparison.as_page(), encoding="utf-8")
    print(f"\n{comparison.as_text()}losses over time: {folder / PAGE}\n"
          f"as CSV, with the config of each run: {folder / CSV}", flush=True)
    if output is not None:
        try:
            shutil.copyfile(folder / CSV, output)
        except OSError as error:
            raise UserError(f"cannot write '{output}': {error.strerror}",
                            hint=f"copy it yourself: {folder / CSV}") from None


def _load(options: argparse.Namespace) -> Mapping[str, Config]:
    """Read the configs, by model; all mistakes are one error."""
    steps = [] if options.steps is None else [f"training.max_steps={options.steps}"]
    settings = [*UNSAVED, *options.settings, *steps]
    paths = {"": options.config} if options.models is None else _config_files(options.models)
    configs: dict[str, Config] = {}
    problems: list[Problem] = []
    for model, path in paths.items():
        try:
            configs[model] = load_config(path, settings)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError.all_of(list(dict.fromkeys(problems)))
    return configs


def _config_files(text: str) -> dict[str, Path]:
    """Return the file of each config that ``--models`` names; all mistakes are one error."""
    names = [name.strip() for name in text.split(",")]
    shipped = shipped_configs()
    known = sorted({*(path.stem for end in ENDINGS for path in CONFIGS.glob(f"*{end}")), *shipped})
    files: dict[str, Path] = {}
    problems: list[Problem] = []
    for name in dict.fromkeys(names):
        bare = Path(name).suffix not in ENDINGS
        paths = [CONFIGS / f"{name}{end}" for end in ENDINGS] if bare else [Path(name)]
        files[name] = next((path for path in paths if path.is_file()), Path(name))
        if not name:
            problems.append(Problem(f"--models '{text}' names nothing in one place",
                                    "give names or files of configs, with commas between them"))
        elif not files[name].is_file() and Path(name).stem not in shipped:
            problems.append(Problem(
                f"--models names '{name}', but there is no " + (f"file '{paths[0]}'" if bare else "such file"),
                nearest(name, known) if bare else "name the file of a config, with its folder"))
        elif names.count(name) > 1:
            problems.append(Problem(f"--models names '{name}' {names.count(name)} times", "name it once"))
    if problems:
        raise UserError.all_of(problems)
    return files
