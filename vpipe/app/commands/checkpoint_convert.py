"""Run ``vpipe checkpoint export | import``: convert the whole model to files of other programs, and from them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vpipe import Model
from vpipe.app.command_line import setting_words
from vpipe.app.commands.checkpoint import checkpoints_in
from vpipe.app.config.config import load_config
from vpipe.app.data.tokenizers import end_token, load_tokenizer
from vpipe.app.families.lora import adapter_names, base_names, is_adapter, merged
from vpipe.app.families.registry import HuggingFace, family_named
from vpipe.app.progress import byte_progress
from vpipe.app.train.checkpoint_model import CheckpointModel, config_text, data_tokenizer, has_model, model_differences
from vpipe.app.train.job import Job
from vpipe.app.train.model_section import model_settings
from vpipe.app.weights.export import export_huggingface, export_peft, export_safetensors, export_torch, make_checkpoint
from vpipe.app.weights.formats import CHECKPOINT_FORMATS, CheckpointFormat
from vpipe.app.weights.import_weights import ADAPTER_CONFIG, CONFIG, import_adapter, import_weights, read_model_config
from vpipe.checkpoint import Checkpoint, Manifest
from vpipe.errors import UserError, counted
from vpipe.units import size_text

SLOW_BYTES = 1 << 29
"""From this size on, writing takes seconds, and a line says so."""


def run_export(options: argparse.Namespace) -> None:
    """Write the model of a checkpoint for other programs."""
    folder = checkpoints_in(options.folder)[-1]
    manifest = Manifest.load(folder)
    named = options.format in ("huggingface", "peft")
    found = CheckpointModel.from_manifest(manifest, folder, options.folder) if named or (
        options.format == "torch" and has_model(manifest)) else None
    huggingface = _names_of(found.name) if named and found is not None else None
    adapters = adapter_names(manifest.tensors)
    lora = None if found is None or not adapters else found.settings.lora
    if options.format == "peft" and lora is None:
        why = "no run has trained any yet" if found is not None and found.settings.lora is not None else (
            "its model is trained whole")
        raise UserError(f"the checkpoint '{folder}' has no adapters: {why}",
                        hint="export it as huggingface, safetensors or torch, or one that a run with model.lora made")
    with byte_progress(f"reading {folder.name}") as progress:
        weights = Checkpoint(folder, manifest).weights(
            adapters if options.format == "peft" else None, progress,
            corrected=not options.uncorrected, averaged=options.averaged)
    if options.format == "huggingface" and lora is not None:
        weights = merged(weights, lora)
        print("note: the adapters are merged into the weights; --format peft writes them alone")
    size = sum(tensor.nbytes for tensor in weights.values())
    if size >= SLOW_BYTES:
        print(f"writing {size_text(size)}", file=sys.stderr, flush=True)
    out, tokenizer = options.output, None
    if huggingface is not None and found is not None and lora is not None and options.format == "peft":
        export_peft(weights, lora, huggingface, found.settings, out)
        load = f"peft.PeftModel.from_pretrained(base, {str(out)!r})"
    elif huggingface is not None and found is not None:
        tokenizer, note = data_tokenizer(manifest, folder, options.folder)
        if tokenizer is None:
            print(f"note: no tokenizer goes with it: {note}")
        end = None if tokenizer is None or huggingface.special else end_token(load_tokenizer(tokenizer))
        export_huggingface(weights, huggingface, found.settings, out, tokenizer, end)
        load = f"transformers.{huggingface.architecture}.from_pretrained({str(out)!r})"
    elif options.format == "torch":
        export_torch(weights, None if found is None else found.model(), out)
        load = f"torch.load({str(out)!r})"
    else:
        export_safetensors(weights, manifest.step, out)
        load = f"safetensors.torch.load_file({str(out)!r})"
    print(f"{out}: {counted(len(weights), 'tensor')}, {size_text(size)}, after step {manifest.step:,}\nload it: {load}")


def _names_of(family: str) -> HuggingFace:
    huggingface = family_named(family).huggingface
    if huggingface is None:
        raise UserError(f"the model '{family}' has no names at Hugging Face", hint="export it as safetensors or torch")
    return huggingface


def run_import(options: argparse.Namespace) -> None:
    """Make a checkpoint of weights alone, at step 0, from a folder of another program."""
    source, out = options.source, options.output
    forms: list[CheckpointFormat] = [kind() for kind in CHECKPOINT_FORMATS.added()]
    others = "".join(f", or {form.described}" for form in forms)
    if not source.is_dir():
        raise UserError(f"there is no folder '{source}'" if not source.exists() else f"'{source}' is a file",
                        hint=f"give a folder with {CONFIG} and weights{others}")
    job = None
    if options.config is not None:
        job = Job.from_config(load_config(options.config, options.settings, started=None))
    elif options.settings:
        raise UserError(f"{setting_words(options.settings)[0]} changes a config, but there is none",
                        hint="name it with --config")
    found = next(((form, files) for form in forms if (files := form.find(source))), None)
    if options.adapter is not None and found is not None:
        raise UserError(f"--adapter is given, but '{source}' is no model of Hugging Face", hint="leave it out")
    if found is not None:
        _from_files(*found, job, source, out)
    elif (source / ADAPTER_CONFIG).is_file() and not (source / CONFIG).is_file():
        raise UserError(f"'{source}' holds adapters of peft alone, not the model that they are of",
                        hint=f"import the model with them: vpipe checkpoint import MODEL --adapter {source} -o OUT")
    elif (source / CONFIG).is_file():
        _from_huggingface(source, options.adapter, job, out)
    else:
        signs = " nor ".join([f"{'neither ' if forms else 'no '}{CONFIG}", *(form.sign for form in forms)])
        raise UserError(f"'{source}' holds {signs}",
                        hint=f"give a folder that save_pretrained of transformers wrote{others}")
    words = ["vpipe", "train", str(options.config or "CONFIG"), *setting_words(options.settings), "--resume", str(out)]
    print(f"train it: {shlex.join(words)}")
    if job is None:
        print(f"CONFIG's model section: name: {read_model_config(source).family}, config_file: {out / CONFIG}")
    tokenizer = source / "tokenizer.json"
    if tokenizer.is_file() and (job is None or job.config.dataset.tokenizer is None):
        print(f"its tokenizer, for data that are text: --set dataset.tokenizer={tokenizer}")


def _from_huggingface(source: Path, adapter: Path | None, job: Job | None, out: Path) -> None:
    found = read_model_config(source)
    family, huggingface, settings = family_named(found.family), _names_of(found.family), found.settings
    if job is not None:
        section = job.config.model
        if section.name != found.family:
            raise UserError(f"'{source}' is a model of the family {found.family}, the config's is {section.name}",
                            hint=f"set model.name to {found.family}")
        if differences := model_differences(found.family, model_settings(section), settings):
            raise UserError(f"the config's model is not the one in '{source}': {'; '.join(differences)}",
                            hint=f"set model.config_file to {source / CONFIG}, and model.vocab_size to "
                                 f"{settings.vocab_size}, without a preset or sizes of its own")
    weights = import_weights(source, huggingface, settings, note=lambda line: print(f"note: {line}"))
    model = family.factory(settings) if job is None else job.base_model
    if adapter is not None:
        lora, adapters = import_adapter(adapter, huggingface, settings)
        wanted = lora if job is None else job.config.model.lora
        if wanted is None or (wanted.rank, wanted.alpha) != (lora.rank, lora.alpha) or (
                job is not None and adapters.keys() != set(filter(is_adapter, job.model.outline()))):
            here = "is not given" if wanted is None else (
                f"rank {wanted.rank}, alpha {wanted.alpha:g} and {_targets(wanted.targets)}")
            raise UserError(f"the adapter in '{adapter}' has rank {lora.rank}, alpha {lora.alpha:g} and "
                            f"{_targets(lora.targets)}, model.lora {here}",
                            hint=f"set model.lora to {{rank: {lora.rank}, alpha: {lora.alpha:g}, targets: "
                                 f"[{', '.join(lora.targets or ())}]}}")
        settings = replace(settings, lora=lora)
        model = family.model(settings) if job is None else job.model
        weights = {name: weights[theirs] for name, theirs in base_names(model.outline()).items()} | adapters
    config = config_text(found.family, settings, Path(os.path.abspath(out)) / CONFIG) if job is None else (
        job.config.resolved_yaml())
    _make(out, job, config, "Hugging Face", model, weights, source / CONFIG)


def _targets(names: Sequence[str] | None) -> str:
    return "all targets" if names is None else f"the targets {', '.join(names)}"


def _from_files(form: CheckpointFormat, files: Sequence[Path], job: Job | None, source: Path, out: Path) -> None:
    if job is None:
        raise UserError(f"the files in '{source}' do not say what model they are of",
                        hint="name its config: --config CONFIG")
    section = job.config.model
    found = form.read(files, job.model, family_named(section.name), model_settings(section))
    print("\n".join(found.lines))
    weights = dict(found.weights)
    if found.absent:
        seed = job.config.training.seed
        for number, layer in enumerate(job.model.layers):
            if own := [name for name in found.absent if name.startswith(layer.name + ".")]:
                state = layer.materialize(number, seed).state_dict()
                weights |= {name: state[name.removeprefix(layer.name + ".")] for name in own}
        print(f"in no file, so they begin as under seed {seed}: {', '.join(found.absent)}")
    _make(out, job, job.config.resolved_yaml(), form.origin, job.model, weights)


def _make(out: Path, job: Job | None, config: str, origin: str, model: Model, weights: Mapping[str, Tensor],
          model_config: Path | None = None) -> None:
    """Make the checkpoint, and print what is in it."""
    about = Manifest(step=0, samples=0, seed=0 if job is None else job.config.training.seed, config=config,
                     arrangement={"imported": True, "from": origin})
    made = make_checkpoint(out, about, model, weights, model_config)
    size = sum(stored.bytes for stored in made.tensors.values())
    print(f"{out}: {counted(len(made.tensors), 'tensor', commas=True)} of {counted(len(model), 'layer')}, "
          f"{size_text(size)}")
