"""vLLM's parsers in the gateway: a client's view of a turn, and refusals."""

import asyncio

import httpx
import pytest
from chat_model import TOOLS, make_tokenizer
from gateway_site import gateway_site, run

from rl_core.errors import SettingsError
from rl_rollout.gateway.service import ServiceOptions

vllm_parsers = pytest.importorskip("rl_rollout.gateway.vllm_parsers", exc_type=ImportError)

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def parser(*, calls=None, reasoning=None):
    return vllm_parsers.VLLMParser(make_tokenizer(), calls=calls, reasoning=reasoning, ends=("<|im_end|>",))


def test_calls_and_reasoning_are_read_as_vllm_reads_them():
    turn = parser(calls="hermes", reasoning="qwen3").parse(f"<think>hm</think>So {CALL}<|im_end|>", parameters=SCHEMAS)
    assert [(call.name, dict(call.arguments)) for call in turn.calls] == [("add", {"a": 1})]
    assert (turn.answer.strip(), turn.reasoning) == ("So", "hm")


def test_formats_that_we_have_no_parser_of():
    turn = parser(calls="pythonic").parse("[add(a=1)]<|im_end|>", parameters=SCHEMAS)
    assert [(call.name, dict(call.arguments)) for call in turn.calls] == [("add", {"a": 1})]


@pytest.mark.parametrize("text", ["", "<tool_call>", "<tool_call>{", f"{CALL[:-1]}", "</think>", "\ud800"])
def test_a_text_that_is_none_of_it_stays_as_it_is(text):
    turn = parser(calls="hermes", reasoning="qwen3").parse(text, parameters=SCHEMAS)
    assert turn.calls == ()


def test_what_vllm_lacks_or_the_tokenizer_does_not_fit_is_refused():
    with pytest.raises(SettingsError, match="Did you mean 'hermes'"):
        parser(calls="hermess")
    with pytest.raises(SettingsError, match="'mistral' refuses this tokenizer"):
        parser(calls="mistral")
    with pytest.raises(SettingsError, match="reasoning_parser must be"):
        ServiceOptions(reasoning_parser="vllm:qwen3")


def test_the_next_turn_matches_what_a_client_got():
    async def talk():
        options = ServiceOptions(tool_parser="vllm:hermes", reasoning_parser="vllm:qwen3")
        async with gateway_site(lambda _: f"<think>hm</think>So {CALL}", service=options) as gateway:
            session = gateway.open("p")
            headers = {"x-api-key": session.key}
            messages = [{"role": "user", "content": "?"}]
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=50) as client:
                for _ in range(2):
                    body = {"messages": messages, "tools": TOOLS}
                    answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
                    assert (answer["content"], answer["reasoning_content"]) == ("So", "hm")
                    call_id = answer["tool_calls"][0]["id"]
                    messages += [answer, {"role": "tool", "tool_call_id": call_id, "content": "3"}]
            result = await asyncio.wait_for(gateway.finish(session), 50)
            assert len(result.trajectories) == 1
            assert result.failure is None

    run(talk)
