"""Translations by ``vpipe sample``, and what is refused; with the extra translation."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import job_of

from vpipe.app.cli import main
from vpipe.app.data.tokenizers import load_tokenizer
from vpipe.app.families.registry import ModelSettings, family_named
from vpipe.app.train.loop import train
from vpipe.app.weights.export import export_huggingface

pytestmark = pytest.mark.jobs

pytest.importorskip("vpipe.extras.translation.model")

Sample = Callable[..., tuple[int, str, str]]


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


def test_a_translation_is_a_line_of_the_most_probable_tokens(translator: Path, sample: Sample) -> None:
    status, out, err = sample(translator, "--prompt", "two", "--prompt", "one dog")
    assert (status, out) == (0, "zwei\neins Hund\n")
    assert re.search(r"translation, .*\n\d+ tokens in .* tokens/s\n$", err)
    drawn = ("--temperature", 9, "--seed")
    assert sample(translator, "--prompt", "one dog", *drawn, 1)[1] != sample(translator, "--prompt", "one dog", *drawn,
                                                                            2)[1]
    status, _, err = sample(translator, "--prompt", "one " * 40)
    assert status == 2
    assert re.search(r"error: the prompt has \d+ tokens with its end, but the model reads 16\nhint: translate", err)


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


def test_lines_of_a_file_and_of_its_translation_belong_together(
        translator: Path, sample: Sample, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\n\ncat\u2028dog\r\n \ntwo\x0c cat\n".encode())
    status, out, _ = sample(translator, "--prompts", path)
    lines = out.split("\n")
    assert (status, lines[0], lines[1], lines[3], lines[5:]) == (0, "eins", "", "", [""])
    assert all((lines[2], lines[4]))
    assert sample(translator, "--prompt", " ") == (
        2, "", "error: there is nothing to translate\nhint: give a sentence as --prompt\n")
