"""Generate text with a trained model: ``vpipe sample``, and samples at the end of a run; on one rank or several."""
