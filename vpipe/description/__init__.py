"""The parts that describe a pipeline: each checks itself when it is made, and is then passed on as it is."""
