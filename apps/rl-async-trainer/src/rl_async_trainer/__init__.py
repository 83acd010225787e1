"""Fully asynchronous GRPO, built from the four packages."""
