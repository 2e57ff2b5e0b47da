"""Run ``vpipe compare``: train models, systems or schedules in the same processes, in turns."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from vpipe.app.config.config import Config, load_config
from vpipe.app.config.shipped import ENDINGS, shipped_configs
from vpipe.app.launch.local import run_ranks
from vpipe.app.launch.network import free_port
from vpipe.app.launch.rank_env import check_alone, check_gpus, check_unsplit, hosts_of, ranks_here, ranks_of
from vpipe.app.train.csv_rows import check_output
from vpipe.app.train.run_folder import CONFIG, make_run_folder
from vpipe.errors import Problem, UserError, nearest
from vpipe.extras.comparison.systems import HINT, ComparisonRequest

CONFIGS = Path("configs")
"""The folder of a config that ``--models`` names without one."""


def run_compare(options: argparse.Namespace) -> None:
    """Start the ranks of the configs on this host; they measure, plan, and take turns."""
    if options.output is not None:
        check_output(options.output)
    if (options.config is None) == (options.models is None):
        raise UserError("vpipe compare takes a CONFIG or --models, " +
                        ("and there is neither" if options.config is None else "not both"),
                        hint="write vpipe compare CONFIG --systems NAME,..., or vpipe compare --models NAME,...")
    request = ComparisonRequest.parse(options.systems, options.schedules, options.memory)
    if options.models is None and not request.systems and not request.schedules:
        raise UserError("vpipe compare takes --systems or --schedules, and there is neither", hint=HINT)
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps is {options.steps}", hint="give a whole number, 1 or more")
    configs = _load(options)
    check_alone("vpipe compare", os.environ)
    config = next(iter(configs.values()))
    _check_together(configs)
    check_unsplit("vpipe compare", config)
    hosts = hosts_of(config)
    if hosts is not None and hosts.others:
        raise UserError(f"vpipe compare runs on this host alone, but machines names {len(hosts.others)} more",
                        hint="leave machines out, or name this host only")
    free_port(config.parallel.master_port)
    if config.parallel.asks_for_gpus:
        check_gpus(config, range(ranks_of(config)) if hosts is None else hosts.on(None).values())
    from vpipe.app.train.job import Job  # torch is slow to import: only when the configs are worth it
    from vpipe.extras.comparison.run import CSV

    jobs = {model: Job.from_config(own) for model, own in configs.items()}
    job = jobs[next(iter(jobs))]
    files = {model: CONFIG if own is job else f"config-{number}.yaml"
             for number, (model, own) in enumerate(jobs.items(), 1)}
    here = ranks_here(job.config, hosts, job.schedule.ranks, "compare", options.systems or "", options.schedules or "",
                      options.memory or "", *(word for item in files.items() for word in item))
    folder = make_run_folder(job.config.log_directory, job.config.resolved_yaml())
    for model in list(jobs)[1:]:
        (folder / files[model]).write_text(jobs[model].config.resolved_yaml())
    print(f"run folder: {folder}", flush=True)
    try:
        run_ranks(here, folder, job.describe)
        if options.output is not None:
            try:
                shutil.copyfile(folder / CSV, options.output)
            except OSError as error:
                raise UserError(f"cannot write '{options.output}': {error.strerror}",
                                hint=f"copy it yourself: {folder / CSV}") from None
    finally:
        print(f"run folder: {folder}", flush=True)


def _load(options: argparse.Namespace) -> Mapping[str, Config]:
    """Read the configs, by model; all mistakes are one error."""
    settings = options.settings + ([] if options.steps is None else [f"training.max_steps={options.steps}"])
    paths = {"": options.config} if options.models is None else _config_files(options.models)
    configs: dict[str, Config] = {}
    problems: list[Problem] = []
    for model, path in paths.items():
        try:
            configs[model] = load_config(path, settings)
        except UserError as error:
            problems += error.problems
            continue
        if configs[model].parallel.executor == "async_threaded":
            raise UserError("vpipe compare runs schedules that async_threaded cannot, and notes when each action ran",
                            hint="add --set parallel.executor=overlapped, or leave --scheduler out")
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


def _check_together(configs: Mapping[str, Config]) -> None:
    """Refuse configs that cannot run in the same processes, with all differences."""
    common = {model: {
        "the number of ranks": ranks_of(config), "training.threads": config.training.threads,
        "parallel.backend": config.parallel.backend, "parallel.device": config.parallel.device,
        "machines": config.machines, "container": config.container} for model, config in configs.items()}
    first, *others = common
    problems = [Problem(f"{key} is {value} in {first}, but {common[model][key]} in {model}: all models run in the same "
                        "processes", "make them alike with --set, or compare the models apart")
                for model in others for key, value in common[first].items() if common[model][key] != value]
    if problems:
        raise UserError.all_of(problems)
