"""Testing: what others need to test a schedule, a stage or a pipeline of their own against an oracle."""
