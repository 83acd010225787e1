"""OpenAI's Responses and Completions APIs through its SDK, and required tool calls."""

import json

import anthropic
import httpx
import openai
import pytest
from chat_model import CHATML, TOOLS, Speaker, encode, in_turn, make_tokenizer
from gateway_site import gateway_site
from gateway_site import run as run_within

from rl_core.errors import SettingsError
from rl_rollout.engines.protocol import EngineTraits
from rl_rollout.engines.scripted import ScriptedEngine
from rl_rollout.gateway.apis.responses import read_responses_request
from rl_rollout.gateway.service import ServiceOptions

CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1.0}}</tool_call>'
FLAT_TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}]
USER = {"role": "user", "content": "1+2?"}
ALONE = ServiceOptions(decided_by="client")


def talk(test, say, **site):
    async def talking():
        async with gateway_site(say, **site) as gateway:
            session = gateway.open("p")
            async with openai.AsyncOpenAI(
                base_url=f"{gateway.url}/v1", api_key=session.key, max_retries=0, timeout=50
            ) as client:
                await test(client, gateway, session)

    run_within(talking)


async def trained(gateway, session):
    """Finish and audit the session; return the texts that it trains."""
    session.set_reward(1.0)
    result = await gateway.finish(session)
    assert result.failure is None
    rows = [row.input_ids[row.loss_mask] for row in result.trajectories]
    return make_tokenizer().decode(rows, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_with_reasoning_and_calls_are_one_trajectory(stream):
    async def create(client, **fields):
        if not stream:
            return await client.responses.create(model="any", **fields)
        async with client.responses.stream(model="any", **fields) as events:
            seen = [event async for event in events]
            final = await events.get_final_response()
        assert [event.sequence_number for event in seen] == [*range(len(seen))]
        texts = [event.delta for event in seen if event.type == "response.output_text.delta"]
        assert "".join(texts) == final.output_text
        return final

    async def test(client, gateway, session):
        fields = {"instructions": "Be brief.", "tools": FLAT_TOOLS}
        first = await create(client, input="1+2?", **fields)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (first.output[0].content[0].text, first.output_text) == ("hm", "I add.")
        assert json.loads(first.output[2].arguments) == {"a": 1, "b": 2}
        assert (first.status, first.store) == ("completed", False)
        assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
        history = [USER, *(item.model_dump(exclude_none=True) for item in first.output)]
        history += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in first.output[2:]
        ]
        second = await create(client, input=history, **fields)
        assert second.output_text == "3 and 3"
        history += [{"role": "assistant", "content": "3 and 3"}, {"role": "user", "content": "ok"}]
        await create(client, input=history, **fields)
        assert session.counts["roots_first"] == 1
        assert not session.counts["forks"]
        said = f"<think>hm</think>I add. {CALL}{CALL}<|im_end|>3 and 3<|im_end|>Bye<|im_end|>"
        assert await trained(gateway, session) == [said]

    talk(test, in_turn(f"<think>hm</think>I add. {CALL}{CALL}", "3 and 3", "Bye"))


def test_a_response_that_a_limit_cut_says_so():
    async def test(client, gateway, session):
        cut = await client.responses.create(model="any", input="1+2?", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "lo")

    talk(test, lambda _: "long")


def test_items_become_the_turns_that_they_were():
    reasoning = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]}
    ask = read_responses_request({"input": [USER, reasoning, said, call, call, output, output, said, said, call, USER]})
    turns = [(one.role, one.content, one.reasoning, len(one.calls)) for one in ask.messages]
    assert turns == [
        ("user", "1+2?", "", 0), ("assistant", "So", "hm", 2), ("tool", "3", "", 0), ("tool", "3", "", 0),
        ("assistant", "So", "", 0), ("assistant", "So", "", 1), ("user", "1+2?", "", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "The"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ],
)
def test_what_responses_cannot_honour_is_refused_by_name(fields, param):
    async def test(client, gateway, session):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "any", "input": "1+2?", **fields})
        assert caught.value.param == param
        raw = await client.responses.with_raw_response.create(model="any", input="1+2?", store=True, temperature=0.5)
        assert raw.headers["x-rl-overridden"] == "store=ignored, temperature=0.5->1.0"

    talk(test, lambda _: "3")


def test_completions_continue_text_and_tokens_and_a_longer_prompt_is_the_same_trajectory():
    async def test(client, gateway, session):
        first = await client.completions.create(model="any", prompt="1, 2,", logprobs=0, max_tokens=20)
        assert (first.choices[0].text, first.choices[0].finish_reason) == (" 3 ", "stop")
        assert len(first.choices[0].logprobs.token_logprobs) == first.usage.completion_tokens == 4
        longer = encode(make_tokenizer(), "1, 2, 3 <|im_end|>4,").tolist()
        second = await client.completions.create(model="any", prompt=longer)
        assert second.choices[0].text == " 3 "
        stream = await client.completions.create(
            model="any", prompt=["other"], n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        for index in range(2):
            parts = [one.choices[0] for one in chunks if one.choices and one.choices[0].index == index]
            assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (" 3 ", "stop")
        assert chunks[-1].usage.completion_tokens == 8
        assert (session.counts["roots_first"], session.counts["roots_prompt"]) == (1, 1)
        assert await trained(gateway, session) == [" 3 <|im_end|> 3 <|im_end|>", " 3 <|im_end|>"]

    talk(test, lambda _: " 3 ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"logprobs": 3}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"extra_body": {"messages": []}}, "messages"),
    ],
)
def test_what_completions_cannot_honour_is_refused_by_name(fields, param):
    async def test(client, gateway, session):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**{"model": "any", "prompt": "1", **fields})
        assert caught.value.param == param

    talk(test, lambda _: "3")


def forced(said):
    """Return a scripted engine that claims to follow JSON schemas."""
    tokenizer = make_tokenizer()
    traits = EngineTraits(name="forced", max_model_len=4096, vocab_size=1 << 20, structures=("json_schema",))
    end = tokenizer.eos_token_id
    return ScriptedEngine(
        lambda *_: encode(tokenizer, f"{said}<|im_end|>").tolist(),
        end_token_ids=[end],
        traits=traits,
        decode=tokenizer.decoder(),
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_sampled_under_its_schema_where_the_client_decides(stream):
    async def test(client, gateway, session):
        fields = {"model": "any", "messages": [USER], "tools": TOOLS, "tool_choice": "required"}
        if stream:
            async with client.chat.completions.stream(**fields) as events:
                async for _ in events:
                    pass
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**fields)).choices[0].message
        assert (message.content or "", json.loads(message.tool_calls[0].function.arguments)) == ("", {"a": 1, "b": 2})
        (request,) = gateway.service.engine.requests
        (schema,) = json.loads(request.sampling.structure.json_schema)["anyOf"]
        assert schema["properties"]["name"] == {"const": "add"}
        history = [USER, message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"})
        await client.chat.completions.create(model="any", messages=history, tools=TOOLS)
        assert session.counts["roots_first"] == 1
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key, max_retries=0) as claude:
            given = await claude.messages.create(
                model="any",
                max_tokens=99,
                messages=[USER],
                tools=[{"name": "add", "input_schema": {"type": "object"}}],
                tool_choice={"type": "tool", "name": "add"},
            )
        assert [block.type for block in given.content] == ["tool_use"]

    said = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    talk(test, None, engine=forced(said), service=ALONE)


def test_in_a_run_a_demanded_call_is_left_to_the_model_and_reported_but_outside_of_the_task_it_is_had():
    async def test(client, gateway, session):
        fields = {"model": "any", "messages": [USER], "tools": TOOLS}
        named = {"type": "function", "function": {"name": "add"}}
        raw = await client.chat.completions.with_raw_response.create(**fields, tool_choice=named)
        assert raw.headers["x-rl-overridden"] == "tool_choice=ignored"
        answer = await client.chat.completions.create(
            **fields, tool_choice="required", extra_headers={"x-rl-train": "false"}
        )
        assert answer.choices[0].message.content == "{cut"
        first, second = gateway.service.engine.requests
        assert first.sampling.structure is None
        assert second.sampling.structure is not None
        with pytest.raises(openai.BadRequestError, match="one of the tools"):
            await client.chat.completions.create(
                **fields, tool_choice={"type": "function", "function": {"name": "nope"}}
            )

    talk(test, None, engine=forced("{cut"))


FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
FORMATS = [
    ("/v1/chat/completions", "response_format", {"messages": [USER], "response_format": {"type": "json_object"}}),
    ("/v1/responses", "text.format", {"input": [USER], "text": {"format": FORMAT}}),
    (
        "/v1/messages",
        "output_config.format",
        {"messages": [USER], "max_tokens": 9, "output_config": {"format": FORMAT}},
    ),
]


@pytest.mark.parametrize(("path", "name", "body"), FORMATS)
def test_a_run_chooses_whether_response_formats_are_ignored_or_enforced_without_training(path, name, body):
    async def test(client, gateway, session):
        async with httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": session.key}) as plain:
            answer = await plain.post(path, json=body)
        assert answer.status_code == 200, answer.text
        is_enforced = gateway.service.options.enforces_structures
        assert (name not in answer.headers.get("x-rl-overridden", "")) == is_enforced
        (request,) = gateway.service.engine.requests
        assert (request.sampling.structure is not None) == is_enforced
        if is_enforced:
            session.set_reward(1.0)
            assert (await gateway.finish(session)).failure == "the agent made no request that trains"
        else:
            assert await trained(gateway, session) == ["{}<|im_end|>"]

    for structures in (None, "enforce"):
        talk(test, None, engine=forced("{}"), service=ServiceOptions(structures=structures))


def test_a_response_format_that_cannot_be_enforced_is_ignored_in_a_run_and_refused_by_its_name_otherwise():
    async def test(client, gateway, session):
        async with httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": session.key}) as plain:
            for path, name, body in FORMATS:
                answer = await plain.post(path, json=body, headers={"x-rl-train": "false"})
                if gateway.service.options.enforces_structures:
                    assert f"Omit {name}" in answer.json()["error"]["message"]
                else:
                    assert f"{name}=ignored" in answer.headers["x-rl-overridden"]

    for service in (ALONE, ServiceOptions()):
        talk(test, lambda _: "3", service=service)
    with pytest.raises(SettingsError, match='structures = "enforce" needs an engine'):
        talk(test, lambda _: "3", service=ServiceOptions(structures="enforce"))


def test_a_result_that_is_an_error_says_so_to_the_model():
    async def talking():
        speaker = Speaker(make_tokenizer(), lambda heard: f"{'Error: no file' in heard}<|im_end|>")
        async with gateway_site(None, engine=speaker.engine) as gateway:
            session = gateway.open("p")
            used = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "c", "content": "no file", "is_error": True}
            history = [USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
            async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key) as claude:
                given = await claude.messages.create(model="any", max_tokens=9, messages=history)
            assert given.content[0].text == "True"

    run_within(talking)


def test_a_message_that_the_template_refuses_is_named():
    refusal = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no system here') }}{% endif %}"
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages %}" + refusal)

    async def test(client, gateway, session):
        late = {"role": "system", "content": "Be brief."}
        said = {"role": "assistant", "content": "3"}
        for history, number in (
            ([late, USER, said, USER, said, late, USER, said, USER], 6),
            ([USER, said, late, USER], 3),
        ):
            if number == 3:  # the second history continues a sampled turn
                await client.chat.completions.create(model="any", messages=history[:1])
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="any", messages=history)
            assert f"message {number} of the conversation, of role system" in str(caught.value)
            assert "no system here" in str(caught.value)

    talk(test, lambda _: "3", template=template)
