"""From a profile to a plan: partition, recomputation, replicas, schedule and microbatches within a memory limit."""
