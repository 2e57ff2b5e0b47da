"""A small text, made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

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
