"""Read checkpoints of other programs than Hugging Face's.

An extra or a package adds a form by an entry point of its name in the group ``vpipe.checkpoint_formats``, which leads
to a subclass of :class:`CheckpointFormat`::

    [project.entry-points."vpipe.checkpoint_formats"]
    megatron = "my_package.megatron:MegatronCheckpoint"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vpipe import Model
from vpipe.app.families.registry import Family, ModelSettings
from vpipe.plugins import PluginGroup

CHECKPOINT_FORMATS = PluginGroup("vpipe.checkpoint_formats", "form of checkpoints")
"""The group of entry points."""


@dataclass(frozen=True)
class ImportedWeights:
    """The weights of a model as files of another program have them.

    Attributes:
        weights: ``<layer>.<parameter>`` -> tensor, tied ones once.
        absent: weights of the model that the files have not.
        lines: what to tell about them.
    """

    weights: Mapping[str, Tensor]
    absent: Sequence[str]
    lines: Sequence[str]


class CheckpointFormat:
    """A form of checkpoints, which say nothing about their model: the config does.

    Attributes:
        sign: the name of a file by which users know such a folder.
        origin: what the new checkpoint says that it is from.
        described: such a folder in words, for hints.
    """

    sign: str
    origin: str
    described: str

    def find(self, folder: Path) -> list[Path]:
        """Return the files of a checkpoint in a folder, none if it has another form."""
        raise NotImplementedError

    def read(self, files: Sequence[Path], model: Model, family: Family, settings: ModelSettings) -> ImportedWeights:
        """Return the weights in the files.

        Raises:
            UserError: they are not those of the model.
        """
        raise NotImplementedError
