"""The data set ``text``: .txt files, or the prose inside installed packages, for BERT or a language model."""

from __future__ import annotations

from vpipe.data.bert_text import bert_text
from vpipe.data.dataset import Dataset, DatasetSettings
from vpipe.data.registry import register_dataset
from vpipe.data.token_cache import token_dataset
from vpipe.data.token_fields import for_language_model
from vpipe.data.token_text import text_corpus


@register_dataset("text")
def text(settings: DatasetSettings) -> Dataset:
    """Samples for the model that reads ``settings.fields``. Raises :class:`UserError` for text that cannot work."""
    if for_language_model(settings.fields):
        return token_dataset(text_corpus(settings.path), settings)
    return bert_text(settings)
