"""The unmodified SDKs of both providers with the gateway: their results, and the trained texts."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from chat_model import CHATML, THINKING, TOOLS, encode, in_turn, make_tokenizer
from gateway_site import gateway_site
from gateway_site import run as run_within
from openai.types.chat import ChatCompletionChunk

from rl_rollout.engines.protocol import EngineTraits, SamplingParams
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.gateway.agent_requests import StreamedAnswer
from rl_rollout.gateway.apis.chat_completions import ChatCompletions
from rl_rollout.gateway.service import ServiceOptions

CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1.0}}</tool_call>'
ANTHROPIC_TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
USER = {"role": "user", "content": "1+2?"}


OPEN = []
"""Clients opened by a test."""


def run(test):
    async def closing():
        try:
            await test()
        finally:
            while OPEN:
                closed = OPEN.pop().close()
                if closed is not None:
                    await closed

    run_within(closing)


def openai_client(gateway, session, kind=openai.AsyncOpenAI, **fields):
    OPEN.append(kind(base_url=f"{gateway.url}/v1", api_key=session.key, timeout=50, **{"max_retries": 0, **fields}))
    return OPEN[-1]


def anthropic_client(gateway, session, kind=anthropic.AsyncAnthropic, **fields):
    OPEN.append(kind(base_url=gateway.url, api_key=session.key, timeout=50, **{"max_retries": 0, **fields}))
    return OPEN[-1]


async def finished(gateway, session):
    """Finish and audit the session; return its trajectories, and the text that each trains."""
    session.set_reward(1.0)
    result = await gateway.finish(session)
    assert result.failure is None
    decode = gateway.service._encoder._tokenizer.decode
    texts = decode([row.input_ids[row.loss_mask] for row in result.trajectories], skip_special_tokens=False)
    return result.trajectories, texts


def test_openai_turns_with_tools_are_one_trajectory():
    async def talk():
        async with gateway_site(in_turn(f"I add. {CALL}{CALL}", "3 and 3")) as gateway:
            session = gateway.open("p")
            client = openai_client(gateway, session)
            first = await client.chat.completions.create(model="any", messages=[USER], tools=TOOLS)
            message = first.choices[0].message
            assert (message.content, first.choices[0].finish_reason) == ("I add.", "tool_calls")
            assert [call.function.name for call in message.tool_calls] == ["add", "add"]
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
            second = await client.chat.completions.create(
                model="any", messages=[USER, message.model_dump(exclude_none=True), *results], tools=TOOLS
            )
            assert second.choices[0].message.content == "3 and 3"
            assert second.choices[0].finish_reason == "stop"
            assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
            (row,), texts = await finished(gateway, session)
            assert texts == [f"I add. {CALL}{CALL}<|im_end|>3 and 3<|im_end|>"]
            assert row.reward == 1.0
            assert row.extras["gateway"]["turns"] == 2

    run(talk)


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_openai_streams_what_the_whole_answer_would_be_and_the_next_turn_matches_it(template):
    async def talk():
        said = in_turn(f"<think> one,\n two</think>\n\nSo: <b> {CALL}", "  3 < 4\n")
        async with gateway_site(said, template=template) as gateway:
            session = gateway.open("p")
            client = openai_client(gateway, session)
            async with client.chat.completions.stream(model="any", messages=[USER], tools=TOOLS) as stream:
                async for _ in stream:
                    pass
                first = (await stream.get_final_completion()).choices[0]
            assert (first.message.content, first.finish_reason) == ("So: <b>", "tool_calls")
            assert first.message.tool_calls[0].function.arguments == '{"b": 2, "a": 1.0}'
            call = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "3"}
            history = [USER, first.message.model_dump(exclude_none=True), call]
            chunks = [
                one
                async for one in await client.chat.completions.create(
                    model="any", messages=history, tools=TOOLS, stream=True, stream_options={"include_usage": True}
                )
            ]
            assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == "3 < 4"
            assert chunks[-1].usage.completion_tokens == 9
            _, texts = await finished(gateway, session)
            assert texts == [f"<think> one,\n two</think>\n\nSo: <b> {CALL}<|im_end|>  3 < 4\n<|im_end|>"]

    run(talk)


LINES = 'é "\n\r\v\f\x1c\x85\u2028\u2029'


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_text_of_each_token_streamed_or_not(stream):
    async def talk():
        async with gateway_site(lambda _: "<think>hm</think>3") as gateway:
            session = gateway.open("p")
            client = openai_client(gateway, session)
            asked = {"model": "any", "messages": [USER], "logprobs": True, "n": 2}
            given = await client.chat.completions.create(**asked, stream=stream)
            choices = [choice async for chunk in given for choice in chunk.choices] if stream else given.choices
            held = [choice.logprobs.content for choice in choices if choice.logprobs]
            assert len(held) == 2
            for content, sample in zip(held, session.tree.samples, strict=True):
                assert [one.token for one in content] == [*"<think>hm</think>3", "<|im_end|>"]
                assert bytes(byte for one in content for byte in one.bytes) == b"<think>hm</think>3<|im_end|>"
                assert [one.logprob for one in content] == sample.generation.logprobs.tolist()
            asked = {"model": "any", "prompt": "1+2?", "logprobs": 0, "stream": stream}
            given = await client.completions.create(**asked)
            choices = [choice async for chunk in given for choice in chunk.choices] if stream else given.choices
            assert choices[-1].logprobs.tokens == [*"<think>hm</think>3", "<|im_end|>"]

    run(talk)


def test_the_event_of_a_streamed_token_is_as_openais_own_type_writes_it():
    api, live = ChatCompletions({"messages": [{"role": "user", "content": "hi"}]}, "policy"), StreamedAnswer()
    (first,) = api.begin(live)
    for kind, name in (("content", "content"), ("reasoning", "reasoning_content")):
        (event,) = api.piece(0, kind, LINES)
        assert event.splitlines() == [event.strip(), ""]  # clients' readers of lines see one line
        chunk = ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
        assert getattr(chunk.choices[0].delta, name) == LINES
        assert chunk.model_dump(exclude_unset=True) == json.loads(event.removeprefix("data: "))
        assert chunk.id == ChatCompletionChunk.model_validate_json(first.removeprefix("data: ")).id


def test_anthropic_turns_with_thinking_and_tools_are_one_trajectory_streamed_or_not():
    async def talk():
        said = in_turn(f"<think>hm</think>I add. {CALL}", "It is 3.", "Bye")
        async with gateway_site(said) as gateway:
            session = gateway.open("p")
            client = anthropic_client(gateway, session)
            fields = {"model": "any", "max_tokens": 100, "tools": ANTHROPIC_TOOLS, "system": "Be brief."}
            first = await client.messages.create(messages=[USER], **fields)
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
            assert first.stop_reason == "tool_use"
            assert first.content[2].input == {"a": 1, "b": 2}
            result = {
                "type": "tool_result",
                "tool_use_id": first.content[2].id,
                "content": [{"type": "text", "text": "3"}],
            }
            history = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            async with client.messages.stream(messages=history, **fields) as stream:
                assert "".join([text async for text in stream.text_stream]) == "It is 3."
                second = await stream.get_final_message()
            assert (second.stop_reason, second.usage.output_tokens) == ("end_turn", 9)
            history += [{"role": "assistant", "content": "It is 3."}, {"role": "user", "content": "ok"}]
            await client.messages.create(messages=history, **fields)
            counted = await client.messages.count_tokens(model="any", messages=[USER])
            assert counted.input_tokens == len("user\n1+2?\nassistant\n") + 3
            _, texts = await finished(gateway, session)
            assert texts == [f"<think>hm</think>I add. {CALL}<|im_end|>It is 3.<|im_end|>Bye<|im_end|>"]

    run(talk)


def test_anthropic_streams_thinking_text_and_calls_as_blocks():
    async def talk():
        async with gateway_site(lambda _: f"<think>hm</think>I add. {CALL}") as gateway:
            client = anthropic_client(gateway, gateway.open("p"))
            async with client.messages.stream(
                model="any", max_tokens=100, messages=[USER], tools=ANTHROPIC_TOOLS
            ) as stream:
                message = await stream.get_final_message()
            thinking, text, call = message.content
            assert (thinking.thinking, text.text, call.name, call.input) == ("hm", "I add.", "add", {"a": 1, "b": 2})

    run(talk)


def test_the_sync_sdks_work_too():
    async def talk():
        async with gateway_site(lambda _: "3") as gateway:
            session = gateway.open("p")

            def ask():
                chat = openai_client(gateway, session, openai.OpenAI)
                text = chat.chat.completions.create(model="any", messages=[USER]).choices[0].message.content
                models = [model.id for model in chat.models.list()]
                claude = anthropic_client(gateway, session, anthropic.Anthropic)
                message = claude.messages.create(model="any", max_tokens=9, messages=[USER])
                return text, models, message.content[0].text

            assert await asyncio.to_thread(ask) == ("3", ["policy"], "3")

    run(talk)


def test_in_a_run_the_run_decides_on_sampling_and_says_so():
    async def talk():
        own = SamplingParams(max_tokens=50, temperature=0.7, top_p=0.9, seed=3)
        async with gateway_site(lambda _: "3", sampling=own) as gateway:
            client = openai_client(gateway, gateway.open("p"))
            raw = await client.chat.completions.with_raw_response.create(
                model="any", messages=[USER], temperature=0, top_p=0.9, max_tokens=80, user="me"
            )
            assert raw.headers["x-rl-overridden"] == "user=ignored, temperature=0->0.7, max_tokens=80->50"
            (request,) = gateway.service.engine.requests
            assert (request.sampling.temperature, request.sampling.seed) == (0.7, 3)
            async with httpx.AsyncClient() as plain:
                metrics = (await plain.get(f"{gateway.url}/metrics")).text
            assert 'rl_gateway_events_total{event="overridden_temperature"} 1' in metrics

    run(talk)


def test_alone_the_client_decides():
    async def talk():
        async with gateway_site(lambda _: "3", service=ServiceOptions(decided_by="client")) as gateway:
            client = openai_client(gateway, gateway.open("p"))
            raw = await client.chat.completions.with_raw_response.create(
                model="any", messages=[USER], temperature=0.2, seed=5, max_tokens=7
            )
            assert "x-rl-overridden" not in raw.headers
            (request,) = gateway.service.engine.requests
            assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens) == (0.2, 5, 7)

    run(talk)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"stop": ["\n"]}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"temperature": 3}, "temperature"),
        ({"n": 99}, "n"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is"}]}, "messages"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_honoured_is_refused_by_name(fields, param):
    async def talk():
        async with gateway_site(lambda _: "3") as gateway:
            client = openai_client(gateway, gateway.open("p"))
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{"model": "any", "messages": [USER], **fields})
            assert caught.value.param == param
            assert param.split("[")[0] in str(caught.value)

    run(talk)


def test_choices_and_a_request_made_outside_of_the_task_do_not_train():
    async def talk():
        async with gateway_site(lambda heard: "title" if "title?" in heard else "3") as gateway:
            session = gateway.open("p")
            client = openai_client(gateway, session)
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "title?"}], extra_headers={"x-rl-train": "false"}
            )
            answer = await client.chat.completions.create(model="any", messages=[USER], n=3)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            _, texts = await finished(gateway, session)
            assert texts == ["3<|im_end|>"]

    run(talk)


def test_a_context_that_is_full_has_the_code_that_agents_look_for_and_counts_as_a_turn():
    async def talk():
        async with gateway_site(lambda _: "3", max_model_len=256) as gateway:
            session, said = gateway.open("p"), [USER]
            client = openai_client(gateway, session)
            for size in (300, 10_000):  # refused after and before encoding
                for before in ([], said):
                    messages = [*before, {"role": "user", "content": "x" * size}]
                    with pytest.raises(openai.BadRequestError) as caught:
                        await client.chat.completions.create(model="any", messages=messages)
                    assert caught.value.code == "context_length_exceeded"
                answer = await client.chat.completions.create(model="any", messages=said)
                said += [answer.choices[0].message, USER]
            counts = [session.counts[name] for name in ("turns", "roots_first", "roots_user", "forks")]
            assert counts == [6, 1, 0, 0]
            assert gateway.service.counts["turns"] == 6
            _, texts = await finished(gateway, session)
            assert texts == ["3<|im_end|>3<|im_end|>"]

    run(talk)


def paced(*texts, **traits):
    """Return an engine, and the semaphore that releases each of its tokens."""
    tokenizer = make_tokenizer()
    steps = asyncio.Semaphore(0)
    said = iter(texts)
    engine = ScriptedEngine(
        lambda *_: encode(tokenizer, next(said) + "<|im_end|>").tolist(),
        end_token_ids=[tokenizer.eos_token_id],
        traits=EngineTraits(name="paced", max_model_len=4096, vocab_size=1 << 20, **traits),
        decode=tokenizer.decoder(),
        pace=lambda *_: steps.acquire(),
    )
    return engine, steps


def test_tokens_reach_the_client_as_they_are_sampled_but_for_calls():
    async def talk():
        engine, steps = paced(f"<think>a b</think>c d{CALL}")
        async with gateway_site(None, engine=engine) as gateway:
            session = gateway.open("p")
            async with openai_client(gateway, session) as client:
                for _ in range(8):
                    steps.release()
                stream = await client.chat.completions.create(model="any", messages=[USER], tools=TOOLS, stream=True)
                seen, has_answer = [], False
                async for chunk in stream:
                    delta = chunk.choices[0].delta
                    seen += [said for said in (delta.content, delta.model_extra.get("reasoning_content")) if said]
                    seen += delta.tool_calls or []
                    assert session.running or has_answer
                    has_answer = has_answer or bool(delta.content)
                    for _ in range(100 if has_answer else 8):
                        steps.release()
            assert "".join(seen[:-1]) == "a bc d"
            assert len(seen) >= 4
            assert seen[-1].function.name == "add"
            _, texts = await finished(gateway, session)
            assert texts == [f"<think>a b</think>c d{CALL}<|im_end|>"]

    run(talk)


def test_a_client_that_leaves_a_stream_stops_the_engine_and_trains_nothing():
    async def talk():
        engine, steps = paced("a long story", "3")
        async with gateway_site(None, engine=engine) as gateway:
            session = gateway.open("p")
            async with openai_client(gateway, session) as client:
                steps.release()
                stream = await client.chat.completions.create(model="any", messages=[USER], stream=True)
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
                await stream.close()
                while session.running or not session.counts["abandoned_tokens"]:
                    await asyncio.sleep(0.005)
                assert session.counts["abandoned_tokens"] == 1
                for _ in range(9):
                    steps.release()
                await client.chat.completions.create(model="any", messages=[USER])
            _, texts = await finished(gateway, session)
            assert texts == ["3<|im_end|>"]

    run(talk)


def test_a_stop_string_is_not_shown_and_its_token_trains():
    async def talk():
        engine, steps = paced("one\n\ntwo", "one\n\ntwo", "bye")
        for _ in range(60):
            steps.release()
        async with gateway_site(None, engine=engine) as gateway:
            session = gateway.open("p")
            async with anthropic_client(gateway, session) as client:
                fields = {"model": "any", "max_tokens": 90, "stop_sequences": ["\n\n", "x"]}
                message = await client.messages.create(messages=[USER], **fields)
                assert (message.content[0].text, message.stop_reason) == ("one", "stop_sequence")
                assert message.stop_sequence == "\n\n"
                async with client.messages.stream(messages=[USER], **fields) as stream:
                    streamed = await stream.get_final_message()
                assert (streamed.content[0].text, streamed.stop_sequence) == ("one", "\n\n")
                history = [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "?"}]
                await client.messages.create(messages=history, **fields)
            (row,), texts = await finished(gateway, session)
            assert texts == ["one\n\nbye<|im_end|>"]
            (whole,) = make_tokenizer().decode([row.input_ids], skip_special_tokens=False)
            assert "one\n\n<|im_end|>\n<|im_start|>user\n?" in whole

    run(talk)


def test_in_a_run_a_structure_is_ignored_with_a_notice_except_where_nothing_trains():
    async def talk():
        engine, steps = paced("{}", "{}", structures=("json_schema",))
        for _ in range(60):
            steps.release()
        async with gateway_site(None, engine=engine) as gateway:
            session = gateway.open("p")
            schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
            async with openai_client(gateway, session) as client:
                asked = {"model": "any", "messages": [USER], "response_format": schema}
                raw = await client.chat.completions.with_raw_response.create(**asked)
                assert raw.headers["x-rl-overridden"] == "response_format=ignored"
                await client.chat.completions.create(**asked, extra_headers={"x-rl-train": "false"})
            assert engine.requests[0].sampling.structure is None
            assert engine.requests[1].sampling.structure.json_schema == '{"type": "object"}'
            _, texts = await finished(gateway, session)
            assert texts == ["{}<|im_end|>"]

    run(talk)
