"""Test helpers for other packages and backends: rows, a clock, and the conformance suite of queues."""

from rl_core.testing.fixtures import FakeClock, make_prompt, make_prompts, make_trajectory, ragged_like, wait_until
from rl_core.testing.queue_conformance import QueueBackendConformance

__all__ = [
    "FakeClock",
    "QueueBackendConformance",
    "make_prompt",
    "make_prompts",
    "make_trajectory",
    "ragged_like",
    "wait_until",
]
