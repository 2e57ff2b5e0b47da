"""What a run that goes on does in another way than its checkpoint was made, and what that does to its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vpipe.checkpoint.manifest import Manifest
from vpipe.config.config import Config, drop_removed
from vpipe.config.sections import CheckpointSection
from vpipe.config.yaml_tree import describe, parse

_ALWAYS = {"training.num_microbatches", "training.precision", "training.loss_scale", "parallel.compress",
           "parallel.compress_rounding"}
"""Settings of how a run is arranged that change its numbers under every schedule."""

_WITHOUT_FLUSH = {"parallel.partition", "parallel.update_every", "parallel.stage_to_rank_map",
                  "parallel.data_parallel_size", "checkpoint.every_steps", "training.evaluate_every"}
"""Those that do so without a flush; with one at most the order of sums is another."""


def changes(manifest: Manifest, config: Config) -> list[str]:
    """Every key that is another than in the checkpoint's config: ``training.max_steps 60 -> 80 (the learning rate
    follows the new end)``. Of a checkpoint that a script made, none."""
    before = parse(manifest.config, "", "the checkpoint's config")
    drop_removed(before)
    if not isinstance(before.value, dict):
        return []
    then, now = dict(_leaves(before.value)), dict(_leaves(config.model_dump(mode="json")))
    had_flush = not manifest.arrangement.get("drained")
    said = []
    for key, value in now.items():
        if key in then and then[key] != value:
            effect = _effect(key, config, had_flush=had_flush)
            said.append(f"{key} {describe(then[key])} -> {describe(value)}" + (f" ({effect})" if effect else ""))
    return said


def _leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, section in config.items():
        if name == "checkpoint" and section is None:
            section = CheckpointSection.model_validate({}).model_dump(mode="json")
        if isinstance(section, dict):
            yield from ((f"{name}.{key}", value) for key, value in section.items())
        else:
            yield name, section


def _effect(key: str, config: Config, *, had_flush: bool) -> str:
    """What it does to losses and weights from here on; nothing where they stay what they would have been."""
    training, flush = config.training, not config.parallel.asynchronous
    if key in ("training.max_steps", "training.epochs"):
        return "the learning rate follows the new end" if training.lr_policy != "constant" or \
            0 < training.warmup_steps < 1 else ""
    if key == "parallel.schedule" and flush != had_flush:
        return f"with{'' if flush else 'out'} a flush, so another run from here on"
    if key in _ALWAYS:
        return "other losses from here on"
    if key in _WITHOUT_FLUSH and not flush and not had_flush:
        return "without a flush, so another run from here on"
    return ""
