"""The way of weights to the engines: what is said where they do not take them in time."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_replicas import a_canary, an_update

from rl_async_trainer.controller.weight_publisher import WeightPublisher
from rl_core.errors import DeadlineError
from rl_distill.learner_host import PackedWeights


def publish(rollouter: Any, *, deadline_s: float) -> None:
    """Publish version 5 to a rollouter."""
    learner: Any = SimpleNamespace(course=lambda: lambda: True, pack=lambda version, is_current: packed(version))

    async def packed(version: int) -> PackedWeights:
        return PackedWeights(update=an_update(version), canary=a_canary(), step=5, pack_s=0.0)

    async def served(*_: Any) -> None:
        pytest.fail("nothing was taken")

    async def work() -> None:
        publisher = WeightPublisher(learner, rollouter, asyncio.Condition(), deadline_s=deadline_s, on_served=served)
        await publisher.pack(5)
        await publisher.run()

    asyncio.run(work())


def test_engines_that_say_what_they_waited_for_are_heard():
    said = "replica 3 had not ended 8 samples 900 s after new requests were held back, and was not updated."

    async def drained(_: PackedWeights) -> None:
        raise DeadlineError(said)

    with pytest.raises(DeadlineError) as caught:
        publish(SimpleNamespace(publish=drained), deadline_s=900.0)
    assert str(caught.value) == said


def test_engines_that_say_nothing_are_waited_for_twice_as_long_as_a_group():
    async def never(_: PackedWeights) -> None:
        await asyncio.Event().wait()

    words = r"waited 0\.02 s \(twice rollout\.deadline_s\) for the engines to take version 5"
    with pytest.raises(DeadlineError, match=words):
        publish(SimpleNamespace(publish=never), deadline_s=0.01)
