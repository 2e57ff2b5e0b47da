"""Train a Transformer to translate: the model, pairs of sentences, batches of similar length, BLEU at the end."""
