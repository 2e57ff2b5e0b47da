"""Data sets: where batches come from.

Start at ``dataset.py`` (what a data set is) and ``registry.py`` (how one is found by name). For BERT the way is

    prose, plain_text -> documents -> wordpiece -> bert_samples, masking -> bert_cache (text) or build_bert (shards)

and ``bert_arrays``, ``bert_hdf5`` and ``synthetic`` turn samples into batches. For a language model it is

    jsonl, functions, token_text, huggingface -> corpus -> byte_bpe -> token_cache -> token_arrays

``prepared`` keeps what either makes.
"""
