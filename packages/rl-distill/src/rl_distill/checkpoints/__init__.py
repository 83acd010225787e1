"""Checkpoints: what they hold, how they are written whole and read without running code."""
