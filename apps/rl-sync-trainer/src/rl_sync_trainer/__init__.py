"""Synchronous GRPO, built from the four packages."""
