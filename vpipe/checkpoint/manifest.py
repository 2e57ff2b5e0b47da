"""Write and read ``checkpoint.json``: the tensors and files of a checkpoint, and the run and step that it is of."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from vpipe.errors import UserError
from vpipe.files import count_of, parse_json, read_bounded, text_of
from vpipe.plugins import package_versions

FORMAT = 1
"""Grows when an older vpipe could no longer read what a newer one writes."""

MANIFEST = "checkpoint.json"

MOST_BYTES = 64 << 20
"""Of a manifest: 400,000 tensors."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
              "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
              "bool": 1, "complex64": 8}
"""The dtypes that a checkpoint can hold, as torch calls them, with the bytes of one number."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its shape, its dtype (``float32``), and the file of the folder that holds it."""

    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def bytes(self) -> int:
        """Return the bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    """The size of a file in bytes and its SHA-256 in hexadecimal digits, when it was written."""

    bytes: int
    sha256: str


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(frozen=True)
class CheckpointInfo:
    """The run and the step that a checkpoint is of.

    Attributes:
        step: number of training steps done; the next has this index.
        samples: number of samples that they have taken.
        seed: of the run.
        data: fingerprint of the data set.
        config: the resolved YAML; empty where there is none.
        arrangement: how the model was cut and scheduled, JSON values. A resumed run may have another.
        numbers: JSON values of parts that keep more than tensors.
        made: when, ISO 8601.
        versions: of vpipe and torch.
    """

    step: int
    samples: int
    seed: int
    data: str = ""
    config: str = ""
    arrangement: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    made: str = field(default_factory=_now)
    versions: Mapping[str, str] = field(default_factory=partial(package_versions, ("vpipe", "torch")))


@dataclass(frozen=True)
class Manifest(CheckpointInfo):
    """All of ``checkpoint.json``: ``tensors`` by global name, ``files`` of the same folder by name."""

    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    @classmethod
    def build(cls, info: CheckpointInfo, tensors: Mapping[str, TensorEntry],
              files: Mapping[str, FileEntry]) -> Manifest:
        """Return the manifest of these tensors and files."""
        return cls(**{**vars(info), "tensors": tensors, "files": files})

    @property
    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def save(self, folder: Path) -> None:
        """Write it into ``folder`` and wait until the disk has it. Raises OSError when it could not be written."""
        content = {"format": FORMAT, **asdict(self)}
        with (folder / MANIFEST).open("w") as file:
            file.write(_text({**content, "checksum": _checksum(content)}))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read a manifest. Raises UserError when there is none, it is of a newer format, or it is damaged."""
        path = folder / MANIFEST
        try:
            content = parse_json(read_bounded(path, MOST_BYTES, "a manifest"))
        except FileNotFoundError:
            if any(folder.glob("rank*.safetensors")):
                raise UserError(f"the checkpoint '{folder}' is damaged: {MANIFEST} is missing", hint=_OTHER) from None
            raise UserError(f"'{folder}' is no checkpoint: it has no {MANIFEST}",
                            hint="give a step-N folder, or the folder of a run that saved one") from None
        except OSError as error:
            raise UserError(f"cannot read the checkpoint: {error.strerror or error}", where=str(path),
                            hint=_OTHER) from None
        except UserError:
            raise
        except ValueError as error:
            raise _damaged(path, f"it is no JSON ({error})") from None
        if not isinstance(content, dict):
            raise _damaged(path, "it is no JSON object")
        number = content.get("format")
        if type(number) is int and number > FORMAT:
            raise UserError(f"the checkpoint has format {number}, this vpipe reads up to {FORMAT}", where=str(path),
                            hint="resume it with the vpipe that wrote it, or a newer one: git pull && make install")
        stated = content.pop("checksum", None)
        if stated != _checksum(content):
            raise _damaged(path, f"its content has the checksum {_checksum(content)[:12]}..., it states "
                                 f"{str(stated)[:12]}...")
        try:
            return _manifest(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from None


def no_longer_used(manifest: Manifest) -> str | None:
    """Return a warning of state in the checkpoint that only older versions have, if there is any."""
    if any(name.startswith("feedback.") for name in manifest.tensors):
        return ("the checkpoint has error feedback of compressed gradients, which this version has not: it is left "
                "out, so the losses from here on are others")
    return None


_CORRECTION = "delay_correction."
"""Begins the names of what the correction of late gradients keeps."""


def last_change_of(parameter: str) -> str:
    """Return the name of what the latest step added to a parameter, where late gradients are corrected."""
    return f"{_CORRECTION}{parameter}.last_change"


def factor_of(parameter: str) -> str:
    """Return the name of what the correction multiplies by: strength times mean delay."""
    return f"{_CORRECTION}{parameter}.factor"


_OTHER = "resume from an older checkpoint: vpipe checkpoint ls RUN lists them"


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"the manifest of the checkpoint is damaged: {why}", where=str(path), hint=_OTHER)


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the values, however they are spaced."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry, and for each entry of an entry."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_entries(value)}" for key, value in content.items()) + "\n}\n"


def _entries(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    lines = (f" {json.dumps(key)}: {json.dumps(entry, allow_nan=False)}" for key, entry in value.items())
    return "{\n" + ",\n".join(lines) + "\n}"


_ARRANGEMENT = {"partition": list, "placement": list, "recompute": list, "optimizers": list, "optimizer_of": dict,
                "schedule": str, "run": str, "from": str, "microbatches": int, "update_every": int, "imported": bool,
                "drained": bool}
"""The types of what is read again of an arrangement."""


def _manifest(content: Mapping[str, Any]) -> Manifest:
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}")
    files = {_plain_name(name): FileEntry(count_of(entry["bytes"]), text_of(entry["sha256"]))
             for name, entry in content["files"].items()}
    tensors = {name: _tensor_entry(entry) for name, entry in content["tensors"].items()}
    for name, entry in tensors.items():
        if entry.file not in files:
            raise ValueError(f"tensor '{name}' is in file '{entry.file}', which the manifest does not list")
    for key in ("arrangement", "numbers", "versions"):
        if not isinstance(content[key], dict):
            raise TypeError(f"{key} is {content[key]!r}")
    for key, value in content["arrangement"].items():
        kind = _ARRANGEMENT.get(key)
        if kind is not None and not isinstance(value, (kind, type(None))):
            raise TypeError(f"{key} of the arrangement is {value!r}")
    for name in (*(content["arrangement"].get("optimizers") or ()),
                 *(content["arrangement"].get("optimizer_of") or {}).values()):
        text_of(name)
    return Manifest(step=count_of(content["step"]), samples=count_of(content["samples"]),
                    seed=count_of(content["seed"]), data=text_of(content["data"]), config=text_of(content["config"]),
                    made=text_of(content["made"]), arrangement=content["arrangement"], numbers=content["numbers"],
                    versions={name: text_of(value) for name, value in content["versions"].items()},
                    tensors=tensors, files=files)


def _tensor_entry(content: Mapping[str, Any]) -> TensorEntry:
    if text_of(content["dtype"]) not in ITEM_BYTES:
        raise ValueError(f"unknown kind of numbers '{content['dtype']}'")
    entry = TensorEntry(tuple(map(count_of, content["shape"])), content["dtype"], _plain_name(content["file"]))
    count_of(entry.bytes)
    return entry


def _plain_name(name: Any) -> str:
    """Return a file's name that leads nowhere else."""
    if type(name) is not str or not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
        raise ValueError(f"{name!r} is no name of a file of the folder")
    return name
