"""Write and read ``checkpoint.json``: the tensors and files of a checkpoint, and the run and step that it is of."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vpipe.errors import UserError
from vpipe.files import count_of, parse_json, read_bounded, read_record, replace_text, sha256_of, text_of
from vpipe.plugins import PluginGroup

if TYPE_CHECKING:
    from torch import Tensor

    from vpipe.model.model import Model

FORMAT = 1
"""Number of the format; it grows when an older vpipe could no longer read what a newer one writes."""

MANIFEST = "checkpoint.json"

MOST_BYTES = 64 << 20
"""Most bytes of a manifest: 400,000 tensors."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
              "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
              "bool": 1, "complex64": 8}
"""The dtypes that a checkpoint can hold, as torch calls them, with the bytes of one number."""

WEIGHTS = "model."
"""Begins the names of parameters and buffers of the model."""

SHOWN = 3
"""Differences between two models that a message names; the others are counted."""


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

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Return those of a file as the disk has it. Raises OSError."""
        return cls(path.stat().st_size, sha256_of(path))


class TensorKind(NamedTuple):
    """The shape and dtype of a tensor: ``[30522, 256] float32``."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor | TensorEntry) -> TensorKind:
        """Return those of a tensor, in memory or as a manifest has it."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def widened(self) -> TensorKind:
        """Return its kind where training widens it: fp32 for 16 bits."""
        return self._replace(dtype="float32") if self.dtype in ("bfloat16", "float16") else self

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"


@dataclass(frozen=True)
class Position:
    """The position in training at which a checkpoint was made, and a run resumes.

    Attributes:
        steps: that are done; the next one has this index.
        microbatches: that are done, counted over all training. Dropout and stochastic rounding follow their number.
        begun: how many of them are of a batch that is not complete. None: the remainder, as all batches have equally
            many.
        samples: of the microbatches that are done.
    """

    steps: int
    microbatches: int
    begun: int | None = None
    samples: int = 0

    @property
    def updates(self) -> int:
        """Return the steps: a step is an update, except between replicas of different widths without a flush."""
        return self.steps

    def within(self, batch: int) -> int:
        """Return how many microbatches are done of the incomplete batch, which has ``batch`` of them."""
        return self.microbatches % batch if self.begun is None else self.begun

    def as_numbers(self, batch: int) -> dict[str, int]:
        """Return the numbers for a manifest that has the steps and samples; ``batch``: microbatches of a batch."""
        return {"microbatches": self.microbatches, "begun": self.within(batch), "batch": batch}

    @classmethod
    def from_numbers(cls, steps: int, samples: int, numbers: Mapping[str, Any], batch: int) -> Position:
        """Return the position from :meth:`as_numbers`, for batches that now have ``batch`` microbatches.

        Raises:
            UserError: it does not fall between two of these microbatches, or is not known.
        """
        if not steps:  # weights from elsewhere
            return cls(0, 0)
        found = [numbers.get(key) for key in ("microbatches", "begun", "batch")]
        done, begun, then = (count if type(count) is int and count >= 0 else -1 for count in found)
        if not (0 <= begun < then and begun <= done):
            raise UserError(f"the checkpoint of step {steps} does not say how many microbatches are done: it has "
                            + ", ".join(f"{key} {numbers.get(key)!r}" for key in ("microbatches", "begun", "batch")),
                            hint="it was not made by vpipe train or Pipeline.save")
        scaled = []
        for microbatches in (done, begun):
            count, left = divmod(microbatches * batch, then)
            if left:
                raise UserError(f"the checkpoint is of a run with {then} microbatches per batch, and was made after "
                                f"{begun} of them: with {batch} that is within one",
                                hint=f"go on with {then} microbatches per batch, or from another checkpoint")
            scaled.append(count)
        return cls(steps, scaled[0], scaled[1], samples)


@dataclass(frozen=True)
class Manifest:
    """All of ``checkpoint.json``. Whoever saves gives one without tensors and files; the saver adds these.

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
        tensors: by global name.
        files: of the same folder, by name.
    """

    step: int
    samples: int
    seed: int
    data: str = ""
    config: str = ""
    arrangement: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    made: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=partial(PluginGroup.versions_of, ("vpipe", "torch")))
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def check_compatible(self, model: Model, hint: str = "resume with the model section of the checkpoint's own config:"
                         " vpipe checkpoint show prints it") -> None:
        """Refuse the checkpoint of another model.

        Raises:
            UserError: names or shapes differ; with the first of them.
        """
        ours = {name: TensorKind.of(tensor) for name, tensor in model.outline().items()}
        theirs = {name.removeprefix(WEIGHTS): TensorKind.of(entry)
                  for name, entry in self.tensors.items() if name.startswith(WEIGHTS)}
        other = [f"'{name}' is {kind} in the model and {theirs[name]} in the checkpoint"
                 for name, kind in ours.items() if name in theirs and theirs[name].widened != kind.widened]
        missing = [f"'{name}' {kind} is not in the checkpoint" for name, kind in ours.items() if name not in theirs]
        more = [f"'{name}' {kind} of the checkpoint is not in the model"
                for name, kind in theirs.items() if name not in ours]
        parts = []
        for differences in filter(None, (other, missing, more)):
            rest = len(differences) - SHOWN
            parts.append("; ".join(differences[:SHOWN]) + (f"; and {rest} more" if rest > 0 else ""))
        if parts:
            raise UserError(f"the checkpoint of step {self.step} is of another model: {'; '.join(parts)}", hint=hint)

    def position(self, batch: int) -> Position:
        """Return the position in training, for batches that now have ``batch`` microbatches.

        Raises:
            UserError: it does not fall between two of these microbatches, or is not known.
        """
        return Position.from_numbers(self.step, self.samples, self.numbers, batch)

    def save(self, folder: Path) -> None:
        """Write it into ``folder`` and wait until the disk has it. Raises OSError when it could not be written."""
        content = {"format": FORMAT, **asdict(self)}
        replace_text(folder / MANIFEST, _text({**content, "checksum": _checksum(content)}))

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


_CORRECTION = "delay_correction."
"""Begins the names of what the correction of late gradients keeps."""


def last_change_of(parameter: str) -> str:
    """Return the name of what the latest step added to a parameter, where late gradients are corrected."""
    return f"{_CORRECTION}{parameter}.last_change"


def average_of(parameter: str) -> str:
    """Return the name of the average that follows a parameter."""
    return f"average.{parameter}"


def factor_of(parameter: str) -> str:
    """Return the name of what the correction multiplies by: strength times mean delay."""
    return f"{_CORRECTION}{parameter}.factor"


View = Literal["trained", "uncorrected", "average"]
"""Which values of the parameters to look at: those that are trained, or those of a companion."""


def view_of(corrected: bool, averaged: bool, sharded: bool = False) -> View:
    """Return the view that a call asks for; one that asks for two is refused."""
    asked = [text for text, given in (("corrected=False", not corrected), ("averaged=True", averaged),
                                      ("sharded=True", sharded)) if given]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} ask for different tensors in one call",
                        hint="ask for one; the part 'vpipe' of the sharded state has averages and corrections, too")
    return "average" if averaged else "trained" if corrected else "uncorrected"


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
    manifest = read_record(Manifest, {each.name: content[each.name] for each in fields(Manifest)})
    for name in manifest.files:
        if not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
            raise ValueError(f"{name!r} is no name of a file of the folder")
    for name, entry in manifest.tensors.items():
        if entry.file not in manifest.files:
            raise ValueError(f"tensor '{name}' is in file '{entry.file}', which the manifest does not list")
        if entry.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown kind of numbers '{entry.dtype}'")
        count_of(entry.bytes)
    for key, value in manifest.arrangement.items():
        kind = _ARRANGEMENT.get(key)
        if kind is not None and not isinstance(value, (kind, type(None))):
            raise TypeError(f"{key} of the arrangement is {value!r}")
    for name in (*(manifest.arrangement.get("optimizers") or ()),
                 *(manifest.arrangement.get("optimizer_of") or {}).values()):
        text_of(name)
    return manifest
