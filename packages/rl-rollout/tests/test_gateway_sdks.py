"""Both SDKs, sync and async, streaming or not: parallel calls, built-in retries, and timeouts."""

import asyncio
import json

import anthropic
import openai
import pytest
from chat_model import TOOLS, encode, in_turn, make_tokenizer
from gateway_site import gateway_site, run

from rl_core.errors import EngineError
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine

USER = {"role": "user", "content": "1+2 and 3+4?"}
CLAUDE_TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CALLS = "".join(
    f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}</tool_call>" for a, b in ((1, 2), (3, 4))
)


class OpenAI:
    """OpenAI's SDK, with the same methods as Anthropic's below; messages have the SDK's own format."""

    def __init__(self, gateway, session, *, is_sync, **fields):
        kind = openai.OpenAI if is_sync else openai.AsyncOpenAI
        self.client = kind(base_url=f"{gateway.url}/v1", api_key=session.key, **fields)

    def ask(self, messages, *, stream, tools=(), **fields):
        tools = {"tools": TOOLS} if tools else {}
        return self.client.chat.completions.create(model="any", messages=messages, stream=stream, **tools, **fields)

    def text(self, answer):
        return answer.choices[0].message.content

    def delta(self, event):
        return (event.choices[0].delta.content or "") if event.choices else ""


class Anthropic:
    """Anthropic's SDK, with the same methods."""

    def __init__(self, gateway, session, *, is_sync, **fields):
        kind = anthropic.Anthropic if is_sync else anthropic.AsyncAnthropic
        self.client = kind(base_url=gateway.url, api_key=session.key, **fields)

    def ask(self, messages, *, stream, tools=(), **fields):
        tools = {"tools": CLAUDE_TOOLS} if tools else {}
        return self.client.messages.create(
            model="any", max_tokens=500, messages=messages, stream=stream, **tools, **fields
        )

    def text(self, answer):
        return answer.content[0].text

    def delta(self, event):
        return getattr(event.delta, "text", "") if event.type == "content_block_delta" else ""


async def said(sdk, messages, *, is_sync, stream, **fields):
    """Return the text of an answer, streamed or not."""
    if is_sync:

        def ask():
            answer = sdk.ask(messages, stream=stream, **fields)
            return "".join(map(sdk.delta, answer)) if stream else sdk.text(answer)

        return await asyncio.to_thread(ask)
    answer = await sdk.ask(messages, stream=stream, **fields)
    return "".join([sdk.delta(event) async for event in answer]) if stream else sdk.text(answer)


async def closed(sdk):
    ending = sdk.client.close()
    if ending is not None:
        await ending


async def trained(gateway, session):
    """Finish and audit the session; return the trained text of each trajectory."""
    session.set_reward(1.0)
    result = await gateway.finish(session)
    assert result.failure is None
    rows = [row.input_ids[row.loss_mask] for row in result.trajectories]
    return make_tokenizer().decode(rows, skip_special_tokens=False)


def outcomes(*each):
    """Return an engine whose requests fail ("fail"), never end ("hang"), or return a text."""
    tokenizer, left = make_tokenizer(), list(each)

    async def say(_request, _index):
        outcome = left.pop(0)
        if outcome == "fail":
            raise EngineError("out of memory")
        if outcome == "hang":
            await asyncio.Event().wait()
        return encode(tokenizer, f"{outcome}<|im_end|>").tolist()

    traits = EngineTraits(name="scripted", max_model_len=4096, vocab_size=1 << 20)
    return ScriptedEngine(say, end_token_ids=[tokenizer.eos_token_id], traits=traits)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_sync", [False, True])
@pytest.mark.parametrize("kind", [OpenAI, Anthropic])
def test_an_sdk_retries_what_the_engine_failed_twice_and_one_answer_trains(kind, is_sync, stream):
    async def talk():
        async with gateway_site(None, engine=outcomes("fail", "fail", "three")) as gateway:
            session = gateway.open("p")
            sdk = kind(gateway, session, is_sync=is_sync)  # retries twice by default
            sdk.client._calculate_retry_timeout = lambda *_, **__: 0.0
            assert await said(sdk, [USER], is_sync=is_sync, stream=stream) == "three"
            await closed(sdk)
            assert (session.counts["engine_errors"], session.counts["retries"]) == (2, 2)
            assert session.counts["turns"] == 3
            assert await trained(gateway, session) == ["three<|im_end|>"]

    run(talk)


@pytest.mark.parametrize("is_sync", [False, True])
@pytest.mark.parametrize("kind", [OpenAI, Anthropic])
def test_an_sdk_that_times_out_disconnects_and_its_retry_alone_trains(kind, is_sync):
    async def talk():
        async with gateway_site(None, engine=outcomes("hang", "three")) as gateway:
            session = gateway.open("p")
            sdk = kind(gateway, session, is_sync=is_sync, max_retries=1, timeout=5)
            sdk.client._calculate_retry_timeout = lambda *_, **__: 0.0
            short = sdk.client.with_options(timeout=0.3, max_retries=0)
            whole, sdk.client = sdk.client, short
            with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
                await said(sdk, [USER], is_sync=is_sync, stream=False)
            sdk.client = whole
            while session.running or not session.counts["disconnected"]:
                await asyncio.sleep(0.005)
            assert await said(sdk, [USER], is_sync=is_sync, stream=False) == "three"
            await closed(sdk)
            assert session.counts["repeated"] == 1
            assert await trained(gateway, session) == ["three<|im_end|>"]

    run(talk)


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_answered_in_another_order_by_openai_are_one_trajectory(stream):
    async def talk():
        async with gateway_site(in_turn(f"I add.{CALLS}", "3 and 7")) as gateway:
            session = gateway.open("p")
            sdk = OpenAI(gateway, session, is_sync=False)
            if stream:
                async with sdk.client.chat.completions.stream(model="any", messages=[USER], tools=TOOLS) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await sdk.ask([USER], stream=False, tools=True)).choices[0].message
            first, second = message.tool_calls
            assert [json.loads(one.function.arguments) for one in (first, second)] == [
                {"a": 1, "b": 2},
                {"a": 3, "b": 4},
            ]
            results = [
                {"role": "tool", "tool_call_id": one.id, "content": text} for one, text in ((second, "7"), (first, "3"))
            ]
            history = [USER, message.model_dump(exclude_none=True, exclude={"parsed"}), *results]
            assert await said(sdk, history, is_sync=False, stream=stream, tools=True) == "3 and 7"
            await closed(sdk)
            assert session.counts["roots_first"] == 1
            assert not session.counts["forks"]
            assert await trained(gateway, session) == [f"I add.{CALLS}<|im_end|>3 and 7<|im_end|>"]

    run(talk)


def test_parallel_calls_answered_in_another_order_by_anthropic_are_one_trajectory():
    async def talk():
        async with gateway_site(in_turn(f"I add.{CALLS}", "3 and 7")) as gateway:
            session = gateway.open("p")
            sdk = Anthropic(gateway, session, is_sync=False)
            async with sdk.client.messages.stream(
                model="any", max_tokens=500, messages=[USER], tools=CLAUDE_TOOLS
            ) as events:
                message = await events.get_final_message()
            _, first, second = message.content
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": text}
                for one, text in ((second, "7"), (first, "3"))
            ]
            history = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
            assert await said(sdk, history, is_sync=False, stream=True, tools=True) == "3 and 7"
            await closed(sdk)
            assert await trained(gateway, session) == [f"I add.{CALLS}<|im_end|>3 and 7<|im_end|>"]

    run(talk)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        (OpenAI, "required"),
        (OpenAI, {"type": "function", "function": {"name": "add"}}),
        (Anthropic, {"type": "any"}),
        (Anthropic, {"type": "tool", "name": "add"}),
        (Anthropic, {"type": "auto", "disable_parallel_tool_use": True}),
    ],
)
def test_that_a_tool_must_be_called_is_reported_as_ignored(kind, choice):
    async def talk():
        async with gateway_site(lambda _: f"I add.{CALLS}") as gateway:
            sdk = kind(gateway, gateway.open("p"), is_sync=False)
            methods = sdk.client.chat.completions if kind is OpenAI else sdk.client.messages
            limit = {} if kind is OpenAI else {"max_tokens": 500}
            tools = TOOLS if kind is OpenAI else CLAUDE_TOOLS
            raw = await methods.with_raw_response.create(
                model="any", messages=[USER], tools=tools, tool_choice=choice, **limit
            )
            await closed(sdk)
            assert raw.headers["x-rl-overridden"] == "tool_choice=ignored"
            assert "3" in json.dumps(raw.http_response.json())

    run(talk)
