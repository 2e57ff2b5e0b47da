"""Data sets: the sources of batches.

Start at ``dataset.py`` (the interface), ``registry.py`` (data sets by name) and ``epoch.py`` (rows to batches).
BERT's samples come from ``text``: documents of ``plain_text`` or ``local_corpus`` -> ``tokenizers`` -> ``bert_samples``
-> mapped arrays or, for ``bert_hdf5``, shards. A language model's: ``text``, ``code_search_net`` or ``huggingface`` ->
``corpus`` -> ``tokenizers`` -> tokens. ``cache`` keeps prepared folders, ``prefetch`` makes batches ahead of need.
"""
