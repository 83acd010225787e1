"""Hostile clients over real sockets: refusals in bounded memory, while other clients are served."""

import asyncio
import contextlib
import json
import re
import resource
import socket
import threading

import httpx
import pytest
from chat_model import encode, make_tokenizer
from gateway_child import gateway_child
from gateway_site import gateway_site
from gateway_site import run as run_within

from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.gateway.sessions import SessionLimits

BODY = {"model": "any", "messages": [{"role": "user", "content": "1+2?"}]}
MIB = 1 << 20


@pytest.fixture(scope="module")
def child():
    with gateway_child(client_timeout_s=1.0, max_body_bytes=MIB) as started:
        assert_serves(started)
        yield started


def connect(site, content=b""):
    connection = socket.create_connection(("127.0.0.1", site.port), timeout=60)
    connection.sendall(content)
    return connection


def head(key, length, path="/v1/chat/completions"):
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {length}\r\n\r\n".encode()


def assert_serves(site, session=1):
    given = httpx.post(
        f"{site.url}/v1/chat/completions", json=BODY, headers={"x-api-key": site.keys[session]}, timeout=60
    )
    assert given.status_code == 200, given.text


def rest_of(connection):
    """Return all bytes that the server sends until it closes the connection."""
    said = b""
    with connection, contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            said += part
    return said


def flood(connection, part, most):
    """Send until the server closes the connection or `most` bytes are sent; return the number of bytes sent."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            sent += connection.send(part)
    return sent


def test_heads_that_never_end_are_closed_and_hold_nobody_up(child):
    slow = [connect(child, b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-slow: ") for _ in range(50)]
    slow += [connect(child) for _ in range(10)]
    assert_serves(child)
    for connection in slow[::2]:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"a")  # an occasional byte does not extend the timeout
    assert all(rest_of(connection) == b"" for connection in slow)


def test_connections_beyond_the_bound_push_out_those_that_wait_and_the_files_last(child):
    for _ in range(2):
        idle = [connect(child) for _ in range(400)]
        assert_serves(child)
        assert child.num_files < 256
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n" + b"x-bomb: " + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: a\r\n" % index for index in range(20_000)),
        b"\x00\xff garbage \r\n\r\n" * 10,
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + b"garbage\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_heads_that_are_none_and_pipelined_garbage_are_refused(child, content):
    connection = connect(child)
    with contextlib.suppress(ConnectionError):
        connection.sendall(content)
    said = rest_of(connection)
    assert b"200 OK" in said if b"/health" in content else b"200 OK" not in said
    assert b" 400 " in said or b" 401 " in said or not said
    assert_serves(child)


def test_bodies_without_end_are_refused_with_little_memory(child):
    before = child.peak_bytes
    for key, status in ((child.keys[0], b" 413 "), ("wrong", b" 401 ")):
        for path in ("/v1/chat/completions", "/v1/messages"):
            connection = connect(child, head(key, 100 * MIB, path))
            assert flood(connection, b" " * 65_536, 100 * MIB) < 40 * MIB
            said = rest_of(connection)
            assert status in said or not said
    connection = connect(child, head("wrong", 100 * MIB, "/nowhere"))
    flood(connection, b" " * 65_536, 8 * MIB)
    assert b" 404 " in rest_of(connection)  # the server closes before the body's end
    assert child.peak_bytes - before < 30 * MIB
    assert_serves(child)


def test_bodies_that_a_session_holds_open_are_bounded_and_another_is_served(child):
    held = [connect(child, head(child.keys[0], MIB) + b" " * (MIB - 1)) for _ in range(5)]
    assert_serves(child)
    said = b"".join(map(rest_of, held))
    assert said.count(b" 429 ") == 3
    assert said.count(b"took longer than 1 s") == 2


def test_what_is_nested_too_deep_is_refused(child):
    def nested(depth):
        return '{"a":' * depth + "1" + "}" * depth

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "[" * 20_000 + "]" * 20_000}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    texts = {
        f'{{"messages": {nested(100_000)}}}': 400,
        f'{{"messages": {json.dumps(BODY["messages"])}, "metadata": {nested(100_000)}}}': 400,
        json.dumps({"messages": [*said, {"role": "tool", "tool_call_id": "c", "content": "3"}]}): 200,
    }
    for depth in (300, 700, 900, 990):
        tool = f'{{"type": "function", "function": {{"name": "add", "parameters": {nested(depth)}}}}}'
        texts[f'{{"messages": {json.dumps(BODY["messages"])}, "tools": [{tool}]}}'] = None
    for content, status in texts.items():
        given = httpx.post(
            f"{child.url}/v1/chat/completions", content=content, headers={"x-api-key": child.keys[0]}, timeout=60
        )
        assert given.status_code == status or (status is None and given.status_code in (200, 400)), given.text[:300]


def test_text_that_no_context_holds_is_refused_before_it_is_encoded():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
            encoder = gateway.service._encoder
            encoder.opening_ids = encoder.following_ids = None  # encoding would block all clients for minutes
            body = {**BODY, "messages": [{"role": "user", "content": "a " * 3_000_000}]}
            headers = {"x-api-key": gateway.open("p").key}
            given = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert (given.status_code, given.json()["error"]["code"]) == (400, "context_length_exceeded")
            given = await client.post("/v1/messages/count_tokens", json=body, headers=headers)
            assert given.status_code == 400

    run_within(talk)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages/count_tokens"])
def test_a_session_is_answered_while_a_long_text_of_another_is_encoded(path):
    long = "a" * 50_000
    body = {"prompt": long} if path == "/v1/completions" else {"messages": [{"role": "user", "content": long}]}

    async def talk():
        async with (
            gateway_site(lambda _: "3") as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=50) as client,
        ):
            begun, goes_on, running, most = threading.Event(), threading.Event(), [], []
            tokenizer = gateway.service._encoder._tokenizer
            encode = tokenizer.encode

            def slow_encode(texts, **fields):
                if len(texts[0]) >= len(long):
                    running.append(1)
                    most.append(len(running))
                    begun.set()
                    assert goes_on.wait(50)
                    running.pop()
                return encode(texts, **fields)

            tokenizer.encode = slow_encode
            greedy, other = ({"x-api-key": gateway.open("p", index).key} for index in range(2))
            asked = [asyncio.create_task(client.post(path, json=body, headers=greedy)) for _ in range(3)]
            await asyncio.to_thread(begun.wait, 50)
            assert (await client.post("/v1/chat/completions", json=BODY, headers=other)).status_code == 200
            goes_on.set()
            assert [given.status_code for given in await asyncio.gather(*asked)] == [200] * 3
            assert set(most) == {1}

    run_within(talk)


def test_long_texts_that_are_refused_use_up_the_turns_and_runs_of_spaces_are_not_long():
    async def talk():
        async with (
            gateway_site(lambda _: "3", max_model_len=1000) as gateway,
            httpx.AsyncClient(base_url=gateway.url) as client,
        ):
            session = gateway.open("p", limits=SessionLimits(max_turns=3))
            headers = {"x-api-key": session.key}

            async def said(text):
                body = {**BODY, "messages": [{"role": "user", "content": text}]}
                return (await client.post("/v1/chat/completions", json=body, headers=headers)).json()["error"]

            for text, size in (
                ("a" * 10_000, "10002 characters"),
                ("a" * 2000, "20.. tokens"),
                (" " * 10_000, "100.. t"),
            ):
                error = await said(text)
                assert error["code"] == "context_length_exceeded"
                assert re.search(size, error["message"])
            assert (await said("a"))["code"] == "session_limit"
            given = await client.post("/v1/completions", json={"prompt": [9] * 1000}, headers=headers)
            assert given.json()["error"]["code"] == "session_limit"

    run_within(talk)


def test_more_messages_parts_or_tools_than_the_context_has_tokens_are_refused_unread():
    user = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "add"}}

    async def talk():
        async with (
            gateway_site(lambda _: "3", max_model_len=1000) as gateway,
            httpx.AsyncClient(base_url=gateway.url) as client,
        ):
            session = gateway.open("p", limits=SessionLimits(max_turns=3))
            for fields in (
                {"messages": [user] * 1001},
                {"messages": [{**user, "content": [{"type": "text", "text": "a"}] * 1000}]},
                {"messages": [user], "tools": [tool] * 1000},
            ):
                given = await client.post(
                    "/v1/chat/completions", json={**BODY, **fields}, headers={"x-api-key": session.key}
                )
                error = given.json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
                assert "1001 messages, parts and tools" in error["message"]
            assert session.counts["turns"] == 3

    run_within(talk)


NAMED = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
DEEP = '{"a": ' * 150 + "1" + "}" * 150


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"a": "\ud83d"}', {"a": r"\ud83d"}),
        (r'{"\ud83d": {"b": ["\udc00"]}}', {r"\ud83d": {"b": [r"\udc00"]}}),
        ('{"a": NaN, "b": [-Infinity, 1e999]}', {"a": None, "b": [None, None]}),
        (r'{"\ud83d": 1, "\\ud83d": 2}', None),
        (DEEP, None),
    ],
)
def test_arguments_that_json_cannot_carry_are_escaped_or_stay_text(arguments, read):
    async def talk(gateway, client, path, fields):
        session = gateway.open("p")
        given = await client.post(path, json={"model": "any", **fields}, headers={"x-api-key": session.key}, timeout=60)
        assert given.status_code == 200, given.text
        (sample,) = session.tree.samples
        assert [json.loads(call.arguments) for call in sample.message.calls] == ([] if read is None else [read])
        assert (sample.message.content == "") == (read is not None)
        session.set_reward(1.0)
        assert (await gateway.finish(session)).failure is None

    async def everywhere():
        said, flat = BODY["messages"], {"name": "add", "parameters": {"type": "object"}}
        apis = {
            "chat/completions": {"messages": said, "tools": [{"type": "function", "function": flat}]},
            "messages": {"messages": said, "tools": [{"name": "add", "input_schema": {}}], "max_tokens": 1500},
            "responses": {"input": said, "tools": [{"type": "function", **flat}]},
        }
        async with (
            gateway_site(lambda _: NAMED % arguments) as gateway,
            httpx.AsyncClient(base_url=f"{gateway.url}/v1/") as client,
        ):
            for path, fields in apis.items():
                for stream in (False, True):
                    await talk(gateway, client, path, {**fields, "stream": stream})

    run_within(everywhere)


async def some_turns(*_):
    """Yield to the event loop often enough that each token becomes a separate event."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("api", ["/v1/chat/completions", "/v1/messages"])
def test_a_client_that_never_reads_its_stream_is_dropped_and_its_turn_does_not_train(api):
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(
        lambda *_: encode(tokenizer, "long " * 400 + "<|im_end|>").tolist(),
        end_token_ids=[tokenizer.eos_token_id],
        decode=tokenizer.decoder(),
        pace=some_turns,
    )

    async def talk():
        async with gateway_site(None, engine=engine, client_timeout_s=0.5) as gateway:
            session = gateway.open("p")
            content = json.dumps({**BODY, "stream": True, "max_tokens": 3000}).encode()
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            with connection:
                connection.connect(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
                connections = gateway._listener._server.server_state.connections
                while not connections:
                    await asyncio.sleep(0.005)
                (served,) = connections
                served.transport.set_write_buffer_limits(high=1024)
                served.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
                connection.sendall(head(session.key, len(content), api) + content)
                while connections or session.num_attended or not session.counts["turns"]:
                    await asyncio.sleep(0.005)
            assert not any(sample.is_delivered for sample in session.tree.samples)
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
                assert (await client.get("/health")).status_code == 200

    run_within(talk)


@pytest.mark.soak
def test_all_of_it_at_once_while_a_run_goes_on():
    """Clients with and without keys open thousands of connections, and send 100 MB bodies and unread streams."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    options = {"num_sessions": 5, "files": 2048, "client_timeout_s": 2.0}
    with gateway_child(**options) as site, contextlib.ExitStack() as stack:
        assert_serves(site)
        before = site.peak_bytes
        streamed = json.dumps({**BODY, "stream": True}).encode()
        for number in range(8):
            for _ in range(1000):
                stack.enter_context(connect(site, b"GET /" * (number % 2)))
            for key in site.keys[1:4]:
                for _ in range(20):
                    stack.enter_context(connect(site, head(key, 100 * MIB)))
                    stack.enter_context(connect(site, head(key, len(streamed)) + streamed))
                flood(stack.enter_context(connect(site, head(key, 100 * MIB))), b" " * 65_536, 100 * MIB)
                flood(stack.enter_context(connect(site, head(key, 10 * MIB))), b"[" * 65_536, 10 * MIB)
            assert_serves(site, session=0)
            assert site.num_files < 2048
        assert site.peak_bytes - before < 400 * MIB
