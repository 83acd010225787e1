"""Sessions over HTTP: keys, limits, the owner, and clients that leave, return or attack."""

import asyncio
import json
import math
import socket

import anthropic
import httpx
import openai
import pytest
from chat_model import encode, make_tokenizer
from gateway_site import gateway_site, run

from rl_core.errors import DataError, EngineError
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.gateway.apis.chat_completions import ChatCompletions
from rl_rollout.gateway.journal import read_session
from rl_rollout.gateway.sessions import SessionLimits
from rl_rollout.loops.agent_options import AgentOptions

USER = {"role": "user", "content": "1+2?"}
BODY = {"model": "any", "messages": [USER]}
TRAITS = EngineTraits(name="scripted", max_model_len=4096, vocab_size=1 << 20)


class Held:
    """An engine whose requests wait for `go`, and answer with their number."""

    def __init__(self, fails=()):
        self.tokenizer = make_tokenizer()
        self.go = asyncio.Event()
        self.asked = asyncio.Queue()
        self.num_asked = 0
        self._fails = set(fails)
        end = self.tokenizer.eos_token_id
        self.engine = ScriptedEngine(lambda *_: self.say(), end_token_ids=[end], traits=TRAITS)

    async def say(self):
        number = self.num_asked
        self.num_asked += 1
        self.asked.put_nowait(number)
        if number in self._fails:
            raise EngineError("out of memory")
        await self.go.wait()
        return encode(self.tokenizer, f"answer {number}<|im_end|>").tolist()


def texts_of(gateway, result):
    decode = make_tokenizer().decode
    rows = [row.input_ids[row.loss_mask] for row in result.trajectories]
    return decode(rows, skip_special_tokens=False)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def key_of(session):
    return {"authorization": f"Bearer {session.key}"}


def test_wrong_keys_and_those_of_sessions_that_ended_are_refused_in_the_words_of_each_api():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway:
            session = gateway.open("p")
            for key in ("wrong", gateway.owner_key, session.session_id, "é"):
                async with httpx.AsyncClient(base_url=gateway.url) as client:
                    for path in ("/v1/chat/completions", "/v1/messages"):
                        given = await client.post(path, json=BODY, headers={"x-api-key": key.encode()})
                        assert given.status_code == 401
                        assert given.headers["x-should-retry"] == "false"
                        assert "3" not in given.json()["error"]["message"]
                    assert given.json()["type"] == "error"
            async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key) as client:
                await client.chat.completions.create(**BODY)
                await gateway.finish(session)
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(**BODY)
            async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="sk-wrong") as client:
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.create(max_tokens=5, **BODY)

    run(talk)


def test_keys_are_random_and_shown_nowhere():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway:
            one, two = gateway.open("p"), gateway.open("p", 1)
            assert len({one.key, two.key}) == 2
            assert len(one.key) >= 43
            assert one.key not in repr(one)
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                shown = [(await client.get(path)).text for path in ("/health", "/metrics")]
            assert one.key not in "".join(shown)

    run(talk)


def test_an_answers_body_does_not_wait_for_the_clients_acknowledgement_of_its_head():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            await client.post("/v1/chat/completions", json=BODY, headers=key_of(gateway.open("p")))
            (connection,) = gateway._listener._server.server_state.connections
            served = connection.transport.get_extra_info("socket")
            assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(talk)


@pytest.mark.parametrize(
    ("limits", "status", "reason"),
    [
        ({"max_turns": 1}, 403, "limit of 1 turns"),
        ({"max_tokens": 2}, 403, "limit of 2 tokens"),
        ({"wall_s": 1e-9}, 403, "limit of 1e-09 s"),
    ],
)
def test_beyond_a_limit_requests_are_refused_and_what_there_was_stays(limits, status, reason):
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p", limits=SessionLimits(**limits))
            given = [await client.post("/v1/chat/completions", json=BODY, headers=key_of(session)) for _ in range(2)]
            assert given[-1].status_code == status
            assert reason in given[-1].json()["error"]["message"]
            assert given[-1].headers["x-should-retry"] == "false"
            session.set_reward(1)
            result = await gateway.finish(session)
            assert len(result.trajectories) == (0 if "wall_s" in limits else 1)

    run(talk)


def test_a_session_and_its_agent_may_take_any_time():
    options = AgentOptions(command=("true",), time_limit_s=math.inf, limits=SessionLimits(wall_s=math.inf))

    async def talk():
        async with gateway_site(lambda _: "3") as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p", limits=options.limits)
            given = await client.post("/v1/chat/completions", json=BODY, headers=key_of(session))
            assert given.json()["choices"][0]["message"]["content"] == "3"

    run(talk)


def test_requests_beyond_those_that_may_run_at_once_are_told_to_come_again():
    async def talk():
        held = Held()
        async with gateway_site(None, engine=held.engine) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p", limits=SessionLimits(max_concurrent=1))
            first = asyncio.create_task(client.post("/v1/chat/completions", json=BODY, headers=key_of(session)))
            await held.asked.get()
            second = await client.post("/v1/chat/completions", json=BODY, headers=key_of(session))
            assert (second.status_code, second.headers["x-should-retry"]) == (429, "true")
            held.go.set()
            assert (await first).status_code == 200

    run(talk)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_aborted_and_what_it_had_trains_nothing(stream):
    async def talk():
        held = Held()
        async with gateway_site(None, engine=held.engine) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p")
            body = {**BODY, "stream": stream}
            with pytest.raises(httpx.TimeoutException):
                await client.post("/v1/chat/completions", json=body, headers=key_of(session), timeout=0.5)
            await until(lambda: session.counts["disconnected"] == 1 and not session.running)
            held.go.set()
            again = await client.post("/v1/chat/completions", json=BODY, headers=key_of(session), timeout=50)
            assert again.status_code == 200
            session.set_reward(0.5)
            result = await gateway.finish(session)
            assert texts_of(gateway, result) == [f"answer {held.num_asked - 1}<|im_end|>"]

    run(talk)


def test_the_sdks_retry_what_the_engine_failed_and_the_session_is_none_the_worse():
    async def talk():
        held = Held(fails={0})
        held.go.set()
        async with gateway_site(None, engine=held.engine) as gateway:
            session = gateway.open("p")
            async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=2) as client:
                answer = await client.chat.completions.create(**BODY)
            assert answer.choices[0].message.content == "answer 1"
            assert session.counts["retries"] == 1
            session.set_reward(1)
            result = await gateway.finish(session)
            assert (result.failure, texts_of(gateway, result)) == (None, ["answer 1<|im_end|>"])

    run(talk)


def test_what_the_engine_failed_for_good_fails_the_session_with_its_reason():
    async def talk():
        held = Held(fails={1})
        held.go.set()
        async with gateway_site(None, engine=held.engine) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p")
            first = await client.post("/v1/chat/completions", json=BODY, headers=key_of(session))
            messages = [USER, first.json()["choices"][0]["message"], USER]
            second = await client.post(
                "/v1/chat/completions", json={**BODY, "messages": messages}, headers=key_of(session)
            )
            assert second.status_code == 503
            session.set_reward(0)
            result = await gateway.finish(session)
            assert "out of memory" in result.failure
            assert [row.reward for row in result.trajectories] == [None]

    run(talk)


def test_a_request_with_an_idempotency_key_is_sampled_once():
    async def talk():
        held = Held()
        async with gateway_site(None, engine=held.engine) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p")
            headers = {**key_of(session), "idempotency-key": "k1"}
            both = [
                asyncio.create_task(client.post("/v1/chat/completions", json=BODY, headers=headers)) for _ in range(2)
            ]
            await held.asked.get()
            held.go.set()
            first, second = await asyncio.gather(*both)
            third = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert first.json()["choices"] == second.json()["choices"] == third.json()["choices"]
            assert held.num_asked == 1
            assert session.counts["replayed"] == 2
            other = {**BODY, "messages": [{"role": "user", "content": "other"}]}
            fourth = await client.post("/v1/chat/completions", json=other, headers=headers)
            assert fourth.json()["choices"][0]["message"]["content"] == "answer 1"

    run(talk)


def test_the_owner_opens_rewards_and_finishes_sessions_over_http():
    async def talk():
        results = []
        site = gateway_site(lambda _: "3", on_finished=lambda *finished: results.append(finished))
        async with site as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            owner = {"authorization": f"Bearer {gateway.owner_key}"}
            asked = {"group": "g1", "session_index": 2, "limits": {"max_turns": 5}, "metadata": {"task": "sum"}}
            assert (await client.post("/sessions", json=asked)).status_code == 401
            opened = (await client.post("/sessions", json=asked, headers=owner)).json()
            agent = {"x-api-key": opened["key"]}
            assert (await client.post("/v1/chat/completions", json=BODY, headers=agent)).status_code == 200
            for wrong, hint in (("/chat/completions", 'must end in "/v1"'), ("/v1/v1/messages", "must not end in")):
                missing = await client.post(wrong, json=BODY, headers=agent)
                assert (missing.status_code, hint in missing.json()["error"]["message"]) == (404, True)
            path = f"/sessions/{opened['id']}"
            assert (await client.get(path, headers=agent)).status_code == 401
            assert (await client.get("/sessions/session-0", headers=owner)).status_code == 404
            nothing = await client.post(f"{path}/reward", json={"reward": None}, headers=owner)
            assert nothing.status_code == 400
            await client.post(f"{path}/reward", json={"reward": 0.25, "components": {"tests": 0.25}}, headers=owner)
            shown = (await client.get(path, headers=owner)).json()
            assert (shown["reward"], shown["counts"]["turns"], shown["metadata"]) == (0.25, 1, {"task": "sum"})
            ended = (await client.post(f"{path}/finish", json={}, headers=owner)).json()
            (row,) = ended["trajectories"]
            assert (row["reward"], row["parent"], sum(row["loss_mask"])) == (0.25, None, 2)
            assert (await client.post("/v1/chat/completions", json=BODY, headers=agent)).status_code == 401
        ((session, result),) = results
        assert (session.prompt_uid, session.session_index) == ("g1", 2)
        assert result.trajectories[0].reward_components == {"tests": 0.25}

    run(talk)


def test_sessions_do_not_see_each_other():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            sessions = [gateway.open("p", index) for index in range(2)]
            for session in sessions:
                await client.post("/v1/chat/completions", json=BODY, headers=key_of(session))
            assert [session.counts["repeated"] for session in sessions] == [0, 0]

    run(talk)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'"' + b"a" * 70_000 + b'"', 413),
        (b"[" * 50_000, 400),
        (b'{"messages": ' + b'[{"a":' * 5000, 400),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (json.dumps({"messages": [None]}).encode(), 400),
        (json.dumps({"messages": [{"role": "assistant", "tool_calls": [{}]}]}).encode(), 400),
        (json.dumps({"messages": [USER], "tools": [{"function": {"name": "x"}}]}).encode(), 400),
        (json.dumps({"messages": [USER], "stop": [1]}).encode(), 400),
        (json.dumps({"messages": [USER], "stream_options": 5, "stream": True}).encode(), 400),
    ],
)
def test_bodies_that_are_none_are_refused(content, status):
    async def talk():
        async with (
            gateway_site(lambda _: "3", max_body_bytes=65_536) as gateway,
            httpx.AsyncClient(base_url=gateway.url) as client,
        ):
            headers = key_of(gateway.open("p"))
            given = await client.post("/v1/chat/completions", content=content, headers=headers)
            assert given.status_code == status, given.text
            fine = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert fine.status_code == 200

    run(talk)


@pytest.mark.parametrize("has_key", [True, False])
def test_an_endless_body_is_cut_off_and_idle_connections_hold_nobody_up(has_key):
    async def talk():
        sent = 0

        async def endless():
            nonlocal sent
            while True:
                sent += 65_536
                yield b" " * 65_536

        async with gateway_site(lambda _: "3", max_body_bytes=1 << 20) as gateway:
            headers = key_of(gateway.open("p"))
            port = int(gateway.url.rpartition(":")[2])
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                try:
                    shown = headers if has_key else {}
                    given = await client.post("/v1/messages", content=endless(), headers=shown)
                    assert given.status_code == (413 if has_key else 401)
                except httpx.TransportError:  # the gateway closed the connection while the client sent
                    pass
                assert sent < 64 << 20  # no more than the socket buffers hold
                fine = await client.post("/v1/chat/completions", json=BODY, headers=headers)
                assert fine.status_code == 200
            for _, writer in idle:
                writer.close()

    run(talk)


def test_a_slow_body_is_given_up():
    async def talk():
        async with gateway_site(lambda _: "3", client_timeout_s=0.3) as gateway:
            session = gateway.open("p")
            port = int(gateway.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {session.key}\r\ncontent-length: 100\r\n\r\n{{"
            writer.write(head.encode())
            assert b"400" in await reader.readline()
            writer.close()

    run(talk)


def test_a_port_that_is_taken_is_said():
    async def talk():
        with (
            socket.create_server(("127.0.0.1", 0)) as taken,
            pytest.raises(ValueError, match="cannot listen on"),
        ):
            async with gateway_site(lambda _: "3", port=taken.getsockname()[1]):
                pass

    run(talk)


def test_a_request_that_the_end_of_its_session_aborts_is_no_fault_of_the_engine():
    async def talk():
        held = Held()
        abort = held.engine.abort

        async def slow_abort(request_ids):
            await abort(request_ids)
            await until(lambda: not held.engine._waiting)
            await asyncio.sleep(0)  # the request sees the abort first

        held.engine.abort = slow_abort
        async with gateway_site(None, engine=held.engine) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p")
            for number in range(2):
                body = {**BODY, "messages": [{"role": "user", "content": f"{number}?"}]}
                asking = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=key_of(session)))
                await held.asked.get()
                if number == 0:
                    held.go.set()
                    await asking
                    held.go.clear()
            session.set_reward(1.0)
            result = await gateway.finish(session)
            assert result.failure is None
            assert texts_of(gateway, result) == ["answer 0<|im_end|>"]
            assert (await asking).status_code == 503

    run(talk)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("the prompt is too long.", "the engine cannot serve the request: the prompt is too long."),
        ('Traceback\n  File "/secret/x.py"', "the engine has failed; the gateway's log has the reason."),
        ("no space on /dev/shm/x", "the engine has failed; the gateway's log has the reason."),
    ],
)
def test_clients_get_no_stack_and_no_path_of_an_engine(error, said):
    def fail(_):
        raise EngineError(error)

    async def talk():
        async with gateway_site(fail) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            session = gateway.open("p")
            given = await client.post("/v1/chat/completions", json=BODY, headers=key_of(session))
            assert given.json()["error"]["message"] == said
            assert list(session.faults.values()) == [error]

    run(talk)


def _divide(*_, **__):
    return 1 / 0


def _refuse_to_decode(*_, **__):
    raise DataError("the tokenizer took longer than 30 s")


def _recurse(*_, **__):
    return _recurse()


FAULTS = {
    "the samples are read": ("_keep", _divide, "ZeroDivisionError", 503),
    "the samples are decoded": ("_keep", _refuse_to_decode, "DataError", 400),
    "an answer is written": ("whole", _divide, "ZeroDivisionError", 503),
    "an answer is decoded": ("whole", _refuse_to_decode, "DataError", 503),
    "an answer is too deep": ("whole", _recurse, "RecursionError", 503),
    "a stream is decoded": ("piece", _refuse_to_decode, "DataError", None),
    "a stream begins": ("begin", _divide, "ZeroDivisionError", None),
    "a stream goes on": ("piece", _divide, "ZeroDivisionError", None),
    "a stream ends": ("end", _divide, "ZeroDivisionError", None),
}


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_of_the_gateway_is_no_reward_wherever_it_happens(place, monkeypatch, tmp_path):
    name, fails, error, status = FAULTS[place]

    async def talk():
        async with (
            gateway_site(lambda _: "3", sessions=tmp_path) as gateway,
            httpx.AsyncClient(base_url=gateway.url) as client,
        ):
            session = gateway.open("p")
            await client.post("/v1/chat/completions", json=BODY, headers=key_of(session))
            broken = gateway.service if name == "_keep" else ChatCompletions
            with monkeypatch.context() as patched:
                patched.setattr(broken, name, fails)
                body = {**BODY, "stream": status is None}
                try:
                    given = await client.post("/v1/chat/completions", json=body, headers=key_of(session))
                    assert given.status_code == (status or 503)
                except httpx.RemoteProtocolError:
                    assert status is None
            kept, _ = read_session(tmp_path / f"{session.session_id}.open")
            assert kept.faults == session.faults
            session.set_reward(1.0)
            result = await gateway.finish(session)
            assert result.failure.startswith(f"the gateway failed: {error}")
            assert len(result.trajectories) == 1

    run(talk)
