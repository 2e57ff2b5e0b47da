"""``vpipe init`` writes a config of a translation model."""

from __future__ import annotations

from pathlib import Path

import pytest

from vpipe.app.cli import main
from vpipe.app.config.config import load_config


@pytest.mark.parametrize("words", [["--data", "pairs.tsv", "--schedule", "asynchronous"], ["--family", "translation"],
                                   ["--family", "translation", "--size", "big"]])
def test_init_knows_the_family_and_its_data(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.tsv").write_text("a cat\tune chatte\n")
    assert main(["init", *words, "-o", "c.yaml"]) == 0
    config = load_config(Path("c.yaml"))
    assert (config.model.name, config.model.preset) == ("translation", "big" if "big" in words else "tiny")
    assert (config.dataset.name, config.dataset.path) == ("pairs", Path("pairs.tsv") if "--data" in words else None)
