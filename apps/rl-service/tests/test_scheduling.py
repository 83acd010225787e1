"""Training requests run in each client's order, and clients in turns."""

import asyncio

import pytest

from rl_rollout.gateway import RefusedError
from rl_service.futures import Answer
from rl_service.scheduling import Turns, Work
from rl_service.settings import ClientLimits


def work(owner, seq_id, *, num_tokens=0, num_bytes=0):
    return Work(
        owner=owner,
        seq_id=seq_id,
        request_id=f"{owner}:{seq_id}",
        run=lambda: Answer.of(),
        num_tokens=num_tokens,
        num_bytes=num_bytes,
    )


async def taken(turns, count):
    return [(await turns.next()).request_id for _ in range(count)]


def test_requests_wait_for_those_before_them():
    async def run():
        turns = Turns(ClientLimits())
        turns.open("a")
        for seq_id in (3, 2):
            turns.put(work("a", seq_id))
        first = asyncio.ensure_future(turns.next())
        await asyncio.sleep(0)
        assert not first.done()
        turns.put(work("a", 1))
        assert (await first).seq_id == 1
        assert await taken(turns, 2) == ["a:2", "a:3"]

    asyncio.run(run())


def test_a_client_with_much_work_does_not_delay_another():
    async def run():
        turns = Turns(ClientLimits())
        for owner in ("a", "b"):
            turns.open(owner)
        for seq_id in range(1, 5):
            turns.put(work("a", seq_id, num_tokens=100))
        assert await taken(turns, 2) == ["a:1", "a:2"]
        for seq_id in range(1, 4):
            turns.put(work("b", seq_id, num_tokens=100))
        order = await taken(turns, 5)
        assert sorted(order[:2]) == ["a:3", "b:1"]
        assert sorted(order[2:4]) == ["a:4", "b:2"]

    asyncio.run(run())


def test_an_idle_client_gets_no_credit():
    async def run():
        turns = Turns(ClientLimits())
        for owner in ("a", "b"):
            turns.open(owner)
        for seq_id in range(1, 9):
            turns.put(work("a", seq_id, num_tokens=10))
        await taken(turns, 6)
        for seq_id in range(1, 7):
            turns.put(work("b", seq_id, num_tokens=10))
        assert "a:7" in await taken(turns, 2)

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["max_waiting", "max_waiting_tokens", "max_waiting_bytes"])
def test_too_much_waiting_is_refused_by_name_and_may_be_tried_again(limit):
    turns = Turns(ClientLimits(**{limit: 1}))
    turns.open("a")
    one = {"num_tokens": 1, "num_bytes": 1}
    turns.put(work("a", 2, **one))
    with pytest.raises(RefusedError, match=f"limits.{limit} = 1 .* of a; it has 1") as caught:
        turns.check_room("a", seq_id=3, **one)
    turns.check_room("a", seq_id=1, num_tokens=5, num_bytes=5)  # the next one of a client may always wait
    assert caught.value.status == 429


def test_a_position_is_taken_once():
    turns = Turns(ClientLimits())
    turns.open("a")
    turns.put(work("a", 1))
    for seq_id in (0, 1):
        with pytest.raises(RefusedError, match=f"seq_id must be at least 1 and new; found {seq_id}"):
            turns.put(work("a", seq_id))
    assert [one.seq_id for one in turns.close("a")] == [1]
