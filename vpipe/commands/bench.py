"""``vpipe bench``: every model under every schedule, each a run of its own, one after the other; one table, one CSV."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vpipe.compare.systems import names_of
from vpipe.compare.table import SAME
from vpipe.config.config import Config, load_config
from vpipe.draw.table import fitted, terminal_columns
from vpipe.errors import Problem, RunError, UserError, VpipeError, counted, nearest
from vpipe.launch.alone import check_alone
from vpipe.launch.folder import METRICS, SUMMARY, leave, make_run_folder
from vpipe.schedules.registry import schedule_names
from vpipe.train.csv_rows import check_output, config_row, csv_text

CONFIGS = Path("configs")
"""Where a config is looked for that is named without a folder."""

FILE = "bench.csv"
ASKED = "bench.json"
"""In the folder: what the command line said."""


@dataclass
class Bench:
    """One run of many.

    Attributes:
        model: as the command line names it.
        schedule: its name; None takes the config's.
        config: None where it cannot be read with this schedule.
        failed: why there are no figures; None where there are.
        same_as: the one before it that is the same program, so that only that one runs.
        row: of CSV, once it has run.
        figures: by name, as :meth:`vpipe.train.run_figures.RunFigures.as_row` has them.
    """

    model: str
    schedule: str | None
    config: Config | None = None
    failed: VpipeError | None = None
    same_as: Bench | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.model + (f", schedule {self.schedule}" if self.schedule is not None else "")

    @property
    def why(self) -> str | None:
        """Why there are no figures, in one line."""
        if self.failed is None:
            return None
        if isinstance(self.failed, UserError):
            return "; ".join(problem.what for problem in self.failed.problems)
        return self.failed.located if isinstance(self.failed, RunError) else str(self.failed)


def run_bench(options: argparse.Namespace) -> None:
    """Run them all, show the table, write the CSV; also of those that have run when a signal ends the command.

    Raises:
        UserError: nothing that was asked for can be run.
        RunError: some have failed.
        Interrupted: by a signal.
    """
    check_alone("vpipe bench", os.environ)
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps is {options.steps}", hint="give a whole number, 1 or more")
    if options.output is not None:
        check_output(options.output)
    schedules = names_of(options.schedules, "--schedules", schedule_names(), "schedule") if options.schedules else None
    models = _models(options.models)
    benches = [Bench(model, schedule) for model in models for schedule in schedules or [None]]
    for bench in benches:
        _load(bench, models[bench.model], options)
    wrong = [bench.failed for bench in benches if isinstance(bench.failed, UserError)]
    if len(wrong) == len(benches):
        raise UserError.all_of(list(dict.fromkeys(problem for error in wrong for problem in error.problems)))
    first = next(bench.config for bench in benches if bench.config is not None)
    asked = {"models": options.models, "schedules": options.schedules, "set": options.settings, "steps": options.steps}
    folder = make_run_folder(first.log_directory, json.dumps(asked) + "\n", file=ASKED)
    try:
        for number, bench in enumerate(benches, 1):
            print(f"== {number} of {len(benches)}: {bench.name}", flush=True)
            if bench.failed is None:
                _run(bench, benches[:number - 1], folder / str(number))
            if bench.why is not None:
                print(f"{bench.name}: failed: {bench.why}", flush=True)
    finally:
        done = [bench for bench in benches if bench.row or bench.failed]
        if done:
            _tell(done, folder / FILE, options.output)
    failed = [bench for bench in benches if bench.failed is not None]
    if failed:
        raise RunError(f"{len(failed)} of {counted(len(benches), 'run')} failed", hint="the table says why; "
                       + ("the logs are in " + str(folder) if any(b.config for b in failed) else "mend the config"))


def _models(text: str) -> dict[str, Path]:
    """By the names on the command line, their files.

    Raises:
        UserError: a file is not there, or is named twice; all mistakes at once.
    """
    names = [name.strip() for name in text.split(",")]
    known = sorted(path.stem for end in ("yaml", "yml") for path in CONFIGS.glob(f"*.{end}"))
    found: dict[str, Path] = {}
    problems = []
    for name in names:
        if not name:
            problems.append(Problem(f"--models '{text}' names nothing in one place",
                                    "give names or files of configs, with commas between them"))
            continue
        bare = Path(name).suffix not in (".yaml", ".yml")
        path = CONFIGS / f"{name}.yaml" if bare else Path(name)
        if bare and not path.is_file():
            path = path.with_suffix(".yml")
        if not path.is_file():
            problems.append(Problem(
                f"--models names '{name}', but there is no file '{CONFIGS / name}.yaml'" if bare else
                f"--models names '{name}', but there is no such file",
                nearest(name, known) if bare and known else "name the file of a config, with its folder"))
        elif name in found:
            problems.append(Problem(f"--models names '{name}' {names.count(name)} times", "name it once"))
        found[name] = path
    if problems:
        raise UserError.all_of(list(dict.fromkeys(problems)))
    return found


def _load(bench: Bench, path: Path, options: argparse.Namespace) -> None:
    """Its config. No checkpoint is made at the end, unless ``--set`` says so."""
    settings = ["checkpoint.at_end=false", *options.settings]
    settings += [] if options.steps is None else [f"training.max_steps={options.steps}"]
    settings += [] if bench.schedule is None else [f"parallel.schedule={bench.schedule}"]
    try:
        bench.config = load_config(path, settings)
    except UserError as error:
        bench.failed = error


def _same_program(bench: Bench, before: Sequence[Bench]) -> Bench | None:
    """The one before it that trains in the same way: from the same config, but for a schedule of another name."""
    from vpipe.train.job import Job  # torch is slow to import

    assert bench.config is not None, "it was read"
    for other in before:
        if other.same_as is None and other.config is not None and other.config.with_parallel(
                schedule=bench.config.parallel.schedule) == bench.config:
            if other.config == bench.config:
                return other
            with suppress(UserError):  # the run says it
                if Job.of(other.config).same_program(Job.of(bench.config)):
                    return other
    return None


def _run(bench: Bench, before: Sequence[Bench], folder: Path) -> None:
    """Train; its run's folder is the one in ``folder``. What one ``before`` it did is not done again."""
    from vpipe.launch.run import run  # torch is slow to import

    assert bench.config is not None, "it was read"
    if (same := _same_program(bench, before)) is not None:
        print(f"the same program as {same.name}, which has run", flush=True)
        bench.same_as, bench.failed, bench.figures = same, same.failed, same.figures
        bench.row = same.row and {**same.row, "parallel.schedule": bench.config.parallel.schedule}
        return
    try:
        run(bench.config.model_copy(update={"log_directory": folder}), None, None)
        [made] = folder.iterdir()
        bench.figures = _figures(made)
        with (made / SUMMARY).open(newline="") as file:
            bench.row = next(csv.DictReader(file))
    except VpipeError as error:
        bench.failed = error
    finally:
        leave()


def _figures(run: Path) -> Mapping[str, Any]:
    """What the last line of ``metrics.jsonl`` says."""
    last = json.loads((run / METRICS).read_text().splitlines()[-1])
    summary: Mapping[str, Any] = last["summary"]
    return summary


def _tell(benches: Sequence[Bench], file: Path, copy: Path | None) -> None:
    """The table, and the CSV: in the folder of the runs, and where else it is wanted."""
    print("\n".join(["", *_table(benches)]), flush=True)
    rows = [{"model": bench.model, "schedule": bench.schedule, "failed": bench.why,
             "same_as": None if bench.same_as is None else bench.same_as.name,
             **(config_row(bench.config) if bench.config is not None else {}), **bench.row} for bench in benches]
    written = file
    try:
        written.write_text(csv_text(rows))
        if copy is not None:
            written = copy
            shutil.copyfile(file, copy)
    except OSError as error:
        raise UserError(f"cannot write '{written}': {error.strerror}",
                        hint="the table above says the same" if written == file else f"copy it yourself: {file}"
                        ) from None
    print(f"as CSV, with the config of each: {written}", flush=True)


def _table(benches: Sequence[Bench]) -> Iterator[str]:
    from vpipe.train.run_figures import figure_columns

    shown = [figure_columns(bench.figures) if bench.figures else {} for bench in benches]
    heads = next((list(columns) for columns in shown if columns), [])
    rows = [[bench.model, (bench.schedule or "(the config's)") + f" {SAME}" * (bench.same_as is not None),
             str(bench.figures.get("ranks", "-")),
             *(columns.get(head, "-") for head in heads), "-" if not bench.figures else _loss(bench.figures)]
            for bench, columns in zip(benches, shown, strict=True)]
    yield from fitted(["model", "schedule", "ranks", *heads, "loss"], rows, terminal_columns(), left=2, names=2)
    for bench in benches:
        if bench.same_as is not None:
            yield f"{SAME} {bench.name}: the same program as {bench.same_as.name}, which ran for both"
            continue
        if bench.why is not None:
            yield f"{bench.name}: failed: {bench.why}"
        if bench.figures and bench.figures["doubt"]:
            yield f"warning: {bench.name}: {bench.figures['doubt']}"


def _loss(figures: Mapping[str, Any]) -> str:
    return "-" if figures["last_loss"] is None else f"{figures['last_loss']:.3f}"
