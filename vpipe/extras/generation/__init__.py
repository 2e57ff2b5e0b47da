"""Generate text with a trained model: ``vpipe sample``, and samples at the end of a run."""
