"""Write runs as rows of CSV: config and figures of each, to compare in a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.errors import UserError

Row = Mapping[str, Any]


def check_output(path: Path) -> None:
    """Refuse a path that cannot be written as a file, before any work is done."""
    folder, why = path.absolute().parent, None
    if path.is_dir() or not folder.is_dir():
        why = "it is a folder" if path.is_dir() else "it is in no folder"
    else:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = f"{folder}: {error.strerror}"
    if why is not None:
        raise UserError(f"cannot write '{path}': {why}", hint="name a file in a folder that exists, and can be "
                        "written, as -o")


def csv_text(rows: Sequence[Row]) -> str:
    """Return a header and a line per row, with a column for each key of any row, in order of first appearance.

    None and a missing key are empty cells; lists are JSON; true and false are as in YAML.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, (bool, list, tuple, dict)):
        return json.dumps(value)
    assert isinstance(value, (str, int, float)), "a config and figures hold nothing else"
    return value
