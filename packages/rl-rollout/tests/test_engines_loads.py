"""Loads of replicas, measured with a fake clock."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from scripted_replicas import EXACT, Held, a_canary, an_update, ask, until

from rl_core.testing import FakeClock
from rl_rollout.engines.replicas.engine import ReplicatedEngine
from rl_rollout.engines.replicas.replica import EngineLoad


def run_with(held: Sequence[Held], work: Callable[[ReplicatedEngine, FakeClock], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        clock = FakeClock()
        engine = ReplicatedEngine([one.engine for one in held], clock=clock)
        assert [load.state for load in engine.loads()] == ["starting"] * len(held)
        clock.advance(50)  # not counted: the engines have not started
        await engine.start()
        try:
            async with asyncio.timeout(20):
                return await work(engine, clock)
        finally:
            await engine.close()

    return asyncio.run(go())


def times(load: EngineLoad) -> tuple[float, float]:
    return load.busy_s, load.idle_s


def test_an_engine_is_busy_while_one_sample_runs() -> None:
    """The engine is idle for 2 s, busy for 3 + 4 s with overlapping requests, then idle for 1 s."""
    held = [Held(1), Held(2)]

    async def work(engine: ReplicatedEngine, clock: FakeClock) -> None:
        clock.advance(2)
        first = ask(engine, 0, num_samples=2)
        await until(lambda: held[0].num_running == 2, "it to be asked")
        clock.advance(3)
        assert [load.num_running for load in engine.loads()] == [2, 0]
        assert [times(load) for load in engine.loads()] == [(3, 2), (0, 5)]
        second = ask(engine, 1, 2, 3)
        await until(lambda: held[0].num_running + held[1].num_running == 5, "the others to be asked")
        clock.advance(4)
        held[0].finish()
        await asyncio.gather(*first)
        await until(lambda: engine.loads()[0].num_running == 0, "the first to be idle")
        clock.advance(1)
        busy, other = engine.loads()
        assert (busy.index, busy.state, other.index, other.state) == (0, "serving", 1, "serving")
        assert times(busy) == (7, 3)
        assert times(other) == (5, 5)
        assert (busy.num_tokens, other.num_tokens) == (held[0].num_asked, 0)
        assert busy.num_requests + other.num_requests == 4
        held[1].finish()
        await asyncio.gather(*second)
        assert [load.num_tokens for load in engine.loads()] == [held[0].num_asked, held[1].num_asked]

    run_with(held, work)


def test_a_request_that_waits_keeps_no_engine_busy() -> None:
    held = [Held(1)]

    async def work(engine: ReplicatedEngine, clock: FakeClock) -> None:
        running = ask(engine, 0)
        await until(lambda: held[0].num_running == 1, "it to be asked")
        publishing = asyncio.ensure_future(
            engine.publish(an_update(5), canary=a_canary(), tolerances=EXACT, drain=True)
        )
        await until(lambda: engine.loads()[0].state == "draining", "it to drain")
        assert engine.num_serving == 0
        waiting = ask(engine, 1)
        clock.advance(3)
        held[0].finish()
        await publishing
        await until(lambda: held[0].num_running == 1, "the one that waited to be asked")
        assert [load.num_running for load in engine.loads()] == [1]
        assert times(engine.loads()[0]) == (3, 0)
        await engine.abort(None)
        await asyncio.gather(*running, *waiting)
        assert engine.loads()[0].num_requests == 2

    run_with(held, work)


def test_replicas_that_come_go_and_die_are_told_apart() -> None:
    held, third = [Held(1), Held(2)], Held(3)

    async def work(engine: ReplicatedEngine, clock: FakeClock) -> None:
        clock.advance(5)
        await engine.add(third.engine)
        clock.advance(1)
        assert [times(load) for load in engine.loads()] == [(0, 6), (0, 6), (0, 1)]
        running = ask(engine, 0, 1, 2)
        await until(lambda: third.num_running == 1, "all to be asked")
        clock.advance(2)
        held[0].die()
        await until(lambda: held[1].num_running + third.num_running == 3, "its request to move")
        removing = asyncio.ensure_future(engine.remove(1))
        await until(lambda: engine.num_serving == 1, "the removal to begin")
        assert [load.state for load in engine.loads()] == ["dead", "draining", "serving"]
        assert [load.num_requests for load in engine.loads()] == [1, 2, 1]
        assert times(engine.loads()[0]) == (2, 6)
        held[1].finish()
        third.finish()
        removed = await removing
        await asyncio.gather(*running)
        assert (removed.index, removed.num_tokens, times(removed)) == (1, 2, (2, 6))
        assert [load.index for load in engine.loads()] == [0, 2]

    run_with(held, work)
