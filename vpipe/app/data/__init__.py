"""Data sets: the sources of batches.

Start at ``dataset.py`` (the interface), ``registry.py`` (data sets by name) and ``epoch.py`` (rows to batches).
BERT's samples come from ``text``: documents of ``plain_text`` or ``local_corpus`` -> ``tokenizers`` -> ``bert_samples``
-> mapped arrays or, for ``bert_hdf5``, shards. A language model's: ``text``, ``code_search_net`` or ``huggingface`` ->
``corpus`` -> ``tokenizers`` -> tokens. ``cache`` keeps prepared folders, ``epoch`` makes batches ahead of need, too.
"""

KEYS = ("path", "samples", "tokenizer", "max_tokens", "language", "source_language", "target_language")
"""Keys of a config's ``dataset`` that a data set reads if it says so; the others are read for every data set."""

DEFAULT = KEYS[:2]
"""What one reads that says nothing."""

READS = {"synthetic": ("samples", "max_tokens"), "text": (*KEYS[:3], "language"), "code_search_net": KEYS[:3],
         "huggingface": KEYS[:3]}
"""What vpipe's own read: known here, for a config is checked without importing what reads data."""
