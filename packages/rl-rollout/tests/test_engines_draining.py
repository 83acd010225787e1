"""Weights loaded between responses: each response has one policy version."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted_replicas import EXACT, Held, a_canary, an_update, ask, run_with, until

from rl_core.errors import DeadlineError, EngineError, WeightProofError
from rl_core.weights.publish import PublishReport
from rl_core.weights.update import WeightReceipt, WeightUpdate
from rl_rollout.engines.protocol import Generation
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.scripted import honest_receipt


def drain(engine: Any, version: int, **options: Any) -> "asyncio.Future[PublishReport]":
    return asyncio.ensure_future(
        engine.publish(an_update(version), canary=a_canary(), tolerances=EXACT, drain=True, **options)
    )


def versions_of(answers: Sequence[Sequence[Generation]]) -> list[list[int]]:
    return [one.policy_versions.tolist() for samples in answers for one in samples]


def is_draining(engine: ReplicatedEngine, index: int) -> bool:
    return engine._replicas.get(index).state == "draining"


def test_each_replica_ends_its_requests_before_it_takes_the_weights() -> None:
    """The first drained replica serves new requests while the second still finishes old ones."""
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> None:
        old = ask(engine, 0, 1)
        await until(lambda: held[0].num_running == held[1].num_running == 1, "both to be asked")
        publishing = drain(engine, 5)
        await until(lambda: is_draining(engine, 0) and is_draining(engine, 1), "both to drain")
        waiting = ask(engine, 2, 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [len(one.engine.requests) for one in held] == [1, 1]
        held[0].finish()
        await until(lambda: held[0].num_running == 2, "those that waited to be asked of the first")
        assert held[0].engine.updates
        assert not held[1].engine.updates
        assert not publishing.done()
        later = ask(engine, 4)
        await until(lambda: held[0].num_running == 3, "a later one to be asked of the first")
        held[1].finish()
        report = await publishing
        last = ask(engine, 5)
        await until(lambda: held[1].num_running == 1, "the second to be asked again")
        for one in held:
            one.finish()
        assert versions_of(await asyncio.gather(*old)) == [[0], [0]]
        assert versions_of(await asyncio.gather(*waiting, *later, *last)) == [[5]] * 4
        assert report.version == 5
        assert report.drain_s > 0
        assert report.stall_s > 0

    run_with(held, work)


def test_requests_go_on_where_nobody_drains() -> None:
    held = [Held(1)]

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0)
        await until(lambda: held[0].num_running == 1, "it to be asked")
        report = await engine.publish(an_update(5), canary=a_canary(), tolerances=EXACT)
        held[0].finish()
        assert versions_of(await asyncio.gather(*running)) == [[5]]
        assert report.drain_s == 0
        assert report.stall_s == report.update_s > 0

    run_with(held, work)


def test_what_waits_can_be_aborted() -> None:
    held = [Held(1)]

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0, request_id="old")
        await until(lambda: held[0].num_running == 1, "it to be asked")
        publishing = drain(engine, 5)
        await until(lambda: is_draining(engine, 0), "it to drain")
        named = ask(engine, 1, request_id="a", num_samples=3)
        other, scoring = ask(engine, 2, request_id="b"), asyncio.ensure_future(engine.score(a_canary().sequences))
        await asyncio.sleep(0)  # both wait
        await engine.abort(["a"])
        (aborted,) = await asyncio.gather(*named)
        assert [(len(one.token_ids), one.finish_reason) for one in aborted] == [(0, "abort")] * 3
        assert not other[0].done()
        assert not running[0].done()
        await engine.abort(None)
        (last,) = await other[0]
        assert last.finish_reason == "abort"
        with pytest.raises(EngineError, match="aborted before an engine started it"):
            await scoring
        await asyncio.gather(publishing, *running)
        assert len(held[0].engine.requests) == 1

    run_with(held, work)


def test_a_replica_that_does_not_end_its_requests_is_named_and_nothing_is_published() -> None:
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> None:
        await engine.publish(an_update(4), canary=a_canary(), tolerances=EXACT)
        running = ask(engine, 0, num_samples=3)
        await until(lambda: held[0].num_running == 3, "it to be asked")
        with pytest.raises(DeadlineError, match=r"replica 0 had not finished 3 samples 0\.01 s after"):
            await drain(engine, 5, drain_deadline_s=0.01)
        new = ask(engine, 1)
        await until(lambda: held[1].num_running == 1, "the other to be asked")
        for one in held:
            one.finish()
        assert versions_of(await asyncio.gather(*running, *new)) == [[4]] * 4
        assert [update.version for update in held[1].engine.updates] == [4, 5, 4]

    run_with(held, work)


def test_a_proof_that_fails_stops_the_drain_of_the_others() -> None:
    def receive(update: WeightUpdate) -> WeightReceipt:
        return replace(honest_receipt(update), version=update.version if update.version != 5 else 3)

    held = [Held(1, receive=receive), Held(2)]

    async def work(engine: ReplicatedEngine) -> None:
        await engine.publish(an_update(4), canary=a_canary(), tolerances=EXACT)
        running = ask(engine, 0, 1)
        await until(lambda: held[1].num_running == 1, "both to be asked")
        publishing = drain(engine, 5)
        await until(lambda: is_draining(engine, 0) and is_draining(engine, 1), "both to drain")
        held[0].finish()
        with pytest.raises(WeightProofError, match="replica 0: the engine serves version 3"):
            await publishing
        assert held[1].num_running == 1
        assert engine.num_serving == 2
        new = ask(engine, 2, 3)
        await until(lambda: held[0].num_running + held[1].num_running == 3, "new ones to be asked")
        for one in held:
            one.finish()
        assert versions_of(await asyncio.gather(*running, *new)) == [[4]] * 4
        assert [update.version for update in held[1].engine.updates] == [4]

    run_with(held, work)


def test_a_replica_that_joins_or_goes_meanwhile_serves_one_version_only() -> None:
    held, third = [Held(1), Held(2)], Held(3)

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0, 1)
        await until(lambda: held[1].num_running == 1, "both to be asked")
        publishing = drain(engine, 5)
        await until(lambda: is_draining(engine, 0), "them to drain")
        waiting = ask(engine, 2)
        removing = asyncio.ensure_future(engine.remove(1))
        await engine.add(third.engine)
        await until(lambda: third.num_running == 1, "the third to be asked")
        for one in held:
            one.finish()
        await asyncio.gather(publishing, removing)
        third.finish()
        assert versions_of(await asyncio.gather(*running)) == [[0], [0]]
        assert versions_of(await asyncio.gather(*waiting)) == [[5]]
        assert engine.num_serving == 2

    run_with(held, work)


def test_what_a_replica_that_dies_meanwhile_had_begins_anew_under_the_new_weights() -> None:
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0, 1)
        await until(lambda: held[1].num_running == 1, "both to be asked")
        publishing = drain(engine, 5)
        await until(lambda: is_draining(engine, 0) and is_draining(engine, 1), "both to drain")
        held[0].die()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(held[1].engine.requests) == 1
        held[1].finish()
        await publishing
        await until(lambda: held[1].num_running == 1, "the request to begin anew")
        held[1].finish()
        assert versions_of(await asyncio.gather(*running)) == [[5], [0]]

    run_with(held, work)


def test_closing_ends_what_waits() -> None:
    held = [Held(1)]

    async def work(engine: ReplicatedEngine) -> None:
        running = ask(engine, 0)
        await until(lambda: held[0].num_running == 1, "it to be asked")
        publishing = drain(engine, 5)
        await until(lambda: is_draining(engine, 0), "it to drain")
        waiting = ask(engine, 1)
        await asyncio.sleep(0)
        await engine.close()
        for one in (*running, *waiting, publishing):
            with pytest.raises(Exception, match="closed"):
                await one

    run_with(held, work)
