"""Test helpers for other packages and backends: rows, a clock, and the conformance suite of queues."""

from rl_core.testing.clock import FakeClock, wait_until
from rl_core.testing.queue_conformance import QueueBackendConformance
from rl_core.testing.rows import make_prompt, make_prompts, make_trajectory, ragged_like

__all__ = [
    "FakeClock",
    "QueueBackendConformance",
    "make_prompt",
    "make_prompts",
    "make_trajectory",
    "ragged_like",
    "wait_until",
]
