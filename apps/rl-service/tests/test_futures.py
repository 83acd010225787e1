"""Results are kept until clients have them, within bounds."""

import asyncio

import pytest

from rl_service.futures import KEPT_BYTES, Answer, Futures


def test_a_result_can_be_fetched_again_after_a_lost_response():
    async def run():
        futures = Futures(kept_s=60.0, kept_bytes=10_000)
        futures.open("a")
        assert await futures.wait("a", timeout_s=0.0) is None
        waiting = asyncio.ensure_future(futures.wait("a", timeout_s=60.0))
        await asyncio.sleep(0)
        futures.settle("a", Answer.of(path="p"))
        assert await waiting == await futures.wait("a", timeout_s=0.0) == Answer(content=b'{"path":"p"}')
        with pytest.raises(KeyError, match="b"):
            await futures.wait("b", timeout_s=0.0)

    asyncio.run(run())


def test_results_that_were_fetched_go_first_when_there_are_too_many():
    async def run():
        futures = Futures(kept_s=60.0, kept_bytes=int(2.5 * KEPT_BYTES))
        for name in ("a", "b"):
            futures.open(name)
            futures.settle(name, Answer(content=b"0123456789"))
        await futures.wait("b", timeout_s=0.0)
        futures.open("c")
        futures.settle("c", Answer(content=b"0123456789"))
        assert [futures.knows(name) for name in "abc"] == [True, False, True]

    asyncio.run(run())


def test_results_of_an_ended_session_are_kept_as_if_its_client_had_them():
    async def run():
        futures = Futures(kept_s=-1.0, kept_bytes=10_000)
        for name in ("a:1", "a:2", "b:1"):
            futures.open(name)
        futures.settle("a:1", Answer.failed("it failed", "user"))
        futures.release("a:")
        futures.sweep()
        assert [futures.knows(name) for name in ("a:1", "a:2", "b:1")] == [False, False, True]

    asyncio.run(run())


def test_who_waits_learns_that_a_result_is_no_longer_expected():
    async def run():
        futures = Futures(kept_s=60.0, kept_bytes=10_000)
        for name in ("a", "b"):
            futures.open(name)
        futures.settle("b", Answer.of(path="p"))
        waiting = asyncio.ensure_future(futures.wait("a", timeout_s=30.0))
        await asyncio.sleep(0)
        futures.forget_open()
        with pytest.raises(KeyError, match="a"):
            await waiting
        assert [futures.knows(name) for name in "ab"] == [False, True]

    asyncio.run(run())


def test_fetched_results_are_dropped_after_a_time():
    async def run():
        futures = Futures(kept_s=-1.0, kept_bytes=10_000)
        for name in ("a", "b"):
            futures.open(name)
            futures.settle(name, Answer.failed("it failed", "user"))
        await futures.wait("a", timeout_s=0.0)
        futures.sweep()
        assert [futures.knows(name) for name in "ab"] == [False, True]

    asyncio.run(run())
