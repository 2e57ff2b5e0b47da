"""Translations by ``vpipe sample``: by caches, on several ranks, and what is refused; with the extra translation."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_run import job_of
from test_decoding import DECODINGS
from test_pipelined_decoding import REQUESTS, alone, ring, run
from torch import nn

from vpipe import Model
from vpipe.app.cli import main
from vpipe.app.data.tokenizers import load_tokenizer
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.train.loop import train
from vpipe.app.weights.export import export_huggingface
from vpipe.extras.generation.decoding import Chosen, Decoding, Request, Text, chooser
from vpipe.extras.generation.stage_decoder import DecoderModel, StageDecoder, decode

pytestmark = pytest.mark.jobs

pytest.importorskip("vpipe.extras.translation.model")

Sample = Callable[..., tuple[int, str, str]]


def translation(pre_norm: bool = False) -> Model:
    """Two and two blocks, 11 layers."""
    family = family_named("translation")
    assert family.options is not None
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "init_std": 0.3}
    return family.factory(ModelSettings(40, sequence_length=16, overrides=sizes,
                                        options=family.options(pre_norm=pre_norm)))


def whole_translation(model: Model, modules: nn.ModuleDict, request: Request) -> list[Text]:
    """The translations by forwards of encoder and decoder over all tokens of every row."""
    choose, rows = chooser(request.decoding).choose, [list(request.prompt)]
    while True:
        source = torch.tensor([request.source] * len(rows))
        tensors = {"source_ids": source, "source_mask": torch.ones_like(source), "target_ids": torch.tensor(rows)}
        with torch.no_grad():
            for layer in model.layers[:-1]:
                tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
            chosen = choose(modules["head"].scores(tensors["h"])[:, -1])
        if chosen.texts is not None:
            return chosen.texts
        rows = [[*rows[parent], token] for parent, token in zip(chosen.parents, chosen.tokens, strict=True)]


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_translation_by_caches_is_that_of_whole_forwards(decoding: str, pre_norm: bool) -> None:
    model = translation(pre_norm)
    modules, decoder = model.materialize(3).eval(), DecoderModel(model)
    assert (decoder.cached, decoder.grows) == (True, [False] * 4 + [True] * 7)
    assert decoder.crossing(4, begins=True) == ("memory",)
    assert decoder.crossing(6, begins=True) == ("h", "memory")
    assert (decoder.crossing(4, begins=False), decoder.crossing(6, begins=False)) == ((), ("h",))
    for source in ((5, 9, 11, 1), (2, 1)):
        request = Request((0,), Decoding(10, 38, barred=0, **DECODINGS[decoding]), source)
        *_, last = decode(StageDecoder(decoder, modules, 16), request)
        expected = whole_translation(model, modules, request)
        assert last.texts is not None
        assert [text.tokens for text in last.texts] == [text.tokens for text in expected]
        assert [text.score or 0 for text in last.texts] == pytest.approx([text.score or 0 for text in expected])


@pytest.mark.parametrize("partition", [[2, 4, 3, 2], [4, 7], [6, 5]])
def test_translations_are_those_of_one_process(partition: list[int]) -> None:
    """Cut within the encoder, after it, and within the decoder; all embeddings and the head are tied."""
    model = translation()
    requests = [Request((0,), replace(request.decoding, barred=0, end=1, tokens=min(9, request.decoding.tokens)),
                        (*(token + 2 for token in request.prompt[:5]), 1)) for request in REQUESTS]
    found: dict[int, list[Chosen]] = {}
    for number, chosen in run(ring(model, partition, requests)):
        found.setdefault(number, []).append(chosen)
    assert [found[number] for number in range(len(requests))] == [alone(model, request) for request in requests]


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned the word for every word of a tiny language."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    words = {"one": "eins", "two": "zwei", "cat": "Katze", "dog": "Hund"}
    chosen = [rng.choices(list(words), k=rng.randint(1, 2)) for _ in range(400)]
    (folder / "a.tsv").write_text("".join(
        f"{' '.join(one)}\t{' '.join(words[word] for word in one)}\n" for one in chosen))
    (folder / "run").mkdir()
    job = job_of(folder, dataset__name="pairs", dataset__path=str(folder / "a.tsv"), dataset__samples=None,
                 dataset__cache_directory=str(folder / "cache"), model__name="translation", model__preset=None,
                 model__num_layers=1, model__num_heads=2, model__hidden_size=32, model__dropout=0.0,
                 model__vocab_size=-1, training__learning_rate=0.01, training__max_steps=150,
                 training__num_microbatches=1, parallel__model_parallel_size=1, parallel__partition=[6],
                 checkpoint__at_end=True)
    train(job, folder / "run")
    return folder / "run"


def test_a_translation_is_a_line_and_beams_search_it(translator: Path, sample: Sample) -> None:
    status, out, err = sample(translator, "--prompt", "two", "--prompt", "one dog")
    assert (status, out) == (0, "zwei\neins Hund\n")
    assert re.search(r"translation, .*\n\d+ tokens in .* tokens/s, on 1 rank, 4 beams\n$", err)
    assert sample(translator, "--prompt", "one dog", "--temperature", 0)[1] == "eins Hund\n"
    best = sample(translator, "--prompt", "one cat", "--best", 2)[1].splitlines()
    assert best[0].split("  ")[1] == "eins Katze"
    assert len(best) == 2
    status, _, err = sample(translator, "--prompt", "one " * 40)
    assert status == 2
    assert re.search(r"error: the prompt has \d+ tokens with its end, but the model reads 16\nhint: translate", err)
    assert "--best is 5, but there are 4 beams" in sample(translator, "--prompt", "one", "--best", 5)[2]


def test_an_imported_model_reads_as_many_tokens_as_it_has_positions(
        translator: Path, sample: Sample, tmp_path: Path) -> None:
    tokenizer = next((translator.parent / "cache").glob("pairs-*/tokenizer.json"))
    family = family_named("translation")
    settings = ModelSettings(load_tokenizer(tokenizer).get_vocab_size(), tie_weights=True, overrides={
        "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "max_position_embeddings": 20, "pad_token_id": 0, "decoder_start_token_id": 0})
    model = family.factory(settings)
    modules = model.materialize(0)
    tied = {f"{layer.name}.{own}" for layer in model.layers for own in layer.ties}
    assert family.huggingface is not None
    export_huggingface({name: tensor for name, tensor in modules.state_dict().items() if name not in tied},
                       family.huggingface, settings, tmp_path / "hf")
    assert main(["checkpoint", "import", str(tmp_path / "hf"), "-o", str(tmp_path / "own")]) == 0
    words = (tmp_path / "own", "--tokenizer", tokenizer)
    assert sample(*words, "--prompt", "one", "--tokens", 99)[0] == 0
    assert "but the model reads 20\n" in sample(*words, "--prompt", "one " * 40)[2]


@pytest.mark.usefixtures("forked")
def test_lines_of_a_file_and_of_its_translation_belong_together(translator: Path, tmp_path: Path,
                                                                capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\n\ncat\u2028dog\r\n \ntwo\x0c cat\n".encode())
    assert main(["sample", str(translator), "--prompts", str(path)]) == 0
    lines = capfd.readouterr().out.split("\n")
    assert (lines[0], lines[1], lines[3], lines[5:]) == ("eins", "", "", [""])
    assert all((lines[2], lines[4]))
    assert main(["sample", str(translator), "--prompts", str(path), "--ranks", "2"]) == 0
    assert capfd.readouterr().out.split("\n") == lines
    assert main(["sample", str(translator), "--prompt", " "]) == 2
    assert capfd.readouterr().err == "error: there is nothing to translate\nhint: give a sentence as --prompt\n"
