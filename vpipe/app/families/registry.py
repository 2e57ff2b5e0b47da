"""Find model families by name: a family is one file with one decorator.

A built-in family called ``gpt`` lives in ``vpipe/app/families/gpt.py`` and is imported when it is asked for. An
installed package adds a family through an entry point of its name, in the group ``vpipe.models``, that points to
the module or the factory::

    [project.entry-points."vpipe.models"]
    mamba = "my_package.mamba"
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import vpipe.app.families
from vpipe import Model
from vpipe.app.families import ModelSettings as ModelSettings
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup

PLUGINS = PluginGroup("vpipe.models", "model")

Factory = Callable[[ModelSettings], Model]


@dataclass(frozen=True)
class HuggingFace:
    """Convert a family's config and weights from and to Hugging Face's; a weight is ``<layer>.<parameter>`` here.

    Attributes:
        model_type: that a ``config.json`` names.
        architecture: class of ``transformers`` that loads what is exported.
        tokenizer: class of ``transformers`` for a ``tokenizer.json`` of the family's data.
        settings: a ``config.json`` -> settings; a missing key has the default of ``transformers``. Raises UserError for
            what this family does not compute.
        config: settings -> all keys of ``config.json`` that give the sizes and the computation.
        names: such a config -> their name of every weight -> ours, in their order. Where several lead to one of
            ours, all are written, and the last is read.
        copies: such a config -> further names that a file may have for tied weights: not written, and equal where read.
        spelled: a name in a file -> as ``names`` has it; None for what is no weight of this computation.
        transposed: suffixes of their names of the matrices that they store as [inputs, outputs].
        special: of the tokenizer of a model that translates: ``eos_token``, with which each side ends, and others ->
            the token, and the keys of ``config.json`` with its id. Empty for other models.
    """

    model_type: str
    architecture: str
    tokenizer: str
    settings: Callable[[Mapping[str, object]], ModelSettings]
    config: Callable[[ModelSettings], dict[str, object]]
    names: Callable[[Mapping[str, object]], dict[str, str]]
    copies: Callable[[Mapping[str, object]], dict[str, str]]
    spelled: Callable[[str], str | None]
    transposed: tuple[str, ...] = ()
    special: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A registered family.

    Attributes:
        factory: settings -> model.
        huggingface: its names there; None for a family that is not exported to, nor imported from, Hugging Face.
        stage_order: settings -> weights, as ``<layer>.<parameter>``, in the order of the files
            ``checkpoint.<stage>.pth.tar`` of the first VPipe; None for a family that it had not.
        flops: settings -> floating-point operations of the forward per token, of every layer: 2 for each weight that a
            token is multiplied with, biases and norms too, look-up tables not, and 4 H S for the scores and the mixing
            of attention (H = the width of all heads together, S = ``sequence_length``, else the model's positions;
            nothing is taken off for a causal mask). A backward has twice as many. None for a family without.
        tensor_sizes: settings -> what the ranks of tensor parallelism share, by the names of settings; it has
            ``sequence_length`` where activations between layers are shards of the sequence. None for a family without
            plans (:mod:`vpipe.app.families.tensor_parallel`).
        options: a frozen dataclass of the keys in ``model.options``; None for a family that has none.
        presets: sizes by name, for ``vpipe init``.
        datasets: names of the data sets that it is trained on, for ``vpipe init``, which leaves out a family without;
            the first is taken without the user's data.
        reads: of a package's family: which of :data:`vpipe.app.families.KEYS` it reads; a config may set no other.
    """

    factory: Factory
    huggingface: HuggingFace | None = None
    stage_order: Callable[[ModelSettings], list[str]] | None = None
    flops: Callable[[ModelSettings], Sequence[int]] | None = None
    tensor_sizes: Callable[[ModelSettings], Mapping[str, int]] | None = None
    options: type | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    reads: Collection[str] = ()

    def model(self, settings: ModelSettings) -> Model:
        """Return the model of the settings, with its adapters."""
        model = self.factory(settings)
        return model if settings.lora is None else settings.lora.added_to(model)


_families: dict[str, Family] = {}


def register_model(name: str, *, huggingface: HuggingFace | None = None,
                   stage_order: Callable[[ModelSettings], list[str]] | None = None,
                   flops: Callable[[ModelSettings], Sequence[int]] | None = None,
                   tensor_sizes: Callable[[ModelSettings], Mapping[str, int]] | None = None,
                   options: type | None = None, presets: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
                   datasets: tuple[str, ...] = (), reads: Collection[str] = ()) -> Callable[[Factory], Factory]:
    """Register the decorated factory.

    Args:
        name: in configs; the others are described at :class:`Family`.
        options: a frozen dataclass whose fields are the keys of ``model.options``, each with a type (``int``,
            ``float``, ``bool``, ``str``, ``Path``, ``Literal``, a tuple, or one of them or None) and a default. The
            ``metadata`` of a field may have ``help``, a text for errors, and the bounds ``gt``, ``ge``, ``lt``, ``le``.

    Raises:
        UserError: the name is in use, or the options are no such class.
    """
    if options is not None:
        _check_options(name, options)

    def register(factory: Factory) -> Factory:
        if not PLUGINS.is_own(factory.__module__):
            _import_own(name)  # so that the names of vpipe's own families are known to be taken
        holder = _families[name].factory.__module__ if name in _families else factory.__module__
        if holder != factory.__module__:  # the same module again is a reload
            raise UserError(f"two modules register the model '{name}': {holder} and {factory.__module__}",
                            hint="give one of them another name")
        _families[name] = Family(factory, huggingface, stage_order, flops, tensor_sizes, options, presets, datasets,
                                 reads)
        return factory

    return register


def _check_options(name: str, options: object) -> None:
    if not isinstance(options, type) or not is_dataclass(options) or not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        found = f"the class {options.__name__}" if isinstance(options, type) else (
            f"an object of class {type(options).__name__}")
        raise UserError(f"the options of the model '{name}' are {found}, which is no frozen dataclass",
                        hint="write @dataclass(frozen=True) above a class with the options and their defaults, and "
                        "give the class")
    for one in fields(options):
        if one.default is MISSING and one.default_factory is MISSING:
            raise UserError(f"the option '{one.name}' of the model '{name}' has no default",
                            hint=f"give it one in {options.__name__}, such as {one.name}: int = 16")


def family_named(name: str) -> Family:
    """Return the family. Raises UserError when there is none, or not one alone, or its package cannot be imported."""
    if name not in _families:
        _import_own(name)
    return PLUGINS.named(name, _families, lambda family: family.factory.__module__, model_names)


def _import_own(name: str) -> None:
    for module in (name, "llama_kinds"):
        if name not in _families and module.isidentifier() and find_spec(f"vpipe.app.families.{module}") is not None:
            import_module(f"vpipe.app.families.{module}")


def model_names() -> list[str]:
    """Return every family: built in, registered so far, and announced by installed packages."""
    for module in pkgutil.iter_modules(vpipe.app.families.__path__, prefix="vpipe.app.families."):
        import_module(module.name)
    return sorted({*_families, *PLUGINS.names})
