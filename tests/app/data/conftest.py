"""A small text, made here, and what is prepared from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_text import write_text

from vpipe.app.data.text import BertTextSettings

torch.set_num_threads(1)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


@pytest.fixture
def wanted(text_folder: Path) -> BertTextSettings:
    return BertTextSettings(text_folder, sequence_length=32, vocab_size=120)
