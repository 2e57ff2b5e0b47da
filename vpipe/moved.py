"""Refuse the old path of a module with its new one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "vpipe.draw.summary": "vpipe.app.visualize.summary",
    "vpipe.draw.text": "vpipe.app.visualize.terminal",
    "vpipe.checkpoint.export": "vpipe.app.weights.export",
    "vpipe.checkpoint.import_weights": "vpipe.app.weights.import_weights",
    "vpipe.checkpoint.vpipe_stage_files": "vpipe.extras.legacy.vpipe_stage_files",
    "vpipe.checkpoint.integrity": "vpipe.checkpoint.checkpoint",
    "vpipe.checkpoint.load": "vpipe.checkpoint.checkpoint",
    "vpipe.checkpoint.shared_folder": "vpipe.checkpoint.directory",
    "vpipe.cli": "vpipe.app.cli",
    "vpipe.commands.compare": "vpipe.extras.comparison.command",
    "vpipe.commands.data": "vpipe.extras.bert_hdf5.command",
    "vpipe.commands.orion": "vpipe.extras.orion.command",
    "vpipe.commands.sample": "vpipe.extras.generation.command",
    "vpipe.config.vpipe_flat": "vpipe.extras.legacy.vpipe_flat",
    "vpipe.data.bert_hdf5": "vpipe.extras.bert_hdf5.shards",
    "vpipe.data.catalogues": "vpipe.extras.catalogues.catalogues",
    "vpipe.data.length_buckets": "vpipe.extras.translation.length_buckets",
    "vpipe.data.pairs": "vpipe.extras.translation.pairs",
    "vpipe.distributed.exchange": "vpipe.distributed.value_exchange",
    "vpipe.distributed.orion": "vpipe.extras.orion.scheduler",
    "vpipe.distributed.signals": "vpipe.app.signals",
    "vpipe.metric_formulas": "vpipe.app.metric_formulas",
    "vpipe.model.bert": "vpipe.app.families.bert",
    "vpipe.model.generate": "vpipe.extras.generation.stage_decoder",
    "vpipe.model.gpt": "vpipe.app.families.gpt",
    "vpipe.model.kv_cache": "vpipe.app.families.kv_cache",
    "vpipe.model.llama": "vpipe.app.families.llama",
    "vpipe.model.loss": "vpipe.app.families.loss",
    "vpipe.model.registry": "vpipe.app.families.registry",
    "vpipe.model.transformer": "vpipe.app.families.transformer",
    "vpipe.model.translation": "vpipe.extras.translation.model",
    "vpipe.plan.predict": "vpipe.plan.prediction",
    "vpipe.profiling.cache": "vpipe.app.train.profile_cache",
    "vpipe.profiling.kernels": "vpipe.extras.orion.kernels",
    "vpipe.profiling.peak_flops": "vpipe.app.train.peak_flops",
    "vpipe.profiling.measure": "vpipe.profiling.measurement",
    "vpipe.progress": "vpipe.app.progress",
    "vpipe.runtime.generation": "vpipe.extras.generation.pipelined_decoding",
    "vpipe.runtime.transport.distributed": "vpipe.runtime.transport.process_group",
    "vpipe.schedules.build": "vpipe.schedules.builder",
    "vpipe.schedules.check": "vpipe.schedules.checker",
    "vpipe.schedules.lower": "vpipe.schedules.lowering",
    "vpipe.schedules.order": "vpipe.schedules",
    "vpipe.schedules.simulator.simulate": "vpipe.schedules.simulator.timeline",
    "vpipe.train.generation": "vpipe.extras.generation.task",
    "vpipe.train.orion": "vpipe.extras.orion.run",
    "vpipe.train.sampling": "vpipe.extras.generation.text_model",
    "vpipe.train.translations": "vpipe.extras.translation.translations",
    "vpipe.runtime.executors.registry": "vpipe.runtime.pipeline_schedule",
    "vpipe.verify.compression": "vpipe.testing.compression",
    "vpipe.verify.differences": "vpipe.app.verify",
    "vpipe.verify.reference": "vpipe.testing.reference",
    "vpipe.verify.reference_model": "vpipe.testing.reference_model",
    "vpipe.verify.reference_optimizer": "vpipe.testing.reference_optimizer",
    "vpipe.verify.trajectory": "vpipe.testing.trajectory",
}
"""Modules: old path, new path."""

FOLDERS = {
    "vpipe.compare": "vpipe.extras.comparison",
    "vpipe.commands": "vpipe.app.commands",
    "vpipe.config": "vpipe.app.config",
    "vpipe.data": "vpipe.app.data",
    "vpipe.launch": "vpipe.app.launch",
    "vpipe.report": "vpipe.app.report",
    "vpipe.train": "vpipe.app.train",
    "vpipe.visualize": "vpipe.app.visualize",
}
"""Folders whose other modules have kept their names."""


class MovedModules(MetaPathFinder, Loader):
    """Ask this finder last: for what nobody has found.

    An old folder is found, and is empty, so that Python asks for the module in it.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if any(old.startswith(f"{name}.") for old in MOVED) or name in FOLDERS:
            return ModuleSpec(name, self, is_package=True)
        for old, new in {**MOVED, **FOLDERS}.items():
            if name == old or name.startswith(f"{old}."):
                raise ModuleNotFoundError(f"{name} is {new}{name.removeprefix(old)} now", name=name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Leave the folder empty."""
