"""Run ``vpipe cache``: list the data that were prepared and the profiles that were measured, or remove them."""

from __future__ import annotations

import argparse
from datetime import datetime

from vpipe.app.data.cache import default_directory, entries, remove
from vpipe.errors import counted
from vpipe.units import size_text


def run_cache(options: argparse.Namespace) -> None:
    """Print a line for each entry; with ``--clear`` remove those that no process is preparing."""
    directory = options.folder or default_directory()
    total, locks = 0, 0
    for name, paths in entries(directory).items():
        files = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
        size, made = sum(file.stat().st_size for file in files), max(path.stat().st_mtime for path in paths)
        if options.clear and not remove(directory, name, paths):
            print(f"{name} stays: a process is preparing it")
            continue
        total, locks = total + size, locks + (not size)
        if size:
            print(f"{size_text(size):>9}  {datetime.fromtimestamp(made):%Y-%m-%d %H:%M}  {name}")
    print(f"{size_text(total)} {'removed from' if options.clear else 'in'} {directory}"
          + f", and {counted(locks, 'lock')} without data" * bool(locks))
