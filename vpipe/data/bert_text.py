"""BERT samples from a folder of .txt files, or from the prose inside installed packages."""

from __future__ import annotations

from vpipe.data.arrays import first_samples
from vpipe.data.bert_arrays import BertArrays
from vpipe.data.bert_cache import prepare_text
from vpipe.data.bert_corpus import BertText
from vpipe.data.dataset import DatasetSettings, Split


def bert_text(settings: DatasetSettings) -> BertArrays:
    """Prepare (or find prepared) samples and open them: the folder may go while they are in use.

    ``sequence_length`` -1 means 128.
    Raises :class:`UserError` for text that cannot work; see :func:`~vpipe.data.bert_cache.prepare_text`.
    """
    wanted = BertText(settings.path, 128 if settings.sequence_length == -1 else settings.sequence_length,
                      settings.vocab_size, settings.max_predictions, settings.seed, settings.tokenizer)
    cache = prepare_text(wanted, settings.cache_directory)
    counts: dict[Split, int] = {"train": cache.samples("train"), "test": cache.samples("test")}
    opened = cache.arrays()
    return BertArrays(cache.vocab_size, wanted.sequence_length, wanted.predictions,
                      first_samples(counts, settings.samples), lambda split, field: opened[split, field],
                      cache.tokenizer_path)
