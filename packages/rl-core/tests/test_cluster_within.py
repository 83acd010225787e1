"""A block with a deadline."""

import asyncio

import pytest

from rl_core.cluster import within
from rl_core.errors import DeadlineError


def test_a_block_that_never_ends_is_cancelled_with_the_given_message():
    ends: list[str] = []

    async def wait() -> None:
        try:
            async with within(0.01, "waited 0.01 s for nothing."):
                await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    with pytest.raises(DeadlineError, match=r"^waited 0\.01 s for nothing\.$"):
        asyncio.run(wait())
    assert ends == ["cancelled"]


def test_a_timeout_of_the_block_itself_keeps_its_message():
    async def fail() -> None:
        async with within(60.0, "too late"):
            raise TimeoutError("the engine gave up")

    with pytest.raises(TimeoutError, match=r"^the engine gave up$"):
        asyncio.run(fail())


def test_a_block_in_time_has_no_error():
    async def end() -> int:
        async with within(60.0, "too late"):
            return 7

    assert asyncio.run(end()) == 7
