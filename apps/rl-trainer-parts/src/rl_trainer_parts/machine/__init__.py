"""Checks whether this machine can run a trainer: readings, needs of a run, verdicts."""
