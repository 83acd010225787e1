"""Requests go to the engine that has their prefix, unless it has far more load."""

import numpy as np

from rl_core.data.records import IntArray
from rl_rollout.engines.replicas.replica_set import BLOCK_TOKENS, Router

EVERY = (0, 1, 2)


def prompt(*blocks: int) -> IntArray:
    """Return a block of equal tokens for each number, followed by a partial block."""
    return np.array([number for number in blocks for _ in range(BLOCK_TOKENS)] + [7, 7], dtype=np.int32)


def test_the_least_busy_engine_gets_what_nobody_knows() -> None:
    router = Router(3)
    with router.carrying(0, 5), router.carrying(2, 1):
        assert router.choose(prompt(1), among=EVERY) == 1
        assert router.choose(prompt(2), among=(0, 2)) == 2
    assert router.loads == [0, 0, 0]


def test_a_known_prefix_draws_and_a_longer_one_draws_more() -> None:
    router = Router(3)
    with router.carrying(0, 1), router.carrying(2, 1):
        assert router.choose(prompt(1, 2), among=EVERY) == 1
    with router.carrying(1, 1), router.carrying(2, 1):
        assert router.choose(prompt(5), among=EVERY) == 0
    with router.carrying(0, 1):
        assert router.choose(prompt(1, 2, 3), among=EVERY) == 1  # engine 2 is just as idle
    with router.carrying(1, 4), router.carrying(0, 1):
        assert router.choose(prompt(1, 9), among=EVERY) == 1
    with router.carrying(1, 1):
        assert router.choose(prompt(5, 1), among=EVERY) == 0


def test_a_prefix_does_not_draw_beyond_the_slack() -> None:
    router = Router(2, max_ratio=1.0, slack=4)
    first = router.choose(prompt(1), among=(0, 1))
    with router.carrying(first, 4):
        assert router.choose(prompt(1), among=(0, 1)) == first
    with router.carrying(first, 5):
        assert router.choose(prompt(1), among=(0, 1)) == 1 - first


def test_what_an_engine_lost_draws_no_more() -> None:
    router = Router(2)
    first = router.choose(prompt(1), among=(0, 1))
    router.forget(first)
    with router.carrying(first, 1):
        assert router.choose(prompt(1), among=(0, 1)) == 1 - first


def test_a_load_is_given_back_when_a_request_fails() -> None:
    router = Router(1)
    try:
        with router.carrying(0, 3):
            raise ValueError
    except ValueError:
        assert router.loads == [0]
