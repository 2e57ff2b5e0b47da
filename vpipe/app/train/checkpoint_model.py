"""Read the model, the config and the tokenizer of a checkpoint, and compare models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vpipe import Model
from vpipe.app.config.config import Config, ModelSection
from vpipe.app.config.origin import KEPT_BY_RUN, MODEL_CONFIG, TOKENIZER, kept_file
from vpipe.app.config.validation import CHECKED, validated
from vpipe.app.config.yaml_tree import parse, write
from vpipe.app.families.registry import Family, ModelSettings, family_named
from vpipe.app.train.job import Job
from vpipe.app.train.model_section import model_settings
from vpipe.checkpoint import Manifest
from vpipe.errors import UserError

_ONLY_TRAINING = ("dropout", "initializer_range", "router_aux_loss_coef")
"""Parts of keys that change how a model is trained, but not what its weights mean."""


def model_differences(name: str, here: ModelSettings, there: ModelSettings) -> list[str]:
    """Return differences between two models of a family that names and shapes of weights may not show.

    Such as ``num_attention_heads is 4, not 2``, ``here``'s value first. Dropout may differ. Empty for a family without
    a Hugging Face config.
    """
    huggingface = family_named(name).huggingface
    if huggingface is None:
        return []
    ours, theirs = huggingface.config(here), huggingface.config(there)
    return [f"{key} is {ours.get(key)}, not {theirs.get(key)}" for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key) and not any(part in key for part in _ONLY_TRAINING)]


WHERE = "the checkpoint's config"


@dataclass(frozen=True)
class CheckpointModel:
    """The model family and settings of a checkpoint."""

    name: str
    settings: ModelSettings

    @classmethod
    def from_manifest(cls, manifest: Manifest, folder: Path, run: Path | None = None) -> CheckpointModel:
        """Read the ``model`` section of the config in the manifest of the checkpoint in ``folder``, of a ``run``.

        Raises:
            UserError: the section is missing or wrong.
        """
        if not has_model(manifest):
            raise UserError(f"the checkpoint '{folder}' does not say what model it is of: Pipeline.save wrote it",
                            hint="export it as safetensors or torch; only a run of 'vpipe train' knows the family's "
                            "names")
        section = validated(ModelSection, parse(manifest.config, "", WHERE).at(("model",)))
        if section.config_file is not None:
            file = kept_file(MODEL_CONFIG, manifest, folder, run, section.config_file)
            places = (file or section.config_file, folder / MODEL_CONFIG)  # the latter of an import
            section = section.model_copy(update={"config_file": next(filter(Path.is_file, places), places[0])})
        return cls(section.name, model_settings(section))

    @property
    def family(self) -> Family:
        return family_named(self.name)

    def model(self) -> Model:
        """Return the layers of the model, not materialized."""
        return self.family.model(self.settings)


def has_model(manifest: Manifest) -> bool:
    """Return whether a checkpoint describes its model: one that ``Pipeline.save`` wrote does not."""
    return bool(manifest.config) and isinstance(parse(manifest.config, "", WHERE).get(("model",)), dict)


def config_text(found: str, settings: ModelSettings, config_file: Path) -> str:
    """Return a config with only a model section, for an imported checkpoint."""
    lora = {} if settings.lora is None else {
        "lora": {**vars(settings.lora), "targets": list(settings.lora.targets or ())}}
    return write({"model": {"name": found, "vocab_size": settings.vocab_size, "tie_weights": settings.tie_weights,
                            "config_file": str(config_file), **lora}})


def checkpoint_config(manifest: Manifest) -> Config | None:
    """Return the config of the run that wrote a checkpoint; None if no run did. Its rules are not checked again."""
    content = parse(manifest.config, "", WHERE)
    return validated(Config, content, context=CHECKED) if content.get(("training",)) is not None else None


def data_tokenizer(manifest: Manifest, checkpoint: Path, run: Path) -> tuple[Path | None, str]:
    """Return the tokenizer of the data that the ``run`` of a checkpoint trained on, or why there is none."""
    if TOKENIZER in manifest.arrangement.get(KEPT_BY_RUN, {}):
        return kept_file(TOKENIZER, manifest, checkpoint, run), f"its run's {TOKENIZER} is gone, or has changed"
    try:
        config = checkpoint_config(manifest)
        if config is None or not manifest.data:
            return None, "no run made this checkpoint"
        job = Job.from_config(config)
        if job.fingerprint() != manifest.data:
            return None, "the data set is no longer what it was trained on"
    except UserError as error:
        return None, error.problems[0].what
    path = job.tokenizer_path
    return path, "" if path is not None else f"the data set '{config.dataset.name}' has none"
