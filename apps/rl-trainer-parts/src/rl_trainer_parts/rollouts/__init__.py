"""Prompts, engines, skip caches and validation of a run."""
