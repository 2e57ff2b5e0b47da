"""A small text, made here, and what is prepared from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vpipe.app.data.text import BertTextSettings

torch.set_num_threads(1)

WORDS = ("river", "stone", "quiet", "lantern", "harbour", "winter", "signal", "copper", "meadow", "engine", "silver",
         "morning", "letter", "garden", "window", "thunder", "market", "bridge", "velvet", "compass")


def write_text(folder: Path, documents: int = 40, seed: int = 0) -> Path:
    """Files of ten documents each, with 3 to 12 sentences of 4 to 9 words."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for _ in range(documents):
        sentences = [" ".join(rng.choice(WORDS, size=rng.integers(4, 10))).capitalize() + "."
                     for _ in range(rng.integers(3, 13))]
        texts.append("\n".join(sentences))
    for start in range(0, documents, 10):
        (folder / f"part_{start:03d}.txt").write_text("\n\n".join(texts[start:start + 10]))
    return folder


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.fixture
def wanted(text_folder: Path) -> BertTextSettings:
    return BertTextSettings(text_folder, sequence_length=32, vocab_size=120)
