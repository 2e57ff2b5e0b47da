"""Data sets: the sources of batches.

Start at ``dataset.py`` (the interface), ``registry.py`` (data sets by name) and ``epoch.py`` (rows to batches).
BERT's samples are made so:

    local_corpus/prose, plain_text -> documents -> tokenizers -> bert_samples -> bert_text (cache) or bert_shards (HDF5)

and those of a language model so:

    code_search_net, text, huggingface, local_corpus/functions -> corpus -> tokenizers -> token_dataset

``cache`` keeps prepared folders, ``prefetch`` makes batches ahead of need.
"""
