"""Expired sessions, and the memory of many sessions."""

import asyncio
import gc
import resource
import time
import tracemalloc
from pathlib import Path

import httpx
import pytest
from gateway_site import gateway_site, run

from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.gateway.apis.chat_completions import read_chat_request
from rl_rollout.gateway.sessions import SessionLimits

BODY = {"model": "any", "messages": [{"role": "user", "content": "1+2?"}]}
TRAITS = EngineTraits(name="scripted", max_model_len=4096, vocab_size=1 << 20)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_with_the_time_of_its_session_and_what_there_was_trains(stream, caplog, monkeypatch):
    monkeypatch.setattr("rl_rollout.gateway.service.FIRST_TOKEN_S", 0.05)  # the stream begins after this time
    says = iter([[1], None])

    async def say(*_):
        said = next(says)
        if said is None:
            await asyncio.Event().wait()
        return said

    async def talk():
        engine = ScriptedEngine(say, end_token_ids=[1], traits=TRAITS)
        site = gateway_site(None, engine=engine)
        async with site as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            session = gateway.open("p")
            headers = {"x-api-key": session.key}
            first = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert first.status_code == 200
            session.limits = SessionLimits(wall_s=time.monotonic() - session.opened_at + 0.3)
            other = {**BODY, "stream": stream, "messages": [{"role": "user", "content": "other"}]}
            if stream:  # a started stream can only be cut
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.post("/v1/chat/completions", json=other, headers=headers)
            else:
                given = await client.post("/v1/chat/completions", json=other, headers=headers)
                assert (given.status_code, given.json()["error"]["code"]) == (403, "session_limit")
                assert "has reached its limit" in given.json()["error"]["message"]
            await until(lambda: not session.running and not session.num_attended)
            again = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert again.status_code == 403
            session.set_reward(1)
            result = await gateway.finish(session)
            assert (result.failure, len(result.trajectories)) == (None, 1)

    run(talk)
    assert not any(record.exc_info for record in caplog.records)


def test_a_session_that_nobody_finishes_is_removed_and_its_trace_kept():
    async def talk():
        finished = []
        site = gateway_site(lambda _: "3", grace_s=0.001, on_finished=lambda *one: finished.append(one))
        async with site as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            kept = gateway.open("kept")
            session = gateway.open("p")
            headers = {"x-api-key": session.key}
            assert (await client.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 200
            session.limits = SessionLimits(wall_s=1e-9)
            await until(lambda: finished)
            assert list(gateway.sessions) == [kept]
            assert (await client.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 401
            assert 'event="sessions_expired"} 1' in (await client.get("/metrics")).text
        ((removed, result),) = finished
        assert removed is session
        assert result.failure == "its owner did not finish the session in time"
        assert [row.reward for row in result.trajectories] == [None]

    run(talk)


async def played(gateway, index):
    """Play a session of ten turns."""
    session = gateway.open("p", index)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]
    for turn in range(10):
        answer = await gateway.service.answer(session, read_chat_request({"messages": messages}))
        messages.append({"role": "assistant", "content": answer.samples[0].message.content})
        messages.append({"role": "user", "content": f"go on {turn}"})
    gateway.service.engine.requests.clear()
    return session


def token_bytes(sessions):
    samples = [sample for session in sessions for sample in session.tree.samples]
    arrays = [(one.turn.new_ids, *vars_of(one.generation)) for one in samples]
    return sum(array.nbytes for some in arrays for array in some)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def vars_of(generation):
    return generation.token_ids, generation.logprobs, generation.policy_versions


def test_a_session_of_ten_turns_holds_little_beside_its_tokens():
    async def talk():
        async with gateway_site(lambda _: "answer " * 5) as gateway:
            await played(gateway, 0)
            gc.collect()
            tracemalloc.start()
            try:
                sessions = [await played(gateway, index) for index in range(1, 9)]
                gc.collect()
                held = tracemalloc.get_traced_memory()[0] - token_bytes(sessions)
            finally:
                tracemalloc.stop()
            assert held / len(sessions) < 60_000  # the target is 100 KB of process memory

    run(talk)


@pytest.mark.soak
def test_two_thousand_sessions_are_held_at_once():
    async def talk():
        async with gateway_site(lambda _: "answer " * 5) as gateway:
            await played(gateway, 0)
            before = resident_bytes()
            sessions = [await played(gateway, index) for index in range(1, 2001)]
            gc.collect()
            held = resident_bytes() - before - token_bytes(sessions)
            assert held / len(sessions) < 100_000
            assert len(gateway.sessions) == 2001

    asyncio.run(asyncio.wait_for(talk(), 600))
