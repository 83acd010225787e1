"""Fully asynchronous GRPO made of the four packages."""
