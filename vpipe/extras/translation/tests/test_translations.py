"""What a translation run shows at its end: BLEU of held-out pairs, and some of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import job_of
from torch import Tensor

from vpipe.app.families.decoding import Decoding, TextDecoder
from vpipe.app.families.registry import ModelSettings
from vpipe.app.train.loop import train
from vpipe.extras.translation.model import TranslationOptions, translation_from_settings
from vpipe.extras.translation.translations import bleu

NAMES = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}


def pairs(folder: Path) -> Path:
    """Sentences of the names of numbers, without repetitions."""
    words, lines = list(NAMES), []
    for number in range(120):
        found = [words[number % 5], words[number // 5 % 5], words[number // 25]]
        lines.append(f"{' '.join(found)}\t{' '.join(NAMES[word] for word in found)}\n")
    (folder / "pairs.tsv").write_text("".join(lines))
    return folder / "pairs.tsv"


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    changes: dict[str, Any] = {
        "model__name": "translation", "model__preset": "tiny", "model__vocab_size": 300, "model__num_heads": 2,
        "dataset__name": "pairs", "dataset__path": str(pairs(tmp_path)), "dataset__samples": None,
        "dataset__cache_directory": str(tmp_path), "training__max_steps": 2, "parallel__partition": [4, 7]}
    job = job_of(tmp_path, **changes)
    train(job, tmp_path)
    return capsys.readouterr().out


def test_the_end_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(tmp_path, capsys)
    assert "nats per token" in out
    [found] = re.findall(r"\nBLEU of (\d+) held-out pairs?, translated greedily: [\d.]+; before training [\d.]+, the "
                         r"source as it is ([\d.]+) \(nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|.*\)\n", out)
    assert float(found[1]) == 0.0, "no word is the same"
    [source] = set(re.findall(r"\nsource          (.*)\nreference       (.*)\nbefore training ", out)[:1])
    assert [NAMES[word] for word in source[0].split()] == source[1].split()
    assert "\nafter 2 updates  " in out


def test_without_sacrebleu(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    out = run(tmp_path, capsys)
    assert "it needs sacrebleu (pip install vpipe[bleu])" in out
    assert "\nreference " in out


def test_bleu() -> None:
    pytest.importorskip("sacrebleu")
    text = ["a text of several words is here", "and another one is there, too"]
    found, nothing = bleu(text, text), bleu([""] * 2, text)
    assert found is not None
    assert nothing is not None
    assert (found.score, nothing.score) == (pytest.approx(100), 0)
    assert re.fullmatch(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+", found.signature)


@pytest.mark.parametrize(("text", "words"), [
    ("错误：无法打开文件 %s", "zh"), ("ファイルを開けません: open", "char"), ("เปิดไฟล์ไม่ได้", "char"),
    ("cannot open the file 文", "13a"), ("", "13a")])
def test_a_script_without_spaces_is_scored_by_characters(text: str, words: str) -> None:
    pytest.importorskip("sacrebleu")
    found = bleu([text], [text])
    assert found is not None
    assert f"|tok:{words}|" in found.signature


@pytest.mark.parametrize("pre_norm", [False, True])
def test_translations_by_caches_are_those_of_whole_forwards(pre_norm: bool) -> None:
    model = translation_from_settings(ModelSettings(30, "tiny", hidden_size=16, num_heads=2, sequence_length=9,
                                                    options=TranslationOptions(pre_norm=pre_norm)))
    modules = model.materialize(5).eval()
    torch.nn.init.normal_(modules["head"].get_parameter("decoder.weight"),  # tied: so that words differ
                          generator=torch.Generator().manual_seed(2))
    source = torch.randint(2, 30, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) < torch.tensor([[6], [3], [1], [5]])).long()
    decoder = TextDecoder(model, modules, 9)
    assert decoder.cached
    found = decoder.texts(torch.zeros(4, 1, dtype=torch.long), Decoding(9, 28, end=1, barred=0, temperature=0),
                          {"source_ids": source, "source_mask": mask})

    def by_whole_forwards(row: int) -> list[int]:
        tensors: dict[str, Tensor] = {"source_ids": source[row:row + 1], "source_mask": mask[row:row + 1]}
        tokens = [0]
        while len(tokens) < 10 and 1 not in tokens:
            tensors["target_ids"] = torch.tensor([tokens])
            for layer in model.layers[:-1]:
                tensors[layer.outputs[0]] = modules[layer.name](*(tensors[name] for name in layer.inputs))
            scores = modules["head"].scores(tensors["h"])[0, -1, :28]
            tokens.append(int(scores[1:].argmax()) + 1)
        return tokens[1:tokens.index(1) if 1 in tokens else None]

    with torch.no_grad():
        assert found == [by_whole_forwards(row) for row in range(4)]
    assert len({tuple(row) for row in found}) > 1
