"""The model of a checkpoint, as its config describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vpipe.checkpoint.manifest import Manifest
from vpipe.config.config import Config, drop_removed
from vpipe.config.sections import ModelSection
from vpipe.config.validation import validated
from vpipe.config.yaml_tree import parse, write
from vpipe.errors import UserError
from vpipe.model.layer import Model
from vpipe.model.registry import Family, ModelSettings, family_named
from vpipe.train.model_settings import model_file, model_settings

WHERE = "the checkpoint's config"


@dataclass(frozen=True)
class CheckpointModel:
    """What a checkpoint is one of.

    Attributes:
        name: of the family.
        settings: of the model.
    """

    name: str
    settings: ModelSettings

    @classmethod
    def of(cls, manifest: Manifest, folder: Path) -> CheckpointModel:
        """Read the ``model`` section of the config in the manifest of the checkpoint in ``folder``.

        Raises:
            UserError: it has none, or one that is wrong.
        """
        section = validated(ModelSection, parse(model_text(manifest, folder), "", WHERE).at(("model",)))
        if section.config_file is not None and not section.config_file.is_file() and (folder / _COPY).is_file():
            section = section.model_copy(update={"config_file": folder / _COPY})
        return cls(section.name, model_settings(section, section.vocab_size, model_file(section)))

    @property
    def family(self) -> Family:
        return family_named(self.name)

    def model(self) -> Model:
        """Its layers, none of them built."""
        return self.family.factory(self.settings)


_COPY = "config.json"
"""The config that an import leaves in a checkpoint."""


def says_model(manifest: Manifest) -> bool:
    """Whether a checkpoint says what model it is of: one that ``Pipeline.save`` wrote does not."""
    return bool(manifest.config) and isinstance(parse(manifest.config, "", WHERE).get(("model",)), dict)


def model_text(manifest: Manifest, folder: Path) -> str:
    """The config of a checkpoint that says what model it is of.

    Raises:
        UserError: it does not.
    """
    if not says_model(manifest):
        raise UserError(f"the checkpoint '{folder}' does not say what model it is of: Pipeline.save wrote it",
                        hint="export it as safetensors or torch; only a run of 'vpipe train' knows the family's names")
    return manifest.config


def config_text(found: str, settings: ModelSettings, config_file: Path) -> str:
    """A config of nothing but the model, for a checkpoint that no run made."""
    return write({"model": {"name": found, "vocab_size": settings.vocab_size, "tie_weights": settings.tie_weights,
                            "config_file": str(config_file)}})


def config_of(manifest: Manifest) -> Config | None:
    """The whole config of the run that made a checkpoint; None where no run did."""
    content = parse(manifest.config, "", WHERE)
    drop_removed(content)
    return validated(Config, content) if content.get(("training",)) is not None else None
