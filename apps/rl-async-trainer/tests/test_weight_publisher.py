"""Publishing weights to engines, and the error if they do not load them in time."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_replicas import a_canary, an_update

from rl_async_trainer.controller.weight_publisher import WeightPublisher
from rl_core.cluster import RoleRestartedError
from rl_core.errors import DeadlineError, WeightProofError
from rl_core.weights import Canary, ProofTolerances, PublishReport, TokenScores
from rl_distill.learner_host import PackedWeights


def never_told(version: int, error: WeightProofError) -> None:
    pytest.fail(f"the proof of version {version} failed: {error}")


def a_report(version: int) -> PublishReport:
    zeros = dict.fromkeys(("probe_max_diff", "canary_max_diff", "update_s", "proof_s"), 0.0)
    return PublishReport(version=version, fingerprint="", num_tensors=1, **zeros)


def linked(learner: SimpleNamespace) -> Any:
    """Return a link to a learner that is never rolled back."""
    return SimpleNamespace(course=lambda: lambda: True, when=lambda _: learner)


def publish(rollouter: Any, *, deadline_s: float) -> None:
    """Publish version 5 to a rollouter."""

    async def packed(version: int) -> PackedWeights:
        return PackedWeights(update=an_update(version), canary=a_canary(), step=5, pack_s=0.0)

    async def served(*_: Any) -> None:
        pytest.fail("nothing was taken")

    async def work() -> None:
        learner = linked(SimpleNamespace(pack=packed))
        publisher = WeightPublisher(
            learner, rollouter, asyncio.Condition(), deadline_s=deadline_s, on_served=served, on_failed_proof=never_told
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publisher.pack(5))
            tasks.create_task(publisher.run())

    try:
        asyncio.run(work())
    except* DeadlineError as errors:
        raise errors.exceptions[0] from None


def test_engines_that_say_what_they_waited_for_are_heard():
    said = "replica 3 had not finished 8 samples 900 s after new requests were held back, and was not updated."

    async def drained(_: PackedWeights) -> None:
        raise DeadlineError(said)

    with pytest.raises(DeadlineError) as caught:
        publish(SimpleNamespace(publish=drained), deadline_s=900.0)
    assert str(caught.value) == said


def test_engines_that_say_nothing_are_waited_for_twice_as_long_as_a_group():
    async def never(_: PackedWeights) -> None:
        await asyncio.Event().wait()

    words = r"waited 0\.02 s \(twice rollout\.deadline_s\) for the engines to load version 5"
    with pytest.raises(DeadlineError, match=words):
        publish(SimpleNamespace(publish=never), deadline_s=0.01)


def test_weights_that_are_packed_again_for_a_new_rollouter_must_not_change_meanwhile():
    """The learner would otherwise train the next step right after packing, before the engines fetch the weights."""
    is_live: list[bool] = []

    async def pack(version: int | None) -> PackedWeights:
        assert version is None
        is_live.append(publisher.is_live)
        return PackedWeights(update=an_update(6), canary=a_canary(), step=6, pack_s=0.0, is_live=True)

    async def take(packed: PackedWeights) -> PublishReport:
        is_live.append(publisher.is_live)
        raise DeadlineError("that is enough")

    async def served(*_: Any) -> None:
        pytest.fail("nothing was taken")

    learner = linked(SimpleNamespace(pack=pack))
    rollouter: Any = SimpleNamespace(publish=take)

    async def work() -> None:
        nonlocal publisher
        changed = asyncio.Condition()
        publisher = WeightPublisher(
            learner, rollouter, changed, deadline_s=60.0, on_served=served, on_failed_proof=never_told
        )
        async with changed:
            publisher.lost()
        assert not publisher.is_live
        with pytest.raises(DeadlineError, match="enough"):
            await publisher.run()

    publisher: Any = None
    asyncio.run(work())
    assert is_live == [True, True]


@pytest.mark.parametrize("dies", [False, True])
def test_the_weights_of_a_mixture_stay_until_its_canary_is_proven(dies: bool):
    """If the learner dies before that, its restart has other weights, which are packed and published instead."""
    canary, none = replace(a_canary(), logprobs=None), np.zeros((1, 1), np.float32)
    told = tuple([TokenScores.after_first(none, none) for _ in canary.sequences] for _ in range(2))
    report = replace(a_report(5), canary_scores=told)
    happened: list[str] = []

    async def pack(version: int | None) -> PackedWeights:
        happened.append("packed")
        return PackedWeights(update=an_update(version or 6), canary=canary, step=5, pack_s=0.0, is_live=True)

    async def take(packed: PackedWeights) -> PublishReport:
        happened.append(f"published {packed.update.version}")
        return report

    async def prove(of: Canary, found: PublishReport, tolerances: ProofTolerances) -> PublishReport:
        assert of is canary
        assert tolerances == ProofTolerances(canary=0.1)
        assert publisher.is_live
        happened.append("proved")
        if dies and happened.count("proved") == 1:
            raise RoleRestartedError("it died")
        return replace(found, canary_scores=(), canary_max_diff=0.05)

    async def served(_: PackedWeights, found: PublishReport) -> None:
        assert found.canary_max_diff == 0.05
        assert publisher.is_live
        happened.append("served")

    learner = linked(SimpleNamespace(pack=pack, prove=prove))
    rollouter: Any = SimpleNamespace(publish=take, tolerances=ProofTolerances(canary=0.1))

    async def work() -> None:
        nonlocal publisher
        changed = asyncio.Condition()
        publisher = WeightPublisher(
            learner, rollouter, changed, deadline_s=60.0, on_served=served, on_failed_proof=never_told
        )
        running = asyncio.create_task(publisher.run())
        async with asyncio.timeout(60):
            await publisher.pack_and_wait(5)
        assert not publisher.is_live
        running.cancel()

    publisher: Any = None
    asyncio.run(work())
    once = ["packed", "published 5", "proved"]
    assert happened == [*once, *(["packed", "published 6", "proved"] if dies else []), "served"]


@pytest.mark.parametrize("outcomes", ["s", "fs", "ff", "fsfs"])
def test_weights_are_packed_and_published_once_more_after_a_failed_proof(outcomes: str):
    """A second failure in succession is the run's error."""
    happened: list[str] = []
    left = list(outcomes)

    async def pack(version: int | None) -> PackedWeights:
        happened.append(f"packed {version}")
        return PackedWeights(update=an_update(version or 5), canary=a_canary(), step=5, pack_s=0.0)

    async def take(packed: PackedWeights) -> PublishReport:
        if left.pop(0) == "f":
            raise WeightProofError("'b' differs", tensor="b")
        return a_report(packed.update.version)

    async def served(_: PackedWeights, found: PublishReport) -> None:
        happened.append(f"served {found.version}")

    async def check_alive() -> None:
        pass

    learner = linked(SimpleNamespace(pack=pack))
    learner.check_alive = check_alive

    async def work() -> None:
        publisher = WeightPublisher(
            learner,
            SimpleNamespace(publish=take),  # type: ignore[arg-type]
            asyncio.Condition(),
            deadline_s=60.0,
            on_served=served,
            on_failed_proof=lambda version, error: happened.append(f"failed {version} {error.tensor}"),
        )
        running = asyncio.create_task(publisher.run())
        async with asyncio.timeout(60):
            while left and not running.done():
                publishing = asyncio.create_task(publisher.pack_and_wait(5))
                await asyncio.wait([running, publishing], return_when=asyncio.FIRST_COMPLETED)
                publishing.cancel()
        running.cancel()
        await running

    once, again = ["packed 5", "served 5"], ["packed 5", "failed 5 b", "packed None", "served 5"]
    expected = {"s": once, "fs": again, "ff": again[:3], "fsfs": again + again}
    error, says = (WeightProofError, "b") if outcomes == "ff" else (asyncio.CancelledError, None)
    with pytest.raises(error, match=says):
        asyncio.run(work())
    assert happened == expected[outcomes]
