"""Epochs of batches that have equally many samples. Those that differ are tested with the extra translation."""

from __future__ import annotations

from vpipe.app.data.synthetic import synthetic_tokens
from vpipe.app.train.epochs import Epochs, Location


def test_equal_batches_are_counted_as_before() -> None:
    epochs = Epochs(synthetic_tokens(8, 16, 50, 8), 4, 2, 16, lambda epoch: epoch)
    assert (epochs.batches, epochs.samples, epochs.tokens, epochs.per_step(4)) == (12, 48, 768, (8, 128))
    assert epochs.locate(48 + 6) == Location(1, 1, 2, 4)
    assert epochs.microbatches_done(48 + 6) == 27
    assert epochs.steps(0, 2) is None
