"""Fields that agents send and answers that they accept, as recorded from AI SDK, Codex CLI and Anthropic's SDK."""

import json

import anthropic
import httpx
import pytest
from chat_model import in_turn, make_tokenizer
from gateway_site import gateway_site
from gateway_site import run as run_within

from rl_rollout.gateway.apis.responses import read_responses_request

USER = {"role": "user", "content": "1+2?"}
CALL = '<tool_call>{"name": "add", "arguments": {"left": 1, "right": 2}}</tool_call>'
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def talk(test, *turns, **site):
    """Run a test with the gateway, a session and an HTTP client; the model says the turns in order."""

    async def talking():
        async with gateway_site(in_turn(*turns), **site) as gateway:
            session = gateway.open("p")
            headers = {"authorization": f"Bearer {session.key}"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=50) as client:
                await test(client, gateway, session)

    run_within(talking)


async def trained(gateway, session):
    """Finish and audit the session; return the texts that it trains."""
    session.set_reward(1.0)
    result = await gateway.finish(session)
    assert result.failure is None
    rows = [row.input_ids[row.loss_mask] for row in result.trajectories]
    return make_tokenizer().decode(rows, skip_special_tokens=False)


def null_fields(value, where=""):
    """Return the paths of all null fields in a JSON value."""
    if isinstance(value, dict):
        return [path for key, inner in value.items() for path in null_fields(inner, f"{where}.{key}")]
    if isinstance(value, list):
        return [path for inner in value for path in null_fields(inner, f"{where}[]")]
    return [where] if value is None else []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_the_messages_api_has_no_null_fields_that_its_own_answers_do_not_have(stream):
    async def test(client, _gateway, _session):
        body = {"model": "m", "max_tokens": 100, "messages": [USER], "tools": [ADD], "stream": stream}
        answer = await client.post("/v1/messages", json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        found = {path for one in (events if stream else [answer.json()]) for path in null_fields(one)}
        own = {".stop_sequence", ".message.stop_reason", ".message.stop_sequence", ".delta.stop_sequence"}
        assert found == ({".stop_sequence"} if not stream else own - {".stop_sequence"})

    talk(test, f"<think>hm</think>I add.{CALL}")


def test_anthropics_tool_runner_continues_without_a_thread():
    @anthropic.beta_async_tool(name="add", description="Adds.", input_schema={"type": "object"})
    async def add(left, right):
        return str(left + right)

    async def test(_client, gateway, session):
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key, max_retries=0) as client:
            kept = {"model": "m", "max_tokens": 100, "messages": [USER]}
            last = await client.beta.messages.tool_runner(tools=[add], **kept).until_done()
            assert last.content[0].text == "It is 3."
            with pytest.raises(anthropic.BadRequestError, match="stores no messages"):
                await client.beta.messages.create(thread={"type": "create"}, **kept)
        assert await trained(gateway, session) == [f"I add.{CALL}<|im_end|>It is 3.<|im_end|>"]

    talk(test, f"I add.{CALL}", "It is 3.")


NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "close", "description": "Closes.", "parameters": {"type": "object"}}],
}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_namespace_are_called_by_their_full_names_and_answered_with_their_namespace(stream):
    async def ask(client, items):
        body = {"model": "m", "input": items, "tools": [NAMESPACE], "client_metadata": {"k": "v"}, "stream": stream}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert stream or answer.headers["x-rl-overridden"] == "client_metadata=ignored"
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        return events[-1]["response"]["output"] if stream else answer.json()["output"]

    async def test(client, gateway, session):
        (call,) = await ask(client, [USER])
        assert (call["namespace"], call["name"]) == ("agents", "close")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "closed"}
        (message,) = await ask(client, [USER, call, output])
        assert message["content"][0]["text"] == "Done."
        assert await trained(gateway, session) == [f"{said}<|im_end|>Done.<|im_end|>"]

    said = '<tool_call>{"name": "agents__close", "arguments": {}}</tool_call>'
    talk(test, said, "Done.")


@pytest.mark.parametrize("has_type", [True, False])
def test_references_to_items_of_earlier_answers_are_those_items(has_type, tmp_path):
    async def ask(client, items):
        tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
        return await client.post("/v1/responses", json={"model": "m", "input": items, "tools": tools})

    async def test(client, gateway, session):
        output = (await ask(client, [USER])).json()["output"]
        kind = {"type": "item_reference"} if has_type else {}
        result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "3"}
        history = [USER, *({**kind, "id": item["id"]} for item in output), result]
        (message,) = (await ask(client, history)).json()["output"]
        history += [{**kind, "id": message["id"]}, {"role": "user", "content": "Sure?"}]
        assert (await ask(client, history)).status_code == 200
        unknown = await ask(client, [USER, {**kind, "id": "msg_other"}, USER])
        assert unknown.json()["error"]["param"] == "input[1].id"
        assert session.counts["roots_first"] == 1
        said = f"<think>hm</think>I add.{CALL}<|im_end|>It is 3.<|im_end|>Yes.<|im_end|>"
        assert await trained(gateway, session) == [said]

    talk(test, f"<think>hm</think>I add.{CALL}", "It is 3.", "Yes.", sessions=tmp_path)


def test_a_tool_of_a_namespace_without_a_name_is_refused():
    for inner in ([{"type": "function"}], [{"type": "custom", "name": "x"}], ["x"]):
        with pytest.raises(ValueError, match=r"tools\[0\]"):
            read_responses_request({"input": "hi", "tools": [{**NAMESPACE, "tools": inner}]})


def test_calls_whose_text_the_client_drops_stay_in_their_trajectory_after_a_restart_too(tmp_path):
    def ask(client, history):
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        return client.post("/v1/chat/completions", json={"model": "m", "messages": history, "tools": tools})

    history, keys = [USER], []

    async def turn(client):
        message = (await ask(client, history)).json()["choices"][0]["message"]
        history.append({"role": "assistant", "content": None, "tool_calls": message["tool_calls"]})
        history.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"})

    async def test(client, _gateway, session):
        keys.append(session.key)
        await turn(client)

    async def again(_client, gateway, _session):
        session = gateway.sessions.by_key(keys[0])
        headers = {"authorization": f"Bearer {keys[0]}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=50) as client:
            await turn(client)
            await ask(client, history)
        assert session.counts["roots_first"] == 1
        said = f"I add.{CALL}<|im_end|>I add again.{CALL}<|im_end|>It is 3.<|im_end|>"
        assert await trained(gateway, session) == [said]

    turns = (f"I add.{CALL}", f"I add again.{CALL}", "It is 3.")
    talk(test, *turns, sessions=tmp_path)
    talk(again, *turns, sessions=tmp_path)
