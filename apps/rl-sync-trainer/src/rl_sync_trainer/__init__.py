"""Synchronous GRPO made of the four packages."""
