"""Scores of the served policy refer to one version."""

import asyncio
from typing import Any

import numpy as np

from rl_core.data.records import NO_VERSION
from rl_rollout.engines.protocol import EngineTraits, TokenScores
from rl_rollout.rollouter.served_policy import TRIES, PolicyScores, ServedPolicy

SEQUENCES = [np.asarray([1, 2, 3], dtype=np.int32)]


class Engine:
    """Counts its requests, and calls `meanwhile` during each of them."""

    traits = EngineTraits(name="fake", max_model_len=99, vocab_size=99, max_top_k=5)

    def __init__(self) -> None:
        self.num_asked = 0
        self.meanwhile: Any = lambda: None

    async def score(self, sequences: Any, *, top_k: int) -> list[TokenScores]:
        self.num_asked += 1
        self.meanwhile()
        ids = np.full((len(sequences[0]), top_k + 1), self.num_asked, dtype=np.int32)
        return [TokenScores(token_ids=ids, logprobs=np.zeros(ids.shape, dtype=np.float32))]


def number_of(found: PolicyScores) -> int:
    """Return the number of the request that these scores answer."""
    return int(found.scores[0].token_ids[0, 0])


def take(served: ServedPolicy, version: int) -> None:
    with served.changing(version):
        pass


def test_scores_have_the_version_that_is_served() -> None:
    served, engine = ServedPolicy(), Engine()
    assert asyncio.run(served.scores(engine, SEQUENCES, 2)).version == NO_VERSION  # type: ignore[arg-type]
    take(served, 3)
    found = asyncio.run(served.scores(engine, SEQUENCES, 2))  # type: ignore[arg-type]
    assert (found.version, number_of(found), found.scores[0].token_ids.shape) == (3, 2, (3, 3))


def test_what_is_scored_while_weights_are_replaced_is_scored_again() -> None:
    served, engine = ServedPolicy(), Engine()
    take(served, 3)
    changes = iter([4])
    engine.meanwhile = lambda: take(served, version) if (version := next(changes, 0)) else None
    found = asyncio.run(served.scores(engine, SEQUENCES, 2))  # type: ignore[arg-type]
    assert (found.version, number_of(found)) == (4, 2)


def test_weights_that_are_being_taken_are_waited_for() -> None:
    served, engine = ServedPolicy(), Engine()

    async def run() -> PolicyScores:
        with served.changing(5):
            asking = asyncio.create_task(served.scores(engine, SEQUENCES, 2))  # type: ignore[arg-type]
            for _ in range(10):
                await asyncio.sleep(0)
            assert engine.num_asked == 0
        return await asking

    assert asyncio.run(run()).version == 5


def test_an_update_that_failed_leaves_the_version_and_counts_as_a_change() -> None:
    served, engine = ServedPolicy(), Engine()
    take(served, 3)
    failures = iter([True])

    def fail() -> None:
        if next(failures, False):
            try:
                with served.changing(4):
                    raise RuntimeError
            except RuntimeError:
                pass

    engine.meanwhile = fail
    found = asyncio.run(served.scores(engine, SEQUENCES, 2))  # type: ignore[arg-type]
    assert (found.version, number_of(found)) == (3, 2)


def test_weights_that_are_always_replaced_give_no_scores() -> None:
    served, engine = ServedPolicy(), Engine()
    versions = iter(range(1, 100))
    engine.meanwhile = lambda: take(served, next(versions))
    found = asyncio.run(served.scores(engine, SEQUENCES, 2))  # type: ignore[arg-type]
    assert found.scores == ()
    assert engine.num_asked == TRIES
